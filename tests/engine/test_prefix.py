"""The prefix cache: what is reused, what it changes (nothing, where exact), and what it must never reuse."""

import json
from contextlib import contextmanager

import pytest
import torch

from dskit import checkpoint
from dskit.config import PRESETS_DIR, ModelConfig
from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams
from tests import models, oracle

from .mock import engine

IDS = [3 + (11 * i * i + 5 * i + i // 7) % 59 for i in range(200)]
ALL = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=512)


def rows(result) -> torch.Tensor:
    """Log-probabilities [tokens, V] of a result that asked for all of them."""
    return torch.tensor([[p for _, p in sorted(one.top)] for one in result.logprobs], dtype=torch.float64)


@contextmanager
def serving(model, **settings):
    """A small engine over a model, watched by the canary."""
    with LLM(model, max_model_len=256, canary="raise", **settings) as llm:
        yield llm
        llm.engine.check()


# ---- which tokens are reused, on the mock ----------------------------------------------------------------


def ask(e, prompt, **params):
    handle = e.submit(prompt, SamplingParams(**{"seed": 1, "max_tokens": 1} | params))
    return handle.result().usage.cached_tokens


@pytest.mark.parametrize("exact", [True, False])
def test_a_repeated_prompt_is_computed_once(exact):
    """30 tokens in blocks of 4: the last border that leaves a row to compute is 28."""
    e = engine(exact_prefix=exact, max_num_batched_tokens=64)
    assert [ask(e, IDS[:30]) for _ in range(3)] == [0, 28, 28]
    assert e.runner.computed == 30 + 2 * (2 if exact else 2 + 6)
    assert [ask(e, IDS[:28]) for _ in range(2)] == ([0, 24] if exact else [24, 24])


@pytest.mark.parametrize("exact", [True, False])
def test_a_conversation_goes_on_behind_its_answer(exact):
    e = engine(exact_prefix=exact, max_num_batched_tokens=64)
    first = e.submit(IDS[:9], SamplingParams(seed=1, max_tokens=12, ignore_eos=True)).result()
    talk = IDS[:9] + first.token_ids  # of its 21 tokens all but the last are in the caches
    assert ask(e, talk + IDS[50:57]) == 20


def test_where_two_prompts_part_a_snapshot_is_taken():
    """The third prompt with one system text is the first that can start exactly behind it."""
    e = engine(max_num_batched_tokens=64)
    system = IDS[:17]
    assert [ask(e, system + IDS[30 + 9 * i : 38 + 9 * i]) for i in range(4)] == [0, 0, 16, 16]


def test_short_hits_cost_more_than_they_save():
    """Rebuilding a window of 6 for a hit of 4 tokens would compute more rows than a cold start."""
    e = engine(exact_prefix=False, max_num_batched_tokens=64)
    assert [ask(e, IDS[:7]), ask(e, IDS[:7]), ask(e, IDS[:9]), ask(e, IDS[:9])] == [0, 0, 0, 8]


def test_what_must_not_be_shared():
    e = engine(max_num_batched_tokens=64)
    assert ask(e, IDS[:30]) == 0
    handle = e.submit(IDS[:30], SamplingParams(max_tokens=1), cache_salt="another tenant")
    assert handle.result().usage.cached_tokens == 0
    assert ask(e, [IDS[0] + 1, *IDS[1:30]]) == 0
    off = engine(enable_prefix_caching=False)
    assert [ask(off, IDS[:30]), ask(off, IDS[:30])] == [0, 0]
    assert off.stats()["blocks_cached"] == 0


def test_blocks_of_a_failed_request_are_forgotten():
    """A row that is not finite may come from what lies in the caches: nobody starts behind it."""
    e = engine(max_num_batched_tokens=64)
    run = e.runner.run
    e.runner.run = lambda work, copies: run(work, copies) * float("nan")
    assert e.submit(IDS[:30], SamplingParams(max_tokens=3)).result().finish_reason == "error"
    e.runner.run = run
    assert ask(e, IDS[:30]) == 0


def test_eviction_takes_the_longest_unused_leaf():
    e = engine(num_blocks=20, max_num_batched_tokens=64)
    for start in (0, 40, 80):
        ask(e, IDS[start : start + 24])
    assert e.stats()["blocks_free"] == 20 and e.stats()["blocks_cached"] == 18
    assert ask(e, IDS[:24]) == 20  # now the newest
    ask(e, IDS[120:150])
    assert e.stats()["evictions"] == 6
    assert ask(e, IDS[80:104]) == 20 and ask(e, IDS[40:64]) == 0


def test_a_cleared_tree_reuses_nothing_and_loses_nothing():
    e = engine(max_num_batched_tokens=64)
    long = e.submit(IDS[:30], SamplingParams(seed=1, ignore_eos=True, max_tokens=20))
    e.step()
    e.forget()
    assert ask(e, IDS[:30]) == 0
    long.result()
    assert e.stats()["blocks_free"] == e.stats()["blocks_total"]
    e.forget()
    assert e.stats()["blocks_cached"] == 0 and e.scheduler.blocks.free_count == 24


# ---- what it changes, on a model -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """The preset tiny in release numerics, with rows that do not depend on their batch."""
    return checkpoint.load("tiny", device="cpu", batch_invariant=True)


PROMPTS = [IDS[:70], IDS[:70], IDS[:50] + IDS[90:99], IDS[:50] + IDS[120:160], IDS[:50] + IDS[100:104]]


MORE = [("off", 11), ("off", 1024), ("compact", 11), ("compact", 40), ("compact", 1024)]


@pytest.mark.parametrize(("replay", "budget"), [
    ("off", 40), *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)])
