"""`dskit bench throughput`, `prefill`, `decode` and `startup`: one model under a load that it is given whole.

Idea: what `bench serve` measures from outside is taken apart here, in this process. throughput: all prompts
are there at once. prefill: requests whose first tokens are cached already bring new ones, some at a time.
decode: so many requests with a long shared beginning decode, and every step is clocked. startup: a process
of its own imports, loads and writes one token.

Prompts are random words of the model's vocabulary, drawn anew for each run, and texts go on to their last
token, so that each run computes what its numbers say.

Several ranks (`--dp`) get equally many requests each. They step together, so the clock is rank 0's: a step
ends when rank 0 has booked it. The shared beginning is in the prefix cache of every rank before the clock
runs. Beside the times stands the least that they could be, where the GPU's speeds are known (engine/plan.py).

Shapes: `requests` and what ends in `_per_rank` are of one rank, which is one GPU; other tokens are of all.
Units: tokens per second; milliseconds per step; seconds for the phases of a start; bytes of rank 0's GPU.
`accepted_per_step` is what the draft gave, measured; speeds hold with it, and say nothing without it.
`efficiency` is tokens per rank over those of the first number of ranks, `of_floor` the floor over the time.
Errors: ValueError for lengths that the model's context cannot hold; RuntimeError when a request fails.
Source: engine.md section 22: context, new tokens and requests of the public shapes are flags here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import mean, median, quantiles
from typing import Any

import torch

from dskit import checkpoint
from dskit.bench import floors
from dskit.bench.environment import deliver, environment, header, say
from dskit.bench.latency import Prompts
from dskit.engine.llm import LLM
from dskit.engine.loop import Handle
from dskit.engine.plan import Plan
from dskit.engine.seq import SamplingParams, Usage

Report = dict[str, Any]
WARM_STEPS = 10  # of decode, left out


def main(args: Any, command: str) -> int:
    """Measure what `args` is for, print a table or one JSON document, and keep it where asked."""
    name = type(args).__name__.removesuffix("Args").lower()
    report = {"bench": name} | {"throughput": throughput, "prefill": prefill, "decode": decode,
                                "startup": startup}[name](args)
    return deliver(report, args, f"{report['model']}-{name}", command, show)


def throughput(args: Any) -> Report:
    """All prompts at once: tokens per second from the call to the last token."""

    def rows(bench: Bench) -> list[Report]:
        llm, count = bench.llm, args.num_prompts * bench.ranks
        llm.generate(bench.prompts.draw(bench.ranks, args.input_len), _params(2))
        runs = []
        for run in range(args.repeats):
            say(f"{count} prompts, run {run + 1}")
            runs.append(bench.batch(args.num_prompts, args.input_len, args.output_len)[0])
        took, new = median(runs), count * args.output_len
        return [{"ranks": bench.ranks, "requests": args.num_prompts, "input_len": args.input_len,
                 "output_len": args.output_len, "seconds": took, "seconds_spread": [min(runs), max(runs)],
                 "requests_per_s": count / took, "output_tok_s": new / took,
                 "total_tok_s": (new + count * args.input_len) / took,
                 "output_tok_s_per_rank": new / took / bench.ranks}]

    interval = "from the call of generate to its return, in the calling process; one prompt a rank warms up"
    return _measured(args, args.input_len + args.output_len, args.max_num_seqs, rows, interval)


def prefill(args: Any) -> Report:
    """New tokens per second behind a cached beginning, and the time of a step, by requests at a time."""

    def rows(bench: Bench) -> list[Report]:
        shared, found = bench.shared(args.cached_len), []
        for count in args.requests:
            say(f"{count} requests on each of {bench.ranks} ranks")
            times, cached = zip(*(bench.batch(count, args.new_len, 1, shared)
                                  for _ in range(args.repeats + 1)), strict=True)
            took, new = median(times[1:]), count * args.new_len * bench.ranks
            fresh = new + count * bench.ranks * (args.cached_len - cached[-1])
            found.append({"ranks": bench.ranks, "requests": count, "context": args.cached_len,
                          "cached_tokens": cached[-1], "new_tokens": args.new_len, "batch_ms": 1e3 * took,
                          "computed_tok_s": fresh / took, "new_tok_s": new / took,
                          "new_tok_s_per_rank": new / took / bench.ranks}
                         | bench.floor(1e3 * took, _prefill_floor, fresh // bench.ranks,
                                       args.cached_len + args.new_len // 2))
        return found

    interval = (f"wall time of whole batches, the median of {args.repeats} after one; first token included")
    return _measured(args, args.cached_len + args.new_len + 1, max(args.requests), rows, interval)


def decode(args: Any) -> Report:
    """Time of a step while so many requests decode behind a shared context."""
    most = 1 + (args.steps + WARM_STEPS) * 8  # tokens of an answer, should each step accept a whole block

    def rows(bench: Bench) -> list[Report]:
        shared, found = bench.shared(args.context_len), []
        for count in args.requests:
            say(f"{count} requests on each of {bench.ranks} ranks")
            handles = bench.decoding(shared, count, most)
            row = {"ranks": bench.ranks, "requests": count, "context": args.context_len}
            row |= bench.clocked(count, args.steps) | _accepted([handle.usage for handle in handles])
            found.append(row | bench.floor(row["step_ms"], _decode_floor, count, args.context_len))
            for handle in handles:
                handle.cancel()
            for handle in handles:
                handle.result()
        return found

    interval = f"between the ends of {args.steps} steps of rank 0 after {WARM_STEPS}, all requests decoding"
    return _measured(args, args.context_len + 2 + most, max(args.requests), rows, interval)


# ---- a load on one rank or several -------------------------------------------------------------------------


class Bench:
    """A loaded model on so many ranks, with prompts for it, and with what its plan says of it."""

    def __init__(self, llm: LLM, ranks: int, plan: Plan | None, seed: int):
        self.llm, self.ranks, self.plan = llm, ranks, plan
        self.prompts = Prompts(llm, seed, natural=False)

    def shared(self, tokens: int) -> list[int]:
        """A beginning for prompts, in the prefix cache of every rank."""
        shared = self.prompts.draw(1, tokens)[0]
        for _ in range(2):  # where a second prompt parts from the first a snapshot is taken
            self.batch(1, 2, 1, shared)
        return shared

    def batch(self, count: int, tokens: int, new_tokens: int, shared: list[int] = ()) -> tuple[float, int]:
        """Answer `count` prompts of so many own tokens on every rank: (seconds, tokens that were cached)."""
        work = [[*shared, *tail] for tail in self.prompts.draw(count * self.ranks, tokens)]
        begin = time.perf_counter()
        results = self.llm.generate(work, _params(new_tokens))
        took = time.perf_counter() - begin
        if bad := next((r for r in results if r.finish_reason != "length"), None):
            raise RuntimeError(f"a request ended with {bad.finish_reason}: {bad.error}")
        return took, min(result.usage.cached_tokens for result in results)

    def decoding(self, shared: list[int], count: int, most: int) -> list[Handle]:
        """`count` requests of every rank, all of which decode; the engine's thread takes the steps."""
        engine = self.llm.engine
        tails = self.prompts.draw(count * self.ranks, 2)
        handles = engine.submit_all((shared + tail, _params(most)) for tail in tails)
        engine.start()
        for handle in handles:
            if (first := next(iter(handle))).finish_reason:
                raise RuntimeError(f"a request ended with {first.finish_reason}: {first.error}")
        return handles

    def clocked(self, count: int, steps: int) -> Report:
        """Mean and 99th percentile of the time of a step, and tokens per second."""
        engine = self.llm.engine
        self._wait(engine.steps + WARM_STEPS)
        begin = time.perf_counter()
        self._wait(engine.steps + steps + 2)
        records = [record for record in engine.trace() if record.ended_s > begin][: steps + 1]
        if len(records) <= steps or any((r.kind, r.sequences) != ("decode", count) for r in records):
            raise RuntimeError(f"not all of {steps} steps decoded {count} requests; time fewer")
        times = [after.ended_s - before.ended_s for before, after in pairwise(records)]
        each = sum(record.tokens for record in records[1:]) / sum(times)
        return {"step_ms": 1e3 * mean(times), "step_p99_ms": 1e3 * quantiles(times, n=100)[98],
                "output_tok_s": self.ranks * each, "output_tok_s_per_rank": each}

    def floor(self, took_ms: float, least: Callable[..., float], *load: int) -> Report:
        """The least milliseconds that a plan gives, and which share of the time that is."""
        floor_ms = least(self.plan, *load) if self.plan else None
        return {"floor_ms": floor_ms, "of_floor": floor_ms and floor_ms / took_ms}

    def memory(self) -> Report | None:
        """Bytes of rank 0's GPU: weights and caches as they are and as planned, and the most there were."""
        device = self.llm.device
        if device.type != "cuda":
            return None
        plan = self.plan and self.plan.weight_bytes + self.plan.state_bytes + self.plan.block_bytes
        return {"ranks": self.ranks, "held_bytes": torch.cuda.memory_allocated(device),
                "planned_bytes": plan, "peak_bytes": torch.cuda.max_memory_allocated(device)}

    def _wait(self, number: int) -> None:
        """Until the engine's thread has taken so many steps."""
        engine = self.llm.engine
        while engine.steps < number:
            if engine.closed:
                raise RuntimeError(engine.failure or "the engine was closed")
            time.sleep(0.005)


