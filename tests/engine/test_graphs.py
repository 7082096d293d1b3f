"""Steps through a stand-in for CUDA graphs: the same operations, on the tensors of the first time."""

import json
import logging
import math
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from dskit import checkpoint, ops
from dskit.config import preset
from dskit.engine import engram, graphs
from dskit.engine.host import leaves
from dskit.engine.llm import LLM
from dskit.engine.runner import ModelRunner, Work
from dskit.engine.seq import SamplingParams
from dskit.model import directly
from tests import drive

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
        self.captured, self.fails, self.phases = 0, fails, []

    def renew(self):
        """A tape has no memory of its own."""

    def capture(self, work):
        self.captured += 1
        self.phases.append(ops._state.phase)  # whose kernels are captured
        recording = graphs.Recording(Tape, lambda tensor: tensor)
        if self.captured in self.fails:
            recording.abandon()
            raise RuntimeError("operation not permitted when stream is capturing")
        out = work(recording.pause)
        recording.end()
        for each in leaves(out):
            each.fill_(math.nan if each.is_floating_point() else 7)
        return recording.replay, out


class Wrong(Backend):
    def capture(self, work):
        replay, out = super().capture(work)
        return lambda: (replay(), leaves(out)[0].neg_()), out


def one_call(reference):
    """A reference that asks the host as one operation, which a kernel would be."""

    def run(*args, **kwargs):
        mode = _get_current_dispatch_mode()
        with _disable_current_modes():
            result = reference(*args, **kwargs)
        return mode.add(reference, args, kwargs, result) if isinstance(mode, Tape) else result

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Few layers: one of windows only, two of ratio 2 with n-grams, three of ratio 1, and a draft."""
    config = preset("tiny").replace(num_hidden_layers=6, compress_ratios=(0, 2, 2, 1, 1, 1, 0, 0),
                                    kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 5),
                                    candidate_source_layer_id=3, engram_layer_ids=(1, 2),
                                    dspark_target_layer_ids=(4, 5), hc_sinkhorn_iters=2)
    return checkpoint.write_random(config, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def model(folder):
    return checkpoint.load(folder, device="cpu", batch_invariant=True)


@contextmanager
def graphed(model, backend=None, prompts=False, **settings):
    """An LLM that replays decode steps, or prompts and nothing else."""
    with replayed(prompts), LLM(model, max_model_len=256, **settings) as llm:
        llm.engine.runner.graphs = graphs.Graphs(llm.engine.runner, backend or Backend())
        yield llm


@contextmanager
def replayed(prompts):
    experts = ops.find("moe.experts").implementations["torch"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "function", one_call(experts.function))
        for kind in ("decode", "guess", "draft") if prompts else ("prefill",):
            patch.setitem(graphs.MOST_ROWS, kind, 0)
        yield


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


@pytest.mark.parametrize("prompts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_of_tables_elsewhere_come_in_breaks(folder, eager, monkeypatch, prompts):
    """And no thread looks up beside a capture, which it would spoil on a GPU."""
    busy, gather, begin = [], engram.Staged._gather, Tape.__init__

    def slowly(*args):
        busy.append(True)
        time.sleep(0.02)
        found = gather(*args)
        busy.pop()
        return found

    def alone(tape):
        assert not busy
        begin(tape)

    monkeypatch.setattr(engram.Staged, "_gather", slowly)
    monkeypatch.setattr(Tape, "__init__", alone)
    settings = dict(device="cpu", batch_invariant=True, speculate="off", engram_placement="host")
    with graphed(folder, prompts=prompts, **settings) as llm:
        found = llm.generate(PROMPTS[:3], PARAMS[:3])
        stats = llm.stats()
    assert [r.token_ids for r in found] == eager[:3] and not stats["graph_failures"]
    assert stats["graph_prefills"] if prompts else stats["graph_steps"] > 3
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
        assert backend.captured == 3 * before and set(backend.phases) == {"decode"}


def test_sizes():
    assert [graphs.padded(n) for n in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]
    padded = {n: graphs._in_octaves(n) for n in range(1, 2049)}
    assert all(n <= rows <= max(n + 7, 1.25 * n) and padded[rows] == rows for n, rows in padded.items())
    assert len(set(padded.values())) == 28


# ---- prompts -----------------------------------------------------------------------------------------------


def sequences(lengths):
    return [[3 + (7 * s + 11 * i * i + i // 5) % 500 for i in range(n)] for s, n in enumerate(lengths)]


def run_prompts(model, schedules, backend=None, **settings):
    """The logits of several lots of sequences, with graphs of 32 or 64 prompt rows; and the runner."""
    on = drive.runner(model, drafts=True, **settings)
    with replayed(prompts=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_in_octaves", lambda rows: -(-rows // 32) * 32)
        on.graphs = graphs.Graphs(on, backend) if backend else None
        return [torch.cat(drive.play(on, prompts, schedule)) for prompts, schedule in schedules], on


def lots(full):
    """(sequences, in which steps): one and several, at once, in chunks, and with rows of decoding between."""
    counts = [[1], [31], [32], [33], [64], [1, 9, 22], [40, 3]] if full else [[42, 4]]
    found, long = [(s, drive.at_once(s)) for s in map(sequences, counts)], sequences([61, 70])
    return found + ([(long, drive.chunks(long, 29)), (long, drive.ragged(long, 1))] if full else [])


@pytest.mark.parametrize("numerics, replay, full", [
    ("release", "compact", False), *(pytest.param(*each, True, marks=pytest.mark.slow) for each in product(
        ("release", "exact"), ("off", "mask", "compact")))])  # fmt: skip
def test_prompts_have_the_bits_that_they_have_without_graphs(folder, numerics, replay, full):
    model = checkpoint.load(folder, device="cpu", numerics=numerics, batch_invariant=True)
    want, _ = run_prompts(model, lots(full), replay=replay)
    found, on = run_prompts(model, lots(full), Backend(), replay=replay)
    for logits, eager in zip(found, want, strict=True):
        assert torch.equal(logits, eager)
    counts, through, late = on.graphs.counts, model.through, model.layers[3]
    assert counts["graph_prefills"] >= 4 and not counts["graph_failures"] + counts["eager_prefills"]
    parts = {(through, range(3)), (late.begin,), (late.finish,), (through, range(4, 6))}
    parts = (parts if replay == "compact" else set()) | ({(through, range(6))} if full else set())
    assert {size.part for size in on.graphs.graphs} == parts


def test_the_end_of_a_long_prompt_runs_by_a_graph(model, monkeypatch):
    long, backend = sequences([80]), Backend()
    monkeypatch.setitem(graphs.MOST_ROWS, "prefill", 32)
    want, _ = run_prompts(model, [(long, drive.at_once(long))], replay="compact")
    found, on = run_prompts(model, [(long, drive.at_once(long))], backend, replay="compact")
    assert torch.equal(found[0], want[0])
    parts = [(model.layers[3].finish,), (model.through, range(4, 6))]
    assert [size.part for size in on.graphs.graphs] == parts
    assert on.graphs.counts["graph_prefills"] == on.graphs.counts["eager_prefills"] == 2
    with replayed(prompts=True), ops.use(moe="torch"):
        assert on.graphs.recapture() == 2 and backend.phases == 4 * ["prefill"]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["device", "host"])
def test_turns_of_a_chat_go_on_behind_their_prefix(folder, placement):
    """Windows behind a reused prefix are rebuilt (Work.fresh), rows of tables come from elsewhere."""
    settings = dict(device="cpu", batch_invariant=True, exact_prefix=False, replay="compact",
                    max_num_batched_tokens=48, engram_placement=placement, canary="raise")
    turns, said = sequences([70, 20, 31]), []
    for make in (lambda: LLM(folder, max_model_len=256, **settings),
                 lambda: graphed(folder, prompts=True, **settings)):
        with make() as llm:
            chat, answers = [], []
            for turn in turns:
                chat += turn
                result = llm.generate(chat, PARAMS[0])
                answers.append((result.token_ids, result.usage.cached_tokens))
                chat += result.token_ids
            said.append(answers)
            stats = llm.stats()
    assert said[0] == said[1] and said[0][-1][1] > 0
    assert stats["graph_prefills"] > 4 and not stats["graph_failures"] + stats["graph_steps"]


@pytest.mark.parametrize("backend, why", [
    (Backend(fails=[1]), "RuntimeError: operation not permitted"),
    pytest.param(Wrong(), "it differs by 2 from the same step", marks=pytest.mark.slow),
])  # fmt: skip
def test_prompts_run_eagerly_where_a_graph_may_not(model, caplog, backend, why):
    """Where its capture fails, where it computes something else, where modules have choices of their own."""
    prompt = sequences([20])
    want, _ = run_prompts(model, [(prompt, drive.at_once(prompt))])
    with caplog.at_level(logging.WARNING):
        found, on = run_prompts(model, [(prompt, drive.at_once(prompt)) for _ in range(2)], backend)
    assert all(torch.equal(logits, want[0]) for logits in found)
    assert on.graphs.counts["graph_failures"] == 1 and on.graphs.counts["eager_prefills"] == 2
    assert f"prefill steps of 32 in Model.through(range(0, 6)), which run eagerly: {why}" in caplog.text
    with ops.pin(model, "layers.2", moe="torch"):
        found, on = run_prompts(model, [(prompt, drive.at_once(prompt))], Backend())
    assert torch.equal(found[0], want[0]) and not on.graphs.graphs


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
def test_a_step_passes_nothing_between_host_and_device(looks, preset):
    """With the kernels, caches and weights of a GPU; everything that is left to torch is seen."""
    model = checkpoint.load(preset, device="cpu", storage="packed", dtype=torch.bfloat16)
    runner = ModelRunner(model, num_blocks=8, block_size=128, num_slots=2, cache_storage="packed",
                         drafts=True)
    work = [Work(1, [1, 2], IDS, 70, 71, 70), Work(2, [3, 4], IDS, 60, 62, 60)]
    runner.run([Work(w.seq_slot, w.blocks, w.tokens, 0, w.start, w.start) for w in work])
    held = graphs.Graphs(runner, None)
    inputs = held._inputs(graphs.Size("decode", 4, 256), work)
    rounds = held._inputs(graphs.Size("draft", 2), torch.tensor([[1], [71], [5]]))
    with torch.inference_mode(), ops.step("decode"):
        want = held._logits(inputs, directly)  # fills caches, as before a capture
        held._drafts(rounds, directly)
        step, part = runner.step([Work(2, [3, 4], IDS, 0, 40, 40)]), (model.through, range(len(model.layers)))
        given = step.ids, step.pos, step.gram, model.streams(step.ids)
        held._room(part, given).fill(given, held._index(40, 40))
        held._stand_aside(40)
        with looks, graphs.Unbroken() as unbroken:
            found = held._logits(inputs, unbroken.pause)
            held._guesses(rounds, unbroken.pause)
            held._drafts(rounds, unbroken.pause)
            if preset == "tiny":
                held._part(graphs.Size("prefill", 40, part=part), unbroken.pause)
        assert torch.equal(found[0], want[0])
        asking = ops.use({"moe.experts": "torch"})  # the host for each row's experts
        with asking, pytest.raises(graphs.CannotRepeat, match="tolist"), looks:
            held._logits(inputs, directly)


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
