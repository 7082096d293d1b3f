"""A draft changes how fast a text comes, never which text: any guesses, any lengths, any company."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch

from dskit import LLM, checkpoint
from dskit.chat import Tokenizer, render
from dskit.config import preset
from dskit.engine import pools, scheduler, spec
from dskit.engine.config import EngineConfig, EngineConfigError
from dskit.engine.draft import Drafter
from dskit.engine.runner import Work
from dskit.engine.scheduler import PROBE
from dskit.engine.seq import Chunk, Request, SamplingParams, Sequence
from dskit.engine.spec import StepCost, allocate, capacity, survivals
from dskit.evaluate import items
from dskit.train.skills import SKILLS
from tests.engine.mock import Runner, engine, scores

G, SLOW = 5, pytest.mark.slow
SAYS = {"what holds": lambda holds: 2.0 if holds else -2.0, "too little": lambda holds: -0.8,
        "too much": lambda holds: 2.0}
COSTS = {"flat": StepCost((1, 64), (1.0, 1.01)), "steep": StepCost(tuple(range(1, 65)), tuple(range(1, 65)))}


class Guesser(Runner):
    """The mock with a draft: it guesses rightly until a place that differs from round to round."""

    def __init__(self, block_size, right=lambda tokens: len(tokens) % 7, **more):
        super().__init__(block_size, **more)
        self.config, self.num_slots, self.right = SimpleNamespace(dspark_block_size=G), 40, right
        self.told: dict[int, list[int]] = {}
        self.says = SAYS["what holds"]  # of each guess

    def _rows(self, w):
        self.told[w.seq_slot] = w.tokens[: w.stop]
        return super()._rows(w)

    def propose(self, slots, starts, newest, pick):
        texts = [[*self.told[s][:start], new] for s, start, new in zip(slots, starts, newest, strict=True)]
        assert [len(t) for t in texts] == [start + 1 for start in starts]
        good, tokens, logits = [self.right(t) for t in texts], [], []
        for k in range(G):
            rows = torch.stack([self._guess(t, k < n) for t, n in zip(texts, good, strict=True)])
            tokens.append(pick(rows))
            logits.append(rows)
            for text, token in zip(texts, tokens[-1].tolist(), strict=True):
                text.append(token)
        confidence = torch.tensor([[self.says(k < n) for k in range(G)] for n in good])
        return torch.stack(tokens, 1), torch.stack(logits, 1), confidence

    @staticmethod
    def _guess(text, right):
        history = 0
        for token in text:
            history = (history * 1000003 + token + 1) % (2**61 - 1)
        return scores(history) if right else -scores(history)


def texts(requests, **settings):
    """What an engine makes of (prompt, params), with its statistics."""
    e = engine(Guesser(4), **settings) if "runner" not in settings else engine(**settings)
    handles = [e.submit(prompt, params) for prompt, params in requests]
    results = [handle.result() for handle in handles]
    e.check()
    stats = e.stats()
    assert stats["slots_free"] == e.cfg.max_num_seqs
    assert stats["blocks_free"] == stats["blocks_total"]
    return results


REQUESTS = [([5 + i, 6, 7 + i], SamplingParams(seed=i, temperature=[0, 1, 0.5][i % 3], max_tokens=9 + 4 * i,
                                               top_p=[1, 0.7][i % 2], presence_penalty=[0, 0, 0, 1.5][i % 4],
                                               ignore_eos=i % 5 == 0))
            for i in range(9)]


@pytest.mark.parametrize("speculate", ["static", "scheduled"])
@pytest.mark.parametrize("cost", [None, "flat", "steep"])
@pytest.mark.parametrize("blocks", [24, 17])
def test_coupled_texts_are_those_without_a_draft(speculate, cost, blocks):
    """With preemptions (few blocks), every sampling parameter, and the canary over every read and write."""
    plain = texts(REQUESTS)
    drafted = texts(REQUESTS, speculate=speculate, step_cost=COSTS.get(cost), num_blocks=blocks)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain]
    held = sum(r.usage.accepted for r in drafted)
    assert held <= sum(r.usage.drafted for r in drafted)
    if cost != "steep" or speculate == "static":
        assert held > 20  # else nothing was tried


@pytest.mark.parametrize("accept", ["rejection", "block"])
@pytest.mark.parametrize("cost", [None, *COSTS])
def test_every_rule_is_greedy_where_the_request_is(accept, cost):
    greedy = [(p, SamplingParams(temperature=0, max_tokens=20)) for p, _ in REQUESTS]
    drafted = texts(greedy, speculate="scheduled", accept=accept, step_cost=COSTS.get(cost))
    assert [r.token_ids for r in drafted] == [r.token_ids for r in texts(greedy)]


TIGHT, LOOSE = {"num_blocks": 17}, {"num_blocks": 24}


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=SLOW) for n in range(4, 60))])
def test_any_requests_under_any_settings(seed):
    """Coupled texts, their ends and log-probabilities are those without a draft; aborts lose nothing."""
    rng = Random(seed)
    requests = [([rng.randrange(2, 60) for _ in range(rng.randint(1, 14))],
                 SamplingParams(temperature=rng.choice([0, 0.7, 1.2]), seed=rng.randrange(99),
                                max_tokens=rng.randint(1, 30), top_k=rng.choice([0, 3]),
                                stop=rng.choice([None, ["A"], ["k1", "Zz"]]), logprobs=rng.choice([None, 2]),
                                frequency_penalty=rng.choice([0, 0.8]), ignore_eos=rng.random() < 0.5))
                for _ in range(rng.randint(1, 8))]
    requests += requests[: rng.randint(0, 2)]  # equal prompts are forked
    settings = rng.choice([TIGHT, LOOSE]) | {
        "speculate": rng.choice(["static", "scheduled"]), "step_cost": rng.choice([None, *COSTS.values()]),
        "overlap": rng.random() < 0.5, "enable_prefix_caching": rng.random() < 0.7}
    e = engine(Guesser(4, right=lambda tokens: rng.randint(0, G)), **settings)
    handles = [e.submit(prompt, params) for prompt, params in requests]
    gone = rng.choice([None, *range(len(handles))])
    for _ in range(rng.randint(0, 6) if gone is not None else 0):
        e.step()
    if gone is not None:
        handles[gone].cancel()
    for i, ((prompt, params), handle) in enumerate(zip(requests, handles, strict=True)):
        found, want = handle.result(), texts([(prompt, params)])[0]
        if i == gone and found.finish_reason == "abort":
            assert found.token_ids == want.token_ids[: len(found.token_ids)]
            continue
        assert (found.token_ids, found.text, found.finish_reason) == (want.token_ids, want.text,
                                                                       want.finish_reason)
        assert found.logprobs == want.logprobs
    e.check()
    assert e.stats()["blocks_free"] == e.stats()["blocks_total"] and not e.has_work


class Timed(Guesser):
    """The mock on a clock of its own: steps and drafts take what a cost says."""

    def __init__(self, cost, right):
        super().__init__(4, right)
        self.cost, self.ms = cost, 0.0

    def run(self, work, copies):
        if all(w.start >= w.prompt_len for w in work):
            self.ms += self.cost(sum(w.stop - w.start for w in work))
        return super().run(work, copies)

    def propose(self, slots, starts, newest, pick):
        self.ms += self.cost(1, len(slots)) - self.cost(1)
        return super().propose(slots, starts, newest, pick)


RATES = {"a CPU": StepCost((1, 2, 6, 32, 48, 192), (45, 53, 62, 97, 116, 345), (1, 8, 32), (15, 25, 60)),
         "a step at a time": StepCost((1, 8, 9, 64, 65, 192), (20, 20, 30, 30, 60, 60), (1, 32), (4, 8)),
         "bound by rows": StepCost((1, 192), (4, 768), (1, 32), (3, 96))}
DRAFTS = {"good": lambda tokens: G - (len(tokens) % 7 == 0), "bad": lambda tokens: 0,
          "seldom bad": lambda tokens: G if sum(tokens[-3:]) % 8 else 0,
          "in between": lambda tokens: len(tokens) * 7 % (G + 1),
          "good for some": lambda tokens: G if tokens[0] % 2 else 0}


LOADS = [(cost, load, draft, "what holds") for cost in RATES for load in (1, 8, 32) for draft in DRAFTS]
LOADS += [("a CPU", load, draft, says) for load in (1, 8) for draft in DRAFTS for says in list(SAYS)[1:]]
SOON = {("a CPU", 1), ("bound by rows", 1)}, {("a CPU", 8, draft, "what holds") for draft in list(DRAFTS)[3:]}


@pytest.mark.parametrize("cost, load, draft, says", [
    pytest.param(*case, marks=() if case[:2] in SOON[0] or case in SOON[1] else SLOW) for case in LOADS])
def test_the_schedule_is_never_slower_than_the_better_of_static_and_none(cost, load, draft, says):
    """By the clock of the mock, but for what finding out takes: first guesses, and a try now and then.

    At 32 also but for the last requests, whose companions were faster.
    """
    work = [([5 + i % 50, 6], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
            for i in range(4 * load)]
    ms = {}
    for way in ("off", "static", "scheduled"):
        runner = Timed(RATES[cost], DRAFTS[draft])
        runner.says = SAYS[says]
        settings = {"speculate": way, "max_num_seqs": load, "num_blocks": 20 * load, "num_snapshots": 1}
        texts(work, runner=runner, step_cost=RATES[cost], **settings)
        ms[way] = runner.ms
    most = 1.2 if says != "what holds" else 1.05 if load == 32 else 1.03
    assert ms["scheduled"] <= most * min(ms.values()), ms


def test_guessing_stops_where_it_does_not_pay_and_is_tried_again():
    """A draft that is always wrong is asked thrice, then after PROBE steps; one that is right every step."""
    params = SamplingParams(temperature=0, max_tokens=PROBE + 20, ignore_eos=True)
    told = {}
    for right in (0, G):
        runner = Guesser(4, right=lambda tokens, right=right: right)
        runner.asked, propose = 0, runner.propose
        runner.propose = lambda *a, runner=runner, propose=propose: _counted(runner, propose, a)
        cost = StepCost((1, 6), (10.0, 11.0), (1,), (5.0,))
        found = texts([([5, 6], params)], runner=runner, speculate="scheduled", step_cost=cost)[0]
        assert found.token_ids == texts([([5, 6], params)])[0].token_ids
        told[right] = runner.asked, runner.steps
    assert 2 <= told[0][0] <= 4
    assert told[G][0] >= told[G][1] - 2


def test_few_steps_are_thought_about_while_all_guesses_pay_and_each_once_they_fall(monkeypatch):
    """Ever fewer, to one in REST + 1; of those that fall behind token 360 two rounds at most are not."""
    runner, thought = Guesser(4, right=lambda tokens: G if len(tokens) < 360 else 0), []
    params = SamplingParams(temperature=0, max_tokens=370, ignore_eos=True)
    cost = StepCost((1, 6), (10.0, 11.0))
    monkeypatch.setattr(scheduler, "capacity", lambda hopes, cost: (
        thought.append(runner.steps), capacity(hopes, cost))[1])
    texts([([5, 6], params)], runner=runner, speculate="scheduled", step_cost=cost, num_blocks=100,
          max_model_len=400)
    gaps = [b - a for a, b in itertools.pairwise(step for step in thought if step <= 60)]
    assert gaps == [min(1 + i, scheduler.REST + 1) for i in range(len(gaps))] and len(gaps) >= 9
    assert set(range(63, runner.steps)) <= set(thought)


def test_all_guesses_pay_plainly_where_half_their_chance_would_do():
    flat, steep = StepCost((1, 6), (10.0, 11.0)), StepCost((1, 6), (10.0, 60.0))
    assert spec.plainly_all([[0.9] * 5], flat) and not spec.plainly_all([[0.9] * 5], steep)
    assert not spec.plainly_all([[0.9] * 4 + [0.0]], flat) and not spec.plainly_all([[]], flat)


@pytest.mark.parametrize("accept", ["rejection", "coupled"])
def test_how_many_rows_a_step_has_is_settled_before_its_guesses_are(monkeypatch, accept):
    """Other confidences in the third round's guesses; where texts depend on no lengths they may be seen."""
    told, params = [], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for other in (False, True):
        runner, seen = Guesser(4), []
        runner.asked, propose = 0, runner.propose

        def asked(*args, runner=runner, propose=propose, other=other):
            runner.says = SAYS["too little" if other and runner.asked == 2 else "what holds"]
            return _counted(runner, propose, args)

        runner.propose = asked
        monkeypatch.setattr(scheduler, "REST", 0)
        monkeypatch.setattr(scheduler, "capacity", lambda hopes, cost, seen=seen: (
            seen.append(list(hopes)), capacity(hopes, cost))[1])
        settings = {"speculate": "scheduled", "accept": accept, "step_cost": COSTS["flat"]}
        texts([([5, 6], params)], runner=runner, **settings)
        told.append(seen)
    same = [a == b for a, b in zip(*told, strict=False)]
    assert same[:3] == [True, True, accept == "rejection"]