def _measured(args: Any, length: int, seqs: int | None, rows: Callable[[Bench], list[Report]],
              interval: str) -> Report:
    """Load the model on every number of ranks in turn and let `rows` measure it."""
    config = checkpoint.configuration(args.model)
    if length > config.max_position_embeddings:
        raise ValueError(f"{args.model} holds {config.max_position_embeddings} tokens, and this needs "
                         f"{length}; ask for shorter prompts, answers or fewer steps")
    settings = {"max_model_len": length, "max_num_seqs": args.max_num_seqs or seqs,
                "max_num_batched_tokens": args.max_num_batched_tokens, "speculate": args.speculate,
                "enforce_eager": args.enforce_eager}
    found, memory = [], []
    for ranks in args.data_parallel_size:
        experts = min(ranks, args.expert_parallel_size or ranks)
        with LLM(args.model, args.device, args.numerics, args.seed, dp=ranks, ep=experts, progress=say,
                 distributed_timeout=args.distributed_timeout_seconds, **settings) as llm:
            bench = Bench(llm, ranks, _plan(llm, ranks, settings) if experts == ranks else None, args.seed)
            held = bench.memory()
            found += rows(bench)
            memory += [held | {"peak_bytes": bench.memory()["peak_bytes"]}] if held else []
            env = environment(llm, *flags(args), interval)
    _compare(found)
    return {"env": env, "model": model_name(args), "rows": found, "memory": memory}


