"""The engine from outside: threads, cancellation, failures, and the parts of a step by hand."""

import asyncio
import threading
import time

import pytest
import torch

from dskit.engine.seq import SamplingParams

from .mock import VOCAB, Runner, engine, scores

LONG = SamplingParams(seed=1, ignore_eos=True)


def free(e):
    return e.stats()["blocks_free"] == e.stats()["blocks_total"] and not e.has_work


@pytest.fixture
def threaded():
    e = engine()
    e.start()
    yield e
    e.close()


def test_a_step_in_three_parts():
    e = engine()
    handle = e.submit([5, 6, 7], LONG)
    plan = e.plan()
    with pytest.raises(RuntimeError, match="not committed yet"):
        e.plan()
    events = e.commit(plan, e.launch(plan))
    with pytest.raises(RuntimeError, match="committed once"):
        e.commit(plan, e.launch(plan))
    assert [ev.request_id for ev in events] == [handle.request_id]
    assert events[0].token_id == e.scheduler.running[0].tokens[-1]
    assert e.trace()[0].rows == 3 and e.stats()["steps"] == 1 and e.stats()["tokens"] == 1


def test_the_thread_gives_the_same_as_steps_by_hand(threaded):
    handles = [threaded.submit([5, i], SamplingParams(seed=i)) for i in range(2, 12)]
    by_thread = [h.result().token_ids for h in handles]
    e = engine()
    assert by_thread == [e.submit([5, i], SamplingParams(seed=i)).result().token_ids for i in range(2, 12)]


def test_many_threads_share_one_engine(threaded):
    """Eight callers submit, read and cancel at once; each gets its own tokens, and nothing is left behind."""
    want = [engine().submit([9, i], SamplingParams(seed=i)).result().token_ids for i in range(2, 10)]
    got = {}

    def call(i):
        for round in range(5):
            handle = threaded.submit([9, i], SamplingParams(seed=i))
            if round % 2:
                handle.cancel()
                handle.result()
            else:
                got[i, round] = [ev.token_id for ev in handle if ev.token_id is not None]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2, 10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=20)
    assert len(got) == 24 and all(tokens == want[i - 2] for (i, _), tokens in got.items())
    wait_until(lambda: free(threaded))


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen within 10 s"
        time.sleep(0.005)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_at_any_moment(steps):
    """Waiting, between chunks, running: one abort event, everything free, the neighbour untouched."""
    e = engine()
    other = e.submit([3, 4], SamplingParams(seed=5))
    handle = e.submit(range(2, 40), LONG)
    for _ in range(steps):
        e.step()
    handle.cancel()
    handle.cancel()
    events = list(handle)
    assert [ev.finish_reason for ev in events if ev.finish_reason] == ["abort"]
    assert handle.result().finish_reason == "abort"
    assert other.result().token_ids == engine().submit([3, 4], SamplingParams(seed=5)).result().token_ids
    assert free(e) and not e.cancel(handle.request_id)


@pytest.mark.parametrize("overlap", [False, True])
def test_cancelled_at_every_step_of_a_run(overlap):
    """A long prompt in chunks, two choices of one, a decoding one: what they held is free two steps later."""

    def begin():
        e = engine(overlap=overlap)
        params = [SamplingParams(seed=i, ignore_eos=True, max_tokens=10) for i in range(3)]
        return e, e.submit_all(zip([range(2, 40), [5, 6, 7], [5, 6, 7]], params, strict=True))

    e, handles = begin()
    count = 0
    while e.has_work:
        e.step()
        count += 1
    assert count >= 12
    for steps in range(count):
        e, handles = begin()
        for _ in range(steps):
            e.step()
        for handle in handles:
            handle.cancel()
        for _ in range(2):
            e.step()
        e.check()
        assert free(e) and e.stats()["slots_free"] == 4
        assert {handle.result().finish_reason for handle in handles} <= {"abort", "length"}


def test_a_failed_step_ends_its_requests_and_no_other():
    e = engine(Runner(4, spoil={3: RuntimeError("device on fire")}))
    short = e.submit([5, 6], SamplingParams(max_tokens=1))
    e.step()
    victims = [e.submit([7, 8], LONG), e.submit([9, 9], LONG)]
    e.step()
    e.step()
    later = e.submit([3, 4], SamplingParams(seed=5))
    for v in victims:
        assert v.result().finish_reason == "error"
        assert "decode step failed: RuntimeError: device on fire" in v.result().error
        assert len(v.result().token_ids) == 1
    assert short.result().finish_reason == "length"
    assert later.result().token_ids == engine().submit([3, 4], SamplingParams(seed=5)).result().token_ids
    assert free(e)


