"""Several ranks are one engine: the same tokens as on one, whoever is idle; and they end together."""

from __future__ import annotations

import random
import signal
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist

from dskit import LLM, SamplingParams, checkpoint, ops
from dskit.engine.dist import DECODE, IDLE, PREFILL, GroupError, Parallel, Row
from dskit.engine.ranks import RankEngine, take_seat
from dskit.engine.seq import RequestError

TIMEOUT = 10.0
CASES = {
    "exact, drafts": {"numerics": "exact", "speculate": "static"},
    "exact": {"numerics": "exact", "speculate": "off"},
    "release, drafts": {"numerics": "release", "batch_invariant": True, "speculate": "static"},
    "release": {"numerics": "release", "batch_invariant": True, "speculate": "off"},
}
SETTINGS = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16}


PAIR: list[LLM] = []  # two ranks, as long as one test after the other uses them


def opened(case: str, ranks: int, **more) -> LLM:
    """The small model on so many ranks."""
    part()
    return LLM("tiny", dp=ranks, ep=ranks, distributed_timeout=TIMEOUT, **SETTINGS | CASES[case] | more)


def part() -> None:
    """End the pair: a process is in one group at a time, whichever tests it runs."""
    while PAIR:
        PAIR.pop().close()


def conversations(seed: int, count: int) -> list[tuple[list[list[int]], SamplingParams]]:
    """Prompts in two rounds, of which the second goes on from the first, with parameters."""
    draw, found = random.Random(seed), []
    shared = [draw.randrange(5, 500) for _ in range(33)]
    for i in range(count):
        own = [draw.randrange(5, 500) for _ in range(draw.choice((1, 3, 17, 40)))]
        first = shared + own if i % 3 == 0 else own
        longer = first + [draw.randrange(5, 500) for _ in range(20)]
        params = SamplingParams(temperature=draw.choice((0.0, 0.9)), seed=i,
                                max_tokens=draw.choice((1, 6, 11)), ignore_eos=True)
        found.append(([first, longer], params))
    return found


def answers(llm: LLM, seed: int, count: int) -> list[list[int]]:
    """Tokens of both rounds; the second finds the prompts of the first in the cache."""
    talks, found = conversations(seed, count), []
    for turn in range(2):
        results = llm.generate([prompts[turn] for prompts, _ in talks], [params for _, params in talks])
        assert all(result.finish_reason == "length" for result in results), results
        found += [result.token_ids for result in results]
    return found


@cache
def whole(numerics: str, batch_invariant: bool = False):
    """The model with all its experts, loaded once for all tests."""
    return checkpoint.load("tiny", device="cpu", numerics=numerics, batch_invariant=batch_invariant)


@cache
def alone(case: str, seed: int, count: int) -> list[list[int]]:
    """What one process says."""
    settings = SETTINGS | CASES[case]
    model = whole(*(settings.pop(name) for name in ("numerics", "batch_invariant") if name in settings))
    with LLM(model, **settings) as llm:
        return answers(llm, seed, count)


@pytest.fixture(scope="module", autouse=True)
def apart():
    yield
    part()


@pytest.fixture
def pair():
    """Two ranks."""
    if not PAIR or PAIR[0].engine.closed:
        PAIR[:] = [opened("release, drafts", 2)]
    return PAIR[0]


def test_two_ranks_say_what_one_says_with_drafts_and_cached_prefixes(pair):
    assert answers(pair, 1, 7) == alone("release, drafts", 1, 7)
    stats = idle_stats(pair)
    assert stats["blocks_cached"] > 0 and stats["steps"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["shard", "host"])
def test_ranks_that_share_their_tables_say_the_same(placement):
    with opened("release, drafts", 2, engram_placement=placement) as llm:
        assert answers(llm, 1, 7) == alone("release, drafts", 1, 7)
        report = llm.engram.report()
    assert report["placement"] == placement and report["wait_us"].keys() == {1, 3}


def test_a_request_alone_is_served_while_the_other_ranks_take_part_without_rows(pair):
    (prompts, params), *_ = conversations(1, 7)
    before = pair.stats()["dummy_steps"]
    assert pair.generate(prompts[0], params).token_ids == alone("release, drafts", 1, 7)[0]
    assert pair.stats()["dummy_steps"] > before


