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
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dskit import ops
from dskit.bench import environment, floors, records, worker
from dskit.testing import all_cases

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
    bad = found[-1]["counts"]["wrong"] + found[-1]["counts"]["failed"]
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured; floors are the H200's")
        return 1 if bad else 0 if args.allow_no_gpu else NO_GPU
    return int(bad > 0)


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
    """The (op, shape) pairs that the flags name; the rows of a decode step and of a prefill come first."""
    ops.load_all()
    table = all_cases()
    wanted = {word for word in args.op.split(",") if word}
    known = {*table, *(name.split(".")[0] for name in table), "all"}
    if wanted - known:
        raise ValueError(f"--op {', '.join(sorted(wanted - known))}: no case table names it; "
                         f"there are {', '.join(sorted(known))}")
    rows = {int(word) for word in args.rows.split(",") if word}
    jobs = [{"op": name, "shape": shape} for name, cases in table.items()
            if wanted & {"all", name, name.split(".")[0]}
            for shape in cases.frozen if not rows or shape.get("rows") in rows]
    return sorted(jobs, key=lambda job: job["shape"].get("rows") not in QUICK_ROWS)


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
    options = worker.Options(seed=args.seed, check=args.check, compile=args.compile, peer=args.peer,
                             mode=None if args.quick else "max-autotune-no-cudagraphs",
                             replays=7 if args.quick else 20, constants=args.machine,
                             every_edge=not args.quick)
    if torch.cuda.is_available() and len({job["op"] for job in jobs}) > 3:
        warm_up(jobs, options, time.monotonic() + min(600, 0.4 * (end - time.monotonic())))
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


def start(jobs: list[Record], options: worker.Options, **pipes: Any) -> subprocess.Popen:
    """A worker that has its jobs."""
    switches = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    process = subprocess.Popen([sys.executable, "-m", "dskit.bench.worker"], stdin=subprocess.PIPE, text=True,
                               env=os.environ | switches, **pipes)
    process.stdin.write(json.dumps({"jobs": jobs, "options": asdict(options)}))
    process.stdin.close()
    return process


def warm_up(jobs: list[Record], options: worker.Options, end: float) -> None:
    """Run everything once in several processes, so that compilers have filled their caches."""
    options = worker.Options(**asdict(options) | {"warm": True})
    names = list(dict.fromkeys(job["op"] for job in jobs))
    count = max(1, min(len(names), 8, (os.cpu_count() or 2) // 2))
    print(f"bench: compiling in {count} processes", file=sys.stderr, flush=True)
    share = [[job for job in jobs if names.index(job["op"]) % count == i] for i in range(count)]
    running = [start(part, options, stdout=subprocess.DEVNULL) for part in share]
    for process in running:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def one_by_one(jobs: list[Record], options: worker.Options, end: float) -> Iterator[Record]:
    """Records in the order of the jobs; after a worker's death another one goes on behind its last job."""
    left = list(jobs)
    while left and time.monotonic() < end:
        process = start(left, options, stdout=subprocess.PIPE)
        lines, blame = reader(process), None
        while left and time.monotonic() < end:
            try:
                said = lines.get(timeout=min(LIMIT_S, max(1.0, end - time.monotonic())))
            except queue.Empty:
                blame = f"no result within {LIMIT_S} s" if time.monotonic() < end else None
                break
            if isinstance(said, int):  # its exit code; it sends the record before it gives up a lost context
                blame = None if said == worker.LOST else f"the worker ended with exit code {said}"
                break
            left.pop(0)
            yield said
        process.kill()
        process.wait()
        if blame:
            yield unmeasured(left.pop(0), options, "failed", blame)
    for job in left:
        yield unmeasured(job, options, "not_measured", "the minutes of this run were over")


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
