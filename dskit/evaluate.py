"""How often a model's answer is exactly right, skill by skill.

Idea
    Items are drawn from the split that training never sees (definitions apart: every trained word may be
    asked), rendered as the server renders them, answered greedily without any grammar or retry, and parsed as
    the server parses them.  An answer counts if it is right to the letter; a tool call if name and arguments
    are equal and nothing else is called; JSON if the parsed value is equal.

Shapes
    `evaluate` -> {"model": str, "skills": {skill: {"n", "correct", "rate", "ci95": [low, high]}}}.

Units
    rate and ci95 are shares between 0 and 1; the interval is Wilson's.

Errors
    ValueError for an unknown skill or a count below 1.

Source
    E. B. Wilson, 1927, for the interval; dskit/train/skills for the items.

Try
    dskit eval demo --json
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from dskit import chat
from dskit.train.skills import SKILLS, Item, sample

COUNT = 200  # items per skill
RECALL_TOKENS = 2000
MAX_TOKENS = {"define": 64, "arithmetic": 320, "tools": 256, "recall": 96, "json": 192}


def wilson(correct: int, n: int, z: float = 1.96) -> list[float]:
    """Wilson's 95 % interval of a share."""
    share, spread = correct / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return [max(0.0, middle - half), min(1.0, middle + half)]


def items(skill: str, n: int, seed: int, recall_tokens: int = RECALL_TOKENS) -> list[Item]:
    """The evaluation's items of one skill; no two are alike."""
    rng = Random(f"eval {skill} {seed}")
    found: dict[str, Item] = {}
    while len(found) < n:
        item = sample(skill, rng, "eval", plain=True, tokens=recall_tokens if skill == "recall" else None)
        found.setdefault(item.key, item)
    return list(found.values())


def right(item: Item, message: dict[str, Any]) -> bool:
    """Whether a parsed assistant message answers the item."""
    said, wanted = (message.get("content") or "").strip(), item.answer["content"]
    calls, expected = message.get("tool_calls") or [], item.answer.get("tool_calls") or []
    if expected:
        return [_call(call) for call in calls] == [_call(call) for call in expected]
    if calls:
        return False
    if item.skill == "json":
        return _canonical(_value(said)) == _canonical(json.loads(wanted))
    return said == wanted


def evaluate(
    llm: Any,
    skills: Sequence[str] | None = None,
    n: int | None = None,
    seed: int = 0,
    *,
    model: str = "demo",
    recall_tokens: int = RECALL_TOKENS,
    progress: Callable[[str, int, int], None] | None = None,
    failures: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Measure `llm` (anything with `.tokenizer` and `.generate`); wrong answers go to `failures`."""
    from dskit.engine.seq import SamplingParams  # imports torch: not needed to draw or judge items

    report: dict[str, Any] = {}
    for skill in _checked(skills, n):
        drawn = items(skill, n or COUNT, seed, recall_tokens)
        prompts = [chat.render(item.body, llm.tokenizer) for item in drawn]
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS[skill])
        results = llm.generate([prompt.ids for prompt in prompts], params)
        correct = 0
        for item, prompt, result in zip(drawn, prompts, results, strict=True):
            message = chat.parse_ids(prompt, result.token_ids, llm.tokenizer, result.finish_reason)
            good = right(item, message)
            correct += good
            if not good and failures is not None:
                failures.append({"skill": skill, "asked": item.body["messages"][-1]["content"],
                                 "wanted": item.answer, "got": message})  # fmt: skip
        report[skill] = {"n": len(drawn), "correct": correct, "rate": correct / len(drawn)}
        report[skill]["ci95"] = wilson(correct, len(drawn))
        if progress:
            progress(skill, correct, len(drawn))
    return {"model": model, "skills": report}


def table(report: dict[str, Any]) -> Any:
    """The report as a rich table."""
    from rich.table import Table

    view = Table(title=f"{report['model']}: exact answers")
    for name, side in (
        ("skill", "left"),
        ("right", "right"),
        ("of", "right"),
        ("rate", "right"),
        ("95 %", "right"),
    ):
        view.add_column(name, justify=side)
    for skill, row in report["skills"].items():
        low, high = row["ci95"]
        view.add_row(
            skill, str(row["correct"]), str(row["n"]), f"{row['rate']:.1%}", f"{low:.1%} to {high:.1%}"
        )
    return view


def main(args: Any) -> dict[str, Any]:
    """`dskit eval`: load the model, print the table or with `--json` the report, and return the report."""
    from rich.console import Console

    from dskit.engine.llm import LLM

    wanted = [name.strip() for name in args.tasks.split(",") if name.strip()] or None
    _checked(wanted, args.limit)
    console = Console(stderr=args.json)
    settings = {"device": args.device, "numerics": args.numerics, "seed": args.seed}
    with LLM(args.model, **settings) as llm, console.status("answering"):
        report = evaluate(llm, wanted, args.limit, args.seed, model=args.model)
    print(json.dumps(report, indent=2)) if args.json else console.print(table(report))
    return report


def _checked(names: Sequence[str] | None, n: int | None) -> Sequence[str]:
    names = SKILLS if names is None else names
    unknown = [name for name in names if name not in SKILLS]
    if unknown or (n is not None and n < 1):
        raise ValueError(
            f"skills must be among {list(SKILLS)} (unknown: {unknown}) and n at least 1 (got {n})"
        )
    return names


def _call(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], _canonical(_value(call["function"]["arguments"]))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return _Invalid()


def _canonical(value: Any) -> str:
    # As text, since in Python True == 1; 5 and 5.0 are one number in JSON.
    if isinstance(value, _Invalid):
        return f"invalid {id(value)}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


class _Invalid:
    """What is not JSON equals nothing."""
