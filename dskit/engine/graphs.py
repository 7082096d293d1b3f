"""CUDA graphs of decode steps and draft rounds: what they launch, kept and launched again by one call.

Idea: the kernels of a decode step are short, and to launch them one by one takes longer than they run. A
graph repeats a step's launches on the same addresses, so steps are padded to a few numbers of rows (1, 2, 4,
8, then every 8) and of positions (powers of two), and what tells them apart comes as one parcel, always to
the same place. Padding rows stand in the reserved slot and block, which no request reads; so does the step
that a graph is captured from, so that nobody's caches change.

A graph may have breaks: `pause(work)` ends it, runs `work` as it is, and begins another behind it. Rows of
n-gram tables that lie elsewhere are asked for and awaited so.

Before a graph is captured its step is run under `Unbroken`, which refuses what no graph can repeat and says
where it stands; before it serves, its first step is also run as it is, and the two must agree. Where one of
them fails, such steps run eagerly; so do steps whose calls of ops somebody watches, in a profile say.

Shapes: a graph per `Size`; the first rows of its outputs are the step's own.
State: one Graphs per runner, with one memory pool; `counts` says how often which way was taken.
Errors: none; a failed capture is a warning, with its traceback in the log's debug lines, and a count
(`graph_failures`).
Source: engine.md section 14.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dskit import ops
from dskit.engine.engram import Placement, Remote
from dskit.engine.host import Parcel
from dskit.engine.spec import padded
from dskit.layers.dspark import likeliest
from dskit.model import Step

Eager = Callable[[], Tensor | None]
Pause = Callable[[Eager], Tensor | None]  # runs a part of the work between two graphs
Launches = Callable[[Pause], tuple[Tensor, ...]]

logger = logging.getLogger("dskit.engine")
MOST_ROWS = 512
LEAST_POSITIONS = 256
TOLERANCE = 0.01  # relative RMS between what a graph gives and the same step without it


# ---- capturing ---------------------------------------------------------------------------------------------


class CannotRepeat(RuntimeError):
    """A step does what no graph can repeat."""


class Unbroken(TorchDispatchMode):
    """Refuses tensors that the host makes or looks at, and sizes that follow from values.

    A capture that fails half-way leaves torch's allocator in a bad state, so it is better not begun.
    """

    aten = torch.ops.aten
    LOOKS = frozenset((aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2,
                       aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten.lift_fresh))
    MASKED = frozenset((aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_))

    def __init__(self):
        super().__init__()
        self.paused = False

    def pause(self, eager: Eager) -> Tensor | None:
        """What stands between two graphs may do as it likes."""
        self.paused = True
        try:
            return eager()
        finally:
            self.paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None):
        """An operation on tensors; of one that is made of others, those are looked at."""
        if not self.paused:
            with self:
                result = function.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = function(*args, **(kwargs or {}))
        if not self.paused and (why := self._why_not(function.overloadpacket, args, result)):
            raise CannotRepeat(f"{function} {why}")
        return result

    def _why_not(self, packet: Any, args: tuple, result: Any) -> str | None:
        if packet in self.LOOKS:
            return "passes between host and device, or gives as much as values say"
        if packet in self.MASKED and any(i is not None and i.dtype == torch.bool for i in args[1]):
            return "takes a mask: its size follows from values"
        if packet in (self.aten._to_copy, self.aten.copy_):
            devices = {t.device.type for t in (*args, result) if isinstance(t, Tensor)}
            return f"copies between {' and '.join(sorted(devices))}" if len(devices) > 1 else None
        return None


def straight(eager: Eager) -> Tensor | None:
    """A pause where nothing is captured."""
    return eager()


class Cuda:
    """Captures with torch; all graphs share one pool, since only one of them runs at a time."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """Take another pool: torch takes none again whose graphs are all gone, or whose capture broke."""
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Launches) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        """What repeats `work`, which has run before, and where its outputs will be."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream), _uncollected():
            recording = Recording(self._begin)
            try:
                out = work(recording.pause)
                recording.end()
            except BaseException:
                recording.abandon()
                self.renew()
                raise
        torch.cuda.current_stream().wait_stream(self.stream)
        return recording.replay, out

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        return graph


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: what it frees may touch the device."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recording:
    """Graphs with breaks between them, in the order in which they are launched; `begin` begins one."""

    def __init__(self, begin: Callable[[], Any]):
        self._begin, self._parts = begin, list[Callable[[], Any]]()
        self._graph = begin()

    def end(self) -> None:
        """End a graph and run it: what follows may read what it computes."""
        self._graph.capture_end()
        self._graph.replay()
        self._parts.append(self._graph.replay)

    def pause(self, eager: Eager) -> Tensor | None:
        """Run something between two graphs; its result always comes to where the second one reads it."""
        self.end()
        held = eager()
        self._parts.append(eager if held is None else lambda: held.copy_(eager()))
        self._graph = self._begin()
        return held

    def abandon(self) -> None:
        """Leave the capture, which ends with an error of its own."""
        try:
            self._graph.capture_end()
        except RuntimeError as error:
            logger.debug("a broken capture ended: %s", error)

    def replay(self) -> None:
        """Launch all of it again."""
        for part in self._parts:
            part()


