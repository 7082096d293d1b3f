"""LLM.swap: other kernels between two steps, while requests stream; the text does not change."""

import threading

import pytest
import torch

from dskit import ops
from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams
from dskit.layers.moe import route

GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
IDS = [3 + (5 * i * i + i) % 256 for i in range(9)]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", numerics="exact") as llm:
        yield llm


@pytest.fixture
def again(monkeypatch):
    """A second implementation of moe.route, and the threads that it ran in."""
    monkeypatch.setattr(ops, "_rules", [])
    ops.use("torch")  # on a GPU too
    threads = []

    @ops.implement("moe.route", "again", grad=True)
    def route_again(*args):
        threads.append(threading.current_thread().name)
        return route.reference(*args)

    yield threads
    del route.implementations["again"]
    monkeypatch.undo()
    ops._apply(ops.all_ops().values())


def test_a_swap_in_the_middle_of_a_stream_changes_the_kernels_and_not_the_text(llm, again):
    """The engine's own thread makes the swap between two steps; `moe.route` runs in it from then on."""
    want = llm.generate(IDS, GREEDY).token_ids
    got, done = [], None
    for event in llm.stream(IDS, GREEDY):
        got.append(event.token_id)
        if len(got) == 2:
            assert not again
            done = llm.swap({"moe.route": "again"})
        elif len(got) == 5:
            back = llm.swap(moe="torch")
    assert got == want
    assert done.changed == {"moe.route": ("torch", "again")} and back.changed == {
        "moe.route": ("again", "torch")
    }
    assert again and set(again) == {"dskit-engine"}
    assert "torch -> again: moe.route; waited" in repr(done) and "no CUDA graphs to capture" in repr(done)
    assert done.took_ms > 0 and done.waited_ms >= 0


def test_the_interpreted_norms_give_the_same_greedy_text(llm, again):
    """A real kernel, interpreted, for one token of a running request."""
    if not torch.cuda.is_available() and "triton" not in _available("norm.rms"):
        pytest.skip("norm.rms has no Triton kernel here")
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    want = llm.generate(IDS[:4], params).token_ids
    before = ops.find("norm.rms").implementation("triton").calls
    handle = llm.submit(IDS[:4], params, start=False)
    llm.engine.stop()
    llm.step()
    assert llm.swap({"norm.rms": "triton"}).changed["norm.rms"][1] == "triton"
    assert handle.result().token_ids == want
    llm.swap("torch")
    assert ops.find("norm.rms").implementation("triton").calls > before


def _available(name):
    return next(row for row in ops.explain() if row["op"] == name)["available"]


def test_a_swap_waits_for_the_running_step(llm, again, monkeypatch):
    """The step is held inside the model until the swap has been asked for."""
    inside, go, order = threading.Event(), threading.Event(), []
    run = llm.engine.runner.run

    def slow(*args):
        inside.set()
        go.wait(5)
        order.append("step")
        return run(*args)

    llm.engine.stop()
    monkeypatch.setattr(llm.engine.runner, "run", slow)
    handle = llm.submit(IDS, ONE)
    assert inside.wait(5)
    swap = threading.Thread(target=lambda: order.append(llm.swap({"moe.route": "again"})))
    swap.start()
    swap.join(0.05)
    assert order == []
    go.set()
    swap.join(5)
    assert handle.result().finish_reason == "length"
    assert order[0] == "step" and order[1].waited_ms > 40


def test_a_swap_that_cannot_be_made_says_so_and_changes_nothing(llm, again):
    llm.engine.start()
    with pytest.raises(ops.UnknownImplementation, match="did you mean again"):
        llm.swap(moe="agian")
    assert ops.find("moe.route").choice == "torch"
    assert llm.generate(IDS, ONE).finish_reason == "length"


def test_graphs_are_captured_again_under_the_new_choice(llm, again, monkeypatch):
    """What holds captured steps has a `recapture`, called when the choice is made."""
    class Graphs:
        def recapture(self):
            self.seen = ops.find("moe.route").choice
            return 4

    graphs = Graphs()
    monkeypatch.setattr(llm.engine.runner, "graphs", graphs)
    before = ops.revision()
    assert "4 CUDA graphs captured again" in repr(llm.swap({"moe.route": "again"}))
    assert graphs.seen == "again" and ops.revision() > before


def test_nothing_computed_by_other_kernels_is_reused(llm, again):
    with LLM(llm.model, max_model_len=128) as fresh:
        fresh.generate(IDS * 9, ONE)
        assert fresh.generate(IDS * 9, ONE).usage.cached_tokens > 0
        fresh.swap({"moe.route": "again"})
        assert fresh.generate(IDS * 9, ONE).usage.cached_tokens == 0


def test_a_closed_llm_swaps_nothing(llm):
    with LLM(llm.model, max_model_len=64) as gone:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        gone.swap("torch")
