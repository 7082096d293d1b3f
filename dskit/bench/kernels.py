"""`dskit bench kernels`: every op at its released widths, beside its floor, its peers and torch.compile.

Idea
    The shapes are those of the case tables, so that what is timed is what is tested.  Work is done by
    processes of `worker.py`, one after the other; a call that crashes or hangs costs its own record alone.
    Before, several of them run everything once side by side, so that no compiler is waited for while timing.
    Each record is written as it comes; a summary closes the file.

Shapes
    JSON lines: one object of schema `dskit.bench.kernel/1` per op and shape, then one summary.

Units
    Microseconds, bytes, floating-point operations; `of_floor` is floor / time, `vs_peer` is peer / time.

Errors
    ValueError for an op that nobody knows.  Exit code 1: a kernel is wrong or failed; 3: there is no GPU, so
    that nothing could be measured (0 with --allow-no-gpu).

Source
    kernels.md 6.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dskit import ops
from dskit.bench import environment, floors, records, worker
from dskit.testing import Shape, all_cases

Record = dict[str, Any]
QUICK_ROWS = (128, 4096)  # measured first: a decode step and a prefill
LIMIT_S = 150  # without a record in this time, a worker is stuck
NO_GPU = 3
SETTINGS = ("quick", "compile", "check", "peer", "seed")
INTERVAL = "one call in a CUDA graph, launches left out, every copy of the inputs cold in the L2"


def main(args: Any, command: str) -> int:
    """Measure what the flags ask for, or show a file of records (`--read`)."""
    if args.read:
        return show(records.read(args.read), args)
    jobs = chosen(args)
    out = destination(args, command)
    found = []
    with open(out, "w") if out else open(os.devnull, "w") as file:
        for record in measure(jobs, args):
            found.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            if record["schema"] == worker.SCHEMA:
                print(records.line(record), flush=True)
    print("\n".join(records.closing(found[-1])))
    if args.prove and torch.cuda.is_available():
        prove(found)
    bad = found[-1]["counts"]["wrong"] + found[-1]["counts"]["failed"]
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured; floors are the H200's")
        return 1 if bad else 0 if args.allow_no_gpu else NO_GPU
    return int(bad > 0)


def prove(found: list[Record]) -> None:
    """Tell `auto` which kernels passed at every shape on this kind of GPU; those that failed lose what they
    had, those that were not all tried keep it.
    """
    tried: dict[str, list[bool | None]] = {}
    for record in (r for r in found if r["schema"] == worker.SCHEMA):
        tried.setdefault(record["op"], []).append(passed(record))
    gpu = "sm_{}{}".format(*torch.cuda.get_device_capability())
    proven = json.loads(ops.PROVEN.read_text())
    kept = set(proven.get(gpu, {}).get("ops", ())) - {name for name, each in tried.items() if False in each}
    named = sorted(kept | {name for name, each in tried.items() if all(each)})
    run = {name: found[0]["env"].get(name) for name in ("gpu", "torch", "triton", "commit")}
    proven[gpu] = run | {"date": time.strftime("%Y-%m-%d"), "ops": named}
    ops.PROVEN.write_text(json.dumps(proven, indent=1) + "\n")
    print(f"{len(named)} kernels are proven on {gpu}: {ops.PROVEN}")


def passed(record: Record) -> bool | None:
    """Whether a kernel is right at a shape; None where it was not compared."""
    if record["status"] in ("wrong", "failed"):
        return False
    return (record["check"] or {}).get("passed")


def show(found: list[Record], args: Any) -> int:
    """A file of records as a Markdown table, and as a picture."""
    print(records.markdown(found))
    if args.picture:
        from dskit.viz.figures import floor_shares

        rows = int(args.rows.split(",")[0]) if args.rows else max(QUICK_ROWS)
        picture = floor_shares(records.shares(found, rows), "Share of the floor that each kernel reaches")
        Path(args.picture).write_bytes(picture.bytes(Path(args.picture).suffix.lstrip(".") or "png"))
    return 0


def chosen(args: Any) -> list[Record]:
    """The (op, shape) pairs that the flags name, the most telling ones first."""
    ops.load_all()
    table = all_cases()
    wanted = {word for word in args.op.split(",") if word}
    known = {*table, *(name.split(".")[0] for name in table), "all"}
    if wanted - known:
        raise ValueError(f"--op {', '.join(sorted(wanted - known))}: no case table names it; "
                         f"there are {', '.join(sorted(known))}")
    rows = {int(word) for word in args.rows.split(",") if word}
    jobs = [(order, {"op": name, "shape": shape}) for name, cases in table.items()
            if wanted & {"all", name, name.split(".")[0]}
            for shape, order in zip(cases.frozen, urgency(cases.frozen), strict=True)
            if not rows or shape.get("rows") in rows]
    return [job for _, job in sorted(jobs, key=lambda pair: pair[0])]


def urgency(shapes: Sequence[Shape]) -> list[int]:
    """0 for a decode step and a prefill at an op's first widths, 1 for its other rows or other widths, 2 for
    both: a run that ends early has seen every op.
    """
    widths = [{name: size for name, size in shape.items() if name != "rows"} for shape in shapes]
    usual = {shape.get("rows") for shape in shapes} & set(QUICK_ROWS)
    middle = {len(shapes) // 2, len(shapes) - 1}  # where rows are counted in another way
    return [(width != widths[0] if usual else False)
            + (shape.get("rows") not in usual if usual else i not in middle)
            for i, (shape, width) in enumerate(zip(shapes, widths, strict=True))]


def destination(args: Any, command: str) -> Path | None:
    """The file for the records: --out, or kernels.jsonl in a new folder of --result-dir beside its header."""
    if not args.result_dir:
        return Path(args.out) if args.out else None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    settings, defaults = ({name: getattr(flags, name) for name in SETTINGS} for flags in (args, type(args)()))
    header = environment.header("cuda" if gpu else "cpu", settings, defaults, INTERVAL)
    constants = floors.machine(gpu, args.machine)
    header |= {"command": command, "floors": constants and asdict(constants)}
    folder = environment.new_folder(args.result_dir, f"{records.slug(gpu or 'cpu')}-kernels")
    (folder / "run.json").write_text(json.dumps(header, indent=2) + "\n")
    return folder / "kernels.jsonl"


# ---- workers -----------------------------------------------------------------------------------------------

def measure(jobs: list[Record], args: Any) -> Iterator[Record]:
    """Records of all jobs as they come, then the summary."""
    end = time.monotonic() + 60 * (args.minutes or (5.5 if args.quick else 1e9))
    options = worker.Options(seed=args.seed, check=args.check, time=args.time,
                             compile=args.compile and args.time, peer=args.peer if args.time else "none",
                             mode=None if args.quick else "max-autotune-no-cudagraphs",
                             replays=7 if args.quick else 20, constants=args.machine,
                             every_edge=not args.quick)
    if torch.cuda.is_available() and len({job["op"] for job in jobs}) > 3:
        until = time.monotonic() + min(900, 0.4 * (end - time.monotonic()))
        options = replace(options, ready=warm_up(jobs, options, until))
    found = []
    for record in one_by_one(jobs, options, end):
        found.append(record)
        yield record
    yield records.summary(found, launch())


def launch() -> float | None:
    """What an empty kernel takes in the same graph; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from dskit.bench import timing

    return timing.launch_us(timing.Device())


