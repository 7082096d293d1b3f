"""`dskit bench spec`: how many tokens a round with a draft gives, and what that is worth in time.

Idea: held-out prompts of every skill (only definitions are of words that were trained) are answered with
natural stops. With every guess verified, the rounds say how many held; tau counts the model's own token too.
Confidences are calibrated on other prompts and judged on these. Then the same prompts are answered 1, 8 and
32 at a time: without a draft, with every guess verified, and with those that their confidence and the
measured cost of a row are for. These ways take turns, so that a busy machine slows all of them.

Units: tokens per round; tokens per second of all requests' decode steps; milliseconds.
`speedup`: scheduled over none. `block_step`: the model's step of one request's G + 1 rows over one of 1 row.
`acceptance_by_position[k]`: share of guesses k + 1 that held, among those that were judged and stood behind
guesses that held.
Errors: ValueError for a model without a draft, or to be saved beside no files.
Source: dspark.md 9.2, 9.3.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from random import Random
from statistics import mean, median
from typing import Any

from dskit import chat, checkpoint
from dskit.bench.environment import deliver, environment, say
from dskit.engine.llm import LLM
from dskit.engine.runner import Work
from dskit.engine.seq import RoundRecord, SamplingParams
from dskit.engine.spec import BINS, CALIBRATION, StepCost, calibrate, cost_file, ece, survivals
from dskit.evaluate import MAX_TOKENS, items
from dskit.train.skills import SKILLS

INTERVAL = ("decode steps from plan to commit, in the calling process, prompts' own steps left out; the ways "
            "take turns, each was warmed up before")
ROWS = (1, 2, 3, 4, 6, 9, 12, 18, 24, 36, 48, 72, 96, 144, 192)
REQUESTS = (1, 2, 4, 8, 16, 32)
CALIBRATION_SEED = 1000  # added to the seed of the prompts that are measured


def main(args: Any, command: str) -> int:
    """Measure, print a table or one JSON document, and keep the result where `--result-dir` says."""
    report = measure(args)
    return deliver(report, args, f"{report['model']}-spec", command, show)


def measure(args: Any) -> dict[str, Any]:
    """The whole report for parsed flags (`dskit.flags.SpecArgs`)."""
    ways = {"none": {"speculate": "off"}, "static": {"speculate": "static"}}
    report = {"model": str(args.model).rstrip("/").split("/")[-1]}
    with LLM(args.model, args.device, args.numerics, args.seed, speculate="static",
             max_num_seqs=max(16, *args.requests)) as llm:
        if args.save and llm.drawn:
            raise ValueError(f"--save keeps the temperatures beside a checkpoint; {args.model} has no files")
        model, tokenizer = llm.model, llm.tokenizer
        settings, defaults = ({"prompts": a.prompts, "temperature": a.temperature, "device": a.device}
                              for a in (args, type(args)()))
        report["env"] = environment(llm, settings, defaults, INTERVAL)
        say("fitting the confidences' temperatures")
        told = [r for rounds in _by_skill(llm, args, CALIBRATION_SEED).values() for r in rounds]
        whole = [r for r in told if r.judged == len(r.confidence)]
        fitted = calibrate([r.confidence for r in whole], [r.held for r in whole], report["model"])
        say("accepted guesses, skill by skill")
        rounds = _by_skill(llm, args, 0)
        report |= _accepted(rounds) | {"ece": _ece(rounds, fitted.temperatures)}
        say("the cost of rows")
        cost = step_cost(llm, 1 + 2 * args.repeats)
    report["calibration"], report["step_cost"] = asdict(fitted), asdict(cost)
    report["block_step"] = cost(1 + len(fitted.temperatures)) / cost(1)
    if args.save:
        fitted.save(checkpoint.locate(args.model) / CALIBRATION)
        cost.save(cost_file(args.model, str(llm.device)))
    ways["scheduled"] = {"speculate": "scheduled", "step_cost": cost,
                         "draft_temperatures": fitted.temperatures}
    report["throughput"], report["speedup"] = {}, {}
    for count in args.requests:
        say(f"{count} at a time, " + ", ".join(ways))
        with ExitStack() as open_:
            llms = {way: open_.enter_context(LLM(model, tokenizer=tokenizer, max_num_seqs=count, **how))
                    for way, how in ways.items()}
            rates = throughput(llms, args, count)
        report["throughput"][str(count)] = rates
        report["speedup"][str(count)] = rates["scheduled"] / rates["none"]
    return report


def _prompts(llm: LLM, skill: str, n: int, seed: int) -> list[list[int]]:
    return [chat.render(item.body, llm.tokenizer).ids for item in items(skill, n, seed)]


def _params(args: Any, skill: str, seed: int) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, max_tokens=MAX_TOKENS[skill], seed=seed)


def _by_skill(llm: LLM, args: Any, seed: int) -> dict[str, list[RoundRecord]]:
    """The rounds of each skill's prompts."""
    found = {}
    for skill in SKILLS:
        llm.engine.scheduler.rounds.clear()
        prompts = _prompts(llm, skill, args.prompts, args.seed + seed)
        llm.generate(prompts, [_params(args, skill, i) for i in range(len(prompts))])
        found[skill] = llm.engine.rounds()
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