def _counted(runner, propose, args):
    runner.asked += 1
    return propose(*args)


def test_confidence_that_promised_too_much_is_believed_less():
    """Guesses that fall while their confidence is high leave a request without drafts, and no other."""
    runner = Guesser(4, right=lambda tokens: 0 if tokens[0] == 5 else G)
    runner.says = SAYS["too much"]
    cost = StepCost((1, 2, 64), (1.0, 1.1, 8.0))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wrong, right = texts([([5, 6], params), ([7, 6], params)], runner=runner, speculate="scheduled",
                         step_cost=cost)
    assert wrong.usage.accepted == 0 and wrong.usage.drafted < 80, "of 39 rounds of 5"
    assert right.usage.accepted == right.usage.drafted >= 30


@pytest.mark.parametrize("right", [0, G])
def test_the_worst_and_the_best_draft(right):
    """Always wrong costs rows, never tokens; always right takes one round for every G + 1 tokens."""
    runner = Guesser(4, right=lambda tokens: right)
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    found = texts([([5, 6], params)], runner=runner, speculate="static")[0]
    assert found.token_ids == texts([([5, 6], params)])[0].token_ids
    assert found.usage.accepted == (0 if right == 0 else found.usage.drafted)
    assert runner.steps == (25 if right == 0 else 1 + math.ceil(24 / (G + 1)))


