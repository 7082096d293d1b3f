"""The least time that a call can take: its bytes over the memory's speed, or its arithmetic over a peak.

Idea: a floor is max(bytes / bandwidth, flop / peak) of the case table's counts, each input and output moved
once. It leaves out the launch (an empty kernel in a graph takes 0.7 us on an H200) and what a cache serves
twice, so that a share of the floor above one means reads out of the L2.

Units: bytes, floating-point operations, microseconds.
Errors: ValueError naming the field that a file of constants lacks.
Source: copies and 8192^3 products on one H200, 2026-11-29; fp8 is twice bf16, an upper bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dskit.testing import Cases, Shape


@dataclass(frozen=True)
class Machine:
    """What a GPU can move and compute per second; `name` is part of what the driver calls it."""

    name: str
    bytes_per_s: float
    flop_per_s: dict[str, float]


H200 = Machine("H200", 4.3e12, {"bf16": 790e12, "fp8": 1580e12, "tf32": 395e12, "fp32": 60e12})


def machine(gpu: str | None, constants: str | None = None) -> Machine | None:
    """The constants to use for a GPU: those of a JSON file, or the H200's for an H200 and for no GPU."""
    if constants:
        found = json.loads(Path(constants).read_text())
        missing = [name for name in ("name", "bytes_per_s", "flop_per_s") if name not in found]
        if missing:
            raise ValueError(f"{constants} lacks {missing[0]!r}; it needs name, bytes_per_s, flop_per_s")
        return Machine(found["name"], found["bytes_per_s"], found["flop_per_s"])
    return H200 if gpu is None or H200.name in gpu else None


def floor(cases: Cases, shape: Shape, on: Machine | None) -> dict[str, Any]:
    """Bytes, flop, the floor in microseconds and what binds it ("bytes", or the peak's name); else None."""
    moved = cases.nbytes(shape) if cases.nbytes else None
    flop = cases.flop(shape) if cases.flop else None
    least = {"bytes": moved, "flop": flop, "floor_us": None, "bound": None}
    if on is None or moved is None:
        return least
    times = {"bytes": 1e6 * moved / on.bytes_per_s}
    if flop and cases.peak in on.flop_per_s:
        times[cases.peak] = 1e6 * flop / on.flop_per_s[cases.peak]
    bound = max(times, key=times.get)
    return least | {"floor_us": times[bound], "bound": bound}
