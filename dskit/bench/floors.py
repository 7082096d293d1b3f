"""The least time that a call can take: its bytes over the memory's speed, or its arithmetic over a peak.

Idea: a floor is max(bytes / bandwidth, flop / peak) of the case table's counts, each input and output moved
once. It leaves out the launch (an empty kernel in a graph takes 0.7 us on an H200) and what a cache serves
twice, so that a share of the floor above one means reads out of the L2.

Units: bytes, floating-point operations, microseconds.
Errors: ValueError naming the field that a file of constants lacks.
Source: engine/plan.py has the speeds and where they come from.
"""

from __future__ import annotations

from typing import Any

from dskit.engine.plan import H200, Machine
from dskit.testing import Cases, Shape


def machine(gpu: str | None, constants: str | None = None) -> Machine | None:
    """The constants to use for a GPU: those of a JSON file, or the H200's for an H200 and for no GPU."""
    if constants:
        return Machine.load(constants)
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