def test_a_stop_token_inside_the_block_ends_the_text_there():
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = texts([([5, 6], params)])[0].token_ids
    for stop in {whole[i] for i in range(2, 12)}:
        cut = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
        found = texts([([5, 6], cut)], runner=Guesser(4, right=lambda tokens: G), speculate="static")[0]
        assert found.token_ids == whole[: whole.index(stop) + 1] and found.finish_reason == "stop"
        text = "".join(chr(48 + i) for i in found.token_ids[-1:])
        cut = SamplingParams(temperature=0, max_tokens=40, stop=[text], ignore_eos=True)
        found = texts([([5, 6], cut)], runner=Guesser(4, right=lambda tokens: G), speculate="static")[0]
        assert found.token_ids == whole[: whole.index(stop) + 1]


def test_cancelled_at_every_step_and_nothing_is_lost():
    for steps in range(1, 9):
        e = engine(Guesser(4), speculate="static", overlap=steps % 2 == 0)
        handles = [e.submit(p, q) for p, q in REQUESTS[:3]]
        for _ in range(steps):
            e.step()
        for handle in handles:
            handle.cancel()
        e.settle()
        e.check()
        assert e.stats()["blocks_free"] == e.stats()["blocks_total"] and not e.has_work


def test_log_probabilities_are_those_without_a_draft():
    params = SamplingParams(temperature=0, max_tokens=15, logprobs=3)
    plain, drafted = (texts([([5, 6], params)], **more)[0] for more in ({}, {"speculate": "static"}))
    assert [(s.token_id, s.logprob, s.top) for s in drafted.logprobs] == [
        (s.token_id, s.logprob, s.top) for s in plain.logprobs]


