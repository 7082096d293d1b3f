"""Planning a step while the one before it runs changes no token; and what n > 1 asks for is computed once."""

import pytest

from dskit import checkpoint
from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams

from .mock import EOS, VOCAB, engine

IDS = [3 + (11 * i * i + 5 * i + i // 7) % 59 for i in range(100)]


@pytest.mark.parametrize("overlap", [True, False])
def test_results_arrive_one_step_late(overlap):
    """The first token comes with its prompt; from then on a step books the one before it."""
    e = engine(overlap=overlap)
    e.submit([5, 6], SamplingParams(seed=1, ignore_eos=True, max_tokens=4))
    counts = []
    while e.has_work:
        counts.append(len(e.step()))
    assert counts == ([1, 0, 1, 1, 1] if overlap else [1, 1, 1, 1])
    assert e.runner.computed == 2 + 3  # a length is known beforehand: no row too many


def test_an_end_that_nobody_knew_costs_one_row():
    """The row after the end-of-sequence token is under way; its token is thrown away, its memory kept."""
    e = engine(overlap=True, canary="raise")
    bias = SamplingParams(seed=0, logit_bias={EOS: 100})
    free = SamplingParams(seed=1, ignore_eos=True, max_tokens=8)
    handles = [e.submit([5, 6], free), e.submit([7, 8], free)]
    e.step()
    seq = e.scheduler.running[0]
    seq.params, seq.ends = bias.resolve({}, 40), {EOS}
    while not handles[0].finished:
        e.step()
    assert seq.slot and seq.inflight == 1 and len(seq.tokens) == 2 + 2
    e.step()
    assert not seq.slot and not handles[1].finished
    assert handles[1].result().token_ids == engine().submit([7, 8], free).result().token_ids


def test_prompts_and_preemptions_wait_for_the_books():
    """A plan that is made ahead holds decode rows alone, and takes no block from anybody."""
    e = engine(overlap=True, num_blocks=20)
    first = e.submit([5, 6], SamplingParams(seed=1, ignore_eos=True))
    e.step()
    e.step()
    assert len(e._flights) == 1
    e.submit([7, 8], SamplingParams(seed=2, ignore_eos=True))
    e.step()
    assert not e._flights and [r.kind for r in e.trace()] == ["prefill", "decode", "prefill"]
    assert len(first.result().token_ids) == 62


@pytest.mark.parametrize("overlap", [True, False])
def test_choices_of_one_prompt_are_forks(overlap):
    """Five choices of 21 tokens: the prompt is computed once, whole blocks are shared, the last is copied."""
    e = engine(max_num_seqs=6, max_num_batched_tokens=64, num_blocks=60, overlap=overlap)
    params = [SamplingParams(seed=i, ignore_eos=True, max_tokens=9) for i in range(5)]
    handles = [e.submit(IDS[:21], p) for p in params]
    e.step()
    assert e.trace()[-1].rows == 21 and len(e.scheduler.running) == 5
    shared = [seq.blocks[:5] for seq in e.scheduler.running]
    assert all(blocks == shared[0] for blocks in shared)
    assert len({seq.blocks[5] for seq in e.scheduler.running}) == 5
    got = [h.result() for h in handles]
    assert [r.token_ids for r in got] == [
        engine(num_blocks=100).submit(IDS[:21], p).result().token_ids for p in params
    ]
    assert [r.usage.cached_tokens for r in got] == [0, 21, 21, 21, 21]
    assert len({tuple(r.token_ids) for r in got}) == 5


def test_choices_that_come_together_are_forks_also_of_a_running_thread():
    """The engine's thread may wake up between two calls of submit, not between two of one call."""
    e = engine(max_num_seqs=6, max_num_batched_tokens=64, num_blocks=60)
    e.start()
    work = [(IDS[:21], SamplingParams(seed=i, ignore_eos=True, max_tokens=3)) for i in range(5)]
    handles = e.submit_all(work)
    assert [h.result().usage.cached_tokens for h in handles] == [0, 21, 21, 21, 21]
    e.close()


def test_forks_beyond_the_room_start_behind_the_cached_prompt():
    e = engine(max_num_seqs=2, max_num_batched_tokens=64)
    params = [SamplingParams(seed=i, ignore_eos=True, max_tokens=5) for i in range(4)]
    handles = [e.submit(IDS[:21], p) for p in params]
    assert [h.result().usage.cached_tokens for h in handles] == [0, 21, 20, 21]
    assert [h.result().token_ids for h in handles] == [
        engine().submit(IDS[:21], p).result().token_ids for p in params
    ]


def test_a_prompt_at_a_block_border_is_forked_without_a_copy():
    e = engine(max_num_batched_tokens=64)
    handles = [e.submit(IDS[:20], SamplingParams(seed=i, ignore_eos=True, max_tokens=6)) for i in range(3)]
    e.step()
    assert [len(seq.blocks) for seq in e.scheduler.running] == [5, 5, 5] and not e.scheduler.copies.blocks
    assert all(len(h.result().token_ids) == 6 for h in handles)


@pytest.fixture(scope="module")
def model():
    """The preset tiny in release numerics, with rows that do not depend on their batch."""
    return checkpoint.load("tiny", device="cpu", batch_invariant=True)


def test_overlap_changes_no_bit(model):
    """Greedy and drawn, with penalties, with images among the generated tokens, forked, preempted, ended."""
    image = model.config.image_token_id
    common = {"ignore_eos": True, "logprobs": 512}
    params = [
        SamplingParams(temperature=0, max_tokens=12, **common),
        SamplingParams(seed=3, temperature=1.3, top_p=0.9, max_tokens=12, **common),
        SamplingParams(seed=4, temperature=1.3, max_tokens=12, **common),
        SamplingParams(seed=5, repetition_penalty=1.5, frequency_penalty=1, max_tokens=12, **common),
        SamplingParams(seed=6, logit_bias={image: 9}, max_tokens=9, **common),
        SamplingParams(seed=7, temperature=2, stop_token_ids=list(range(0, 500, 3)), logprobs=512),
    ]
    prompts = [IDS[:27], IDS[3:30], IDS[3:30], IDS[40:67], IDS[:13], IDS[70:75]]
    got = []
    for overlap in (False, True):
        settings = dict(max_model_len=64, num_blocks=7, max_num_batched_tokens=32, canary="raise")
        with LLM(model, overlap=overlap, **settings) as llm:
            llm.engine.scheduler.ratio = 0.0
            got.append(llm.generate(prompts, params))
            assert llm.stats()["preemptions"] > 0 and llm.stats()["blocks_free"] == 7
    for one, other in zip(*got, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert one.error is None and one.finish_reason == other.finish_reason
    assert image in got[0][4].token_ids[:-1]
    assert len({token for result in got[0] for token in result.token_ids}) > 20


def test_the_engine_thread_overlaps_too(model):
    with LLM(model, overlap=True, max_model_len=64) as llm:
        handles = [llm.submit(IDS[:9], SamplingParams(seed=i, max_tokens=8)) for i in range(3)]
        got = [h.result().token_ids for h in handles]
    with LLM(model, overlap=False, max_model_len=64) as llm:
        want = [llm.generate(IDS[:9], SamplingParams(seed=i, max_tokens=8)).token_ids for i in range(3)]
    assert got == want


def test_a_failed_step_under_overlap_ends_its_requests_and_no_other():
    from .mock import Runner

    e = engine(Runner(4, spoil={3: RuntimeError("device on fire")}), overlap=True)
    victims = [e.submit(ids, SamplingParams(ignore_eos=True)) for ids in ([7, 8], [9, 9])]
    for _ in range(4):
        e.step()
    later = e.submit([3, 4], SamplingParams(seed=5))
    for v in victims:
        assert v.result().finish_reason == "error" and "device on fire" in v.result().error
    assert later.result().token_ids == engine().submit([3, 4], SamplingParams(seed=5)).result().token_ids
    assert e.stats()["blocks_free"] == 24 and VOCAB == 64
