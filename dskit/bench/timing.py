"""Microseconds of one call on a GPU: captured in a graph, each call on inputs that the cache has not seen.

Idea
    Calls go round a ring of copies of their arguments and are captured in a CUDA graph; the L2 is
    emptied before each replay.  Every copy is therefore read from memory, as a layer's weights and states
    are in a model, and no launch is timed.  What cannot be captured is timed call by call between events.
    All who compete are timed in turn, three rounds in rotated order, so that a drift of the clocks meets all.

Shapes
    A contender is a list of functions without arguments, one per copy in the ring.

Units
    Microseconds per call; megahertz, watts, degrees Celsius.

Errors
    What a contender raises is raised; a failed capture is not an error: see `Timed.graph_error`.

Source
    kernels.md 6.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]
FLUSH = 256 << 20  # bytes read to empty the L2
MOST_CALLS = 200  # in one graph
REPLAY_US = 2000  # least length of a replay, so that its edges do not count
ROUND_US = 400_000  # most time of one contender in one round


@dataclass
class Timed:
    """A contender, ready to be sampled: `sample()` gives microseconds per call."""

    calls: list[Call]
    sample: Callable[[], float]
    graph: bool
    calls_per_graph: int
    guess_us: float
    graph_error: str | None = None
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def samples(self) -> list[float]:
        """All samples of all rounds."""
        return [sample for one in self.rounds for sample in one]


def alive() -> bool:
    """Whether the CUDA context still answers; frees what the last call held."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def said(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


# ---- one contender -----------------------------------------------------------------------------------------

def ring_size(nbytes: int, calls: int, cache: int) -> int:
    """Copies of a call's arguments that together exceed twice the cache, or one for each of the calls."""
    return max(1, min(calls, math.ceil(2 * cache / max(nbytes, 1))))


class Device:
    """Times calls on the current GPU."""

    kind = "cuda"
    least_s, least_calls = 0.05, 25  # of a warm-up

    def __init__(self):
        self.flush, self.sink = torch.zeros(FLUSH // 4, device="cuda"), torch.zeros((), device="cuda")
        self.cache = torch.cuda.get_device_properties(0).L2_cache_size

    def between(self, work: Call, cold: bool = True) -> float:
        """Microseconds of the work on the GPU, after the L2 was filled with something else."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cold:
            torch.sum(self.flush, dim=0, out=self.sink)  # read, not written: nothing is left to write back
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    def warm_up(self, calls: list[Call]) -> float:
        """Call until so many calls and so long are past, at most a second; gives a guess of a call's time."""
        began, count = time.perf_counter(), 0
        while (past := time.perf_counter() - began) < 1 and (count < self.least_calls or past < self.least_s):
            calls[count % len(calls)]()
            count += 1
            if count % 5 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - began) / count

    def capture(self, calls: list[Call], count: int) -> torch.cuda.CUDAGraph:
        """A graph of `count` calls round the ring; as many results as the ring is long stay apart."""
        stream, graph, kept = torch.cuda.Stream(), torch.cuda.CUDAGraph(), deque(maxlen=len(calls))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(count):
                    kept.append(calls[i % len(calls)]())
            finally:
                graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def prepare(self, calls: list[Call], guess: float | None = None) -> Timed:
        """Warm up unless that has given a guess, guess the time from a short graph, and capture one that is
        long enough to be timed.
        """
        guess = guess or self.warm_up(calls)
        try:
            short = self.capture(calls, 4)
            guess = min(self.between(short.replay) for _ in range(3)) / 4
            del short
            count = max(1, min(MOST_CALLS, math.ceil(REPLAY_US / guess)))
            graph = self.capture(calls, count)
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises where more than the capture is broken
            cause = error.__context__ or error  # ending a broken capture raises once more
            turn = itertools.cycle(calls)
            return Timed(calls, lambda: self.between(next(turn)), False, 1, guess, said(cause))
        return Timed(calls, lambda: self.between(graph.replay) / count, True, count, guess)


# ---- all who compete ---------------------------------------------------------------------------------------