def test_requests_go_to_the_rank_that_has_the_fewest_and_equal_prompts_stay_together(pair):
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    handles = [pair.submit([9, i], params) for i in range(4)]
    twins = pair.submit_all([([7, 7], params), ([7, 7], params)], ["one", "two"])
    assert [handle.rank for handle in handles] == [0, 1, 0, 1] and len({twin.rank for twin in twins}) == 1
    for handle in (*handles, *twins):
        handle.cancel()
    assert {handle.result().finish_reason for handle in (*handles, *twins)} == {"abort"}
    idle_stats(pair)


def test_a_stream_from_another_rank_comes_token_by_token_and_leaving_it_frees_everything(pair):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    pair.submit([3, 4], SamplingParams(max_tokens=400, ignore_eos=True), request_id="long")
    handle = pair.submit([5, 6, 7], params)
    assert handle.rank == 1
    events = []
    for event in handle:
        events.append(event)
        if len(events) == 5:
            break
    assert all(len(event.top_logprobs) == 2 for event in events)
    assert 5 <= handle.usage.completion_tokens < 40
    handle.cancel()
    result = handle.result()
    assert result.finish_reason == "abort" and result.token_ids[:5] == [event.token_id for event in events]
    assert pair.abort("long")
    idle_stats(pair)


def test_a_bad_request_is_refused_and_nothing_else_happens(pair):
    with pytest.raises(RequestError, match="vocabulary"):
        pair.generate([[5, 6], [1 << 20]])
    idle_stats(pair)


def test_logits_are_those_of_one_process(pair):
    pair.submit([3, 4], SamplingParams(max_tokens=60, ignore_eos=True), request_id="busy")
    got = pair.logits(list(range(5, 40)))  # on the other rank
    with LLM(whole("release", True), **SETTINGS) as llm:
        want = llm.logits(list(range(5, 40)))
    assert torch.equal(got, want)
    pair.abort("busy")
    idle_stats(pair)


def test_what_would_part_the_ranks_is_refused(pair):
    with pytest.raises(RuntimeError, match="--kernels"):
        pair.swap("torch")
    with pytest.raises(RuntimeError, match="together"):
        pair.engine.stop()
    with pytest.raises(GroupError, match="close the other"):
        LLM("tiny", dp=2)


