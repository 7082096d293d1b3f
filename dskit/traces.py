"""Traces: what a Chrome trace of torch.profiler says about our ops; pure functions from events to rows.

Idea: a range (`dskit::mhc.read[torch]`, `dskit::layers.3`, `dskit::step[decode]`) owns the time in which no
range inside it is open, and the kernels that were launched in that time. So nothing is counted twice, what
lies outside ops has a row of its own, and the shares of a phase add up to one.

Units: microseconds in events and ranges, milliseconds in rows; MB are 10^6 bytes. `share` is of the wall time
of a phase's steps, `cuda_share` of what the phase's launches took on the GPU.
Errors: FileNotFoundError from `compare` for a folder without a table.csv.
Source: the trace format of Chrome; experience.md section 6.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dskit.table import Table

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # kinds of events that occupy a GPU
LAUNCHES = ("cuda_runtime", "cuda_driver")
BLOCK = "dskit::profile"
OUTSIDE_OPS, BETWEEN_STEPS = "(outside ops)", "(between steps)"
NO_STEP = "outside steps"
_LABEL = re.compile(r"dskit::([\w.]+)\[([\w.]+)\]")  # an op and its implementation, or step and its phase
LAYER = re.compile(r"(layers|mtp)\.\d+")

Event = dict[str, Any]


# ---- what belongs to whom ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Range:
    """A named range of one thread, with the time of the ranges, kernels and allocations inside it."""

    name: str
    start: float
    duration: float
    outer: Range | None
    inner: float = 0.0
    device: float = 0.0
    allocated: int = 0

    def __post_init__(self):
        found, name = _LABEL.fullmatch(self.name), self.name.removeprefix("dskit::")
        self.op, self.by = (found[1], found[2]) if found else ("", "")
        around = (self.outer.phase, self.outer.layer) if self.outer else (NO_STEP, None)
        self.phase = self.by if self.op == "step" else around[0]
        self.layer = name if LAYER.fullmatch(name) else around[1]

    @property
    def own(self) -> float:
        """Microseconds in which no inner range is open."""
        return self.duration - self.inner

    @property
    def is_op(self) -> bool:
        """False for steps, layers and the whole block."""
        return self.op not in ("", "step")


def ranges_of(events: list[Event]) -> list[Range]:
    """The dskit ranges of a trace, each with its own time, kernels and allocations."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        ours = event.get("cat") == "user_annotation" and event["name"].startswith("dskit::")
        if ours or event.get("cat") in LAUNCHES or event["name"] == "[memory]":
            threads[event["pid"], event["tid"]].append(event)
    found: list[Range] = []
    launched: dict[int, Range] = {}
    for mine in threads.values():
        _sweep(sorted(mine, key=lambda e: (e["ts"], -e.get("dur", 0))), found, launched)
    block = next((r for r in found if r.name == BLOCK), None)
    for event in events:
        if event.get("cat") in ON_DEVICE:
            owner = launched.get(event["args"].get("correlation"), block)
            if owner is not None:
                owner.device += event["dur"]
    return found


def _sweep(events: list[Event], found: list[Range], launched: dict[int, Range]) -> None:
    """Walk one thread in time order with the stack of open ranges."""
    stack: list[Range] = []
    for event in events:
        while stack and stack[-1].start + stack[-1].duration <= event["ts"]:
            stack.pop()
        top = stack[-1] if stack else None
        if event.get("cat") == "user_annotation":
            stack.append(Range(event["name"], event["ts"], event["dur"], top))
            found.append(stack[-1])
            if top:
                top.inner += event["dur"]
        elif top and event["name"] == "[memory]":
            top.allocated += max(0, event["args"]["Bytes"])
        elif top and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = top


def rows_of(ranges: list[Range], *, gpu: bool, memory: bool) -> list[dict[str, Any]]:
    """One row per phase, op and implementation, the most expensive first; then what lies outside ops."""
    cells: dict[tuple[str, str, str], list[Range]] = defaultdict(list)
    for r in ranges:
        rest = BETWEEN_STEPS if r.phase == NO_STEP else OUTSIDE_OPS
        cells[(r.phase, r.op, r.by) if r.is_op else (r.phase, rest, "")].append(r)
    phases = phases_of(ranges)
    rows = []
    for (phase, op, by), mine in cells.items():
        about = phases[phase]
        own = sum(r.own for r in mine) / 1e3
        if op == BETWEEN_STEPS:  # the block's thread may only wait while another takes the steps
            own = about["wall_ms"] - sum(r.own for r in ranges if r.phase == NO_STEP and r.is_op) / 1e3
        row = {"phase": phase, "op": op, "implementation": by, "calls": len(mine) if by else None,
               "self_ms": own, "share": _share(own, about["wall_ms"])}
        times = {"ms_per_step": own}
        if gpu:
            there = sum(r.device for r in mine) / 1e3
            row |= {"cuda_ms": there, "cuda_share": _share(there, about["cuda_ms"])}
            times["cuda_ms_per_step"] = there
        row |= {name: ms / about["steps"] if about["steps"] else None for name, ms in times.items()}
        if memory:
            row["alloc_mb"] = sum(r.allocated for r in mine) / 1e6
        rows.append(row | {"layers": _spans({r.layer for r in mine})})
    order, cost = list(phases), "cuda_ms" if gpu else "self_ms"
    return sorted(rows, key=lambda row: (order.index(row["phase"]), row["op"].startswith("("), -row[cost]))


