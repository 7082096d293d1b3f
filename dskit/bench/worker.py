"""One process that measures the calls it is given and prints a record for each; it may die without others.

Idea
    `pool.py` starts it, hands it a call at a time and starts another one after the call that killed it.  Its
    work is one of three: `measure` a call; `warm` a call, which only runs its peers once, so that what they
    compile on first use is in the caches on disk; or what `tune.py` does with a call.  A call that is to be
    timed is compiled and compared first, beside those of other processes; then it waits for the GPU.

Shapes
    stdin: the options, then a job a line, {"op", "shape"} and what the work adds; stdout: one line of JSON
    for each, a record, with `warm` the names of what has run.  `null` says that all but the timing is done,
    which a further line of stdin begins.

Units
    Microseconds; `cpu_check_s` are seconds of the interpreter and no figure of a GPU.

Errors
    What an op or a peer raises becomes its record's `reason`.  Exit code 75: the CUDA context is lost.

Source
    kernels.md 6.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import dskit
from dskit import ops
from dskit.bench import floors, peers, timing
from dskit.bench.environment import commit
from dskit.testing import Cases, Maker, Shape, all_cases, judge, outputs, relative_rms

SCHEMA = "dskit.bench.kernel/1"
LOST = 75
COMPILE_S = 60  # of the processor, for torch.compile of one call
WAITS = (2, 5, 10, 20)  # seconds until another try when memory is full
NOT_TIMED = "compared with the reference only (--no-time)"
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8",
         torch.float8_e4m3fn: "fp8", torch.int64: "i64", torch.int32: "i32", torch.complex64: "c64"}
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the flags of `dskit bench kernels` say to a worker."""

    seed: int = 0
    check: bool = True
    time: bool = True
    compile: bool = True
    mode: str | None = None  # of torch.compile
    peer: str = "auto"
    replays: int = 20
    constants: str | None = None
    work: str = "measure"  # or "warm", "tune"
    ready: dict[str, str | None] | None = None  # peers that ran once, or why not; None: nobody tried
    every_edge: bool = True


def main() -> int:
    """Read the jobs, print what they give."""
    from dskit.bench import tune

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers and their compilers print
    gc.disable()  # nothing may be freed while a graph is captured
    options = Options(**json.loads(sys.stdin.readline()))
    work = {"measure": run, "warm": warm, "tune": tune.run}[options.work]
    ops.load_all()
    while line := sys.stdin.readline():
        answer = work(json.loads(line), options)
        if callable(answer):
            print("null", file=out, flush=True)
            sys.stdin.readline()
            answer = answer()
        print(json.dumps(answer), file=out, flush=True)
        del answer
        gc.collect()
        if torch.cuda.is_available() and not timing.alive():
            os._exit(LOST)  # an orderly end would hang in the lost context
    return 0


def run(job: Record, options: Options) -> Record | Callable[[], Record]:
    """The record of one call, or what gives it when the GPU is free of others."""
    name, shape = job["op"], job["shape"]
    cases = all_cases()[name]
    record, race = blank(cases, shape, options), None
    with reasons(record):
        implementation = ops.find(name).implementation("triton")
        if torch.cuda.is_available():
            race = on_gpu(cases, shape, implementation, options, record)
        else:
            record["reason"] = "no CUDA device"
            if options.check:
                record |= interpreted(name, options.seed, options.every_edge)

    def timed() -> Record:
        with reasons(record):
            fill(record, race, options.replays)
        return record

    return timed if race else record


@contextlib.contextmanager
def reasons(record: Record) -> Iterator[None]:
    """Whatever goes wrong inside is the record's reason; no reference in there is made of kernels."""
    try:
        with torch.no_grad(), ops.use("torch"):
            yield
    except ops.UnknownImplementation:
        record["reason"] = "this op has no Triton kernel"
    except ops.Unsupported as error:
        record["reason"] = str(error)
    except Exception as error:
        record |= {"status": "failed", "reason": timing.said(error)}


def blank(cases: Cases, shape: Shape, options: Options) -> Record:
    """A record in which nothing is measured yet."""
    empty = dict.fromkeys(("reason", "dtype", "us", "us_warm", "cold_l2", "graph", "reps", "calls_per_graph",
                           "ring", "of_floor", "bytes_per_s", "flop_per_s", "peer", "eager_us", "compile_us",
                           "eager_reason", "compile_reason", "vs_peer", "vs_eager", "vs_compile", "check",
                           "cpu_check_s", "clock_moved"))
    env = environment()
    least = floors.floor(cases, shape, floors.machine(env["gpu"], options.constants))
    return {"schema": SCHEMA, "op": cases.op, "shape": shape, "status": "not_measured", **empty, **least,
            "peers": [], "env": env}


def environment() -> Record:
    """The header of a record: what decides whether it can be compared with another."""
    gpu = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if gpu else (0, 0)
    return {"gpu": torch.cuda.get_device_name() if gpu else None, "sm": 10 * major + minor if gpu else None,
            "driver": driver() if gpu else None, "cuda": torch.version.cuda, "torch": torch.__version__,
            "triton": triton_version(), "dskit": dskit.__version__, "commit": build(),
            **dict.fromkeys(timing.FIELDS)}