def test_a_killed_rank_ends_the_group_with_an_error_that_says_so(pair):
    handles = [pair.submit([5, i], SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(4)]
    next(iter(handles[1]))
    begin = time.monotonic()
    pair.engine._seat.started[0].send_signal(signal.SIGKILL)
    results = [handle.result() for handle in handles]
    assert time.monotonic() - begin < TIMEOUT
    assert {result.finish_reason for result in results} == {"error"}
    assert all("group of 2 ranks has ended" in result.error for result in results)
    assert len(results[1].token_ids) > 0, "what had come is kept"
    with pytest.raises(RuntimeError, match="closed"):
        pair.submit([5])
    pair.close()
    assert not dist.is_initialized()


def idle_stats(llm: LLM) -> dict:
    """Counts of all ranks once nothing runs; nothing is held."""
    end = time.monotonic() + TIMEOUT
    while (stats := llm.stats())["running"] + stats["waiting"] and time.monotonic() < end:
        time.sleep(0.02)
    assert stats["running"] == stats["waiting"] == 0
    assert stats["blocks_free"] == stats["blocks_total"]
    assert stats["slots_free"] == llm.engine.group.size * SETTINGS["max_num_seqs"]
    return stats


# ---- without processes -------------------------------------------------------------------------------------


def vote(tables: list[list[Row]], every: int = 1) -> list[int]:
    """The kinds that follow each table."""
    engine = RankEngine.__new__(RankEngine)
    engine.cfg, engine._since, found = type("C", (), {"prefill_interval": every}), 0, []
    for table in tables:
        engine._vote(max(row.kind for row in table), table)
        found.append(engine._kind)
    return found


def row(kind=DECODE, wants=0, running=1) -> Row:
    return Row(kind, 1, wants, running, 0, 1)


def test_a_prompt_is_begun_at_once_when_nothing_runs_or_the_interval_is_one():
    assert vote([[row(IDLE, 1, 0), row(IDLE, 0, 0)]], every=100) == [PREFILL]
    assert vote([[row(wants=1), row()]], every=1) == [PREFILL]
    assert vote([[row(), row()]], every=1) == [DECODE]


def test_one_wish_waits_for_the_interval_and_the_wish_of_all_for_less():
    one, all_, done = [row(wants=1), row()], [row(wants=1), row(wants=1)], [row(PREFILL, 1), row(IDLE)]
    assert vote([one] * 100, every=100).index(PREFILL) == 99
    assert vote([all_] * 100, every=100).index(PREFILL) == 69
    assert vote([done, one, one], every=100) == [DECODE] * 3, "after a prefill the count begins again"
    assert vote([[row(PREFILL, 1), row(IDLE, 1)]], every=100) == [PREFILL], "all want the next one too"


@pytest.mark.parametrize("dp, ep, says", [(2, 3, "ep is 3"), (4, 3, "multiple"), (0, 1, "dp is 0"),
                                          (2, True, "ep is True")])
def test_sizes_that_do_not_fit_are_refused_by_name(dp, ep, says):
    with pytest.raises(GroupError, match=says):
        LLM("tiny", dp=dp, ep=ep)


def test_a_ready_model_cannot_be_spread():
    with pytest.raises(GroupError, match="name it"):
        LLM(whole("release", True), dp=2)


def test_torchrun_must_have_started_as_many_ranks(monkeypatch):
    part()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(GroupError, match="3 ranks were started, but dp is 2"):
        LLM("tiny", dp=2)


# ---- all of it ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_says_what_one_says(ranks, case):
    with opened(case, ranks, canary="raise") as llm:
        for seed in range(3):
            assert answers(llm, seed, 20) == alone(case, seed, 20)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_groups_of_experts_in_four_ranks():
    with LLM("tiny", dp=4, ep=2, distributed_timeout=TIMEOUT, **SETTINGS, **CASES["release"]) as llm:
        assert answers(llm, 1, 20) == alone("release", 1, 20)


@pytest.mark.slow
def test_ranks_choose_the_kernels_that_rank_0_has_chosen():
    with ops.use(exchange="auto"), opened("exact", 2) as llm:
        assert answers(llm, 1, 2) == alone("exact", 1, 2)


@pytest.mark.slow
def test_a_rank_ends_with_rank_0_while_it_still_loads():
    part()
    seat = take_seat(Parallel(2, 2), {"model": "tiny", **SETTINGS})  # which never joins the other one
    [started] = seat.started
    while not seat.store.check(["here/1"]):
        assert started.poll() is None
        time.sleep(0.05)
    started.stdin.close()  # as the end of this process does
    assert started.wait(20) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stuck_rank_ends_the_group_within_the_timeout():
    with opened("exact", 3) as llm:
        stuck = llm.engine._seat.started[1]
        handles = [llm.submit([5, i], SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(3)]
        next(iter(handles[0]))
        begin = time.monotonic()
        stuck.send_signal(signal.SIGSTOP)
        assert {handle.result().finish_reason for handle in handles} == {"error"}
        assert time.monotonic() - begin < TIMEOUT + 5
        assert stuck.wait(10) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_killed_at_any_step_leaves_nobody_waiting(seed):
    draw = random.Random(seed)
    with opened(draw.choice(list(CASES)), 2) as llm:
        prompts = [[draw.randrange(5, 500) for _ in range(draw.choice((2, 60)))] for _ in range(6)]
        handles = [llm.submit(p, SamplingParams(max_tokens=400, ignore_eos=True)) for p in prompts]
        time.sleep(draw.random())
        begin = time.monotonic()
        llm.engine._seat.started[0].send_signal(signal.SIGKILL)
        assert {handle.result().finish_reason for handle in handles} == {"error"}
        assert time.monotonic() - begin < TIMEOUT
    assert not dist.is_initialized() and torch.is_inference_mode_enabled() is False