def test_exact_prefixes_change_no_bit(model, replay, budget):
    """Prompts that share, part and repeat, in chunks of several sizes, against an engine without a cache."""
    with serving(model, replay=replay, enable_prefix_caching=False) as llm:
        want = [rows(llm.generate(p, ALL)) for p in PROMPTS]
    with serving(model, replay=replay, max_num_batched_tokens=budget) as llm:
        got = [llm.generate(p, ALL) for p in PROMPTS]
        again = llm.generate(PROMPTS, ALL)
    hits = [r.usage.cached_tokens for r in got]
    assert hits == ([0, 64, 0, 48, 48] if replay == "off" else [0, 48, 0, 48, 32])
    for result, other, wanted in zip(got, again, want, strict=True):
        assert torch.equal(rows(result), wanted) and torch.equal(rows(other), wanted)


def test_v4_needs_the_overlapping_group_too():
    """Its groups of four look back at the group before: a snapshot has those rows as well."""
    config = ModelConfig.from_dict(models.random_v4(5) | {"vocab_size": 300})
    model = checkpoint.random(config, device="cpu", numerics="exact")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=config.vocab_size)
    prompts = [[i % 100 + 3 for i in p] for p in PROMPTS]
    got = []
    for caching in (False, True):
        with LLM(model, enable_prefix_caching=caching, canary="raise") as llm:
            got.append([llm.generate(p, params) for p in prompts])
    assert sum(r.usage.cached_tokens for r in got[1]) > 100
    for cold, hit in zip(*got, strict=True):
        assert models.relative_rms(rows(hit), rows(cold)) < 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The preset tiny with weights that the oracle reads too: (folder, raw config)."""
    raw = json.loads((PRESETS_DIR / "tiny.json").read_text())
    folder = tmp_path_factory.mktemp("tiny")
    return models.save(folder, raw, models.draw(models.flat(raw)))


def replayed(folder, replay: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities behind a hit of 48 tokens: of the engine, of the oracle, of a cold run."""
    with serving(folder, numerics="exact", exact_prefix=False, replay=replay) as llm:
        llm.generate(IDS[:50], ALL)
        result = llm.generate(IDS[:62], ALL)
        assert result.usage.cached_tokens == 48
        keep = llm.engine.cfg.keep_tokens if replay != "off" else None
    ids = IDS[:62] + result.token_ids[:-1]
    net = models.net(folder)
    wanted = oracle.forward(net, ids, keep=keep, prompt=62, behind=(40, 48)).logits
    cold = oracle.forward(net, ids, keep=keep, prompt=62).logits
    return rows(result), *(one[61:].double().log_softmax(-1) for one in (wanted, cold))


@pytest.mark.parametrize("replay", ["off", "mask", "compact"])
def test_rebuilt_windows_equal_their_oracle(made, replay):
    found, wanted, cold = replayed(made, replay)
    assert models.relative_rms(found, wanted) < 1e-5
    assert models.relative_rms(found, cold) > 1e-4  # an approximation, and this case shows it


def test_without_the_replay_windows_are_stale(made, monkeypatch):
    """The same hit, rows left out: the canary sees it, and so do the numbers."""
    from dskit.engine.scheduler import Scheduler

    admit = Scheduler._admit

    def without(self, seq):
        done = admit(self, seq)
        seq.replay = 0
        return done

    monkeypatch.setattr(Scheduler, "_admit", without)
    with pytest.raises(Exception, match="stale windows|not finite"):
        replayed(made, "off")
    monkeypatch.setattr("dskit.engine.canary.Canary._require", lambda *_: None)
    monkeypatch.setattr("dskit.engine.pools.wipe", lambda *_: None)
    found, wanted, _ = replayed(made, "off")
    assert models.relative_rms(found, wanted) > 1e-3