def triton_version() -> str | None:
    """The version of Triton, None without it."""
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None


@functools.cache
def build() -> str:
    """The commit, asked for once."""
    return commit()


@functools.cache
def driver() -> str | None:
    """The driver's version as its file in /proc says it."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


# ---- right or wrong ----------------------------------------------------------------------------------------

def verdict(cases: Cases, results: tuple[Tensor, ...], oracle: tuple[Tensor, ...]) -> Record:
    """Results beside the oracle, by tolerance class."""
    have, want = ([tuple(tensor.shape) for tensor in some] for some in (results, oracle))
    if have != want:
        return {"class": cases.classes, "rel_rms": None, "passed": False,
                "figure": f"shapes {have}, not {want}"}
    judged = list(map(judge, results, oracle, cases.classes))
    off = max(map(relative_rms, results, oracle), default=0.0)
    return {"class": cases.classes, "rel_rms": off if math.isfinite(off) else None,
            "passed": all(one.passed for one in judged),
            "figure": "; ".join(one.figure if one.passed else f"{one.figure}, {one.worst}" for one in judged)}


@functools.cache
def interpreted(name: str, seed: int, every_edge: bool) -> Record:
    """The op's edge shapes through the interpreter: `check` and `cpu_check_s`."""
    cases, began = all_cases()[name], time.perf_counter()
    function = ops.find(name).implementation("triton").function
    found = []
    for shape in cases.edges if every_edge else cases.edges[-1:]:
        args = cases.make(shape, Maker("cpu", seed))
        results = outputs(function(*copy.deepcopy(args)))
        found.append(verdict(cases, results, cases.oracle(copy.deepcopy(args))))
    wrong = [one for one in found if not one["passed"]]
    worst = max(wrong or found, key=lambda one: one["rel_rms"] or 0)
    return {"status": "wrong" if wrong else "not_measured", "check": worst | {"shapes": len(found)},
            "cpu_check_s": round(time.perf_counter() - began, 3)}


# ---- how fast ----------------------------------------------------------------------------------------------

def on_gpu(cases: Cases, shape: Shape, implementation: ops.Implementation, options: Options,
           record: Record) -> timing.Race | None:
    """Compare a kernel with what is right, and let it enter a race with its peers and with the reference,
    eager and compiled; None where there is nothing to time.
    """
    args = made(cases, shape, options)
    record["dtype"] = "+".join(dict.fromkeys(NAMES.get(t.dtype, str(t.dtype)[6:]) for t in tensors(args)))
    record["reason"] = implementation.why_not(args, {})
    if record["reason"]:
        return None
    asked = peers.of(cases.op, options.peer)
    record["peers"] = [peer.header(options.ready) for peer in asked]
    runners = own(cases.op, implementation, options)
    runners |= {peer.name: peer.prepare for peer, header in zip(asked, record["peers"], strict=True)
                if not header["reason"]}
    results = outputs(implementation.function(*copy.deepcopy(args)))
    oracle = right(cases, args, record) if options.check else None
    if oracle:
        record["check"] = verdict(cases, results, oracle)
    if not options.time:
        wrong = record["check"] and record["check"]["passed"] is False
        record |= {"status": "wrong", "reason": record["check"]["figure"]} if wrong else {"reason": NOT_TIMED}
        return None
    race = timing.Race(args, sum(t.nbytes for t in (*tensors(args), *results)), device())
    del results
    looks = {peer.name: look(peer, oracle, header)
             for peer, header in zip(asked, record["peers"], strict=True) if peer.compare and oracle}
    for name, prepare in runners.items():
        with limit(COMPILE_S) if name == "compile" else contextlib.nullcontext():
            race.enter(name, prepare, looks.get(name))
    return race


def made(cases: Cases, shape: Shape, options: Options) -> tuple:
    """Arguments of a call; while others fill the GPU's memory side by side, it waits for its turn."""
    for wait in WAITS:
        try:
            return cases.make(shape, Maker(device().kind, options.seed, on_device=True))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(wait)
    return cases.make(shape, Maker(device().kind, options.seed, on_device=True))


def right(cases: Cases, args: tuple, record: Record) -> tuple[Tensor, ...] | None:
    """What is right; without room for it None, with the reason in the record's check."""
    try:
        return cases.oracle(copy.deepcopy(args))
    except torch.OutOfMemoryError as error:
        record["check"] = {"class": cases.classes, "rel_rms": None, "passed": None,
                           "figure": timing.said(error)}
        torch.cuda.empty_cache()
        return None


def look(peer: peers.Peer, oracle: tuple[Tensor, ...], header: Record) -> Callable[[Any], None]:
    """A function that compares a peer's first result with what is right, as far as it can be."""

    def compare(result: Any) -> None:
        pairs = zip(peer.compare(result), oracle, strict=True)
        off = max(relative_rms(got.reshape(want.shape), want) for got, want in pairs if got is not None)
        header["rel_rms"] = off if math.isfinite(off) else None
        if off > peer.limit:
            header.update(status="wrong", reason=f"relative rms {off:.1e}")

    return compare