def test_a_row_that_is_not_finite_ends_its_request_alone():
    e = engine(Guesser(4), speculate="static")
    bad, good = (e.submit([5 + i, 6], SamplingParams(temperature=0, max_tokens=12)) for i in range(2))
    e.step()
    slot, rows = e.scheduler.running[0].slot, e.runner._rows
    e.runner._rows = lambda w: [r * math.nan for r in rows(w)] if w.seq_slot == slot else rows(w)
    assert bad.result().finish_reason == "error" and "finite" in bad.result().error
    assert good.result().token_ids == texts([([6, 6], SamplingParams(temperature=0, max_tokens=12))]
                                            )[0].token_ids


# ---- the law of rejection ----------------------------------------------------------------------------------


class Toy:
    """A draft and a model over three tokens, each one's next-token logits from the last token alone."""

    asynchronous = False

    def __init__(self, runs):
        r = torch.Generator().manual_seed(3)
        self.p, self.q = (2 * torch.randn(3, 3, generator=r) for _ in range(2))
        self.config, self.num_slots = SimpleNamespace(dspark_block_size=2), runs

    def propose(self, slots, starts, newest, pick):
        tokens, logits, at = [], [], torch.tensor(newest)
        for _ in range(2):
            logits.append(self.q[at])
            at = pick(logits[-1])
            tokens.append(at)
        return torch.stack(tokens, 1), torch.stack(logits, 1), torch.zeros(len(slots), 2)

    def texts(self, accept, params, lengths) -> list[tuple[int, ...]]:
        """The first three tokens after token 0, once for every seed."""
        drafter, seqs = Drafter(self, accept), []
        for seed in range(self.num_slots):
            seq = Sequence(Request("r", [0], params), text=None)
            seq.seed, seq.limit, seq.slot = seed, 100, 1 + seed
            seqs.append(seq)
        for _ in range(4):
            chunks, rows = [], []
            for seq in seqs:
                drafts = seq.proposal.tokens[: lengths(seq)] if seq.proposal else []
                rows += [(seq.tokens + list(drafts[:j]))[-1] for j in range(1 + len(drafts))]
                stop = len(seq.tokens) + len(drafts)
                chunks.append(Chunk(seq, stop - 1 - len(drafts), stop, "last", stop, drafts=drafts))
            for seq, found in zip(seqs, drafter.rounds(chunks, self.p[rows]), strict=True):
                seq.tokens += [one.token_id for one in found.sampled]
                seq.proposal = found.proposal
        return [tuple(seq.tokens[1:4]) for seq in seqs]


