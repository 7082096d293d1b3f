"""CUDA graphs of steps and draft rounds: what they launch, kept and launched again by one call.

Idea: the kernels of a step are short, and to launch them one by one takes longer than they run. A graph
repeats a step's launches on the same addresses, so steps are padded to a few numbers of rows, and their
inputs always come to the same place. A graph may have breaks: `pause(work, ...)` ends it, runs `work` as it
is, and begins another behind it.

    decode, draft   one graph of everything, for 1, 2, 4, 8, then every 8 rows, and positions in powers of
                    two; inputs come as one parcel, padding rows stand in the reserved slot and block
    prefill         layers that compute rows side by side, for four numbers of rows in an octave; what meets
                    the caches (`Step.meet`) depends on lengths and runs in breaks, on the step's own rows,
                    of which the last stands in for the padding. Where bounded replay drops rows, the layers
                    before have such graphs, those behind, which see few rows, and both halves of the layer

Rows of n-gram tables that lie elsewhere are asked for and awaited in breaks as well. A graph is captured from
a step that stands in the reserved slot and block, so that nobody's caches change.

Before a graph is captured its step is run under `Unbroken`, which refuses what no graph can repeat and says
where it stands; before it serves, it is also run as it is, and the two must agree. Where one of them fails,
such steps run eagerly; so do steps whose calls of ops somebody watches, in a profile say.

Where experts lie on several ranks, a decode step has as many rows as the rank with the most, padded. Each
rank captures for itself (`Peers.captured`), and compares nothing, since the others take part in a step once.

Shapes: a graph per `Size`; the first rows of its outputs are the step's own.
State: one Graphs per runner, with one memory pool: a graph's outputs hold until another one runs. `counts`
says how often which way was taken.
Errors: none; a failed capture is a warning, with its traceback in the log's debug lines, and a count
(`graph_failures`).
Source: engine.md section 14.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dskit import ops
from dskit.engine.engram import Placement, Remote
from dskit.engine.exchange import ALIKE
from dskit.engine.host import Parcel, leaves, mapped
from dskit.engine.spec import padded
from dskit.layers.dspark import likeliest
from dskit.layers.mla import Global, Memory
from dskit.model import State, Step, directly

Eager = Callable[..., Tensor | None]  # of tensors; what it gives stands in the same place each time
Pause = Callable[..., Tensor | None]  # runs an Eager with the tensors behind it between two graphs
Launches = Callable[[Pause], Any]

logger = logging.getLogger("dskit.engine")
MOST_ROWS = {"decode": 512, "guess": 512, "draft": 512, "prefill": 2048}
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

    def pause(self, eager: Eager, *tensors: Tensor) -> Tensor | None:
        """What stands between two graphs may do as it likes."""
        self.paused = True
        try:
            return eager(*tensors)
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


class Address:
    """Bytes on a GPU as torch takes them over: by their place, without a claim to it."""

    def __init__(self, place: int, count: int):
        self.__cuda_array_interface__ = {"version": 3, "typestr": "|u1", "shape": (count,),
                                         "data": (place, False)}


def lent(tensor: Tensor) -> Tensor:
    """The same numbers in the same place, which may be given to others meanwhile.

    Graphs of one pool run one after another, so what one leaves is read before another takes its place.
    """
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    raw = torch.as_tensor(Address(tensor.data_ptr(), reach * tensor.element_size()), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Cuda:
    """Captures with torch; all graphs share one pool, since only one of them runs at a time."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """Take another pool: torch takes none again whose graphs are all gone, or whose capture broke."""
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Launches) -> tuple[Callable[[], None], Any]:
        """What repeats `work`, which has run before, and where its outputs will be."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream), _uncollected():
            recording = Recording(self._begin, lent)
            try:
                out = work(recording.pause)
                recording.end()
            except BaseException:
                recording.abandon()
                self.renew()
                raise
        torch.cuda.current_stream().wait_stream(self.stream)
        return recording.replay, mapped(out, lent)

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
    """Graphs with breaks between them, in the order in which they are launched.

    `begin` begins one; `lend` gives a tensor to a break and lets go of its memory.
    """

    def __init__(self, begin: Callable[[], Any], lend: Callable[[Tensor], Tensor]):
        self._begin, self._lend, self._parts = begin, lend, list[Callable[[], Any]]()
        self._graph = begin()

    def end(self) -> None:
        """End a graph and run it: what follows may read what it computes."""
        self._graph.capture_end()
        self._graph.replay()
        self._parts.append(self._graph.replay)

    def pause(self, eager: Eager, *tensors: Tensor) -> Tensor | None:
        """Run something between two graphs; its result stands where the second one reads it."""
        self.end()
        part = partial(eager, *map(self._lend, tensors))
        held = part()
        self._parts.append(part)
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
        self._held: dict[int, Tensor] = {}
        pause(self._ask)

    def _ask(self) -> None:
        self._lookup = self._tables.fetch(self._gram)
        if not self._held:  # a graph is captured next: no thread may load kernels or take memory beside that
            self._tables.settle()

    def rows(self, layer: int) -> Tensor:
        """The numbers [T, C*Y] of a layer."""
        return self._pause(partial(self._await, layer))

    def _await(self, layer: int) -> Tensor:
        found = self._lookup.rows(layer)
        return self._held.setdefault(layer, found).copy_(found)


