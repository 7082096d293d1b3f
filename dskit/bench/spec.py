"""`dskit bench spec`: how many tokens a round with a draft gives, and what that is worth in time.

Idea: held-out prompts of every skill (only definitions are of words that were trained) are answered with
natural stops. With every guess verified, the rounds say how many held; tau counts the model's own token too.
Confidences are calibrated on other prompts and judged on these. Then the same prompts are answered 1, 8 and
32 at a time: without a draft, with every guess verified, and with those that their confidence and the
measured cost of a row are for.

Units: tokens per round; tokens per second over all requests, from the first step to the last; milliseconds.
`acceptance_by_position[k]`: share of guesses k + 1 that held, among those that were judged and stood behind
guesses that held.
Errors: ValueError for a model without a draft.
Source: dspark.md 9.2, 9.3.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from random import Random
from statistics import mean, median
from typing import Any

from dskit import chat, checkpoint
from dskit.bench.environment import environment, write
from dskit.bench.latency import say
from dskit.engine.llm import LLM
from dskit.engine.runner import Work
from dskit.engine.seq import RoundRecord, SamplingParams
from dskit.engine.spec import BINS, CALIBRATION, StepCost, calibrate, cost_file, ece, survivals
from dskit.evaluate import MAX_TOKENS, items
from dskit.train.skills import SKILLS

INTERVAL = "from the first step to the last one, in the calling process; each way was warmed up before"
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
CALIBRATION_SEED = 1000  # added to the seed of the prompts that are measured


def main(args: Any, command: str) -> int:
    """Measure, print a table or one JSON document, and keep the result where `--result-dir` says."""
    report = measure(args)
    if args.result_dir:
        say(f"written to {write(report, args.result_dir, report['model'] + '-spec', command)}")
    print(json.dumps(report)) if args.json else show(report)
    return 0


def measure(args: Any) -> dict[str, Any]:
    """The whole report for parsed flags (`dskit.flags.SpecArgs`)."""
    model = checkpoint.load(args.model, device=args.device, numerics=args.numerics, seed=args.seed)
    if not model.config.num_nextn_predict_layers:
        raise ValueError(f"{args.model} has no draft (mtp.*); train one with `dskit train demo-draft`")
    tokenizer = chat.Tokenizer(checkpoint.locate(args.model))
    ways = {"none": {"speculate": "off"}, "static": {"speculate": "static"}}
    report = {"model": str(args.model).rstrip("/").split("/")[-1]}
    with LLM(model, tokenizer=tokenizer, speculate="static") as llm:
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
        cost = step_cost(llm)
    report["calibration"], report["step_cost"] = asdict(fitted), asdict(cost)
    if args.save:
        fitted.save(checkpoint.locate(args.model) / CALIBRATION)
        cost.save(cost_file(args.model, str(llm.device)))
    ways["scheduled"] = {"speculate": "scheduled", "step_cost": cost,
                         "draft_temperatures": fitted.temperatures}
    report["throughput"], report["speedup"] = {}, {}
    for count in args.requests:
        rates = {}
        for way, how in ways.items():
            say(f"{count} at a time, {way}")
            with LLM(model, tokenizer=tokenizer, max_num_seqs=max(count, 1), **how) as llm:
                rates[way] = tokens_per_s(llm, args, count)
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


def step_cost(llm: LLM, repeats: int = 5) -> StepCost:
    """Time of a round by the rows that it verifies: the model's step and the draft's, 200 tokens in."""
    runner, G = llm.engine.runner, llm.config.dspark_block_size
    most = min(ROWS[-1], llm.engine.cfg.max_num_seqs * (1 + G))
    per, times = -(-(200 + G + 1) // runner.block_size), {}
    most = min(most, (runner.num_blocks // per) * (1 + G))
    ids = Random(0).choices(range(300, llm.config.vocab_size // 2), k=200 + G + 1)
    for rows in [r for r in ROWS if r <= most]:
        each = [1 + G] * (rows // (1 + G)) + ([rows % (1 + G)] if rows % (1 + G) else [])
        work = [Work(1 + i, list(range(1 + i * per, 1 + (i + 1) * per)), ids, 200, 200 + n, 200, "all")
                for i, n in enumerate(each)]
        for w in work:
            runner.run([Work(w.seq_slot, w.blocks, ids, 0, 200, 200)])
        slots, starts, newest = [w.seq_slot for w in work], [w.stop for w in work], [7] * len(work)
        spent = []
        for _ in range(1 + repeats):
            begin = time.perf_counter()
            runner.run(work).argmax(-1).tolist()
            runner.propose(slots, starts, newest, lambda logits: logits.argmax(-1))[0].tolist()
            spent.append(1e3 * (time.perf_counter() - begin))
        times[rows] = median(spent[1:])
    return StepCost(tuple(times), tuple(times.values()))


def tokens_per_s(llm: LLM, args: Any, count: int) -> float:
    """Tokens per second of prompts of all skills, `count` requests at a time; first tokens are left out."""
    total = max(count, 2 * len(SKILLS))
    work = [(prompt, _params(args, skill, i)) for skill in SKILLS
            for i, prompt in enumerate(_prompts(llm, skill, -(-total // len(SKILLS)), args.seed))]
    work = [work[i] for k in range(0, total) for i in range(k, len(work), -(-total // len(SKILLS)))][:total]
    llm.generate(*map(list, zip(*work[:2], strict=True)))  # warms up
    llm.engine.forget()
    tokens, seconds = 0, 0.0
    for at in range(0, total, count):
        batch = work[at : at + count]
        results = llm.generate(*map(list, zip(*batch, strict=True)))
        ends = [r.usage.ttft_s + (len(r.token_ids) - 1) / (r.usage.decode_tok_s or math.inf) for r in results]
        tokens += sum(len(r.token_ids) - 1 for r in results)
        seconds += max(ends) - min(r.usage.ttft_s for r in results)
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
    costs = zip(report["step_cost"]["rows"], report["step_cost"]["time_ms"], strict=True)
    console.print("a round of so many rows: " + ", ".join(f"{rows}: {ms:.1f} ms" for rows, ms in costs))
    env = report["env"]
    console.print(f"{env['device']}, torch {env['torch']}, {env['threads']} threads, commit {env['commit']}")
