"""Who goes first, who is refused, who has waited too long: with what words, and nothing left behind."""

import pytest

from dskit.engine.seq import RequestError, SamplingParams

from .mock import engine

LONG = SamplingParams(seed=1, ignore_eos=True)


def full(**settings):
    """An engine whose only place is taken."""
    e = engine(max_num_seqs=1, **settings)
    e.submit([5, 6], LONG)
    e.step()
    return e


def order_of_first_tokens(e, handles):
    order = []
    while e.has_work:
        for event in e.step():
            name = event.request_id
            if name in handles and name not in order:
                order.append(name)
    return order


def test_a_lower_priority_value_goes_first_and_equals_in_order():
    e = full()
    names = ["later", "first", "second", "urgent"]
    for name, priority in zip(names, (1, 0, 0, -5), strict=True):
        e.submit([7, 8], SamplingParams(seed=2, max_tokens=3), request_id=name, priority=priority)
    assert order_of_first_tokens(e, names) == ["urgent", "first", "second", "later"]


def test_priority_does_not_push_aside_a_prompt_that_is_half_done():
    e = engine(max_num_batched_tokens=8)
    e.submit(range(2, 32), LONG, request_id="long")
    e.step()
    e.submit([7, 8], LONG, request_id="urgent", priority=-1)
    e.step()
    assert [seq.request.request_id for seq in e.scheduler.waiting] == ["long", "urgent"]


def test_too_many_requests_or_tokens_are_refused_and_say_why():
    e = full(max_queued_requests=3, max_queued_tokens=50)
    for _ in range(2):
        e.submit([5] * 20, LONG)
    with pytest.raises(RequestError, match="60 prompt tokens would wait, and max_queued_tokens all") as no:
        e.submit([5] * 20, LONG)
    assert (no.value.status, no.value.code) == (429, "queue_full")
    e.step()  # what is in the inbox counts as what is in the queue
    e.submit([5], LONG)
    with pytest.raises(RequestError, match="4 requests would wait, and max_queued_requests allows 3"):
        e.submit([5], LONG)
    assert e.stats()["waiting"] == 3


def test_a_prompt_longer_than_the_queue_is_taken_when_nobody_waits():
    e = engine(max_queued_tokens=10)
    assert e.submit([5] * 30, SamplingParams(max_tokens=2, ignore_eos=True)).result().error is None


def test_requests_that_come_together_are_taken_or_refused_together():
    e = full(max_queued_requests=3)
    work = [([5, 6], LONG)] * 2
    handles = e.submit_all(work, ["a", "b"])
    assert [h.request_id for h in handles] == ["a", "b"]
    for names, words in ((["c", "d"], "4 requests would wait"), (["b"], "'b' is being served")):
        with pytest.raises(RequestError, match=words):
            e.submit_all(work[: len(names)], names)
    with pytest.raises(RequestError, match="token id 99"):
        e.submit_all([([5], LONG), ([99], LONG)])
    assert e.stats()["waiting"] == 2


@pytest.fixture
def clock(monkeypatch):
    """The engine's clock: `clock.now += 5`."""

    class Clock:
        now = 1000.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    for module in ("loop", "seq", "scheduler"):
        monkeypatch.setattr(f"dskit.engine.{module}.time", clock)
    return clock


def test_who_waits_too_long_is_told(clock):
    e = full(queue_timeout=30.0)
    waiting = e.submit([7, 8], LONG)
    e.step()
    clock.now += 31
    e.step()
    result = waiting.result()
    assert result.finish_reason == "error" and "no room was free within 30 s (queue_timeout)" in result.error
    assert len(e.scheduler.running) == 1  # whoever has begun goes on


def test_a_batch_waits_its_turn_however_long(clock):
    e = full()
    e.submit([7, 8], LONG)
    e.step()
    clock.now += 10_000
    e.step()
    assert len(e.scheduler.waiting) == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_has_a_time_of_its_own(clock, overlap):
    e = engine(overlap=overlap)
    slow = e.submit([5, 6], LONG, timeout=2.5)
    other = e.submit([7, 8], SamplingParams(seed=3, ignore_eos=True, max_tokens=9))
    for _ in range(3):
        e.step()
        clock.now += 1
    result = slow.result()
    assert "not finished within its timeout of 2.5 s" in result.error and 1 < len(result.token_ids) <= 3
    assert len(other.result().token_ids) == 9
    assert e.stats()["blocks_free"] == e.stats()["blocks_total"] and e.stats()["slots_free"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 1.5}, "priority is 1.5"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": -1}, "timeout"),
        ({"cache_salt": 7}, "cache_salt is 7"),
    ],
)
def test_wrong_options(options, words):
    e = engine()
    with pytest.raises(RequestError, match=words):
        e.submit([5], **options)
    assert not e.has_work