class Awaited:
    """Rows of n-gram tables that lie elsewhere, which the step whose rows they are has asked for."""

    def __init__(self, step: Step):
        self._step = step

    def rows(self, layer: int) -> Tensor:
        """The numbers [T, C*Y] of a layer."""
        return self._step.meet(lambda own, *_: own.found.rows(layer), self._step, None, None)


# ---- the graphs of a runner --------------------------------------------------------------------------------


class Rows:
    """Room for many rows of each tensor of a structure; graphs of fewer rows use the first ones."""

    def __init__(self, like: Any, most: int):
        self._room = mapped(like, lambda own: own.new_zeros(most, *own.shape[1:]))

    def first(self, rows: int) -> Any:
        """The structure as a graph of so many rows sees it."""
        return mapped(self._room, lambda room: room[:rows])

    def fill(self, value: Any, index: Tensor) -> Any:
        """Bring rows of a structure like it, in the order of an index; gives them as they stand here."""
        held = self.first(len(index))
        for room, own in zip(leaves(held), leaves(value), strict=True):
            torch.index_select(own, 0, index, out=room)
        return held


@dataclass
class Graph:
    """A captured step: what it launches, what repeats that, and where its outputs are.

    inputs: of its own, where it shares none (Rows). checked: it has served.
    """

    work: Launches
    inputs: Parcel | None
    replay: Callable[[], None]
    outputs: Any
    checked: bool = False


@dataclass(frozen=True)
class Size:
    """What steps of one graph share: the kind, so many rows, positions, and the part of a model, as its
    method and what that is given more than the rest (prefill).

    Rows of a draft are rounds, with ("draft") or without ("guess") the walk through the block that takes the
    likeliest tokens.
    """

    kind: str
    rows: int
    positions: int = 0
    part: tuple[Any, ...] = ()

    def __str__(self) -> str:
        within = f" within {self.positions} positions" if self.positions else ""
        for work, *more in [self.part] if self.part else ():
            within = f" in {work.__qualname__}({', '.join(map(str, more))})"
        return f"{self.kind} steps of {self.rows}{within}"