def _plan(llm: LLM, ranks: int, settings: Report) -> Plan | None:
    """What engine/plan.py says of this model on so many GPUs of this kind, if it knows them."""
    on = floors.machine(torch.cuda.get_device_name(llm.device)) if llm.device.type == "cuda" else None
    return Plan(llm.config, ranks, on, **settings) if on else None


def _decode_floor(plan: Plan, requests: int, context: int) -> float:
    return plan.decode(requests, context)["floor_ms"]


def _prefill_floor(plan: Plan, tokens: int, context: int) -> float:
    least = plan.prefill(context)
    return max(1e-3 * tokens * least["us_per_token"], least["experts_ms"])


def _compare(rows: list[Report]) -> None:
    """Put the efficiency into rows of several numbers of ranks: tokens per rank beside those of the first."""
    name = next(name for name in rows[0] if name.endswith("tok_s_per_rank"))
    first = {row["requests"]: row[name] for row in rows if row["ranks"] == rows[0]["ranks"]}
    for row in rows:
        row["efficiency"] = row[name] / first[row["requests"]] if row["ranks"] != rows[0]["ranks"] else None


def _accepted(usages: list[Usage]) -> Report:
    rounds = sum(usage.rounds for usage in usages)
    return {"accepted_per_step": sum(usage.accepted for usage in usages) / rounds if rounds else None}


# ---- a start -----------------------------------------------------------------------------------------------

STARTUP = """
import json, sys, time
begin = time.perf_counter()
import dskit
from dskit.engine.llm import LLM
imported = time.perf_counter()
llm = LLM({model!r}, device={device!r}, numerics={numerics!r}, seed={seed!r})
loaded = time.perf_counter()
llm.generate([llm.tokenizer.bos_id], dskit.SamplingParams(max_tokens=1))
first = time.perf_counter()
print(json.dumps({{"import_s": imported - begin, "load_s": loaded - imported, "first_token_s": first - loaded,
                  "device": str(llm.device)}}))
llm.close()
"""


def startup(args: Any) -> Report:
    """Seconds until a new process has imported dskit, loaded the model and written a token."""
    script = STARTUP.format(model=args.model, device=args.device, numerics=args.numerics, seed=args.seed)
    runs = []
    for run in range(args.repeats):
        say(f"start {run + 1}")
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the process that was started failed: {done.stderr.strip().splitlines()[-1]}")
        runs.append(json.loads(done.stdout) | {"total_s": time.perf_counter() - begin})
    names = ("import_s", "load_s", "first_token_s", "total_s")
    row = {name: median(run[name] for run in runs) for name in names}
    row["total_s_spread"] = [f(run["total_s"] for run in runs) for f in (min, max)]
    interval = "from the start of a Python process to its end; files may be in the system's cache"
    env = header(runs[0]["device"], *flags(args), interval)
    return {"env": env, "model": model_name(args), "rows": [row]}


# ---- shared ------------------------------------------------------------------------------------------------

def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


def model_name(args: Any) -> str:
    """The model as reports call it."""
    return str(args.model).rstrip("/").split("/")[-1]


def flags(args: Any) -> tuple[Report, Report]:
    """The flags as given and a user's, without those that only say where the result goes."""
    return tuple({k: v for k, v in vars(a).items() if k not in ("json", "result_dir")}
                 for a in (args, type(args)()))


def show(report: Report) -> None:
    """Print the rows as a table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Column, Table

    names = [name for name in report["rows"][0] if any(row[name] is not None for row in report["rows"])]
    table = Table(*(Column(name.replace("_", " "), overflow="fold") for name in names), box=SIMPLE)
    for row in report["rows"]:
        table.add_row(*(_cell(row[name]) for name in names))
    console, env = Console(), report["env"]
    console.print(table)
    for held in report.get("memory", ()):
        gib = {name: "-" if size is None else f"{size / 2**30:.2f}" for name, size in held.items()}
        console.print(f"{held['ranks']} ranks, GiB on GPU 0: {gib['held_bytes']} of weights and caches, "
                      f"{gib['planned_bytes']} planned, at most {gib['peak_bytes']}")
    console.print(f"timed: {env['interval']}")
    console.print(f"{env['device']}, torch {env['torch']}, {env['threads']} threads, commit {env['commit']}")


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(_cell, value))
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
