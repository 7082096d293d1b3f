"""`dskit bench serve`: what clients of a server see, at a given rate or as many at a time.

Idea: the server runs in a process of its own (or is there already, `--url`), the clients in this one. They
come at random (`--request-rate`, a Poisson process) or all at once, at most `--max-concurrency` at a time,
each with random words behind a beginning that all share (`--prefix-len`), and read their answers as streams.
Each run has prompts of its own; a first one is not counted.

Units: milliseconds. ttft: from the call to the first token; tpot: per token after it; itl: between two
events; e2el: from the call to the end. `hit_ratio`: share of prompt tokens that came from the prefix cache.
`goodput`: requests per second within every limit of `--goodput`.
Errors: RuntimeError when a request fails or the server does not come up.
Source: engine.md section 22; the names are vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median, quantiles
from typing import Any

import httpx

from dskit.bench.environment import deliver, header, say
from dskit.bench.steps import Report, flags, model_name, show

LIMITED = ("ttft", "tpot", "e2el")  # what --goodput may limit: a figure of each request
METRICS = ("ttft", "tpot", "itl", "e2el")
INTERVAL = "from each HTTP call to its events, in a process beside the server; a first run is left out"


def main(args: Any, command: str) -> int:
    """Measure, print a table or one JSON document, and keep the result where `--result-dir` says."""
    report = {"bench": "serve"} | measure(args)
    return deliver(report, args, f"{report['model']}-serve", command, show)


def measure(args: Any) -> Report:
    """The whole report for parsed flags (`dskit.flags.ServingArgs`)."""
    limits(args.goodput)
    with contextlib.nullcontext(args.url) if args.url else _server(args) as url:
        card = httpx.get(f"{url}/models").raise_for_status().json()["data"][0]
        length = args.prefix_len + args.input_len + args.output_len
        if length > card["max_model_len"]:
            raise ValueError(f"{card['id']} holds {card['max_model_len']} tokens, a request needs {length}")
        draw, runs = random.Random(args.seed), []
        shared = _words(draw, args.prefix_len)
        for run in range(args.repeats + 1):
            say(f"{args.num_prompts} requests, " + (f"run {run}" if run else "to warm up"))
            runs.append(asyncio.run(_run(args, url, card["id"], shared, draw)))
    rows = [_row(args, answers, took) for answers, took in runs[1:]]
    row = {name: median(row[name] for row in rows) for name in rows[0]}
    speeds = [row["output_tok_s"] for row in rows]
    row["output_tok_s_spread"] = [min(speeds), max(speeds)]
    env = header(args.device or "cpu", *flags(args), INTERVAL)
    return {"env": env, "model": model_name(args), "rows": [row]}


def limits(goodput: Iterable[str]) -> dict[str, float]:
    """`--goodput ttft:500 tpot:50` as milliseconds by name; ValueError for what is no such limit."""
    found = {}
    for limit in goodput:
        name, _, most = limit.partition(":")
        try:
            found[name] = float(most)
        except ValueError:
            raise ValueError(f"--goodput {limit!r} has no milliseconds; write it as ttft:500") from None
        if name not in LIMITED:
            raise ValueError(f"--goodput limits {name!r}; there are {', '.join(LIMITED)}")
    return found


def _words(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(32, 250), k=count)  # ids that every vocabulary has


@contextlib.contextmanager
def _server(args: Any) -> Iterator[str]:
    """A server of its own, until the block ends."""
    command = [sys.executable, "-m", "dskit", "serve", args.model, "--port", "0", "--no-ui"]
    command += ["--numerics", args.numerics, "--seed", str(args.seed)]
    command += ["--device", args.device] if args.device else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next((line for line in process.stdout if "/v1" in line), "")
            if not (found := re.search(r"http://\S+/v1", line)):
                raise RuntimeError(f"the server did not start: {process.stderr.read().strip()[-500:]}")
            yield found[0]
        finally:
            process.terminate()


@dataclass
class Answer:
    """When what came, in seconds of one clock; and how many tokens."""

    begin: float
    events: list[float] = field(default_factory=list)
    usage: Report = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """ttft, tpot and e2el in milliseconds."""
        first, last, n = self.events[0], self.events[-1], self.usage["completion_tokens"]
        tpot = (last - first) / (n - 1) if n > 1 else 0.0
        seconds = {"ttft": first - self.begin, "tpot": tpot, "e2el": last - self.begin}
        return {name: 1e3 * value for name, value in seconds.items()}


async def _run(args: Any, url: str, model: str, shared: list[int],
               draw: random.Random) -> tuple[list[Answer], float]:
    """All requests of a run; its answers, and the seconds that it took."""
    limit, begin = asyncio.Semaphore(args.max_concurrency or args.num_prompts), time.perf_counter()
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:

        async def one(prompt: list[int]) -> Answer:
            async with limit:
                return await _ask(client, url, model, prompt, args.output_len)

        tasks = []
        for _ in range(args.num_prompts):
            tasks.append(asyncio.create_task(one(shared + _words(draw, args.input_len))))
            if args.request_rate:
                await asyncio.sleep(draw.expovariate(args.request_rate))
        return await asyncio.gather(*tasks), time.perf_counter() - begin


async def _ask(client: httpx.AsyncClient, url: str, model: str, prompt: list[int],
               output_len: int) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(time.perf_counter())
    async with client.stream("POST", f"{url}/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"the server refused a request: {(await reply.aread()).decode()[:300]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(f"a request failed: {chunk['error']['message']}")
            if chunk["choices"]:
                answer.events.append(time.perf_counter())
            answer.usage = chunk.get("usage") or answer.usage
    return answer


def _row(args: Any, answers: list[Answer], took: float) -> Report:
    """The figures of one run."""
    each = [answer.metrics() for answer in answers]
    values = {name: [one[name] for one in each] for name in LIMITED}
    values["itl"] = [1e3 * (b - a) for x in answers for a, b in zip(x.events, x.events[1:], strict=False)]
    prompt = sum(answer.usage["prompt_tokens"] for answer in answers)
    new = sum(answer.usage["completion_tokens"] for answer in answers)
    details = [answer.usage.get("prompt_tokens_details") or {} for answer in answers]
    cached = sum(one.get("cached_tokens", 0) for one in details)
    kept = limits(args.goodput).items()
    good = sum(all(one[name] <= most for name, most in kept) for one in each)
    row = {"requests": len(answers), "seconds": took, "requests_per_s": len(answers) / took,
           "output_tok_s": new / took, "total_tok_s": (new + prompt) / took, "hit_ratio": cached / prompt,
           "goodput": good / took}
    for name in METRICS:
        cuts = quantiles(values[name] + values[name][:1], n=100) if values[name] else [0.0] * 99
        row |= {f"{name}_mean_ms": mean(values[name] or [0.0])}
        row |= {f"{name}_p{p}_ms": cuts[p - 1] for p in (50, 90, 99)}
    return row
