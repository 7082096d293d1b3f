"""Profiles: which op, by which implementation, in which layer, costs how much; torch.profiler with our names.

Idea: while a profile is open, every step and every op call is a named range (`dskit::mhc.read[torch]`) in the
trace of torch.profiler. The table is made from that trace and from nothing else (traces.py).

    with dskit.profile(llm) as seen:
        llm.generate("hello")
    seen                       # the table
    seen.save("profiles/mine") # table.csv, a trace for ui.perfetto.dev, summary.md

Units: milliseconds; MB are 10^6 bytes. Profiled steps are slower than others, since every torch call is
recorded: compare shares, and take speeds from `dskit bench`.
State: `prof` is torch's profiler, `trace` the Chrome trace. One profile at a time.
Errors: RuntimeError from torch when another profiler is running.
Source: experience.md section 6.
"""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, tensorboard_trace_handler

from dskit import ops, traces
from dskit.table import Table

OPEN_WITH = "drag the trace into https://ui.perfetto.dev, or load it in chrome://tracing"
NO_GPU = "no GPU here: all times are the processor's"


class profile:  # noqa: N801 - reads as a verb: with dskit.profile(llm) as seen
    """Record the steps and ops that run inside the `with` block, in whichever thread.

    model: a module, or an LLM that holds one, whose layers then appear by number. memory: also record
    allocations, which torch does for the calling thread alone: what other threads run is then not seen.
    tensorboard: a folder for TensorBoard, written through torch's own handler.
    """

    def __init__(self, model: Any = None, *, memory: bool = False, tensorboard: str | Path | None = None):
        self.root = model if model is None or isinstance(model, torch.nn.Module) else model.model
        self.with_memory, self.tensorboard = memory, tensorboard
        self.gpu = torch.cuda.is_available()
        self.notes = [] if self.gpu else [NO_GPU]
        self.trace: dict[str, Any] = {"traceEvents": []}
        self.ranges: list[traces.Range] = []
        self.memory: list[dict[str, Any]] = []
        self.snapshot: dict[str, Any] | None = None

    def __enter__(self) -> profile:
        self._open = ExitStack()
        self._open.enter_context(ops.named_ranges())
        self._open.enter_context(_layer_ranges(self.root))
        if self.gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            if self.with_memory:  # no stacks: they would carry the paths of this machine
                torch.cuda.memory._record_memory_history(context=None)
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=not self.with_memory)
        self.prof = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])],
            record_shapes=True, profile_memory=self.with_memory, experimental_config=threads)
        self.prof.start()
        self._block = record_function(traces.BLOCK)
        self._block.__enter__()
        return self

    def __exit__(self, failed: type | None, *_: Any) -> None:
        if self.gpu:
            torch.cuda.synchronize()
        self._block.__exit__(None, None, None)
        self.prof.stop()
        self._open.close()
        if self.gpu and self.with_memory:
            self.snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        if failed is None:
            self._read()

    def _read(self) -> None:
        """Let torch write the trace, which it does once, and make of it what the table needs."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(self.tensorboard or scratch)
            folder.mkdir(parents=True, exist_ok=True)
            before = set(folder.iterdir())
            tensorboard_trace_handler(str(folder), worker_name="dskit")(self.prof)
            (path,) = set(folder.iterdir()) - before
            raw = json.loads(path.read_text())
            self.trace, self.ranges = traces.slim(raw), traces.ranges_of(raw["traceEvents"])
            if self.with_memory:
                self.memory = self._memory(raw["traceEvents"])
            if self.tensorboard:
                path.write_text(json.dumps(self.trace, separators=(",", ":")))
                self._write_scalars(folder)

    def _memory(self, events: list[traces.Event]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"device": "cpu", "peak_over_start_mb": traces.peak_mb(events)}]
        if self.gpu:
            found.append({"device": "cuda", "peak_mb": torch.cuda.max_memory_allocated() / 1e6,
                          "held_mb": torch.cuda.memory_allocated() / 1e6,
                          "reserved_mb": torch.cuda.memory_reserved() / 1e6})
        return found

    def _write_scalars(self, folder: Path) -> None:
        """The table as scalars, which TensorBoard shows without its profiler plugin."""
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder)) as writer:
            for row in self.table():
                value = row.get("cuda_ms_per_step", row["ms_per_step"])
                if value is not None:
                    name = f"{row['op']}[{row['implementation']}]" if row["implementation"] else row["op"]
                    writer.add_scalar(f"{row['phase']} ms per step/{name}", value)
            writer.add_text("summary", "\n\n".join(self.lines()))

    # ---- reading -------------------------------------------------------------------------------------------

    def table(self, phase: str | None = None) -> Table:
        """The rows of every phase, or of one: prefill, decode, outside steps."""
        rows = traces.rows_of(self.ranges, gpu=self.gpu, memory=self.with_memory) if self.ranges else []
        return Table([row for row in rows if phase in (None, row["phase"])],
                     "self: without inner ops" + ("" if self.gpu else f"; {NO_GPU}"))

    def summary(self) -> dict[str, Any]:
        """Wall time, steps and wall time per phase, and the GPU's busy time (None without one)."""
        phases = traces.phases_of(self.ranges) if self.ranges else {}
        wall = sum(about["wall_ms"] for about in phases.values())
        busy = traces.busy_ms(self.trace["traceEvents"]) if self.gpu else None
        return {"wall_ms": wall, "phases": phases, "gpu_busy_ms": busy,
                "gpu_idle_share": 1 - busy / wall if busy is not None and wall else None}

    def lines(self) -> list[str]:
        """The summary in words."""
        found = self.summary()
        parts = [f"{name} {about['wall_ms']:.1f} ms" + f" in {about['steps']} steps" * (about["steps"] > 1)
                 for name, about in found["phases"].items()]
        lines = [f"wall {found['wall_ms']:.1f} ms; " + "; ".join(parts)]
        if found["gpu_idle_share"] is not None:
            lines.append(f"GPU busy {found['gpu_busy_ms']:.1f} ms, idle {found['gpu_idle_share']:.1%}")
        for row in self.memory:
            figures = [f"{name.removesuffix('_mb').replace('_', ' ')} {value:.1f} MB"
                       for name, value in row.items() if name != "device"]
            lines.append(f"memory of {row['device']}: {', '.join(figures)}")
        return lines + self.notes

    def __repr__(self) -> str:
        return "\n".join([repr(self.table()), *self.lines()])

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + "".join(f"<div>{line}</div>" for line in self.lines())

    # ---- keeping -------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, header: dict[str, Any] | None = None) -> Path:
        """Write table.csv, trace.rank0.json.gz, summary.md, and run.json from `header`; gives the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if header is not None:
            (folder / "run.json").write_text(json.dumps(header, indent=2) + "\n")
        rows = self.table()
        with (folder / "table.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows.columns)
            writer.writeheader()
            writer.writerows(rows)
        with gzip.open(folder / "trace.rank0.json.gz", "wt") as file:
            file.write(json.dumps(self.trace, separators=(",", ":")))
        if self.snapshot is not None:
            (folder / "memory.rank0.pickle").write_bytes(pickle.dumps(self.snapshot))
        words = "".join(f"- {line}\n" for line in [*self.lines(), OPEN_WITH])
        (folder / "summary.md").write_text(words)
        return folder


@contextmanager
def _layer_ranges(root: torch.nn.Module | None) -> Iterator[None]:
    """While open, the layers of a model are ranges: dskit::layers.3."""
    hooks = []
    for name, module in root.named_modules() if root is not None else ():
        if traces.LAYER.fullmatch(name):
            before, after = _range_hooks(f"dskit::{name}")
            hooks += [module.register_forward_pre_hook(before),
                      module.register_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _range_hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    running: list[record_function] = []

    def before(*_: Any) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def after(*_: Any) -> None:
        if running:  # a layer that ran when the profile was opened has none
            running.pop().__exit__(None, None, None)

    return before, after