def own(name: str, implementation: ops.Implementation, options: Options) -> dict[str, Callable]:
    """Kernel, eager reference and compiled reference, each as arguments to call."""
    functions = {"kernel": implementation.function, "eager": ops.find(name).reference}
    if options.compile:
        functions["compile"] = compiled(name, options.mode)
    return {key: calling(function) for key, function in functions.items()}


def calling(function: Callable) -> Callable[..., timing.Call]:
    """Bind the arguments of a function of the op's signature."""
    return lambda *args: lambda: function(*args)


@functools.cache
def compiled(name: str, mode: str | None) -> Callable:
    """torch.compile of the reference for fixed shapes; each shape compiles once."""
    torch._dynamo.config.recompile_limit = 1 << 10
    return ops.compiled(ops.find(name), dynamic=False, mode=mode)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside after so many seconds of the processor; a stopped process spends none."""

    def over(number: int, frame: Any) -> None:
        raise TimeoutError(f"not compiled within {seconds} s of the processor")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in arguments: in tuples, lists, dataclasses and modules too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, tuple | list):
        yield from (tensor for part in value for tensor in tensors(part))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def warm(job: Record, options: Options) -> dict[str, str | None]:
    """Run the libraries that compile once: why each failed, or None."""
    name = job["op"]
    try:
        args = made(all_cases()[name], job["shape"], options)
    except Exception as error:
        print(f"{name}: {timing.said(error)}", file=sys.stderr)
        return {}
    return {f"{name} {peer.name}": once(f"{name}, {peer.name}", peer.prepare, args)
            for peer in libraries(name, options.peer)}


def libraries(name: str, choice: str) -> list[peers.Peer]:
    """An op's peers that are installed and compile on their first call."""
    return [peer for peer in peers.of(name, choice) if peer.compiles and not peer.missing()]


def once(what: str, prepare: Callable, args: tuple) -> str | None:
    """Run a call once; why it failed, or None."""
    try:
        with torch.no_grad(), ops.use("torch"):
            prepare(*copy.deepcopy(args))()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"warming up {what}: {timing.said(error)}", file=sys.stderr)
        return timing.said(error)
    return None


@functools.cache
def device() -> timing.Device:
    """The clock."""
    return timing.Device()


def fill(record: Record, race: timing.Race, replays: int) -> None:
    """Run the race for times, rates and ratios; a wrong kernel gets its time and no ratio."""
    before, after, clock_moved = race.run(replays)
    if "kernel" in race.failed:
        record |= {"status": "failed", "reason": race.failed["kernel"]}
        return
    ours = race.contenders["kernel"]
    us = timing.spread(ours.samples)
    record |= {"status": "ok", "us": us, "cold_l2": True, "graph": ours.graph, "reps": len(ours.samples),
               "calls_per_graph": ours.calls_per_graph, "ring": len(race.ring), "clock_moved": clock_moved,
               "us_warm": race.repeated("kernel", replays)}
    record["env"] |= {name: [before[name], after[name]] for name in timing.FIELDS}
    if ours.graph_error:
        record["reason"] = f"not captured: {ours.graph_error}"
    for name in ("eager", "compile"):
        if name in race.contenders:
            record[f"{name}_us"] = timing.spread(race.contenders[name].samples)["median"]
        elif name in race.failed:
            record[f"{name}_reason"] = race.failed[name]
    for header in record["peers"]:
        timed = race.contenders.get(header["name"])
        if timed:
            header |= {"us": timing.spread(timed.samples)["median"], "graph": timed.graph,
                       "status": "wrong" if header["status"] == "wrong" else "ok"}
        elif header["name"] in race.failed:
            header |= {"status": "failed", "reason": race.failed[header["name"]]}
    sound = [header for header in record["peers"] if header["status"] == "ok"]
    record["peer"] = min(sound, key=lambda header: header["us"], default=None)
    if record["check"] and record["check"]["passed"] is False:
        record |= {"status": "wrong", "reason": record["check"]["figure"]}
    else:
        relate(record, race)


def relate(record: Record, race: timing.Race) -> None:
    """Shares and ratios of a kernel that is right."""
    us, rivals = record["us"]["median"], {"vs_eager": "eager", "vs_compile": "compile"}
    if record["peer"]:
        rivals["vs_peer"] = record["peer"]["name"]
    ours = race.contenders["kernel"]
    record |= {key: timing.ratio(race.contenders[name], ours) for key, name in rivals.items()
               if name in race.contenders}
    record |= {"of_floor": record["floor_us"] and record["floor_us"] / us,
               "bytes_per_s": record["bytes"] and 1e6 * record["bytes"] / us,
               "flop_per_s": record["flop"] and 1e6 * record["flop"] / us}


if __name__ == "__main__":
    sys.exit(main())
