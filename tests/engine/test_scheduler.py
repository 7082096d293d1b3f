"""Random traffic over a tiny pool: nothing leaks, everybody is served once, and company changes no output."""

import random

import pytest

from dskit.engine.seq import SamplingParams

from .mock import EOS, VOCAB, engine


def requests(rng, n):
    """Random prompts with random sampling; some begin alike, some are equal, some run to the limit."""
    system, prompt = [rng.randrange(2, VOCAB) for _ in range(30)], [5]
    for _ in range(n):
        if rng.random() < 0.7:
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 40))]
            shared = rng.choice([0, 0, 9, 17, 30])
            prompt[:shared] = system[: min(shared, len(prompt))]
        room = 64 - len(prompt)
        yield (
            prompt,
            SamplingParams(
                seed=rng.randrange(2**64),
                temperature=rng.choice([0.0, 1.0, 1.5]),
                top_p=rng.choice([1, 0.9]),
                max_tokens=rng.choice([None, rng.randint(1, room)]),
                ignore_eos=rng.random() < 0.5,
                frequency_penalty=rng.choice([0, 0.5]),
                logprobs=rng.choice([None, 2]),
            ),
        )


def one_trace(seed):
    """One random trace; returns its preemptions and aborts."""
    rng = random.Random(seed)
    exact = rng.random() < 0.5
    e = engine(
        num_blocks=rng.choice([20, 24, 40]),
        max_num_seqs=rng.choice([2, 4, 9]),
        max_num_batched_tokens=rng.choice([3 if exact else 10, 16, 50]),
        prefill_interval=rng.choice([1, 1, 5]),
        exact_prefix=exact,
        num_snapshots=rng.choice([1, 2, 6]) if exact else 0,
        overlap=rng.random() < 0.5,
    )
    todo, handles, aborted = list(requests(rng, 12)), [], set()
    for _ in range(2000):
        while todo and rng.random() < 0.3:
            prompt, params = todo.pop()
            priority = rng.choice([0, 0, 1])
            handles.append((e.submit(prompt, params, priority=priority), prompt, params))
        if handles and rng.random() < 0.03:
            victim = rng.choice(handles)[0]
            aborted |= {victim.request_id} if e.cancel(victim.request_id) else set()
        e.step()
        if not todo and not e.has_work:
            break
    assert not e.has_work, "the trace did not end"
    assert e.scheduler.free_blocks == e.scheduler.blocks.total
    for handle, prompt, params in handles:
        events = list(handle)
        assert [ev.finish_reason for ev in events[:-1]] == [None] * (len(events) - 1) and events[
            -1
        ].finish_reason
        check_output(handle.result(), events, prompt, params, handle.request_id in aborted)
    return e.scheduler.preemptions, len(aborted)


def check_output(result, events, prompt, params, aborted):
    """The output equals that of the request alone in a large pool (of an aborted one: its beginning)."""
    alone = engine(num_blocks=100, canary="off").submit(prompt, params).result()
    assert "".join(ev.text for ev in events) == result.text
    assert [ev.token_id for ev in events if ev.token_id is not None] == result.token_ids
    if aborted and result.finish_reason == "abort":
        assert alone.token_ids[: len(result.token_ids)] == result.token_ids
        return
    assert (result.token_ids, result.text, result.finish_reason) == (
        alone.token_ids,
        alone.text,
        alone.finish_reason,
    )
    assert result.logprobs == alone.logprobs and result.seed == params.seed
    assert result.usage.completion_tokens == len(result.token_ids) and result.usage.prompt_tokens == len(
        prompt
    )


def traces(n):
    preempted, aborted = map(sum, zip(*map(one_trace, range(n)), strict=True))
    assert preempted > n / 4 and aborted > n / 4  # the property was put to the test


def test_random_traces():
    traces(8)


@pytest.mark.slow
def test_random_traces_full():
    traces(120)


def test_long_prompts_are_cut_at_block_borders():
    e = engine(max_num_batched_tokens=10)
    e.submit(range(2, 32))
    rows = []
    while (plan := e.plan()).kind == "prefill":
        rows += [(c.start, c.stop, c.want) for c in plan.chunks]
        e.commit(plan, e.launch(plan))
    assert rows == [(0, 8, "none"), (8, 16, "none"), (16, 24, "none"), (24, 30, "last")]


def test_prompts_share_a_step():
    e = engine()
    for n in (3, 4, 5, 30):
        e.submit(range(2, 2 + n), SamplingParams(max_tokens=1))
    plan = e.plan()
    assert [(c.start, c.stop, c.want) for c in plan.chunks] == [
        (0, 3, "last"),
        (0, 4, "last"),
        (0, 5, "last"),
        (0, 4, "none"),
    ]


def test_a_new_prompt_goes_before_the_next_decode_step():
    e = engine()
    e.submit([5, 6], SamplingParams(ignore_eos=True))
    e.step()
    assert e.plan().kind == "decode"
    e.commit(e._open, e.launch(e._open))
    e.submit([7, 8])
    assert e.plan().kind == "prefill"


def test_prefill_interval_lets_decode_run():
    e = engine(prefill_interval=3)
    e.submit([5, 6], SamplingParams(ignore_eos=True))
    kinds = []
    for _ in range(6):
        e.step()
        kinds.append(e.trace()[-1].kind)
        if kinds == ["prefill", "decode"]:
            e.submit([7, 8])
    assert kinds == ["prefill", "decode", "decode", "decode", "prefill", "decode"]


def test_the_longest_output_is_preempted_and_ends_the_same():
    """Three sequences outgrow the pool; each still gets what it gets alone."""
    e = engine(num_blocks=20, max_num_batched_tokens=64)
    params = [SamplingParams(seed=i, ignore_eos=True) for i in range(3)]
    prompts = [[10 + i] * 8 for i in range(3)]
    for _ in range(2):
        e.scheduler.ratio = 0.0
        handles = [e.submit(p, q) for p, q in zip(prompts, params, strict=True)]
        got = [h.result().token_ids for h in handles]
        assert got == [
            engine(num_blocks=100).submit(p, q).result().token_ids
            for p, q in zip(prompts, params, strict=True)
        ]
    assert e.scheduler.preemptions > 0


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"ignore_eos": True, "max_tokens": 5}, "length"),
        ({"ignore_eos": True}, "length"),
        ({"stop_token_ids": list(range(VOCAB))}, "stop"),
        ({"logit_bias": {EOS: 100}}, "stop"),
        ({"logit_bias": {EOS: 100}, "ignore_eos": True, "max_tokens": 3}, "length"),
    ],
)
def test_reasons_to_end(params, reason):
    result = engine().submit([4, 5, 6], SamplingParams(seed=0, **params)).result()
    assert result.finish_reason == reason
    if reason == "stop":
        assert len(result.token_ids) == 1 and result.text == ""
    else:
        assert len(result.token_ids) == len(result.text) == params.get("max_tokens", 61)


def test_a_stop_string_ends_the_text_before_it():
    free = engine().submit([4, 5], SamplingParams(seed=3, ignore_eos=True, max_tokens=30)).result().text
    cut = (
        engine()
        .submit([4, 5], SamplingParams(seed=3, ignore_eos=True, max_tokens=30, stop=[free[10:13]]))
        .result()
    )
    assert cut.finish_reason == "stop" and cut.text == free[: free.index(free[10:13])]
