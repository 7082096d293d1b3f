"""Decode steps through a stand-in for CUDA graphs: the same operations, on the tensors of the first time."""

import json
import logging
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from dskit import checkpoint, ops
from dskit.engine import graphs
from dskit.engine.host import leaves
from dskit.engine.llm import LLM
from dskit.engine.runner import ModelRunner, Work
from dskit.engine.seq import SamplingParams

IDS = [3 + (11 * i * i + 5 * i + i // 7) % 59 for i in range(80)]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=6, ignore_eos=True) for i in range(5)]
PROMPTS = [IDS[i : 4 * i + 9] for i in range(5)]


class Tape(TorchDispatchMode):
    """Does the same operations on the same tensors again, as a graph does: nothing that a host computes."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.add(function, args, kwargs or {}, function(*args, **(kwargs or {})))

    def add(self, function, args, kwargs, result):
        self.calls.append((function, args, kwargs, result))
        return result

    def capture_end(self):
        self.__exit__(None, None, None)

    def replay(self):
        for function, args, kwargs, result in self.calls:
            for held, new in zip(leaves(result), leaves(function(*args, **kwargs)), strict=True):
                if held.data_ptr() != new.data_ptr():
                    held.copy_(new)


class Backend:
    def __init__(self, fails=()):
        self.captured, self.fails = 0, fails

    def renew(self):
        """A tape has no memory of its own."""

    def capture(self, work):
        self.captured += 1
        assert ops._state.phase == "decode"  # else the kernels of another phase would be captured
        recording = graphs.Recording(Tape)
        if self.captured in self.fails:
            recording.abandon()
            raise RuntimeError("operation not permitted when stream is capturing")
        out = work(recording.pause)
        recording.end()
        for each in out:
            each.fill_(math.nan if each.is_floating_point() else 7)
        return recording.replay, out


def one_call(reference):
    """A reference that asks the host as one operation, which a kernel would be."""

    def run(*args, **kwargs):
        mode = _get_current_dispatch_mode()
        with _disable_current_modes():
            result = reference(*args, **kwargs)
        return mode.add(reference, args, kwargs, result) if isinstance(mode, Tape) else result

    return run


@pytest.fixture(scope="module")
def model():
    return checkpoint.load("tiny", device="cpu", batch_invariant=True)


@contextmanager
def graphed(model, backend=None, **settings):
    experts = ops.find("moe.experts").implementations["torch"]
    with pytest.MonkeyPatch.context() as patch, LLM(model, max_model_len=256, **settings) as llm:
        patch.setattr(experts, "function", one_call(experts.function))
        llm.engine.runner.graphs = graphs.Graphs(llm.engine.runner, backend or Backend())
        yield llm


@pytest.fixture(scope="module")
def eager(model):
    with LLM(model, max_model_len=256, speculate="off") as llm:
        return [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("count, new, settings", [
    pytest.param(5, 6, {"speculate": "off"}, marks=pytest.mark.slow),
    (5, 6, {"speculate": "off", "overlap": True}), (1, 3, {"speculate": "static"}),
    pytest.param(5, 6, {"speculate": "static"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_tokens_are_those_without_graphs(model, eager, count, new, settings):
    """Rows come and go, so that steps of several sizes are padded; drafts make rows of one request many."""
    with graphed(model, canary="raise", **settings) as llm:
        found = llm.generate(PROMPTS[:count], [replace(p, max_tokens=new) for p in PARAMS[:count]])
        stats, sizes = llm.stats(), llm.engine.runner.graphs.graphs
        llm.engine.check()
    assert [r.token_ids for r in found] == [ids[:new] for ids in eager[:count]]
    kinds = {"decode"} | ({"draft" if count == 1 else "guess"} if settings["speculate"] != "off" else set())
    assert {size.kind for size in sizes} == kinds and not stats["graph_failures"]
    assert stats["graph_steps"] > 1 and all(graph.checked for graph in sizes.values())


def test_rows_of_tables_elsewhere_come_in_breaks(eager):
    settings = dict(device="cpu", batch_invariant=True, speculate="off", engram_placement="host")
    with graphed("tiny", **settings) as llm:
        found = llm.generate(PROMPTS[:3], PARAMS[:3])
        stats = llm.stats()
    assert [r.token_ids for r in found] == eager[:3] and stats["graph_steps"] > 3
    assert stats["engram_lookups"] == sum(map(len, PROMPTS[:3])) + 3 * 5


def test_a_failed_capture_runs_eagerly_with_a_warning(model, eager, caplog):
    with caplog.at_level(logging.WARNING), graphed(model, Backend(fails=[1]), speculate="off") as llm:
        found = llm.generate(PROMPTS, PARAMS)
        stats = llm.stats()
    assert [r.token_ids for r in found] == eager
    assert stats["graph_failures"] == 1 and stats["eager_steps"] > 0
    assert "which run eagerly: RuntimeError: operation not permitted" in caplog.text


def test_what_no_graph_can_repeat_is_tried_once_for_each_choice_of_kernels(model, eager, monkeypatch):
    def asking(self, inputs, pause):
        raise graphs.CannotRepeat("aten.nonzero")

    monkeypatch.setattr(graphs.Graphs, "_logits", asking)
    with graphed(model, speculate="off") as llm:
        assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == eager  # of several sizes
        assert llm.stats()["graph_failures"] == 1
        with ops.use(moe="torch"):
            llm.generate(PROMPTS[0], PARAMS[0])
        assert llm.stats()["graph_failures"] == 2 and not llm.stats()["graph_steps"]


def test_a_step_that_is_watched_calls_its_ops(model, eager):
    calls, params = [], replace(PARAMS[0], max_tokens=3)
    with graphed(model, speculate="off") as llm, ops.watch(lambda op, *_: calls.append(op.name)):
        assert llm.generate(PROMPTS[0], params).token_ids == eager[0][:3]
        assert llm.stats()["eager_steps"] == 2 and calls.count("mla.attend_cached") == 3 * len(model.layers)


def test_a_graph_that_computes_something_else_is_not_used(model, eager, caplog):
    class Wrong(Backend):
        def capture(self, work):
            replay, out = super().capture(work)
            return lambda: (replay(), out[0].neg_()), out

    with caplog.at_level(logging.WARNING), graphed(model, Wrong(), speculate="off") as llm:
        assert llm.generate(PROMPTS[0], PARAMS[0]).token_ids == eager[0]
    assert "differs by 2 from the same step without it" in caplog.text


def test_a_swap_captures_again(model):
    backend, short = Backend(), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with graphed(model, backend, speculate="off") as llm:
        want = llm.generate(PROMPTS[0], short).token_ids
        before = backend.captured
        done = llm.swap()
        assert done.graphs == before == backend.captured - before > 0
        assert "CUDA graphs captured again" in repr(done)
        assert llm.generate(PROMPTS[0], short).token_ids == want
        assert backend.captured == 2 * before
        with ops.use(moe="torch"):  # no swap, and yet the graphs hold other kernels
            assert llm.generate(PROMPTS[0], short).token_ids == want
        assert backend.captured == 3 * before


def test_sizes():
    assert [graphs.padded(n) for n in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]


# ---- what a graph cannot repeat ----------------------------------------------------------------------------


class Looks(TorchFunctionMode):
    """Refuses what a CPU does without an operation, and a GPU by a copy."""

    names = {"tolist", "numpy", "cpu", "cuda", "as_tensor", "from_numpy", "__array__"}
    off = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in self.names and not self.off:
            raise graphs.CannotRepeat(f"{function.__name__} passes between host and device")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def looks(monkeypatch):
    """`auto` chooses as on an H200; what kernels compute there is done by references, unseen."""
    mode, proven = Looks(), json.loads(ops.PROVEN.read_text())["sm_90"]["ops"]

    def unseen(reference):
        def run(*args, **kwargs):
            mode.off, before = True, mode.off
            with _disable_current_modes():
                result = reference(*args, **kwargs)
            mode.off = before
            return result

        return run

    ops.load_all()
    monkeypatch.setattr(ops.Op, "aside", lambda op, name: None if op.name in proven else "unproven")
    for name in proven:
        op = ops.find(name)
        monkeypatch.setattr(op.implementation("triton"), "function", unseen(op.reference))
    with ops.use("auto"):
        yield mode


@pytest.mark.parametrize("preset", ["tiny", "demo"])
def test_a_decode_step_passes_nothing_between_host_and_device(looks, preset):
    """With the kernels, caches and weights of a GPU; everything that is left to torch is seen."""
    model = checkpoint.load(preset, device="cpu", storage="packed", dtype=torch.bfloat16)
    runner = ModelRunner(model, num_blocks=8, block_size=128, num_slots=2, cache_storage="packed",
                         drafts=True)
    work = [Work(1, [1, 2], IDS, 70, 71, 70), Work(2, [3, 4], IDS, 60, 62, 60)]
    runner.run([Work(w.seq_slot, w.blocks, w.tokens, 0, w.start, w.start) for w in work])
    held = graphs.Graphs(runner, None)
    inputs = held._inputs(graphs.Size("decode", 4, 256), work)
    guess, draft = (held._inputs(graphs.Size(kind, 2), [(1, 71, 5)]) for kind in ("guess", "draft"))
    with torch.inference_mode(), ops.step("decode"):
        want = held._logits(inputs, graphs.straight)  # fills caches, as before a capture
        held._drafts(draft, graphs.straight)
        with looks, graphs.Unbroken() as unbroken:
            found = held._logits(inputs, unbroken.pause)
            held._guesses(guess, unbroken.pause)
            held._drafts(draft, unbroken.pause)
        assert torch.equal(found[0], want[0])
        asking = ops.use({"moe.experts": "torch"})  # the host for each row's experts
        with asking, pytest.raises(graphs.CannotRepeat, match="tolist"), looks:
            held._logits(inputs, graphs.straight)


@pytest.mark.parametrize("bad", [
    lambda x: x.max().item(), lambda x: x[x > 0], lambda x: torch.tensor([1.0]) + x, lambda x: x.nonzero(),
    lambda x: bool((x > 0).any()), lambda x: x.masked_select(x > 0), lambda x: x.unique(),
    lambda x: x.to("meta"), lambda x: x.repeat_interleave(x.long().abs()),
])  # fmt: skip
def test_what_no_graph_can_repeat_is_refused(bad):
    x = torch.ones(4)
    for inference in (False, True):  # which sees operations before they are taken apart
        with torch.inference_mode(inference), pytest.raises(graphs.CannotRepeat), graphs.Unbroken():
            bad(x)
        with torch.inference_mode(inference), graphs.Unbroken() as unbroken:
            unbroken.pause(lambda: bad(x))
            torch.where(x > 0, x, -1).to(torch.float16).repeat_interleave(2)[:3].sort()
