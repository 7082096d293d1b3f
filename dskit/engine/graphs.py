"""CUDA graphs of decode steps: what a step launches, kept and launched again by one call.

Idea: the kernels of a decode step are short, and to launch them one by one takes longer than they run. A
graph repeats a step's launches on the same addresses, so steps are padded to a few numbers of rows (1, 2, 4,
8, then every 8) and of positions (powers of two), and what tells them apart is copied into the tensors that
the graph was captured with. Padding rows stand in the reserved slot and block, which no request reads; so
does the step that a graph is captured from, so that nobody's caches change. Before a graph serves, its first
step is also run as it is, and the two must agree; where they do not, or a capture fails, such steps run
eagerly.

Shapes: a graph per (rows, positions); logits float32 [rows, V], of which the first are the step's own.
State: one Graphs per runner, with one memory pool; `counts` says how often which way was taken.
Errors: none; a failed capture is a warning and a count (`graph_failures`).
Source: engine.md section 14.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dskit import ops
from dskit.layers.indexer import Segment
from dskit.model import Step

logger = logging.getLogger("dskit.engine")
MOST_ROWS = 512
LEAST_POSITIONS = 256
TOLERANCE = 0.01  # relative RMS between a graph's logits and those of the same step without one


class Cuda:
    """Captures with torch; all graphs share one pool, since only one of them runs at a time."""

    def __init__(self):
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What repeats `work`, and where its result will be; runs it once to warm up."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            out = work()
        return graph.replay, out


@dataclass
class Graph:
    """A captured step: its inputs, what repeats it, and where its logits are. `checked`: it has served."""

    step: Step
    replay: Callable[[], None]
    logits: Tensor
    checked: bool = False


class Graphs:
    """The graphs of one runner."""

    def __init__(self, runner: Any, backend: Any):
        self.runner, self.backend = runner, backend
        self.graphs: dict[tuple[int, int], Graph | None] = {}  # None: it failed, run eagerly
        self.counts = {"graph_steps": 0, "eager_steps": 0, "graph_failures": 0}

    def run(self, work: list[Any]) -> Tensor | None:
        """Logits of a decode step, or None where it has to run eagerly."""
        rows, stop = sum(w.stop - w.start for w in work), max((w.stop for w in work), default=0)
        key = _rows(rows), max(LEAST_POSITIONS, 1 << (stop - 1).bit_length())
        step = self._step(work, key) if 0 < rows <= MOST_ROWS and self.graphs.get(key, True) else None
        graph = self._graph(key) if step is not None else None
        logits = self._replay(graph, step, key) if graph is not None else None
        self.counts["eager_steps" if logits is None else "graph_steps"] += 1
        return None if logits is None else logits[:rows].clone()

    @torch.inference_mode()
    def recapture(self) -> int:
        """Capture every graph again, as other kernels were chosen; how many there are now."""
        keys = list(self.graphs)
        self.graphs.clear()
        with ops.step("decode"):
            return sum(self._graph(key) is not None for key in keys)

    def _graph(self, key: tuple[int, int]) -> Graph | None:
        """The graph of a size, captured now if it is new; None if that failed."""
        if key not in self.graphs:
            try:
                step = mapped(self._step([], key), Tensor.clone)
                run = lambda: self.runner.model(step, self.runner.memory)  # noqa: E731
                self.graphs[key] = Graph(step, *self.backend.capture(run))
            except Exception as error:
                self._fail(key, f"{type(error).__name__}: {error}")
        return self.graphs[key]

    def _replay(self, graph: Graph, step: Step, key: tuple[int, int]) -> Tensor | None:
        for target, source in zip(leaves(graph.step), leaves(step), strict=True):
            target.copy_(source)
        graph.replay()
        if not graph.checked:
            want = self.runner.model(step, self.runner.memory)
            away = (graph.logits - want).square().mean().sqrt() / want.square().mean().sqrt()
            if not away < TOLERANCE and want.isfinite().all():
                self._fail(key, f"its logits differ by {away:.2g} from those of the same step without it")
                return None
            graph.checked = True
        return graph.logits

    def _fail(self, key: tuple[int, int], why: str) -> None:
        logger.warning("no CUDA graph for %d rows within %d positions, which run eagerly: %s", *key, why)
        self.graphs[key] = None
        self.counts["graph_failures"] += 1

    def _step(self, work: list[Any], key: tuple[int, int]) -> Step | None:
        """A step with the shapes of its size; None where it holds what a graph does not."""
        rows, positions = key
        filler = self.runner.placeholder()
        padded = [*work, *[filler] * (rows - sum(w.stop - w.start for w in work))]
        step = self.runner.step(padded)
        if step.found is not None or step.tail is not None or step.windows[0].history is not None:
            return None
        image = self.runner.config.image_token_id
        groups = {ratio: _pad_group(group, rows) for ratio, group in step.groups.items()}
        segments = {ratio: [_by_row(parts, positions // ratio)] for ratio, parts in step.segments.items()}
        return replace(step, groups=groups, segments=segments, wanted=None,
                       image=None if image is None else step.ids == image)


def _rows(rows: int) -> int:
    """The number of rows that so many are padded to."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def _pad_group(group: Any, rows: int) -> Any:
    """As many new entries as rows: those that are none are made of row 0 and go to row 0 of the pool."""
    more = rows - len(group.slots)
    ring = group.ring and replace(group.ring, read=_pad(group.ring.read, more))
    return replace(group, ring=ring, turn=_pad(group.turn, more), slots=_pad(group.slots, more))


def _by_row(parts: list[Segment], entries: int) -> Segment:
    """Segments as one, in which every row has a table of its own, so wide that a size shares it."""
    tables = [F.pad(p.table, (0, entries - p.table.shape[1])).repeat_interleave(p.shape[1], 0) for p in parts]
    visible = torch.cat([p.visible.reshape(-1, 1) for p in parts])
    return Segment(slice(0, len(visible)), (len(visible), 1), visible, torch.cat(tables))


def _pad(tensor: Tensor, more: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(more, *tensor.shape[1:])))


def mapped(value: Any, work: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with `work` done on each tensor in it."""
    if isinstance(value, Tensor):
        return work(value)
    if isinstance(value, dict):
        return {key: mapped(one, work) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(one, work) for one in value)
    if is_dataclass(value):
        return replace(value, **{f.name: mapped(getattr(value, f.name), work) for f in fields(value)})
    return value


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a structure, in the order in which `mapped` meets them."""
    found: list[Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)
    return found
