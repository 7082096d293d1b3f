"""`dskit bench spec`: how many tokens a round with a draft gives, and what that is worth in time.

Idea: held-out prompts of every skill (only definitions are of words that were trained) are answered with
natural stops. With every guess verified, the rounds say how many held; tau counts the model's own token too.
Confidences are calibrated on other prompts and judged on these. Then the same prompts are answered 1, 8 and
32 at a time: without a draft, with every guess verified, and with those that their confidence and the
measured cost of a row are for. These ways take turns at each batch, so that a busy machine slows all of them,
and a run in which CUDA graphs were captured is taken again.

Units: tokens per round; tokens per second of all requests' decode steps; milliseconds.
`speedup`: scheduled over none. `block_step`: the model's step of one request's G + 1 rows over one of 1 row.
`step_cost`: the model's step of so many rows, and the draft of so many requests.
`acceptance_by_position[k]`: share of guesses k + 1 that held, among those that were judged and stood behind
guesses that held.
Errors: ValueError for a model without a draft, or to be saved beside no files.
Source: dspark.md 9.2, 9.3.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from operator import itemgetter
from random import Random
from statistics import mean, median
from typing import Any

from dskit import chat, checkpoint
from dskit.bench.environment import deliver, environment, say
from dskit.engine.llm import LLM
from dskit.engine.runner import Work
from dskit.engine.seq import RoundRecord, SamplingParams, StepRecord
from dskit.engine.spec import (
    BINS,
    CALIBRATION,
    Calibration,
    StepCost,
    calibrate,
    cost_file,
    ece,
    padded,
    survivals,
)
from dskit.evaluate import MAX_TOKENS, items
from dskit.train.skills import SKILLS

INTERVAL = ("from the end of one step to the end of the next, in the calling process, without those of "
            "prompts; the ways take turns at each batch, whose median turn counts; each was warmed up before")
ROWS = (1, 2, 3, 4, 6, 9, 12, 18, 24, 36, 48, 72, 96, 144, 192)
REQUESTS = (1, 2, 4, 8, 16, 32)
REPLAYS = 5  # of each count of rows, behind one that warms up
Way = tuple[LLM, dict[str, Any]]  # an engine, and settings that its scheduler is given
CALIBRATION_SEED = 1000  # added to the seed of the prompts that are measured


def main(args: Any, command: str) -> int:
    """Measure, print a table or one JSON document, and keep the result where `--result-dir` says."""
    report = measure(args)
    return deliver(report, args, f"{report['model']}-spec", command, show)


def measure(args: Any) -> dict[str, Any]:
    """The whole report for parsed flags (`dskit.flags.SpecArgs`)."""
    report = {"model": str(args.model).rstrip("/").split("/")[-1]}
    common = {"max_num_seqs": max(16, *args.requests)}
    with LLM(args.model, args.device, args.numerics, args.seed, speculate="static", **common) as llm, \
            LLM(llm.model, tokenizer=llm.tokenizer, speculate="off", **common) as plain:
        if args.save and llm.drawn:
            raise ValueError(f"--save keeps the temperatures beside a checkpoint; {args.model} has no files")
        settings, defaults = ({"prompts": a.prompts, "temperature": a.temperature, "device": a.device}
                              for a in (args, type(args)()))
        report["env"] = environment(llm, settings, defaults, INTERVAL)
        fitted, found = _judged(llm, args, report["model"])
        say("the cost of rows")
        cost = step_cost(llm)
        report |= found | {"step_cost": asdict(cost)}
        report["block_step"] = cost(1 + len(fitted.temperatures)) / cost(1)
        say(f"{report['accepted_length']['all']:.2f} tokens a round; a whole block's step is "
            f"{report['block_step']:.2f} of one row's")
        if args.save:
            fitted.save(checkpoint.locate(args.model) / CALIBRATION)
            cost.save(cost_file(args.model, str(llm.device)))
        scheduled = {"speculate": "scheduled", "step_cost": cost, "draft_temperatures": fitted.temperatures}
        report |= _loads({"none": (plain, {}), "static": (llm, {}), "scheduled": (llm, scheduled)}, args)
        report["capture_ms"] = {"with the draft": _captured(llm), "without": _captured(plain)}
    return report


def _judged(llm: LLM, args: Any, name: str) -> tuple[Calibration, dict[str, Any]]:
    """Temperatures that fit what became of some prompts' guesses, and what becomes of the others'."""
    say("fitting the confidences' temperatures")
    told = [r for rounds in _by_skill(llm, args, CALIBRATION_SEED).values() for r in rounds]
    whole = [r for r in told if r.judged == len(r.confidence)]
    fitted = calibrate([r.confidence for r in whole], [r.held for r in whole], name)
    say("accepted guesses")
    rounds = _by_skill(llm, args, 0)
    return fitted, _accepted(rounds) | {"ece": _ece(rounds, fitted.temperatures),
                                        "calibration": asdict(fitted)}


def _loads(ways: dict[str, Way], args: Any) -> dict[str, Any]:
    """Tokens per second of each way at each load, and how much faster the scheduled one is than none."""
    found: dict[str, Any] = {"throughput": {}, "speedup": {}}
    for count in args.requests:
        say(f"{count} at a time, " + ", ".join(ways))
        rates = found["throughput"][str(count)] = throughput(ways, args, count)
        say("tokens a second: " + ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items()))
        found["speedup"][str(count)] = rates["scheduled"] / rates["none"]
    return found


def _prompts(llm: LLM, skill: str, n: int, seed: int) -> list[list[int]]:
    return [chat.render(item.body, llm.tokenizer).ids for item in items(skill, n, seed)]


def _params(args: Any, skill: str, seed: int) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, max_tokens=MAX_TOKENS[skill], seed=seed)


def _work(llm: LLM, args: Any, n: int, seed: int) -> list[tuple[str, list[int], SamplingParams]]:
    """(skill, prompt, parameters) of `n` prompts of each skill, one skill after the other in turn."""
    by_skill = [[(skill, prompt, _params(args, skill, i))
                 for i, prompt in enumerate(_prompts(llm, skill, n, args.seed + seed))] for skill in SKILLS]
    return [one for row in zip(*by_skill, strict=True) for one in row]


def _by_skill(llm: LLM, args: Any, seed: int) -> dict[str, list[RoundRecord]]:
    """The rounds of each skill's prompts."""
    llm.engine.scheduler.rounds.clear()
    skills, prompts, params = zip(*_work(llm, args, args.prompts, seed), strict=True)
    results = llm.generate(prompts, params)
    skill_of = {result.request_id: skill for skill, result in zip(skills, results, strict=True)}
    found: dict[str, list[RoundRecord]] = {skill: [] for skill in SKILLS}
    for record in llm.engine.rounds():
        found[skill_of[record.request_id]].append(record)
    return found


