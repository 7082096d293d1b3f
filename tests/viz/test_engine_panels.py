"""Panels of a running model: swap, live profile, cache map, expert load; each is what the engine says."""

from __future__ import annotations

import re

import pytest
import torch

import dskit
from dskit import ops
from dskit.engine.llm import LLM
from dskit.viz import figures
from dskit.viz.blocks import CacheMap
from dskit.viz.experts import ExpertLoad, counts, evenness
from dskit.viz.figures.engine import block_state
from dskit.viz.live import Clock, Compiling, Frame, LiveProfile, own_times
from dskit.viz.swap import KernelSwap

LONG = dskit.SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    """A small engine whose blocks run out: two sequences fit, and grow."""
    with LLM("tiny", speculate="off", max_num_seqs=3, block_size=8, num_blocks=10, max_model_len=64) as llm:
        yield llm


# ---- swap --------------------------------------------------------------------------------------------------


@pytest.fixture
def swap():
    panel = KernelSwap(["norm", "rope"])
    yield panel
    panel.reset()


def line(panel: KernelSwap, group: str) -> dict:
    return next(row for row in panel.data if row["group"] == group)


def test_a_click_is_a_use_and_reset_gives_back_what_was_there(swap):
    before = ops.selection()
    swap.toggles["norm"].value = "auto"
    assert swap.code == "dskit.use(norm='auto')" and ops.selection()["norm.rms"] == "auto"
    assert line(swap, "norm")["choice"] == "auto" and "auto in use" in swap.cells["norm"].value
    swap.toggles["rope"].value = "auto"
    swap.undo()
    assert swap.code == "dskit.use(norm='auto')" and swap.toggles["rope"].value == before["rope.rotate"]
    assert swap.toggles["rope"].index == swap.choices.index(before["rope.rotate"]), "the button is pressed"
    swap.reset()
    assert ops.selection() == before and swap.code.startswith("# as it was")


@pytest.mark.skipif(not ops.interpreting(), reason="where kernels are interpreted")
def test_an_interpreted_kernel_has_an_error_and_no_time(swap):
    picture = swap._image.value
    swap.toggles["norm"].value = "triton"
    row = line(swap, "norm")
    assert row["time"] == "interpreted" and 0 < row["error"] < 1e-2
    assert swap._image.value != picture and "norm = triton" in swap._image.value
    assert "interpreted" in swap.cells["norm"].value
    assert re.fullmatch(r"[\d.]+ ms", line(swap, "rope")["time"])


def test_a_refused_kernel_says_why_and_nothing_changes(swap, monkeypatch):
    before = ops.selection()
    monkeypatch.setattr(ops, "not_here", lambda name: "no GPU today" if name == "triton" else None)
    swap.toggles["norm"].value = "triton"
    assert ops.selection() == before and swap.toggles["norm"].value == before["norm.rms"]
    assert line(swap, "norm")["state"].startswith("refused: op norm.rms: implementation 'triton'")
    assert "no GPU today" in swap.cells["norm"].value
    swap.toggles["norm"].value = "auto"
    assert "leaves triton aside: no GPU today" in line(swap, "norm")["state"]


def test_choices_made_elsewhere_stay(swap):
    with dskit.use(rope="auto"):
        swap.toggles["norm"].value = "auto"
        swap.reset()
        assert ops.selection()["rope.rotate"] == "auto"


# ---- live profile ------------------------------------------------------------------------------------------