class Fetched:
    """Rows of n-gram tables that lie elsewhere (layers.engram.Found), asked for and awaited in breaks."""

    def __init__(self, tables: Placement, gram_TQ: Tensor, pause: Pause):
        self._tables, self._gram, self._pause = tables, gram_TQ, pause
        pause(self._ask)

    def _ask(self) -> None:
        self._lookup = self._tables.fetch(self._gram)

    def rows(self, layer: int) -> Tensor:
        """The numbers [T, C*Y] of a layer."""
        return self._pause(lambda: self._lookup.rows(layer))


# ---- the graphs of a runner --------------------------------------------------------------------------------


@dataclass
class Graph:
    """A captured step: its inputs, what repeats it, and where its outputs are. `checked`: it has served."""

    inputs: Parcel
    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]
    checked: bool = False


@dataclass(frozen=True)
class Size:
    """What steps of one graph share: "decode", so many rows and positions; or so many rounds of a draft, with
    ("draft") or without ("guess") the walk through the block that takes the likeliest tokens."""

    kind: str
    rows: int
    positions: int = 0

    def __str__(self) -> str:
        within = f" within {self.positions} positions" if self.positions else ""
        return f"{self.kind} steps of {self.rows}{within}"


class Graphs:
    """The graphs of one runner."""

    def __init__(self, runner: Any, backend: Any):
        self.runner, self.backend = runner, backend
        self.graphs: dict[Size, Graph | None] = {}  # None: it failed, run eagerly
        self.counts = {"graph_steps": 0, "eager_steps": 0, "graph_failures": 0, "graph_capture_ms": 0}
        self._choice = ops.revision()  # of kernels, that the graphs were captured with
        self._refused: set[str] = set()  # kinds of steps that do what no graph repeats, whatever their size

    def decode(self, work: list[Any]) -> Tensor | None:
        """Logits of a decode step, or None where it has to run eagerly."""
        rows, stop = sum(w.stop - w.start for w in work), max((w.stop for w in work), default=0)
        size = Size("decode", padded(rows), max(LEAST_POSITIONS, 1 << (stop - 1).bit_length()))
        found = self._outputs(size, work, rows)
        self.counts["eager_steps" if found is None else "graph_steps"] += 1
        return None if found is None else found[0]

    def guess(self, rounds: list[tuple[int, int, int]]) -> tuple[Tensor, ...] | None:
        """`Model.guess` for (slot, start, newest token) each, or None where it has to run eagerly."""
        rows = len(rounds) * self.runner.config.dspark_block_size
        return self._outputs(Size("guess", padded(len(rounds))), rounds, rows)

    def draft(self, rounds: list[tuple[int, int, int]]) -> tuple[Tensor, ...] | None:
        """`Model.draft` of the likeliest tokens, likewise."""
        return self._outputs(Size("draft", padded(len(rounds))), rounds, len(rounds))

    @torch.inference_mode()
    def recapture(self) -> int:
        """Capture every graph again, as other kernels were chosen; how many there are now."""
        sizes = list(self.graphs)
        self._forget()
        with ops.step("decode"):
            return sum(self._graph(size) is not None for size in sizes)

    def _forget(self) -> None:
        self.graphs.clear()
        self._refused.clear()
        self.backend.renew()

    def _outputs(self, size: Size, work: list[Any], rows: int) -> tuple[Tensor, ...] | None:
        """The first rows of what a step gives, by the graph of its size; None: there is none."""
        if self._choice != ops.revision():
            self._forget()
        able = 0 < size.rows <= MOST_ROWS and size.kind not in self._refused and self.graphs.get(size, True)
        inputs = self._inputs(size, work) if able and rows and not ops.watched() else None
        graph = self._graph(size) if inputs is not None else None
        if graph is None or not self._replay(graph, size, inputs):
            return None
        return tuple(of[:rows].clone() for of in graph.outputs)

    def _graph(self, size: Size) -> Graph | None:
        """The graph of a size, captured now if it is new; None if that failed."""
        if size not in self.graphs:
            begin = time.perf_counter()
            try:
                nobody = self._inputs(size, [])
                inputs = Parcel(nobody, self.runner.device)
                work = partial(self._launches(size), inputs.fill(nobody))
                work(straight)  # compiles kernels, fills caches
                with Unbroken() as unbroken:
                    work(unbroken.pause)
                self.graphs[size] = Graph(inputs, *self.backend.capture(work))
            except Exception as error:
                logger.debug("the capture of %s failed", size, exc_info=True)
                self._fail(size, f"{type(error).__name__}: {error}")
                self._refused |= {size.kind} if isinstance(error, CannotRepeat) else set()
            self._choice = ops.revision()  # kernels that were imported meanwhile included
            self.counts["graph_capture_ms"] += round(1e3 * (time.perf_counter() - begin))
        return self.graphs[size]

    def _replay(self, graph: Graph, size: Size, inputs: Step) -> bool:
        """Run a step by its graph; False if its first one shows that the graph is wrong."""
        step = graph.inputs.fill(inputs)
        graph.replay()
        if not graph.checked:
            for found, want in zip(graph.outputs, self._launches(size)(step, straight), strict=True):
                away = (found - want).float().square().mean().sqrt() / want.float().square().mean().sqrt()
                if not away < TOLERANCE and want.isfinite().all():
                    self._fail(size, f"it differs by {away:.2g} from the same step without it")
                    return False
            graph.checked = True
        return True

    def _fail(self, size: Size, why: str) -> None:
        logger.warning("no CUDA graph for %s, which run eagerly: %s", size, why)
        self.graphs[size] = None
        self.counts["graph_failures"] += 1

    # ---- the kinds of steps --------------------------------------------------------------------------------

    def _launches(self, size: Size) -> Callable[[Step, Pause], tuple[Tensor, ...]]:
        """What a graph holds: from a step as it was laid out to its outputs."""
        return {"decode": self._logits, "guess": self._guesses, "draft": self._drafts}[size.kind]

    def _logits(self, inputs: Step, pause: Pause) -> tuple[Tensor]:
        runner = self.runner
        step = runner.arrive(inputs, unknown=True)
        if isinstance(runner.engram, Remote):
            step.found = Fetched(runner.engram, step.gram, pause)
        return (runner.model(step, runner.memory),)

    def _guesses(self, inputs: Step, pause: Pause) -> tuple[Tensor, Tensor]:
        return self.runner.model.guess(self.runner.arrive(inputs, unknown=False), self.runner.memory)

    def _drafts(self, inputs: Step, pause: Pause) -> tuple[Tensor, Tensor, Tensor]:
        runner, G = self.runner, self.runner.config.dspark_block_size
        step, shape = runner.arrive(inputs, unknown=False), (len(inputs.ids) // G, G)
        return runner.model.draft(step, runner.memory, shape, likeliest)

    def _inputs(self, size: Size, work: list[Any]) -> Step | None:
        """A step as it is laid out, in the shapes of its size; None where it holds what a graph does not."""
        runner = self.runner
        if size.kind != "decode":
            return runner.lay_out_block([*work, *[(0, 0, 0)] * (size.rows - len(work))])
        fillers = [runner.placeholder()] * (size.rows - sum(w.stop - w.start for w in work))
        step = runner.lay_out([*work, *fillers])
        if step.tail is not None or step.windows[0].history is not None:
            return None
        groups = {ratio: _pad_group(group, size.rows) for ratio, group in step.groups.items()}
        blocks = -(-size.positions // runner.block_size)
        segments = {ratio: [_by_row(parts, blocks, runner.block_size // ratio)]
                    for ratio, parts in step.segments.items()}
        return replace(step, groups=groups, segments=segments, wanted=None, image=None)


def _pad_group(group: Any, rows: int) -> Any:
    """As many new entries as rows: those that are none are made of row 0 and go to row 0 of the pool."""
    more = rows - len(group.slots)
    ring = group.ring and replace(group.ring, read=_pad(group.ring.read, more))
    return replace(group, ring=ring, turn=_pad(group.turn, more), slots=_pad(group.slots, more))


def _by_row(parts: list[Any], blocks: int, per_block: int) -> Any:
    """Pages as one, in which every row has blocks of its own, so many that a size shares it."""
    each = [F.pad(p.blocks, (0, blocks - p.blocks.shape[1])).repeat_interleave(p.shape[1], 0) for p in parts]
    visible = torch.cat([p.visible.reshape(-1, 1) for p in parts])
    return replace(parts[0], rows=slice(0, len(visible)), shape=(len(visible), 1), visible=visible,
                   blocks=torch.cat(each), entries=blocks * per_block)


def _pad(tensor: Tensor, more: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(more, *tensor.shape[1:])))