def step_cost(llm: LLM, repeats: int) -> StepCost:
    """Time of the model's step by the rows that it verifies, and of a draft by its requests, 200 tokens in.

    All counts take turns, so that whatever else the machine does meanwhile falls on all of them.
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
        runner.propose(list(slots[:requests]), starts, newest, lambda logits: logits.argmax(-1))[0].tolist()

    jobs = [(verify, n) for n in ROWS if n <= most * (1 + G)] + [(draft, n) for n in REQUESTS if n <= most]
    spent: dict[Any, list[float]] = {job: [] for job in jobs}
    for _ in range(1 + repeats):
        for job, n in jobs:
            begin = time.perf_counter()
            job(n)
            spent[job, n].append(1e3 * (time.perf_counter() - begin))
    times = {job: median(each[1:]) for job, each in spent.items()}
    return StepCost.fit(*({n: times[job, n] for job, n in jobs if job is which} for which in (verify, draft)))


def throughput(llms: dict[str, LLM], args: Any, count: int) -> dict[str, float]:
    """Tokens per second of decode steps with `count` requests at a time, by the way of drafting.

    The ways take turns; prompts of all skills, the first tokens left out.
    """
    total = max(count, 2 * len(SKILLS))
    each = -(-total // len(SKILLS))
    by_skill = [[(prompt, _params(args, skill, i))
                 for i, prompt in enumerate(_prompts(next(iter(llms.values())), skill, each, args.seed))]
                for skill in SKILLS]
    work = [item for row in zip(*by_skill, strict=True) for item in row][:total]
    rates: dict[str, list[float]] = {way: [] for way in llms}
    for turn in range(1 + args.repeats):
        for way, llm in llms.items():
            llm.engine.forget()
            part = work if turn else work[:2]  # the first turn warms up
            rates[way].append(_decode_rate(llm, part, count))
    return {way: median(each[1:]) for way, each in rates.items()}


def _decode_rate(llm: LLM, work: list[tuple[list[int], SamplingParams]], count: int) -> float:
    """Tokens per second of the decode steps that answer these prompts, `count` at a time."""
    tokens, seconds = 0, 0.0
    for at in range(0, len(work), count):
        steps = llm.engine.steps
        results = llm.generate(*map(list, zip(*work[at : at + count], strict=True)))
        tokens += sum(len(r.token_ids) - 1 for r in results)
        seconds += sum(s.plan_us + s.launch_us + s.wait_us + s.commit_us
                       for s in llm.engine.trace()[steps - llm.engine.steps :] if s.kind == "decode") / 1e6
    return tokens / seconds


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