def start(**switches: str) -> subprocess.Popen:
    """A worker that waits for its jobs."""
    if not torch.cuda.is_available():
        switches["TRITON_INTERPRET"] = "1"
    return subprocess.Popen([sys.executable, "-m", "dskit.bench.worker"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env=os.environ | switches,
                            start_new_session=True)


def stop(process: subprocess.Popen) -> None:
    """End a worker and the compilers that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def order(jobs: list[Record], options: worker.Options) -> str:
    """What a worker reads."""
    return json.dumps({"jobs": jobs, "options": asdict(options)})


def warm_up(jobs: list[Record], options: worker.Options, end: float) -> list[str]:
    """Run everything once, a process per op and as many as there are cores; returns which peers have run."""
    names = list(dict.fromkeys(job["op"] for job in jobs))
    count = min(len(names), 16, os.cpu_count() or 1)
    print(f"bench: compiling {len(names)} ops, {count} at a time", file=sys.stderr, flush=True)
    running: list[subprocess.Popen] = []

    def one(name: str) -> list[str]:
        if time.monotonic() > end:
            return []
        running.append(process := start(TORCHINDUCTOR_COMPILE_THREADS="1"))
        text = order([job for job in jobs if job["op"] == name], replace(options, warm=True))
        try:
            return process.communicate(text, timeout=max(1.0, end - time.monotonic()))[0].splitlines()
        except subprocess.TimeoutExpired:
            stop(process)
            return process.communicate()[0].splitlines()

    with ThreadPoolExecutor(count) as pool:
        try:
            return [json.loads(text) for lines in pool.map(one, names) for text in lines]
        except BaseException:  # interrupted: whoever compiles has a session of its own
            for process in running:
                stop(process)
            raise


def one_by_one(jobs: list[Record], options: worker.Options, end: float) -> Iterator[Record]:
    """Records in the order of the jobs; after a worker's death another one goes on behind its last job."""
    left = list(jobs)
    while left and time.monotonic() < end:
        process = start()
        try:
            process.stdin.write(order(left, options))
            process.stdin.close()
            blame = yield from until_it_ends(process, left, end)
        finally:
            stop(process)
        if blame:
            yield unmeasured(left.pop(0), options, "failed", blame)
    for job in left:
        yield unmeasured(job, options, "not_measured", "the minutes of this run were over")


def until_it_ends(process: subprocess.Popen, left: list[Record], end: float) -> Iterator[Record]:
    """A worker's records, each job taken off the list; returns what its next job is to be blamed for."""
    lines = reader(process)
    while left and time.monotonic() < end:
        try:
            said = lines.get(timeout=min(LIMIT_S, max(1.0, end - time.monotonic())))
        except queue.Empty:
            return f"no result within {LIMIT_S} s" if time.monotonic() < end else None
        if isinstance(said, int):  # its exit code; it sends the record before it gives up a lost context
            return None if said == worker.LOST else f"the worker ended with exit code {said}"
        left.pop(0)
        yield said
    return None


def reader(process: subprocess.Popen) -> queue.Queue:
    """The worker's records as they come, then its exit code."""
    lines: queue.Queue = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(json.loads(line))
        lines.put(process.wait())

    threading.Thread(target=read, daemon=True).start()
    return lines


def unmeasured(job: Record, options: worker.Options, status: str, reason: str) -> Record:
    """A record with a reason instead of figures."""
    blank = worker.blank(all_cases()[job["op"]], job["shape"], options)
    return blank | {"status": status, "reason": reason}