def _accepted(by_skill: dict[str, list[RoundRecord]]) -> dict[str, Any]:
    """Accepted length by skill and in all, and the share of guesses that held by position."""
    every = [r for rounds in by_skill.values() for r in rounds]
    length = {name: 1 + mean(r.held for r in rounds)
              for name, rounds in {"all": every, **by_skill}.items() if rounds}
    positions = range(len(every[0].confidence))
    reached = [[r for r in every if r.held >= k and r.judged > k] for k in positions]
    share = [sum(r.held > k for r in told) / len(told) if told else None for k, told in enumerate(reached)]
    return {"accepted_length": length, "acceptance_by_position": share, "rounds": len(every)}


def _ece(by_skill: dict[str, list[RoundRecord]], temperatures: tuple[float, ...]) -> dict[str, float]:
    """Mean calibration error of survivals over the positions, with temperatures of 1 and with the fitted."""
    every = [r for rounds in by_skill.values() for r in rounds if r.judged == len(r.confidence)]

    def error(temperatures: tuple[float, ...] | None) -> float:
        chances = [survivals(r.confidence, temperatures) for r in every]
        return mean(ece([c[k] for c in chances], [r.held > k for r in every])
                    for k in range(len(every[0].confidence)))

    return {"before": error(None), "after": error(temperatures), "bins": BINS, "rounds": len(every)}