def test_ctrl_c_ends_the_step_and_leaves_the_books_in_order():
    e = engine(Runner(4, spoil={2: KeyboardInterrupt()}))
    handle = e.submit([5, 6], LONG)
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert "KeyboardInterrupt" in handle.result().error and free(e)
    assert e.submit([5, 6]).result().finish_reason in ("stop", "length")


class Poisoned(Runner):
    """Gives NaN to sequences whose prompt begins with token 13."""

    def _rows(self, w):
        return [row * (float("nan") if w.tokens[0] == 13 else 1) for row in super()._rows(w)]


@pytest.mark.parametrize("scoring", [False, True])
def test_nan_rows_end_only_their_request(scoring):
    e = engine(Poisoned(4))
    handles = [e.submit([t, 5], SamplingParams(seed=0), scoring=scoring) for t in (3, 13, 4)]
    results = [h.result() for h in handles]
    assert [r.finish_reason == "error" for r in results] == [False, True, False]
    assert "not finite" in results[1].error and free(e)


def test_scoring_returns_the_logits_of_every_row():
    """Three chunks, beside a request that samples."""
    e = engine()
    other = e.submit([3, 4], SamplingParams(seed=5))
    ids = list(range(2, 42))
    handle = e.submit(ids, scoring=True)
    assert handle.result().finish_reason == "stop" and handle.result().token_ids == []
    history, rows = 0, []
    for token in ids:
        history = (history * 1000003 + token + 1) % (2**61 - 1)
        rows.append(scores(history))
    assert torch.equal(handle.logits, torch.stack(rows)) and handle.logits.shape == (40, VOCAB)
    assert other.result().finish_reason and free(e)
    assert e.submit(range(64), scoring=True).result().error is None  # a prompt as long as the context


def test_asyncio(threaded):
    async def read(i):
        return [
            ev.token_id
            async for ev in threaded.submit([5, i], SamplingParams(seed=i))
            if ev.token_id is not None
        ]

    async def all_of_them():
        return await asyncio.gather(*(read(i) for i in range(2, 8)))

    want = [engine().submit([5, i], SamplingParams(seed=i)).result().token_ids for i in range(2, 8)]
    assert asyncio.run(all_of_them()) == want


def test_a_listener_that_fails_cancels_its_request_only():
    e = engine()
    bad, good = e.submit([5, 6], LONG), e.submit([5, 6], LONG)

    def listener(event):
        raise OSError("the client is gone")

    bad.subscribe(listener)
    assert len(good.result().token_ids) == 62
    assert bad.result().finish_reason == "abort" and len(bad.result().token_ids) == 1 and free(e)


def test_close_ends_everything_from_any_state(threaded):
    handles = [threaded.submit(range(2, 40), LONG) for _ in range(9)]
    threaded.close()
    assert all(h.result().finish_reason in ("abort", "length") for h in handles) and free(threaded)
    threaded.close()
    with pytest.raises(RuntimeError, match="closed"):
        threaded.submit([1, 2])


def test_a_failure_outside_the_model_ends_every_request_and_the_thread_goes_on(threaded):
    def broken(ahead=False):
        raise ValueError("a bug")

    plan, threaded.scheduler.plan = threaded.scheduler.plan, broken
    assert "a bug" in threaded.submit([5, 6]).result().error
    threaded.scheduler.plan = plan
    assert threaded.submit([5, 6]).result().finish_reason in ("stop", "length")
    assert free(threaded)


def test_stop_hands_the_steps_back(threaded):
    handle = threaded.submit([5, 6], LONG)
    threaded.stop()
    assert not threaded.driven_elsewhere and len(handle.result().token_ids) == 62


def test_usage_counts_and_times():
    e = engine()
    usage = e.submit([5, 6, 7], SamplingParams(seed=1, ignore_eos=True, max_tokens=4)).result().usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 0)
    assert usage.ttft_s > 0 and usage.decode_tok_s > 0
    assert e.submit([5], SamplingParams(max_tokens=1)).result().usage.decode_tok_s is None


def test_a_seed_is_drawn_and_reported():
    e = engine()
    first = e.submit([5, 6], SamplingParams(ignore_eos=True)).result()
    again = e.submit([5, 6], SamplingParams(ignore_eos=True, seed=first.seed)).result()
    assert first.token_ids == again.token_ids
    assert e.submit([5, 6]).result().seed != first.seed