def phases_of(ranges: list[Range]) -> dict[str, dict[str, float]]:
    """{phase: steps, wall_ms, cuda_ms}, and what is left of the block under "outside steps"."""
    found = {name: {"steps": 0, "wall_ms": 0.0, "cuda_ms": 0.0} for name in ("prefill", "decode")}
    for r in ranges:
        about = found.setdefault(r.phase, {"steps": 0, "wall_ms": 0.0, "cuda_ms": 0.0})
        about["cuda_ms"] += r.device / 1e3
        if r.op == "step":
            about["steps"] += 1
            about["wall_ms"] += r.duration / 1e3
    outside = found.pop(NO_STEP)
    in_steps = sum(about["wall_ms"] for about in found.values())
    outside["wall_ms"] = next(r.duration for r in ranges if r.name == BLOCK) / 1e3 - in_steps
    return {name: about for name, about in found.items() if about["steps"]} | {NO_STEP: outside}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spans(layers: set[str | None]) -> str:
    """{layers.0, layers.1, layers.2, layers.5, mtp.0} -> "0-2,5,mtp.0"."""
    numbers = sorted(int(name[7:]) for name in layers if name and name.startswith("layers."))
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    named = [f"{a}-{b}" if a < b else str(a) for a, b in spans]
    return ",".join(named + sorted(name for name in layers if name and name.startswith("mtp.")))


def busy_ms(events: list[Event]) -> float:
    """Milliseconds in which the GPU had something to do, overlaps counted once."""
    busy, until = 0.0, float("-inf")
    for event in sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return busy / 1e3


def peak_mb(events: list[Event], device_type: int = 0) -> float:
    """The most that was held at once beyond what was held at the start (0: processor, 1: GPU)."""
    held = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        if event["args"]["Device Type"] == device_type:
            held += event["args"]["Bytes"]
            peak = max(peak, held)
    return peak / 1e6


# ---- to keep -----------------------------------------------------------------------------------------------

_KEPT = ("schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit")
_DROPPED = frozenset(("Ev Idx", "Record function id", "Concrete Inputs", "Input type", "Input Strides",
                      "Sequence number", "Fwd thread id"))


def slim(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace to keep and to show: no host name, no allocations, no torch call inside another one."""
    events = [e for e in trace["traceEvents"] if e["name"] != "[memory]"]
    zero = min((e["ts"] for e in events if e["ph"] == "X"), default=0.0)
    on_gpu = any(e.get("cat") in ON_DEVICE for e in events)
    dropped = _DROPPED if on_gpu else _DROPPED | {"External id"}
    kept = {"distributedInfo": {"rank": 0, "world_size": 1}}
    kept |= {key: trace[key] for key in _KEPT if key in trace}
    return kept | {"traceEvents": [_slim_event(e, zero, dropped) for e in _outermost(events)]}


def _outermost(events: list[Event]) -> list[Event]:
    """Events without the torch calls that other torch calls make: more than half of a trace."""
    until: dict[Any, float] = defaultdict(float)
    kept = []
    for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0))):
        if event.get("cat") == "cpu_op":
            thread = event["pid"], event["tid"]
            if event["ts"] < until[thread]:
                continue
            until[thread] = event["ts"] + event["dur"]
        kept.append(event)
    return kept


def _slim_event(event: Event, zero: float, dropped: frozenset[str]) -> Event:
    found = event | {"ts": round(max(0.0, event["ts"] - zero), 3)}
    if "dur" in event:
        found["dur"] = round(event["dur"], 3)
    found["args"] = {key: value for key, value in event.get("args", {}).items() if key not in dropped}
    return found if found["args"] else {key: value for key, value in found.items() if key != "args"}


# ---- two runs ----------------------------------------------------------------------------------------------


def compare(a: str | Path, b: str | Path) -> Table:
    """Two run folders beside each other: milliseconds per step of every op, the largest difference first.

    Times of the GPU where both runs have them, else of the processor. An op that only one run has is there
    with nothing in the other's column.
    """
    runs = [_read_table(folder) for folder in (a, b)]
    on_gpu = all("cuda_ms_per_step" in row for run in runs for row in run)
    old, new = (_per_step(run, "cuda_ms_per_step" if on_gpu else "ms_per_step") for run in runs)
    rows = []
    for phase, op in dict.fromkeys([*old, *new]):
        (a_ms, a_by), (b_ms, b_by) = (one.get((phase, op), (None, "")) for one in (old, new))
        rows.append({"phase": phase, "op": op, "a": a_by, "b": b_by, "a_ms": a_ms, "b_ms": b_ms,
                     "difference_ms": (b_ms or 0.0) - (a_ms or 0.0),
                     "ratio": b_ms / a_ms if a_ms and b_ms is not None else None})
    rows.sort(key=lambda row: -abs(row["difference_ms"]))
    what = "on the GPU" if on_gpu else "on the processor, inner ops apart"
    return Table(rows, f"milliseconds per step {what}: a is {Path(a).name}, b is {Path(b).name}")


def _read_table(folder: str | Path) -> list[dict[str, str]]:
    path = Path(folder) / "table.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no table.csv; give two folders that dskit profile wrote")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _per_step(rows: list[dict[str, str]], unit: str) -> dict[tuple[str, str], tuple[float, str]]:
    """(phase, op) -> milliseconds per step, all implementations together, and their names."""
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for row in rows:
        if row[unit]:
            ms, names = found.get((row["phase"], row["op"]), (0.0, ""))
            names = "/".join(filter(None, (names, row["implementation"])))
            found[row["phase"], row["op"]] = (ms + float(row[unit]), names)
    return found
