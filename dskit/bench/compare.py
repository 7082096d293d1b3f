"""`dskit bench compare OLD NEW`: which kernels became faster or slower between two files of records.

Idea: a difference counts when the medians are more than 5 % apart and each median lies outside the other
run's tenth to ninetieth percentile; anything less is noise. What one file has and the other has not is told
too, and so is another GPU or another build of torch or Triton, which makes the comparison one of machines.

Units: microseconds; `change` is new / old - 1.
Errors: ValueError for a file that holds no records. Exit code 1: something became slower or wrong.
"""

from __future__ import annotations

import json
from typing import Any

from dskit.bench.records import Record, read, shape_words, value

LEAST = 0.05


def main(args: Any) -> int:
    """Print what changed, as lines or as one JSON document."""
    report = compare(read(args.old), read(args.new))
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(lines(report)))
    return int(bool(report["slower"] or report["broken"]))


def compare(old: list[Record], new: list[Record]) -> Record:
    """Calls by what became of them: faster, slower, same, broken, new, gone; and how the machines differ."""
    before, after = ({_key(record): record for record in found} for found in (old, new))
    report: Record = {"faster": [], "slower": [], "same": 0, "broken": [], "unmeasured": [],
                      "added": [_named(after[key]) for key in after if key not in before],
                      "gone": [_named(before[key]) for key in before if key not in after],
                      "machines": _machines(old, new)}
    for key in (key for key in before if key in after):
        _place(before[key], after[key], report)
    for kind in ("faster", "slower"):
        report[kind].sort(key=lambda row: -abs(row["change"]))
    return report


def _place(old: Record, new: Record, report: Record) -> None:
    """Put one call where it belongs."""
    row = _named(new)
    if value(old, "us") is None or value(new, "us") is None:
        broken = old["status"] == "ok" and new["status"] in ("wrong", "failed")
        report["broken" if broken else "unmeasured"].append(row | {"reason": new["reason"]})
        return
    change = value(new, "us") / value(old, "us") - 1
    if abs(change) <= LEAST or not _apart(old["us"], new["us"]):
        report["same"] += 1
        return
    row |= {"old_us": value(old, "us"), "new_us": value(new, "us"), "change": change}
    report["faster" if change < 0 else "slower"].append(row)


def _apart(one: Record, two: Record) -> bool:
    """Whether neither median lies within the other's spread."""
    return not (one["p10"] <= two["median"] <= one["p90"] or two["p10"] <= one["median"] <= two["p90"])


def _key(record: Record) -> str:
    return json.dumps([record["op"], record["shape"]], sort_keys=True)


def _named(record: Record) -> Record:
    return {"op": record["op"], "shape": record["shape"]}


def _machines(old: list[Record], new: list[Record]) -> dict[str, list]:
    """What differs between the headers of the runs: GPU, driver, torch, Triton."""
    names = ("gpu", "driver", "torch", "triton")
    seen = {name: [sorted({str(record["env"][name]) for record in found}) for found in (old, new)]
            for name in names}
    return {name: pair for name, pair in seen.items() if pair[0] != pair[1]}


def lines(report: Record) -> list[str]:
    """The report in words."""
    said = [f"{name} differs: {', '.join(old)} and {', '.join(new)}"
            for name, (old, new) in report["machines"].items()]
    for kind in ("slower", "faster"):
        said += [f"{kind}: {row['op']} at {shape_words(row['shape'])}: {row['old_us']:.2f} to "
                 f"{row['new_us']:.2f} us ({row['change']:+.1%})" for row in report[kind]]
    for kind in ("broken", "unmeasured"):
        said += [f"{kind}: {row['op']} at {shape_words(row['shape'])}: {row['reason']}"
                 for row in report[kind]]
    for kind in ("added", "gone"):
        said += [f"{kind}: {row['op']} at {shape_words(row['shape'])}" for row in report[kind]]
    return [*said, f"{report['same']} calls within {LEAST:.0%} or within their spreads"]
