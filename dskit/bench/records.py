"""Records of `dskit bench kernels`: reading them, summing them up, showing them as lines, tables and bars.

Idea: a number is shown only out of a record that measured it. A record without a measurement shows its reason
on the terminal and "not measured" in a table, whatever its fields hold.

Shapes: records as `worker.py` writes them, one per op and shape; the last line of a file is their summary.
Units: microseconds; shares and ratios without a unit.
Errors: ValueError naming file and line for what is no record.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
RECORD, SUMMARY = "dskit.bench.kernel/1", "dskit.bench.kernel.summary/1"
STATES = ("ok", "wrong", "failed", "not_measured")
RATIOS = ("of_floor", "vs_peer", "vs_compile", "vs_eager")
MISSING = "not measured"


def read(file: str | Path) -> list[Record]:
    """The records of a file, without its summary."""
    found = []
    for number, text in enumerate(Path(file).read_text().splitlines(), 1):
        try:
            one = json.loads(text)
            schema = one["schema"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{file}, line {number} is no record of dskit bench kernels") from None
        if schema not in (RECORD, SUMMARY):
            raise ValueError(f"{file}, line {number} has schema {schema!r}; this version reads {RECORD}")
        found += [one] if schema == RECORD else []
    return found


def value(record: Record, key: str) -> float | None:
    """A measured number, None unless the record measured it."""
    if record["status"] != "ok":
        return None
    return record["us"]["median"] if key == "us" else record.get(key)


def timed(record: Record, compiled: bool) -> bool:
    """Whether a record holds all that is to be known of its call: its time, and that of the compiler."""
    return record["status"] == "ok" and (record["compile_us"] is not None or not compiled)


def same(one: Record, other: Record) -> bool:
    """Whether two are of the same op at the same shape."""
    return (one["op"], one["shape"]) == (other["op"], other["shape"])


def slug(text: str) -> str:
    """A name as part of a folder's name."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower())[-2:])


def shape_words(shape: Record) -> str:
    """A shape in words: rows 128, width 5120."""
    return ", ".join(f"{name} {size}" for name, size in shape.items())


# ---- summing up --------------------------------------------------------------------------------------------

def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are there."""
    logs = [math.log(one) for one in values if one]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summary(found: list[Record], launch_us: float | None) -> Record:
    """Counts by status, geometric means by group, and the worst op of each ratio; no single score."""
    groups: dict[str, list[Record]] = {}
    for record in found:
        groups.setdefault(record["op"].split(".")[0], []).append(record)
    counts = {state: sum(record["status"] == state for record in found) for state in STATES}
    return {"schema": SUMMARY, "counts": counts, "launch_us": launch_us,
            "groups": {name: _group(group) for name, group in groups.items()},
            "worst": {ratio: _worst(found, ratio) for ratio in RATIOS},
            "env": found[-1]["env"] if found else None}


def _group(group: list[Record]) -> Record:
    measured = [record for record in group if record["status"] == "ok"]
    return {"calls": len(group), "measured": len(measured),
            "without_peer": sum(record["peer"] is None for record in measured),
            **{ratio: mean(value(record, ratio) for record in group) for ratio in RATIOS}}


def _worst(found: list[Record], ratio: str) -> Record | None:
    there = [record for record in found if value(record, ratio) is not None]
    last = min(there, key=lambda record: value(record, ratio), default=None)
    return last and {"op": last["op"], "shape": last["shape"], "value": value(last, ratio)}


# ---- on the terminal ---------------------------------------------------------------------------------------

def line(record: Record) -> str:
    """A record in one line: time and ratios, or why there are none."""
    start = f"{record['op']:<20} {shape_words(record['shape']):<34}"
    if record["status"] != "ok":
        check = record["check"] or {"passed": None}
        checked = f", right ({check['figure']})" if check["passed"] else ""
        least = f"floor {record['floor_us']:.2f} us: " if record["floor_us"] else ""
        return f"{start} {least}{record['status'].replace('_', ' ')}: {record['reason']}{checked}"
    us, ratios = record["us"], []
    for ratio, name in zip(RATIOS, ("of the floor", "x peer", "x compile", "x eager"), strict=True):
        share = value(record, ratio)
        ratios += [f"{share:.2f} {name}"] if share is not None else []
    ratios += ["clock moved"] if record["clock_moved"] else []
    ratios += [] if record["graph"] else ["no graph"]
    return f"{start} {us['median']:8.2f} us ({us['p10']:.2f}-{us['p90']:.2f})  {', '.join(ratios)}"


def closing(summed: Record) -> list[str]:
    """The summary in lines."""
    counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in summed["counts"].items())
    lines = [f"calls: {counts}"]
    if summed["launch_us"]:
        lines.append(f"an empty kernel takes {summed['launch_us']:.2f} us")
    for name, group in summed["groups"].items():
        means = ", ".join(f"{ratio} {group[ratio]:.2f}" for ratio in RATIOS if group[ratio])
        if means:
            lines.append(f"{name}: {means} (geometric means), {group['without_peer']} without a peer")
    for ratio, worst in summed["worst"].items():
        if worst:
            where = f"{worst['op']} at {shape_words(worst['shape'])}"
            lines.append(f"worst {ratio}: {worst['value']:.2f}, {where}")
    return lines


# ---- in a document -----------------------------------------------------------------------------------------

COLUMNS = {"us": "{:.1f}", "floor_us": "{:.1f}", "of_floor": "{:.0%}", "vs_peer": "{:.2f}",
           "vs_compile": "{:.2f}", "vs_eager": "{:.1f}"}
HEADS = ("op", "shape", "us", "floor, us", "share of the floor", "times the peer", "times torch.compile",
         "times eager", "peer")


def markdown(found: list[Record]) -> str:
    """A table of the records, and below it where they come from."""
    rows = [HEADS, ("---",) * len(HEADS)]
    for record in found:
        cells = [MISSING if value(record, key) is None else form.format(value(record, key))
                 for key, form in COLUMNS.items()]
        peer = value(record, "peer")
        cells.append(peer["name"] if peer else "-")
        rows.append((f"`{record['op']}`", shape_words(record["shape"]), *cells))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([table, *sources(found)])


def sources(found: list[Record]) -> list[str]:
    """One sentence per machine and build that measured something."""
    keys = ("gpu", "driver", "torch", "triton", "commit")
    seen = dict.fromkeys(tuple(record["env"][key] for key in keys) for record in found
                         if record["status"] == "ok")
    return [f"Measured on one {gpu}, driver {driver}, torch {torch}, triton {triton}, dskit {commit}."
            for gpu, driver, torch, triton, commit in seen]


def shares(found: list[Record], rows: int | None = None) -> list[Record]:
    """What `viz.figures.floor_shares` draws: per op the first record with so many rows, else its last one."""
    picked: dict[str, Record] = {}
    for record in found:
        before = picked.get(record["op"])
        if before is None or before["shape"].get("rows") != rows:
            picked[record["op"]] = record
    bars = []
    for name, record in picked.items():
        peer, least = value(record, "peer"), value(record, "floor_us")
        bars.append({"what": name, "shape": shape_words(record["shape"]), "us": value(record, "us"),
                     "share": value(record, "of_floor"), "peer": peer["name"].split(":")[0] if peer else None,
                     "peer_share": least / peer["us"] if peer and least else None})
    return bars