def step_cost(llm: LLM) -> StepCost:
    """Time of the model's step by the rows that it verifies, and of a draft by its requests, 200 tokens in.

    Where steps are CUDA graphs, of the sizes that are captured. All counts take turns, so that whatever else
    the machine does meanwhile falls on all of them.
    """
    runner, G = llm.engine.runner, llm.config.dspark_block_size
    per = -(-(200 + G + 1) // runner.block_size)
    most = min(llm.engine.cfg.max_num_seqs, runner.num_blocks // per, REQUESTS[-1])
    ids = Random(0).choices(range(llm.config.vocab_size // 4, llm.config.vocab_size // 2), k=200 + G + 1)
    slots = range(1, 1 + most)
    blocks = {slot: list(range(1 + (slot - 1) * per, 1 + slot * per)) for slot in slots}
    for slot in slots:
        runner.run([Work(slot, blocks[slot], ids, 0, 200, 200)])

    def verify(rows: int) -> None:
        each = [1 + G] * (rows // (1 + G)) + ([rows % (1 + G)] if rows % (1 + G) else [])
        work = [Work(slot, blocks[slot], ids, 200, 200 + n, 200, "all")
                for slot, n in zip(slots, each, strict=False)]
        runner.run(work).argmax(-1).tolist()

    def draft(requests: int) -> None:
        starts, newest = [200] * requests, [7] * requests
        runner.propose(list(slots[:requests]), starts, newest)[0].tolist()

    graphs = runner.graphs is not None
    rows = sorted({padded(n) if graphs else n for n in ROWS})
    jobs = [(verify, n) for n in rows if n <= most * (1 + G)] + [(draft, n) for n in REQUESTS if n <= most]
    spent: dict[Any, list[float]] = {job: [] for job in jobs}
    for _ in range(1 + REPLAYS):
        for job, n in jobs:
            begin = time.perf_counter()
            job(n)
            spent[job, n].append(1e3 * (time.perf_counter() - begin))
    times = {job: median(each[1:]) for job, each in spent.items()}
    return StepCost.fit(*({n: times[job, n] for job, n in jobs if job is which} for which in (verify, draft)),
                        graphs)


def throughput(ways: dict[str, Way], args: Any, count: int) -> dict[str, float]:
    """Tokens per second of decode steps with `count` requests at a time, by the way of drafting.

    Prompts of all skills, the first tokens left out. One way answers a batch right behind the other, and of
    several turns the median counts for each batch. Later turns find most of a prompt in the cache, which
    makes them shorter and no decode step faster.
    """
    total = -(-2 * len(SKILLS) // count) * count
    work = [one[1:] for one in _work(ways["none"][0], args, -(-total // len(SKILLS)), 0)][:total]
    batches = [work[at : at + count] for at in range(0, total, count)]
    rates = {}
    for way in ways:
        _answer(ways[way], work[:2])  # warms up
    runs = [{way: [] for way in ways} for _ in batches]
    for turn in range(args.repeats):
        for batch, found in zip(batches, runs, strict=True):
            for way in reversed(ways) if turn % 2 else ways:
                found[way].append(_answer(ways[way], batch))
    for way in ways:
        tokens, seconds = map(sum, zip(*(_middle(found[way]) for found in runs), strict=True))
        rates[way] = tokens / seconds
    return rates


def _middle(runs: list[tuple[int, float]]) -> tuple[int, float]:
    """The one whose seconds are the median, of two the shorter."""
    return sorted(runs, key=itemgetter(1))[(len(runs) - 1) // 2]


def _answer(way: Way, batch: list[tuple[list[int], SamplingParams]]) -> tuple[int, float]:
    """Tokens of a way's decode steps, and their seconds, in a run in which no graph had to be captured."""
    llm, settings = way
    llm.engine.scheduler.cfg = replace(llm.engine.cfg, **settings)
    while True:
        before, steps = _captured(llm), llm.engine.steps
        llm.generate(*map(list, zip(*batch, strict=True)))
        if _captured(llm) == before:
            return _decoded(llm.engine.trace()[steps - llm.engine.steps :])


def _captured(llm: LLM) -> int:
    """Milliseconds that captures have taken."""
    return llm.stats().get("graph_capture_ms", 0)


def _decoded(trace: Iterable[StepRecord]) -> tuple[int, float]:
    """Tokens of decode steps, and the seconds from the end of the step before to theirs."""
    steps = [(step.tokens, step.ended_s - last.ended_s) for last, step in pairwise(trace)
             if step.kind == "decode"]
    return sum(tokens for tokens, _ in steps), sum(seconds for _, seconds in steps)


def show(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("prompts of", "tokens per round", box=SIMPLE)
    for skill, length in report["accepted_length"].items():
        table.add_row(skill, f"{length:.2f}")
    console.print(table)
    shares = ", ".join("-" if a is None else f"{a:.0%}" for a in report["acceptance_by_position"])
    console.print(f"held at position 1, 2, ...: {shares}, over {report['rounds']} rounds")
    error = report["ece"]
    console.print(f"calibration error {error['before']:.3f}, with fitted temperatures {error['after']:.3f}")
    table = Table("requests", "without", "static", "scheduled", "times without", box=SIMPLE)
    for count, rates in report["throughput"].items():
        table.add_row(count, *(f"{rate:.1f}" for rate in rates.values()), f"{report['speedup'][count]:.2f}")
    console.print(table)
    cost = report["step_cost"]
    for what, counts, times in (("a step of so many rows", "rows", "time_ms"),
                                ("a draft for so many requests", "requests", "draft_ms")):
        each = zip(cost[counts], cost[times], strict=True)
        console.print(f"{what}: " + ", ".join(f"{n}: {ms:.1f} ms" for n, ms in each))
    console.print(f"a whole block's step is {report['block_step']:.2f} of one row's")
    env = report["env"]
    console.print(f"{env['device']}, torch {env['torch']}, {env['threads']} threads, commit {env['commit']}")