class Race:
    """Contenders on one ring of copies of the same arguments; who fails is left out, with the reason."""

    def __init__(self, args: tuple, working_set: int, device: Device):
        self.device, self.warm, self.contenders, self.failed = device, {}, {}, {}
        copies = ring_size(working_set, MOST_CALLS, device.cache)
        self.ring = [copy.deepcopy(args) for _ in range(copies)]

    def enter(self, name: str, prepare: Callable[..., Call],
              look: Callable[[Any], None] | None = None) -> None:
        """Call a contender until nothing is left to compile: `prepare` of each copy gives a call; `look` sees
        what the first returns.
        """
        with self.without(name):
            calls = [prepare(*args) for args in self.ring]
            if look:
                look(calls[0]())
            self.warm[name] = calls, self.device.warm_up(calls)

    def capture(self) -> None:
        """Make those who entered ready to be sampled: from here on the GPU has to be theirs alone."""
        for name, entered in self.warm.items():
            with self.without(name):
                self.contenders[name] = self.device.prepare(*entered)
        self.warm.clear()

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Leave a contender out that raises inside, unless it has taken the context along."""
        try:
            yield
        except Exception as error:
            if not alive():
                raise
            self.failed[name] = said(error)

    def run(self, replays: int) -> tuple[dict, dict, bool]:
        """Capture and sample all: the card's state before and after, and whether its clock moved in a second
        try too.
        """
        self.capture()
        for _ in range(2):
            for timed in self.contenders.values():
                timed.rounds.clear()
                timed.sample()  # so that the clock is read at work, not at rest
            before = state()
            interleave(self.contenders, replays)
            after = state()
            if not moved(before, after):
                return before, after, False
        return before, after, True

    def repeated(self, name: str, replays: int) -> float | None:
        """The median of a contender on a single copy, which the cache may keep; None without a graph."""
        timed = self.contenders[name]
        if not timed.graph:
            return None
        graph, count = self.device.capture([timed.calls[0]], timed.calls_per_graph), timed.calls_per_graph
        times = [self.device.between(graph.replay, cold=False) for _ in range(replays + 1)]
        return statistics.median(times[1:]) / count


def interleave(contenders: dict[str, Timed], replays: int, rounds: int = 3) -> None:
    """Sample every contender in each round, the order rotated by one from round to round."""
    names = list(contenders)
    for turn in range(rounds):
        at = turn % max(1, len(names))
        for name in names[at:] + names[:at]:
            timed = contenders[name]
            fit = max(3, min(replays, int(ROUND_US / max(timed.guess_us * timed.calls_per_graph, 1))))
            timed.rounds.append([timed.sample() for _ in range(fit)])


def spread(samples: list[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile."""
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return {"median": statistics.median(samples), "p10": tenths[0], "p90": tenths[-1]}


def ratio(theirs: Timed, ours: Timed) -> float:
    """How many times longer theirs takes: the median over rounds of the ratio of medians."""
    rounds = zip(theirs.rounds, ours.rounds, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in rounds)


def launch_us(device: Device) -> float | None:
    """An empty Triton kernel in the same graph: what no kernel of ours can undercut; None without a graph."""
    import triton

    @triton.jit
    def empty(ptr):
        pass

    line = torch.zeros(1, device="cuda")
    timed = device.prepare([lambda: empty[(1,)](line)])
    return statistics.median(timed.sample() for _ in range(20)) if timed.graph else None


# ---- the card's state --------------------------------------------------------------------------------------

FIELDS = ("clock_mhz", "memory_mhz", "power_w", "temperature_c")


def state() -> dict[str, float | None]:
    """Clocks, power and temperature now, by NVML, else by nvidia-smi, else None; nothing is set."""
    for ask in (_nvml, _smi):
        try:
            return dict(zip(FIELDS, ask(), strict=True))
        except Exception:  # no module, no library, no program: a header without these is still a header
            continue
    return dict.fromkeys(FIELDS)


def _nvml() -> tuple[float, ...]:
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByUUID(_uuid())
    clocks = [pynvml.nvmlDeviceGetClockInfo(card, kind) for kind in
              (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)]
    heat = pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)
    return *clocks, pynvml.nvmlDeviceGetPowerUsage(card) / 1000, heat


def _smi() -> tuple[float, ...]:
    asked = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    said = subprocess.run(["nvidia-smi", f"--id={_uuid()}", asked, "--format=csv,noheader,nounits"],
                          capture_output=True, text=True, check=True, timeout=20).stdout
    return tuple(map(float, said.split(",")))


def _uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def moved(before: dict, after: dict) -> bool:
    """Whether the SM clock moved by more than 5 %."""
    one, two = before["clock_mhz"], after["clock_mhz"]
    return bool(one and two) and abs(two - one) > 0.05 * one
