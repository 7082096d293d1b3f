"""Whatever is cancelled, whenever: all of it comes back, and no step reads what others left. The canary sees
it if not."""

import pytest

from dskit.engine.canary import CanaryError
from dskit.engine.seq import SamplingParams, StepPlan

from .mock import VOCAB, engine, scores

LONG = SamplingParams(seed=1, ignore_eos=True, max_tokens=14)
SYSTEM = [2 + 7 * i % (VOCAB - 2) for i in range(17)]
PROMPTS = [SYSTEM + [9, 8, 7], SYSTEM + [9, 8, 7], SYSTEM[:10], SYSTEM + [5] * 20]  # the second is a fork


def traffic(**settings):
    """An engine with four requests that share, fork and come in chunks, and their handles."""
    e = engine(num_blocks=26, **settings)
    return e, [e.submit(prompt, LONG) for prompt in PROMPTS]


def free(e):
    stats = e.stats()
    return stats["blocks_free"] == stats["blocks_total"] and stats["slots_free"] == e.cfg.max_num_seqs


def steps_of(e):
    count = 0
    while e.has_work:
        e.step()
        count += 1
    return count


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_abort_at_every_step(exact, overlap):
    """Within two steps nothing is held any more; the others end as they would have; the canary is clean."""
    e, handles = traffic(exact_prefix=exact, overlap=overlap)
    last = steps_of(e)
    want = [h.result().token_ids for h in handles]
    assert last > 15 and all(len(ids) == 14 for ids in want)
    for step in range(last):
        victim = step % len(PROMPTS)
        e, handles = traffic(exact_prefix=exact, overlap=overlap)
        for _ in range(step):
            e.step()
        seq = handles[victim]._seq
        handles[victim].cancel()
        e.step()
        e.step()
        assert not seq.slot and not seq.blocks and handles[victim].finished
        got = [h.result().token_ids for h in handles]
        assert got[victim] == want[victim][: len(got[victim])]
        assert [g for g in got if g is not got[victim]] == [w for i, w in enumerate(want) if i != victim]
        e.settle()
        e.check()
        assert free(e)


def test_a_step_without_rows_wipes_nothing():
    """Another rank asked for it, and it runs before the copies that are due of what was freed."""
    e, _ = traffic(exact_prefix=True)
    steps_of(e)
    plan = StepPlan("decode", [])
    assert e._canary.freed_slots
    e._launch(plan, 0.0)
    assert not plan.copies.wipe_slots and not plan.copies.wipe_blocks


def break_into(e, how):
    """Run until the first request has decoded a little, then spoil its memory; the canary must notice."""
    while len(e.scheduler.running) < 3 or e.scheduler.running[0].generated < 3:
        e.step()
    how(e.scheduler)
    with pytest.raises(CanaryError) as caught:
        steps_of(e)
    return str(caught.value)


def swap_blocks(s):
    one, other = s.running[0], s.running[2]
    one.blocks[2], other.blocks[2] = other.blocks[2], one.blocks[2]


def swap_slots(s):
    one, other = s.running[0], s.running[2]
    one.slot, other.slot = other.slot, one.slot


def lose_a_block(s):
    s.running[2].blocks.append(s.blocks.alloc(1)[0])
    s.running[2].blocks.pop()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (swap_blocks, "read other entries at positions"),
        (swap_slots, "read stale windows at positions"),
        (lose_a_block, "has 1 holders in the pool, 0 in fact"),
    ],
)
def test_the_canary_notices(how, says, monkeypatch):
    e, _ = traffic(num_snapshots=1)
    monkeypatch.setattr(e.runner, "_rows", lambda w: [scores(5)] * (w.want == "last"))
    assert says in break_into(e, how)


def test_a_canary_that_only_logs_goes_on(caplog, monkeypatch):
    e, handles = traffic(canary="log")
    monkeypatch.setattr(e.runner, "_rows", lambda w: [scores(5)] * (w.want == "last"))
    while len(e.scheduler.running) < 3:
        e.step()
    swap_slots(e.scheduler)
    steps_of(e)
    assert "canary: request" in caplog.text and all(h.finished for h in handles)