def second_by_first(seq):
    """Lets the second guess in by the value of the first, as a confidence would."""
    return 1 + (seq.proposal.tokens[0] == 1)


@pytest.mark.parametrize("runs", [1000, pytest.param(20000, marks=SLOW)])
@pytest.mark.parametrize("accept", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 2}], ids=str)
def test_texts_follow_the_model(accept, params, runs):
    """Chi-square over the 27 continuations of three tokens, with guesses let in by the values before them."""
    toy = Toy(runs)
    params = SamplingParams(**params).resolve({}, max_tokens=50)
    assert distance(toy, toy.texts(accept, params, second_by_first), params) < 5


def distance(toy, texts, params) -> float:
    """How many standard deviations the chi-square over the continuations lies above its mean."""
    logits = toy.p.double() / params.temperature
    if params.top_k:
        logits = logits.masked_fill(logits < logits.sort(dim=-1, descending=True).values[:, [1]], -math.inf)
    p, chi, cells, found = logits.softmax(-1), 0.0, 0, Counter(texts)
    for a, b, c in itertools.product(range(3), repeat=3):
        want = len(texts) * float(p[0, a] * p[a, b] * p[b, c])
        assert want or not found[a, b, c]
        if want > 1:
            chi, cells = chi + (found[a, b, c] - want) ** 2 / want, cells + 1
    return (chi - cells) / math.sqrt(2 * cells)


COLD = StepCost((1, 2, 3), (1.0, 2.0, 1 / 0.45))  # the second row pays only with a third


def scheduled(peeks):
    """Lengths by the engine's schedule; one that peeks looks at the live round for how many rows there are.

    The second guess is likely to hold behind token 1 and hopeless behind another, as a confidence may say.
    """
    def lengths(seq):
        live = [survivals([1.4, 2.2 if seq.proposal.tokens[0] == 1 else -30.0])]
        return allocate(live, capacity(live if peeks else [[0.9, 0.85]], COLD))[0]
    return lengths


@pytest.mark.parametrize("accept", ["rejection", pytest.param("block", marks=SLOW)])
def test_a_schedule_that_peeks_bends_the_law_and_ours_does_not(accept):
    toy, params = Toy(1500), SamplingParams().resolve({}, max_tokens=50)
    assert distance(toy, toy.texts(accept, params, scheduled(peeks=False)), params) < 5
    assert distance(toy, toy.texts(accept, params, scheduled(peeks=True)), params) > 10


def test_a_draft_that_is_let_in_by_its_own_value_bends_the_law():
    """The control: were a guess verified only when it is token 1, token 1 would come too often."""
    toy = Toy(3000)
    params = SamplingParams().resolve({}, max_tokens=50)
    texts = toy.texts("rejection", params, lambda seq: seq.proposal.tokens[0] == 1)
    p = toy.p.double().softmax(-1)
    want = float(p[0] @ p[:, 1]) * 3000
    assert abs(sum(text[1] == 1 for text in texts) - want) > 5 * math.sqrt(want)


