"""`dskit bench throughput`, `prefill`, `decode` and `startup`: one model under a load that it is given whole.

Idea: what `bench serve` measures from outside is taken apart here, in this process. throughput: all prompts
are there at once. prefill: requests whose first tokens are cached already bring new ones, some at a time.
decode: so many requests with a long shared beginning decode, and every step is clocked. startup: a process
of its own imports, loads and writes one token.

Prompts are random words of the model's vocabulary, drawn anew for each run, and texts go on to their last
token, so that each run computes what its numbers say.

Units: tokens per second over all requests; milliseconds per step; seconds for the phases of a start.
`accepted_per_step` is what the draft gave, measured; speeds hold with it, and say nothing without it.
Errors: ValueError for lengths that the model's context cannot hold.
Source: engine.md section 22: context, new tokens and requests of the public shapes are flags here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import mean, median, quantiles
from typing import Any

from dskit.bench.environment import deliver, environment, header, say
from dskit.bench.latency import Prompts
from dskit.engine.llm import LLM
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
    with _load(args, args.input_len + args.output_len) as llm:
        prompts, runs = Prompts(llm, args.seed, natural=False), []
        llm.generate(prompts.draw(1, args.input_len), _params(2))
        for run in range(args.repeats):
            say(f"{args.num_prompts} prompts, run {run + 1}")
            begin = time.perf_counter()
            results = llm.generate(prompts.draw(args.num_prompts, args.input_len), _params(args.output_len))
            runs.append(time.perf_counter() - begin)
            _all_ended(results)
        took, new = median(runs), args.num_prompts * args.output_len
        row = {"requests": args.num_prompts, "input_len": args.input_len, "output_len": args.output_len,
               "seconds": took, "seconds_spread": [min(runs), max(runs)],
               "requests_per_s": args.num_prompts / took, "output_tok_s": new / took,
               "total_tok_s": (new + args.num_prompts * args.input_len) / took}
        interval = "from the call of generate to its return, in the calling process; one prompt warms up"
        return _report(llm, args, interval, [row])


def prefill(args: Any) -> Report:
    """New tokens per second behind a cached beginning, and the time of a step, by requests at a time."""
    with _load(args, args.cached_len + args.new_len + 1, max_num_seqs=max(args.requests)) as llm:
        prompts, rows = Prompts(llm, args.seed, natural=False), []
        shared = prompts.draw(1, args.cached_len)[0]
        for _ in range(2):  # where a second prompt parts from the first a snapshot is taken
            llm.generate(shared + prompts.draw(1, args.new_len)[0], _params(1))
        for count in args.requests:
            say(f"{count} requests")
            times, cached = [], 0
            for _ in range(args.repeats + 1):
                work = [shared + tail for tail in prompts.draw(count, args.new_len)]
                begin = time.perf_counter()
                results = llm.generate(work, _params(1))
                times.append(time.perf_counter() - begin)
                _all_ended(results)
                cached = min(r.usage.cached_tokens for r in results)
            took = median(times[1:])
            fresh = count * (args.cached_len + args.new_len - cached)
            rows.append({"requests": count, "context": args.cached_len, "cached_tokens": cached,
                         "new_tokens": args.new_len, "batch_ms": 1e3 * took,
                         "computed_tok_s": fresh / took, "new_tok_s": count * args.new_len / took})
        interval = f"wall time of whole batches, the median of {args.repeats} after one; first token included"
        return _report(llm, args, interval, rows)


def decode(args: Any) -> Report:
    """Time of a step while so many requests decode behind a shared context."""
    steps, rows = args.steps + WARM_STEPS, []
    most = 1 + steps * 8  # tokens of an answer, should each step accept a whole block
    with _load(args, args.context_len + 2 + most, max_num_seqs=max(args.requests)) as llm:
        prompts = Prompts(llm, args.seed, natural=False)
        shared = prompts.draw(1, args.context_len)[0]
        for count in args.requests:
            say(f"{count} requests")
            work = [shared + tail for tail in prompts.draw(count, 2)]
            handles = llm.engine.submit_all((one, _params(most)) for one in work)
            while len(llm.engine.scheduler.running) < count or llm.engine.scheduler.waiting:
                llm.step()
            rows.append({"requests": count, "context": args.context_len}
                        | _clocked(llm, args.steps) | _accepted([h.usage for h in handles]))
            for handle in handles:
                llm.abort(handle.request_id)
        interval = f"Engine.step, {args.steps} times after {WARM_STEPS}, all requests decoding"
        return _report(llm, args, interval, rows)


def _clocked(llm: LLM, steps: int) -> Report:
    """Mean and 99th percentile of the time of a step, and tokens per second."""
    for _ in range(WARM_STEPS):
        llm.step()
    times, tokens = [], llm.engine.tokens
    for _ in range(steps):
        begin = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - begin)
    return {"step_ms": 1e3 * mean(times), "step_p99_ms": 1e3 * quantiles(times, n=100)[98],
            "output_tok_s": (llm.engine.tokens - tokens) / sum(times)}


def _accepted(usages: list[Usage]) -> Report:
    rounds = sum(usage.rounds for usage in usages)
    return {"accepted_per_step": sum(usage.accepted for usage in usages) / rounds if rounds else None}


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

def _load(args: Any, length: int, **settings: Any) -> LLM:
    llm = LLM(args.model, device=args.device, numerics=args.numerics, seed=args.seed, **settings)
    if length > llm.max_model_len:
        llm.close()
        raise ValueError(f"{args.model} holds {llm.max_model_len} tokens, and this needs {length}; "
                         "ask for shorter prompts, answers or fewer steps")
    return llm


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


def _all_ended(results: list[Any]) -> None:
    """A failure must not pass for slowness, nor for speed."""
    if bad := next((r for r in results if r.finish_reason != "length"), None):
        raise RuntimeError(f"a request ended with {bad.finish_reason}: {bad.error}")


def model_name(args: Any) -> str:
    """The model as reports call it."""
    return str(args.model).rstrip("/").split("/")[-1]


def flags(args: Any) -> tuple[Report, Report]:
    """The flags as given and a user's, without those that only say where the result goes."""
    return tuple({k: v for k, v in vars(a).items() if k not in ("json", "result_dir")}
                 for a in (args, type(args)()))


def _report(llm: LLM, args: Any, interval: str, rows: list[Report]) -> Report:
    return {"env": environment(llm, *flags(args), interval), "model": model_name(args), "rows": rows}


def show(report: Report) -> None:
    """Print the rows as a table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in report["rows"][0]), box=SIMPLE)
    for row in report["rows"]:
        table.add_row(*map(_cell, row.values()))
    console, env = Console(), report["env"]
    console.print(table)
    console.print(f"timed: {env['interval']}")
    console.print(f"{env['device']}, torch {env['torch']}, {env['threads']} threads, commit {env['commit']}")


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(_cell, value))
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
