"""`dskit profile`: one prompt and a few decode steps of a model, op by op.

Idea: the model is loaded as a user receives it and warmed up with other prompts of the same length, so that
no run finds an earlier one's work in a cache. The last warm-up is timed without the profiler, which says how
long a step takes by itself; then the work runs once under `dskit.profile`.

Units: milliseconds.
Errors: RuntimeError when a request fails; what the loader and the registry raise.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import asdict
from datetime import date
from statistics import median
from typing import Any

import torch

from dskit import ops, profiling, traces
from dskit.bench.environment import environment, new_folder
from dskit.bench.latency import Prompts, ours
from dskit.engine.llm import LLM


def main(args: Any, command: str) -> int:
    """Profile, keep the run's folder, print tables or one JSON document.

    command: the command line, for the header of what is kept.
    """
    if args.compare:
        found = traces.compare(*args.compare)
        print(json.dumps(found)) if args.json else show(found)
        return 0
    report, seen = measure(args, command)
    if args.json:
        print(json.dumps(report))
        return 0
    for phase in report["phases"]:
        show(seen.table(phase))
    for line in [*seen.lines(), f"written to {report['folder']}", profiling.OPEN_WITH]:
        print(line)
    return 0


def measure(args: Any, command: str) -> tuple[dict[str, Any], profiling.profile]:
    """The whole report for parsed flags (`dskit.flags.ProfileArgs`), and the profile itself."""
    with LLM(args.model, device=args.device, numerics=args.numerics, seed=args.seed) as llm:
        drawn, length = Prompts(llm, args.seed, natural=False), args.prompt_tokens
        if args.prompt:
            length = len(llm.encode(args.prompt))
        generate = ours(llm)
        for _ in range(args.warmup):
            generate(drawn.draw(args.num_prompts, length), args.decode + 1)
        plain = step_ms(llm, args) if args.warmup else {}
        prompts = drawn.draw(args.num_prompts, length)
        if args.prompt:
            prompts = [llm.encode(args.prompt)] * args.num_prompts
        with profiling.profile(llm, memory=args.memory, tensorboard=args.tensorboard) as seen:
            generate(prompts, args.decode + 1)
        env = {"command": command, "date": date.today().isoformat(), "selection": ops.selection()}
        env |= environment(llm, speed(args), speed(type(args)()), interval(args, length))
        chip = chip_of(llm.device)
    seen.notes += [f"without the profiler a {phase} step takes {ms:.1f} ms" for phase, ms in plain.items()]
    name = str(args.model).rstrip("/").split("/")[-1]
    folder = seen.save(new_folder(args.out, f"{name}-{chip}-profile"), env)
    report = {"env": env, "model": name, "num_prompts": args.num_prompts, "prompt_tokens": length,
              "decode": args.decode, **seen.summary(), "unprofiled_step_ms": plain,
              "rows": list(seen.table()), "memory": seen.memory, "folder": str(folder),
              "no_gpu": None if seen.gpu else profiling.NO_GPU}
    return report, seen


def interval(args: Any, length: int) -> str:
    """What was timed, in words."""
    return (f"prefill of {args.num_prompts} x {length} tokens and {args.decode} decode steps under "
            "torch.profiler, which slows them; loading and warm-up left out")


def chip_of(device: torch.device) -> str:
    """cpu, or the last word of the GPU's name: h200."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).split()[-1].lower()


def step_ms(llm: LLM, args: Any) -> dict[str, float]:
    """Median milliseconds of the newest steps, by phase."""
    times: dict[str, list[float]] = defaultdict(list)
    for record in llm.engine.trace()[-(args.decode + 1):]:
        times[record.kind].append(record.launch_us / 1e3)
    return {kind: median(found) for kind, found in times.items()}


def speed(args: Any) -> dict[str, Any]:
    """The flags that decide how fast dskit itself runs."""
    return {name: value for name, value in asdict(args).items() if name in ("device", "numerics", "kernels")}


def show(table: profiling.Table) -> None:
    """Print a table in its ruled form, shares in percent."""
    from rich.console import Console

    rows = [{name: f"{value:.1%}" if name.endswith("share") else value for name, value in row.items()}
            for row in table]
    Console(width=None if sys.stdout.isatty() else 160).print(type(table)(rows, table.caption))