# ---- with a real model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """The tiny preset, exact and batch-invariant; it has a draft with random weights."""
    return checkpoint.load("tiny", numerics="exact", device="cpu", batch_invariant=True)


PROMPTS = [[9 + (7 * i * j) % 240 for j in range(3 + 11 * i)] for i in range(3)]


@pytest.mark.parametrize("settings", [{}, {"replay": "compact"}, {"enable_prefix_caching": False}], ids=str)
def test_a_real_draft_changes_nothing(model, settings):
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=9, ignore_eos=True) for i in range(3)]
    with LLM(model, speculate="off", **settings) as plain, LLM(model, canary="raise", **settings) as drafted:
        want = plain.generate(PROMPTS, params)
        for _ in range(2):  # the second time from the cache
            found = drafted.generate(PROMPTS, params)
            assert [r.token_ids for r in found] == [r.token_ids for r in want]
        drafted.engine.check()
        assert all(r.usage.drafted > 0 for r in found)


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_guesses_before_the_host_has_looked_are_the_same(model, accept):
    """As on a GPU, where the draft begins on what the device knows, with a fork and an aborted request."""
    found, params = [], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    work = [(prompt, params) for prompt in (*PROMPTS, PROMPTS[1])]
    for ahead in (False, True):
        with LLM(model, canary="raise", accept=accept, speculate="static") as llm:
            llm.engine.runner.asynchronous = ahead
            handles = llm.engine.submit_all(work)
            llm.step()
            handles[0].cancel()
            found.append([(r.token_ids, r.usage.rounds, r.usage.drafted, r.usage.accepted)
                          for r in (handle.result() for handle in handles[1:])])
            found[-1] += [record.confidence for record in llm.engine.rounds()]
            llm.engine.check()
    torch.testing.assert_close(found[1], found[0])


def test_a_rank_without_requests_drafts_nothing(model):
    with LLM(model) as llm:
        found = llm.engine.runner.propose([], [], [])
    assert [len(part) for part in found] == [0, 0, 0]


def confidences(llm, prompt):
    """What the draft said of its guesses, round by round, and how much of the prompt was cached."""
    llm.engine.scheduler.rounds.clear()
    found = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
    return torch.tensor([r.confidence for r in llm.engine.rounds()]), found.usage.cached_tokens


@pytest.mark.parametrize("exact", [True, False])
def test_behind_a_cached_prefix_the_drafts_window_is_there(model, exact, monkeypatch):
    """Its guesses are those without a cache; were its keys not copied, or rebuilt, they would be others."""
    prompt, other = [9 + 7 * j % 240 for j in range(36)], [11 + 5 * j % 230 for j in range(36)]
    settings = {"speculate": "static", "exact_prefix": exact, "max_num_batched_tokens": 64, "max_num_seqs": 1}
    with LLM(model, **settings) as llm:
        fresh, _ = confidences(llm, prompt)
        confidences(llm, other)  # its keys are in the slot now
        found, cached = confidences(llm, prompt)
        assert cached > 0
        if exact:
            torch.testing.assert_close(found, fresh, rtol=1e-4, atol=1e-4)
        confidences(llm, other)
        tables, absorb = pools.slot_tables, type(llm.model).absorb
        drafts = [llm.engine.runner.memory.windows[stage.layer] for stage in llm.model.mtp]
        monkeypatch.setattr(pools, "slot_tables", lambda memory: [
            t for t in tables(memory) if not (exact and any(t is d for d in drafts))])
        monkeypatch.setattr(type(llm.model), "absorb", lambda self, state, step, memory: (
            absorb(self, state, step, memory) if exact or len(step.pos) <= 5 else None))
        stale, _ = confidences(llm, prompt)
    assert (stale[0] - found[0]).abs().max() > 0.01


@pytest.mark.parametrize("numerics, skills, count, limit", [
    ("exact", ["define"], 2, 12), *(pytest.param(n, list(SKILLS), 60, 320, marks=SLOW)
                                    for n in ("exact", "release"))])