def test_one_step_in_so_many_is_sampled_and_its_ops_are_there(llm):
    panel = LiveProfile(llm, every=4)
    steps = llm.engine.steps
    llm.generate([3, 4, 5], dskit.SamplingParams(max_tokens=9, ignore_eos=True))
    panel.poll()
    assert panel.clock.taken == -(-(llm.engine.steps - steps) // 4)
    shares = [row["share"] for row in panel.data if row["share"] is not None]
    assert sum(shares) == pytest.approx(1) and min(shares) >= 0
    assert any(row["label"].startswith("mhc.") for row in panel.data) and "one in 4" in panel.figure().alt
    panel.pause()
    llm.generate([3, 4, 5], dskit.SamplingParams(max_tokens=2))
    assert panel.clock.taken == -(-9 // 4) and not ops._state.ranges
    second = LiveProfile(llm, every=4)
    third = LiveProfile(llm, every=4)
    assert second.paused and len(ops._state.ranges) == 1, "one at a time"
    third.pause()


def test_own_times_add_up_and_compiling_stands_apart():
    step = Frame("step[decode]", None, 0.0, 0.010)
    outer = Frame("moe.experts[torch]", step, 0.001, 0.009, compile_ms=2.0)
    inner = Frame("moe.plan[torch]", outer, 0.002, 0.005, compile_ms=2.0)
    step.compile_ms = 2.0
    found = own_times([[step, outer, inner]])
    assert found == pytest.approx({"moe.experts[torch]": 5, "(outside ops)": 2, "moe.plan[torch]": 1})


def test_another_thread_s_call_belongs_to_no_sample():
    clock = Clock(Compiling())
    with clock("dskit::norm.rms[torch]"):
        assert not clock._frames
    with clock("dskit::step[decode]"), clock("dskit::norm.rms[torch]"):
        pass
    (frames,) = clock.samples
    assert [frame.label for frame in frames] == ["step[decode]", "norm.rms[torch]"]


def test_the_compiler_is_heard():
    compiling = Compiling()
    torch.compile(lambda x: x + 1, backend="eager")  # loads it
    compiling.listen(), compiling.listen()
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
    assert compiling.ms > 0 and "dynamo" in compiling._heard


# ---- cache map ---------------------------------------------------------------------------------------------


def states(panel: CacheMap) -> list[str]:
    return [block_state(row) for row in panel.data]


def assert_counts_match(panel: CacheMap) -> None:
    """The picture says what stats() and /metrics say."""
    stats = panel.llm.stats()
    assert states(panel).count("free") + states(panel).count("cached") == stats["blocks_free"]
    assert sum(row["cached"] for row in panel.data) == stats["blocks_cached"]
    assert len(panel.data) == stats["blocks_total"]


def test_the_map_follows_a_preemption_step_by_step(llm):
    panel = CacheMap(llm)
    for name in ("a", "b"):
        llm.submit([ord(name)] * 28, LONG, start=False, request_id=name)
    while panel.go(4):
        assert_counts_match(panel)
    assert llm.stats()["preemptions"] and "preempted" in {row["kind"] for row in panel.lives}
    assert set(states(panel)) <= {"free", "cached"}
    assert "then preempted for" in figures.request_lives(panel.lives).alt


def test_requests_that_begin_alike_share_blocks(llm):
    panel = CacheMap(llm)
    for name in ("a", "b"):
        llm.submit(list(range(3, 23)), dskit.SamplingParams(max_tokens=2), start=False, request_id=name)
    panel.plan(), panel.launch(), panel.commit()
    assert states(panel).count("shared") == 2 and "2 shared" in panel.figure().alt
    sizes = llm.cache_bytes()
    assert sum(sizes.values()) > 0 and f"global {sizes['global']:,} bytes" in panel.figure().alt
    panel.go()


def test_parts_of_a_step_are_taken_in_their_order(llm):
    panel = CacheMap(llm)
    for wrong, before in ((panel.launch, "plan"), (panel.commit, "launch")):
        with pytest.raises(RuntimeError, match=f"press {before} first"):
            wrong()
    assert not panel.plan() and panel.said.value == "nothing to do"
    button = panel.children[0].children[1]
    button.click()
    assert "press plan first" in panel._note.value


# ---- experts -----------------------------------------------------------------------------------------------


def test_loads_count_every_choice_and_the_scale_stays(llm):
    panel = ExpertLoad(llm, ["hello", "hello, hello"])
    k, first = llm.config.num_experts_per_tok, panel.top
    assert [sum(row["loads"]) for row in panel.data] == [6 * k] * llm.config.num_hidden_layers
    panel.text.value = "hello, hello"
    panel.run()
    assert sum(panel.data[0]["loads"]) == 13 * k and panel.top == first
    panel.which.value = "running"
    assert sum(panel.data[0]["loads"]) == 19 * k
    panel.reset()
    assert sum(panel.data[0]["loads"]) == 13 * k
    with dskit.tap(llm, "layers.*.ffn.gate") as seen:
        llm.logits(llm.encode("hello, hello"))
    assert counts(seen, llm.config.n_routed_experts)[2] == panel.data[2]["loads"]


def test_evenness_of_the_extremes():
    assert evenness([3, 3, 3, 3]) == pytest.approx({"ideal": 3, "max_over_mean": 1, "entropy": 1})
    assert evenness([0, 8, 0, 0]) == pytest.approx({"ideal": 2, "max_over_mean": 4, "entropy": 0})
