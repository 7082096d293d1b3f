"""`dskit bench tune`: which configuration of each kernel is the fastest on this GPU, at the released widths.

Idea
    A kernel asks `common.tuned` for its configuration and lists those worth timing in CANDIDATES.  At each
    shape of the case tables they run in turn on inputs that the L2 has not seen, as `dskit bench kernels`
    times, each checked against the default first; a kernel of several parts is tuned part by part.  What is
    not LEAST faster than the default leaves the default.  Many processes compile before one times, without
    launching anything (offline.py), so that their arguments take no memory.

Shapes
    tuned.json: GPU -> kernel -> {date, driver, torch, triton, commit, sizes}, each size {key, config, us,
    default_us}; key = [rows, *widths] as the kernel asks.  A run replaces the sizes that it measured.

Units
    Microseconds, medians.

Errors
    ValueError for an op that nobody knows.  Exit code 3: there is no GPU.

Source
    kernels.md 6.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dskit import ops
from dskit.bench import kernels, pool, records, timing, worker
from dskit.flags import KernelsArgs
from dskit.testing import Cases, Shape, all_cases, assert_close, outputs

Record = dict[str, Any]
LEAST = 0.02  # what a configuration must gain to be taken
SHARE = 0.45  # of the minutes, at most, for compiling
PARTS = 4  # jobs that compile the candidates of one call
REPLAYS = 3  # of each configuration in each round
RUN = ("driver", "torch", "triton", "commit")  # what a kernel's entry says of the run


def main(args: Any) -> int:
    """Time the candidates and write the table."""
    if not torch.cuda.is_available():
        print("no CUDA device: configurations can only be timed on a GPU")
        return kernels.NO_GPU
    from dskit.kernels import common

    end = time.monotonic() + 60 * args.minutes
    jobs = calls(args.op)
    options = worker.Options(seed=args.seed, work="tune")
    compile_all(jobs, options, time.monotonic() + 60 * SHARE * args.minutes)
    found: dict[str, list[Record]] = {}
    for job, answer in pool.work(jobs, options, 1, end):
        for size in said(job, answer):
            sizes = found.setdefault(size.pop("kernel"), [])
            if size["key"] not in [other["key"] for other in sizes]:
                sizes.append(size)
    write(found, Path(args.out or common.TUNED))
    return 0


def calls(op: str) -> list[Record]:
    """The calls that are tuned for these ops: those that are timed, then what layers use beside them."""
    jobs = kernels.chosen(KernelsArgs(op=op))
    names = dict.fromkeys(job["op"] for job in jobs)
    return [*jobs, *({"op": name, "shape": shape} for name in names for shape in all_cases()[name].tuned)]


def compile_all(jobs: list[Record], options: worker.Options, end: float) -> None:
    """Compile every candidate, as many jobs at a time as there are cores.

    An op's shapes share most of what is compiled, so they are taken one after the other, not at once.
    """
    print(f"tune: compiling for {len(jobs)} calls, {pool.cores()} at a time", file=sys.stderr, flush=True)
    before: Counter[str] = Counter()
    parts = []
    for job in jobs:
        parts += [(before[job["op"]], job | {"part": part}) for part in range(PARTS)]
        before[job["op"]] += 1
    turns = [job for _, job in sorted(parts, key=lambda pair: pair[0])]
    for _ in pool.work(turns, options, pool.cores(), end):
        pass


def said(job: Record, answer: Any) -> list[Record]:
    """Print what became of a call; its sizes."""
    where = f"{job['op']} at {records.shape_words(job['shape'])}"
    if isinstance(answer, pool.Lost) or "reason" in answer:
        print(f"{where}: {answer.reason if isinstance(answer, pool.Lost) else answer['reason']}", flush=True)
        return []
    for size in answer["sizes"]:
        print(f"{where}, {size['kernel']}: {size['default_us']:.2f} -> {size['us']:.2f} us, {size['config']}",
              flush=True)
    for reason in answer["failed"]:
        print(f"{where}: {reason}", flush=True)
    return answer["sizes"]


def write(found: dict[str, list[Record]], out: Path) -> None:
    """Put what was measured into a table, beside what it says of other sizes, kernels and GPUs."""
    from dskit.kernels import common

    table = json.loads((out if out.exists() else common.TUNED).read_text())
    env, gpu = worker.environment(), torch.cuda.get_device_name()
    run = {"date": time.strftime("%Y-%m-%d")} | {name: env[name] for name in RUN}
    old = table.get(gpu, {})
    for name, sizes in found.items():
        new = [size["key"] for size in sizes]
        kept = [size for size in old.get(name, {"sizes": []})["sizes"] if size["key"] not in new]
        old[name] = run | {"sizes": [*kept, *sizes]}
    table[gpu] = old
    out.write_text("\n".join(lines(table)) + "\n")
    print(f"{sum(map(len, found.values()))} sizes of {len(found)} kernels: {out}")


def lines(table: Mapping[str, Mapping[str, Record]]) -> Iterator[str]:
    """The table as JSON, a size a line."""
    yield "{"
    for gpu in table:
        yield f"{json.dumps(gpu)}: {{"
        for name, kernel in sorted(table[gpu].items()):
            yield f" {json.dumps(name)}: {json.dumps(kernel | {'sizes': []})[:-2]}"
            yield ",\n".join(f"  {json.dumps(size)}" for size in kernel["sizes"])
            yield " ]}" + ("," if name != max(table[gpu]) else "")
        yield " }" + ("," if gpu != list(table)[-1] else "")
    yield "}"


# ---- in a worker -------------------------------------------------------------------------------------------

def candidates() -> dict[str, tuple]:
    """The configurations worth timing of all kernel files that are loaded."""
    files = [module for name, module in sys.modules.items() if name.startswith("dskit.kernels.")]
    return {name: each for file in files for name, each in getattr(file, "CANDIDATES", {}).items()}


def wanted(function: Callable, args: tuple) -> dict[str, tuple[Any, Any]]:
    """What a call asks for and can be tuned: name -> (key, default)."""
    from dskit.kernels import common

    with common.trial({}) as asked:
        function(*args)
    return {name: each for name, each in asked.items() if name in candidates()}


def under(use: Mapping[str, Any], function: Callable) -> Callable:
    """The function with its kernels in these configurations."""
    from dskit.kernels import common

    def call(*args: Any) -> Any:
        with common.trial(use):
            return function(*args)

    return call


class Hasty(timing.Device):
    """A clock that warms a configuration up for less long: there are many, and most are dropped."""

    least_s, least_calls = 0.005, 5


@functools.cache
def device() -> timing.Device:
    """The clock."""
    return Hasty()


def run(job: Record, options: worker.Options) -> Record:
    """The sizes of one call and why candidates failed; with `part`, one part of them is only compiled."""
    cases = all_cases()[job["op"]]
    try:
        implementation = ops.find(cases.op).implementation("triton")
        args = hollow(cases, job["shape"]) if "part" in job else worker.made(cases, job["shape"], options)
        refused = implementation.why_not(args, {})
        if refused:
            return {"reason": refused}
        with torch.no_grad(), ops.use("torch"):
            if "part" in job:
                return compiled(job["part"], implementation.function, args)
            return measured(cases, implementation.function, args)
    except Exception as error:
        return {"reason": timing.said(error)}


def hollow(cases: Cases, shape: Shape) -> tuple:
    """Arguments in memory that nobody fills, for launches that from now on compile and no more."""
    from dskit.bench import offline  # which compiles what is tuned here

    launch_nothing()
    return cases.make(shape, offline.Hollow())


@functools.cache
def launch_nothing() -> None:
    """Compile what this process launches, for its GPU; the interpreter has nothing to compile."""
    from dskit.bench import offline
    from dskit.kernels import common

    if not common.INTERPRET:
        gpu = torch.cuda.get_device_properties()
        offline.Launches(10 * gpu.major + gpu.minor, gpu.multi_processor_count)


def compiled(part: int, function: Callable, args: tuple) -> Record:
    """Call every PARTS-th candidate of each kernel once."""
    for name in wanted(function, args):
        for config in candidates()[name][part::PARTS]:
            try:
                under({name: config}, function)(*args)
            except Exception as error:  # it will say so when it is timed
                print(f"{name} {config}: {timing.said(error)}", file=sys.stderr)
    return {"sizes": [], "failed": []}


def measured(cases: Cases, function: Callable, args: tuple) -> Record:
    """The fastest configuration of each kernel of a call, the later ones with the earlier ones' in place."""
    asked, best, sizes, failed = wanted(function, args), {}, [], []
    right = outputs(under({}, function)(*copy.deepcopy(args)))

    def look(result: Any) -> None:
        assert_close(result, right, cases.classes, "beside the default")

    nbytes = sum(tensor.nbytes for tensor in (*worker.tensors(args), *right))
    for name, (key, default) in asked.items():
        configs = [default, *(each for each in candidates()[name] if each != default)]
        race = timing.Race(args, nbytes, device())
        for i, config in enumerate(configs):
            race.enter(str(i), worker.calling(under(best | {name: config}, function)), look)
        race.capture()
        timing.interleave(race.contenders, REPLAYS)
        us = {int(i): statistics.median(timed.samples) for i, timed in race.contenders.items()}
        failed += [f"{name} {configs[int(i)]}: {reason}" for i, reason in race.failed.items()]
        if 0 not in us:
            continue
        fastest = min(us, key=us.get)
        fastest = fastest if us[fastest] < (1 - LEAST) * us[0] else 0
        best[name] = configs[fastest]
        sizes.append({"kernel": name, "key": list(key), "config": configs[fastest],
                      "us": round(us[fastest], 3), "default_us": round(us[0], 3)})
    return {"sizes": sizes, "failed": failed}