def test_the_demo_says_the_same_with_and_without_its_draft(numerics, skills, count, limit):
    """Greedy answers to prompts of every skill."""
    model = checkpoint.load("demo", numerics=numerics, device="cpu", batch_invariant=numerics == "release")
    settings = {"tokenizer": Tokenizer(checkpoint.locate("demo")), "max_num_seqs": 32}
    with LLM(model, speculate="off", **settings) as plain:
        bodies = [item.body for skill in skills for item in items(skill, count, 0, recall_tokens=400)]
        prompts = [render(body, plain.tokenizer).ids for body in bodies]
        params = [SamplingParams(temperature=0, max_tokens=limit)] * len(prompts)
        want = [r.token_ids for r in plain.generate(prompts, params)]
    with LLM(model, speculate="static", **settings) as drafted:
        found = drafted.generate(prompts, params)
    assert [r.token_ids for r in found] == want
    assert sum(r.usage.accepted for r in found) > len(prompts)


PHASES = [(hold, length) for hold in range(5) for length in range(1, 33)]  # of windows, rings and groups
SHORT = [(0, 1), (1, 12), (2, 7), (3, 9), (4, 8)]


@pytest.mark.parametrize("hold, length", [
    *SHORT, *(pytest.param(*phase, marks=SLOW) for phase in PHASES if phase not in SHORT)])
def test_a_rewound_state_is_that_of_never_having_drafted(model, hold, length):
    """After rounds in which `hold`, one more, ... guesses were right, all is as after a fresh prefill."""
    truth = [9 + (7 * j) % 240 for j in range(length)] + [20 + i * i % 190 for i in range(40)]
    runner, G = LLM(model, enable_prefix_caching=False).engine.runner, model.config.dspark_block_size
    blocks = [1 + i for i in range(-(-80 // runner.block_size))]
    runner.run([Work(1, blocks, truth, 0, length, length)])
    at = length
    for round in range(4):
        held = (hold + round) % (G + 1)
        wrong = [(t + 1) % 200 + 9 for t in truth[at + 1 + held : at + 1 + G]]
        tokens = truth[: at + 1 + held] + wrong
        runner.run([Work(1, blocks, tokens, at, len(tokens), length, "all")])
        at += 1 + held
    found = runner.run([Work(1, blocks, truth, at, at + 1, length)])
    ring = runner.propose([1], [at + 1], [77])
    fresh = LLM(model, enable_prefix_caching=False).engine.runner
    fresh.run([Work(1, blocks, truth, 0, at, length)])
    torch.testing.assert_close(found, fresh.run([Work(1, blocks, truth, at, at + 1, length)]),
                               rtol=1e-4, atol=1e-4)
    again = fresh.propose([1], [at + 1], [77])
    torch.testing.assert_close(ring[1], again[1], rtol=1e-4, atol=1e-4)


def test_what_was_measured_is_found_beside_the_checkpoint_and_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(spec.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    folder = checkpoint.write_random(preset("tiny"), tmp_path / "model")
    read = {"device": "cpu", "numerics": "exact"}
    with LLM(folder, **read) as plain:
        assert plain.engine.cfg.step_cost is None and plain.engine.cfg.draft_temperatures is None
    cost = StepCost((1, 4), (1.0, 1.5), (1, 2), (0.5, 0.75))
    cost.save(spec.cost_file(str(folder), "cpu"))
    told = spec.Calibration((1.5, 2.0, 1.0, 0.5), "here", 9, (0.0,) * 4, (0.0,) * 4)
    told.save(folder / spec.CALIBRATION)
    with LLM(folder, **read) as measured:
        assert measured.engine.cfg.step_cost == cost
        assert measured.engine.cfg.draft_temperatures == told.temperatures
    with LLM(folder, step_cost=COSTS["flat"], draft_temperatures=(1.0,) * 4, **read) as given:
        assert given.engine.cfg.step_cost == COSTS["flat"]
        assert given.engine.cfg.draft_temperatures == (1.0,) * 4
    replace(told, temperatures=(1.0,) * 5).save(folder / spec.CALIBRATION)
    with pytest.raises(ValueError, match="holds 5 temperatures, the block has 4"):
        LLM(folder, **read)


def test_settings_that_no_draft_can_serve():
    plain = preset("tiny").without_draft()
    for bad, words in (({"speculate": "static"}, "no draft"), ({"speculate": "maybe"}, "choose off"),
                       ({"accept": "all"}, "choose rejection")):
        with pytest.raises(EngineConfigError, match=words):
            EngineConfig.of(plain, **bad)
    assert EngineConfig.of(plain).speculate == "off"
    assert EngineConfig.of(preset("tiny")).speculate == "scheduled"
