"""`dskit bench kernels`: every op at its released widths, beside its floor, its peers and torch.compile.

Idea
    The shapes are those of the case tables, so that what is timed is what is tested.  Many processes compile
    and compare side by side; each in turn gets the GPU for itself to time what it has ready.  Where nothing
    is timed (`--prove --no-time`), comparing is all.  Each record is written as it comes; a summary closes
    the file, and `--resume` goes on where another file has ended.

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
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dskit import ops
from dskit.bench import environment, floors, pool, records, worker
from dskit.testing import Shape, all_cases

Record = dict[str, Any]
QUICK_ROWS = (128, 4096)  # measured first: a decode step and a prefill
BESIDE = 20  # processes that compile and compare side by side: each holds an oracle in float64
NO_GPU = 3
SETTINGS = ("quick", "compile", "check", "peer", "seed")
INTERVAL = "one call in a CUDA graph, launches left out, every copy of the inputs cold in the L2"


def main(args: Any, command: str) -> int:
    """Measure what the flags ask for, or show a file of records (`--read`)."""
    if args.read:
        return show(records.read(args.read), args)
    jobs, old = chosen(args), records.read(args.resume) if args.resume else []
    done = [record for record in old if records.timed(record, args.compile)]
    jobs = [job for job in jobs if not any(records.same(job, record) for record in done)]
    kept = [record for record in old if not any(records.same(job, record) for job in jobs)]
    out = destination(args, command)
    found = []
    with open(out, "w") if out else open(os.devnull, "w") as file:
        for number, record in enumerate(measure(jobs, args, kept)):
            if record.get("status") == "not_measured":  # what is known of it is more
                record = next((each for each in old if records.same(each, record)), record)
            found.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            if record["schema"] == worker.SCHEMA and number >= len(kept):
                print(records.line(record), flush=True)
    print("\n".join(records.closing(found[-1])))
    if args.prove and torch.cuda.is_available():
        prove(found[len(kept):])
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


# ---- measuring ---------------------------------------------------------------------------------------------

def measure(jobs: list[Record], args: Any, kept: Sequence[Record] = ()) -> Iterator[Record]:
    """The records that are kept, those of all jobs as they come, then the summary."""
    end = time.monotonic() + 60 * (args.minutes or (5.5 if args.quick else 1e9))
    options = worker.Options(seed=args.seed, check=args.check, time=args.time,
                             compile=args.compile and args.time, peer=args.peer if args.time else "none",
                             mode=None if args.quick else "max-autotune-no-cudagraphs",
                             replays=7 if args.quick else 20, constants=args.machine,
                             every_edge=not args.quick)
    yield from kept
    found, crowded = list(kept), []
    if torch.cuda.is_available():
        until = time.monotonic() + min(900, 0.4 * (end - time.monotonic()))
        options = replace(options, ready=warm_up(jobs, options, until))
        for job, record in answers(jobs, options, min(BESIDE, pool.cores()), end):
            if out_of_memory(record):
                crowded.append(job)
                continue
            found.append(record)
            yield record
        jobs = crowded
    for _, record in answers(jobs, options, 1, end):
        found.append(record)
        yield record
    yield records.summary(found, launch() if options.time else None)


def answers(jobs: list[Record], options: worker.Options, count: int, end: float
            ) -> Iterator[tuple[Record, Record]]:
    """Each job and its record, whatever became of it."""
    for job, answer in pool.work(jobs, options, count, end):
        yield job, unmeasured(job, options, answer) if isinstance(answer, pool.Lost) else answer


def out_of_memory(record: Record) -> bool:
    """Whether a call had no room, beside others or by itself."""
    said = record["reason"], record["compile_reason"], (record["check"] or {}).get("figure")
    return any("OutOfMemoryError" in (text or "") for text in said)


def launch() -> float | None:
    """What an empty kernel takes in the same graph; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from dskit.bench import timing

    return timing.launch_us(timing.Device())


def warm_up(jobs: list[Record], options: worker.Options, end: float) -> dict[str, str | None]:
    """Run the libraries that compile, at two shapes of each op; what has run, and why others failed."""
    seen: Counter[str] = Counter()
    turns = []
    for job in jobs:
        seen[job["op"]] += 1
        turns += [job] if seen[job["op"]] <= 2 and worker.libraries(job["op"], options.peer) else []
    if not turns:
        return {}
    print(f"bench: compiling peers for {len(turns)} calls", file=sys.stderr, flush=True)
    ready: dict[str, str | None] = {}
    for _, answer in pool.work(turns, replace(options, work="warm"), pool.cores(), end):
        for who, why in {} if isinstance(answer, pool.Lost) else answer.items():
            ready[who] = why and ready.get(who, why)  # a peer that ran at one shape is ready
    return ready


def unmeasured(job: Record, options: worker.Options, lost: pool.Lost) -> Record:
    """A record with a reason instead of figures."""
    blank = worker.blank(all_cases()[job["op"]], job["shape"], options)
    return blank | {"status": "failed" if lost.guilty else "not_measured", "reason": lost.reason}