class Graphs:
    """The graphs of one runner."""

    def __init__(self, runner: Any, backend: Any):
        self.runner, self.backend = runner, backend
        self.graphs: dict[Size, Graph | None] = {}  # None: it failed, run eagerly
        self.counts = dict.fromkeys(("graph_steps", "eager_steps", "graph_prefills", "eager_prefills",
                                     "graph_failures", "graph_capture_ms"), 0)
        self._choice = ops.revision()  # of kernels, that the graphs were captured with
        self._refused: set[str] = set()  # kinds of steps that do what no graph repeats, whatever their size
        self._rooms: dict[Any, Rows] = {}  # what prefill graphs read: their inputs, and what breaks give
        self._nobody: tuple[Step, Global] | None = None  # a step of the reserved slot and block
        self._now: tuple[Step, Global, Tensor]  # what breaks see, and its row in each row of a graph

    def decode(self, work: list[Any]) -> Tensor | None:
        """Logits of a decode step, or None where it has to run eagerly."""
        rows, stop = sum(w.stop - w.start for w in work), max((w.stop for w in work), default=0)
        size = Size("decode", self._padded(rows), max(LEAST_POSITIONS, 1 << (stop - 1).bit_length()))
        found = self._outputs(size, work, rows)
        self.counts["eager_steps" if found is None else "graph_steps"] += 1
        return None if found is None else found[0]

    def draft(self, rounds_3B: Tensor, greedy: bool) -> tuple[Tensor, ...] | None:
        """`Model.draft` of the likeliest tokens for slots, starts and newest tokens, or else `Model.guess`;
        None where it has to run eagerly.
        """
        rounds, G = rounds_3B.shape[1], self.runner.config.dspark_block_size
        size = Size("draft" if greedy else "guess", self._padded(rounds, G))
        return self._outputs(size, rounds_3B, rounds if greedy else rounds * G)

    def prefill(self, work: Callable[..., State], state: State, step: Step, memory: Memory, shared: Global,
                *more: Any) -> State:
        """Part of a model, as a Step runs it: by a graph, where there can be one."""
        rows, graph = len(step.ids), None
        alone = self.runner.peers is None  # an exchange has the size of the rank with the most rows
        size = Size("prefill", _in_octaves(rows), part=(work, *more))
        if alone and rows and step.image is None and not ops.pinned() and self._able(size):
            given, index = (step.ids, step.pos, step.gram, state), self._index(rows, size.rows)
            self._room(size.part, given).fill(given, index)
            graph = self._graph(size)
        if graph is None or not self._sound(graph, size):
            self.counts["eager_prefills"] += rows > 0  # a chunk before the end of its prompt leaves none
            return work(state, step, memory, shared, *more)
        self.counts["graph_prefills"] += 1
        self._now = step, shared, index
        graph.replay()
        return mapped(graph.outputs, lambda of: of[:rows])

    def _padded(self, count: int, each: int = 1) -> int:
        """The size for so many rows or rounds of `each` rows: of the rank that has the most, since exchanges
        of rows have one size on all.
        """
        peers = self.runner.peers
        return padded(count) if peers is None or peers.rows == ALIKE else peers.rows // each

    @torch.inference_mode()
    def recapture(self) -> int:
        """Capture every graph again, as other kernels were chosen; how many there are now."""
        sizes = list(self.graphs)
        self._forget()
        for size in sizes:
            with ops.step("prefill" if size.kind == "prefill" else "decode"):
                self._graph(size)
        return sum(graph is not None for graph in self.graphs.values())

    def _forget(self) -> None:
        self.graphs.clear()
        self._refused.clear()
        self.backend.renew()

    def _able(self, size: Size) -> bool:
        """Whether there may be a graph of a size, under the choice of kernels as it is now."""
        if self._choice != ops.revision():
            self._forget()
        fit = 0 < size.rows <= MOST_ROWS[size.kind] and not ops.watched()
        return fit and size.kind not in self._refused and self.graphs.get(size, True) is not None

    def _outputs(self, size: Size, work: list[Any], rows: int) -> tuple[Tensor, ...] | None:
        """The first rows of what a step gives, by the graph of its size; None: there is none."""
        some = self._shared(size, work) if self.runner.peers else rows > 0
        inputs = self._inputs(size, work) if some and self._able(size) else None
        graph = self._graph(size) if inputs is not None else None
        if graph is None:
            return None
        graph.inputs.fill(inputs)
        if not self._sound(graph, size):
            return None
        graph.replay()
        return tuple(of[:rows].clone() for of in graph.outputs)

    def _shared(self, size: Size, work: list[Any] | Tensor) -> bool:
        """Say how many rows are live; others' need the experts here even if none is. False: too many."""
        window, each = self.runner.peers.window, 1
        if size.kind == "decode":
            live = sum(w.stop - w.start for w in work)
        else:
            each = self.runner.config.dspark_block_size
            live = work.shape[1] * each
        window.live.fill_(live)
        return size.rows * each <= window.max_rows

    def _graph(self, size: Size) -> Graph | None:
        """The graph of a size, captured now if it is new; None if that failed."""
        if size not in self.graphs:
            begin = time.perf_counter()
            try:
                self.graphs[size] = self._captured(size)
            except Exception as error:
                logger.debug("the capture of %s failed", size, exc_info=True)
                self._fail(size, f"{type(error).__name__}: {error}")
                self._refused |= {size.kind} if isinstance(error, CannotRepeat) else set()
            self._choice = ops.revision()  # kernels that were imported meanwhile included
            self.counts["graph_capture_ms"] += round(1e3 * (time.perf_counter() - begin))
        return self.graphs[size]

    def _captured(self, size: Size) -> Graph:
        inputs = None
        if self.runner.engram is not None:
            self.runner.engram.settle()  # the step that comes has asked for its rows
        if size.kind == "prefill":
            self._stand_aside(size.rows)
            work = partial(self._part, size)
        else:
            nobody = self._inputs(size, [])
            inputs = Parcel(nobody, self.runner.device)
            launches = {"decode": self._logits, "guess": self._guesses, "draft": self._drafts}[size.kind]
            work = partial(launches, inputs.fill(nobody))
        peers = self.runner.peers
        with nullcontext() if peers is None else peers.captured():
            work(directly)  # compiles kernels, fills caches
            with Unbroken() as unbroken:
                work(unbroken.pause)
            return Graph(work, inputs, *self.backend.capture(work), checked=peers is not None)

    def _sound(self, graph: Graph, size: Size) -> bool:
        """Whether a graph gives what its launches give for the inputs that it has; asked once."""
        if graph.checked:
            return True
        if size.kind == "prefill":
            self._stand_aside(size.rows)
        graph.replay()
        for found, want in zip(leaves(graph.outputs), leaves(graph.work(directly)), strict=True):
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

    # ---- steps of whole graphs -----------------------------------------------------------------------------

    def _logits(self, inputs: Step, pause: Pause) -> tuple[Tensor]:
        runner = self.runner
        step = runner.arrive(inputs, unknown=True)
        if isinstance(runner.engram, Remote):
            step.found = Fetched(runner.engram, step.gram, pause)
        return (runner.model(step, runner.memory),)

    def _guesses(self, rounds_3B: Tensor, pause: Pause) -> tuple[Tensor, Tensor]:
        return self.runner.model.guess(self.runner.block(rounds_3B), self.runner.memory)

    def _drafts(self, rounds_3B: Tensor, pause: Pause) -> tuple[Tensor, Tensor, Tensor]:
        runner, shape = self.runner, (rounds_3B.shape[1], self.runner.config.dspark_block_size)
        return runner.model.draft(runner.block(rounds_3B), runner.memory, shape, likeliest)

    def _inputs(self, size: Size, work: list[Any] | Tensor) -> Step | Tensor | None:
        """A step as it is laid out, or a draft's rounds, in the shapes of its size; None where a step holds
        what a graph does not.
        """
        runner = self.runner
        if size.kind != "decode":
            rounds_3B = torch.zeros(3, size.rows, dtype=torch.int64, device=runner.device)
            if len(work):
                rounds_3B[:, : work.shape[1]] = work
            return rounds_3B
        fillers = [runner.placeholder()] * (size.rows - sum(w.stop - w.start for w in work))
        step = runner.lay_out([*work, *fillers])
        if step.tail is not None or step.windows[0].history is not None:
            return None
        groups = {ratio: _pad_group(group, size.rows) for ratio, group in step.groups.items()}
        blocks = -(-size.positions // runner.block_size)
        segments = {ratio: [_by_row(parts, blocks, runner.block_size // ratio)]
                    for ratio, parts in step.segments.items()}
        return replace(step, groups=groups, segments=segments, wanted=None, image=None)

    # ---- steps with breaks ---------------------------------------------------------------------------------

    def _part(self, size: Size, pause: Pause) -> State:
        """Part of a model over the rows in its room; breaks meet the caches with those of the step of now."""
        runner, (work, *more) = self.runner, size.part
        ids, pos, gram, state = self._rooms[size.part].first(size.rows)
        step = Step(ids, pos, {}, (), gram=gram, meet=partial(self._meet, pause))
        step.found = Awaited(step) if isinstance(runner.engram, Remote) else None
        return work(state, step, runner.memory, Global(), *more)

    def _meet(self, pause: Pause, work: Callable[..., Tensor | None], step: Step, memory: Memory,
              shared: Global, *rows: Tensor) -> Tensor | None:
        """What meets the caches (Step.meet), in a break: called with the rows and the step of now."""

        def look(*rows: Tensor) -> Tensor | None:
            own, seen, index = self._now
            found = work(own, memory, seen, *(each[: len(own.ids)] for each in rows))
            if found is None:
                return None
            return self._room((found.shape[1:], found.dtype), found).fill(found, index)

        return pause(look, *rows)

    def _room(self, key: Any, like: Any) -> Rows:
        """Room of its own for inputs; what breaks give is read before the next one of its shape comes."""
        if key not in self._rooms:
            self._rooms[key] = Rows(like, MOST_ROWS["prefill"])
        return self._rooms[key]

    def _stand_aside(self, rows: int) -> None:
        """Let breaks see the reserved slot and block."""
        runner = self.runner
        if self._nobody is None:
            step, shared = runner.step([runner.placeholder()]), Global()
            state, every = runner.model.streams(step.ids), range(len(runner.model.layers))
            runner.model.through(state, step, runner.memory, shared, every)
            self._nobody = step, shared
        self._now = *self._nobody, self._index(1, rows)

    def _index(self, rows: int, padded: int) -> Tensor:
        """Rows of a step in a graph: each in its place, and the last one again behind them."""
        return torch.arange(padded, device=self.runner.device).clamp_(max=rows - 1)


def _in_octaves(rows: int) -> int:
    """The number of rows that so many of prompts are padded to: multiples of 8, at most four in an octave."""
    step = max(8, 1 << (rows - 1).bit_length() >> 3)
    return -(-rows // step) * step


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
