"""`dskit bench latency`: time to first token and tokens per second, of one stream and of eight.

Idea: the defaults a user receives are timed, through `LLM.generate`, on conversations (other models than the
demo: on random words). Beside them, in the same run, stand transformers on a V4 model of the same widths and
the same ops under torch.compile, whose compile time is a column of its own. The count of torch calls per
decode step says why a small model is as fast as it is: on a CPU a step pays per call, not per FLOP.

Units: `ttft_s` is seconds from the request to its first token (median over the streams); `decode_tok_s`
is tokens per second after the first, all streams together. Each is the median of `--repeats` runs after
one that warms up.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dskit import chat, ops
from dskit.bench.environment import deliver, environment, say
from dskit.bench.peer import Run, transformers_run
from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams
from dskit.train.skills import sample

ROWS = ((1, 200), (1, 2000), (8, 200))  # streams, prompt tokens
COMPILED = ("mhc.mixes",)  # many small calls, where fusion may pay
INTERVAL = "from the call of generate to each token, in the calling process; warm-up and compilation left out"


def main(args: Any, command: str) -> int:
    """Measure, print a table or one JSON document, and keep the result where `--result-dir` says."""
    report = measure(args)
    return deliver(report, args, f"{report['model']}-{args.device or 'default'}-latency", command, show)


def measure(args: Any) -> dict[str, Any]:
    """The whole report for parsed flags (`dskit.flags.LatencyArgs`)."""
    with LLM(args.model, device=args.device, numerics=args.numerics, seed=args.seed) as llm:
        rows = [row for row in ROWS if row[1] + args.output_len <= llm.max_model_len]
        run = ours(llm, natural=llm.name == "demo")
        prompts = Prompts(llm, args.seed)
        say("dskit as it is")
        runs = [
            {"implementation": args.kernels or "default", **timed(run, prompts, row, args)} for row in rows
        ]
        calls = torch_calls_per_step(run, prompts)
        for row in runs:
            row["torch_calls_per_step"] = calls if row["streams"] == 1 else None
        compiled, why_not_compiled = compiled_row(run, prompts, rows[0], args)
        peer = peer_rows(llm, Prompts(llm, args.seed, natural=False), rows, args)
        settings = flags_that_change_speed(args)
        defaults = flags_that_change_speed(type(args)())
        left_out = [
            {
                "streams": streams,
                "prompt_tokens": tokens,
                "reason": f"{llm.name} holds {llm.max_model_len} tokens",
            }
            for streams, tokens in ROWS
            if (streams, tokens) not in rows
        ]
        env = environment(llm, settings, defaults, INTERVAL)
    ratio = runs[0]["decode_tok_s"] / peer["decode_tok_s"] if peer["decode_tok_s"] else None
    return {
        "env": env,
        "model": str(args.model).rstrip("/").split("/")[-1],
        "runs": runs + compiled,
        "left_out": left_out,
        "compile_reason": why_not_compiled,
        "peer": peer,
        "ratio": ratio,
    }


def flags_that_change_speed(args: Any) -> dict[str, Any]:
    """The flags that decide how fast dskit itself runs."""
    return {name: value for name, value in asdict(args).items() if name in ("device", "numerics", "kernels")}


def ours(llm: LLM, natural: bool = False) -> Run:
    """A function that generates with the LLM and gives each stream's (ttft_s, decode_tok_s); `natural` texts
    may end by themselves.
    """

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[float, float]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=not natural)
        results = llm.generate(prompts, params)
        for result in results:
            if result.finish_reason not in ("length", "stop"):  # a failure must not pass for slowness
                raise RuntimeError(f"a request ended with {result.finish_reason}: {result.error}")
        return [(result.usage.ttft_s, result.usage.decode_tok_s or 0.0) for result in results]

    return run


class Prompts:
    """Seeded prompts, each drawn anew, so that no run finds an earlier one's work in a cache.

    The demo is asked for a product of two numbers at the end of a conversation, since a draft guesses what a
    model says of its own accord; models without skills get random words and go on to the last token.
    """

    def __init__(self, llm: LLM, seed: int, natural: bool | None = None):
        self.ids = range(llm.config.vocab_size // 16, llm.config.vocab_size // 2)  # specials lie at both ends
        self.random, self.tokenizer = random.Random(seed), llm.tokenizer
        self.natural = llm.name == "demo" if natural is None else natural

    def draw(self, streams: int, tokens: int) -> list[list[int]]:
        """`streams` prompts of `tokens` ids (conversations: of about as many)."""
        one = self._conversation if self.natural else self._words
        return [one(tokens) for _ in range(streams)]

    def _words(self, tokens: int) -> list[int]:
        return self.random.choices(self.ids, k=tokens)

    def _conversation(self, tokens: int) -> list[int]:
        talk = sample("recall", self.random, "eval", plain=True, tokens=int(0.95 * tokens) - 10)
        a, b = self.random.choices(range(200, 1000), k=2)
        question = {"role": "user", "content": f"What is {a} times {b}?"}
        body = {"messages": [*talk.body["messages"][:-1], question]}
        return chat.render(body, self.tokenizer).ids


def timed(run: Run, prompts: Prompts, row: tuple[int, int], args: Any) -> dict[str, Any]:
    """Warm up once, then measure `--repeats` times: medians, and the spread of the decode speed."""
    streams, tokens = row
    run(prompts.draw(streams, tokens), min(4, args.output_len))
    ttft, speed = [], []
    for _ in range(args.repeats):
        result = run(prompts.draw(streams, tokens), args.output_len)
        ttft.append(median(first for first, _ in result))
        speed.append(sum(rate for _, rate in result))
    return {
        "streams": streams,
        "prompt_tokens": tokens,
        "new_tokens": args.output_len,
        "ttft_s": median(ttft),
        "decode_tok_s": median(speed),
        "decode_tok_s_spread": [min(speed), max(speed)],
    }


def compiled_row(
    run: Run, prompts: Prompts, row: tuple[int, int], args: Any
) -> tuple[list[dict], str | None]:
    """The first row again with COMPILED ops, compile time apart; or no row and the reason."""
    if not args.compile:
        return [], "left out by --no-compile"
    if not shutil.which("c++") and not shutil.which("g++") and not torch.cuda.is_available():
        return [], "torch.compile needs a C++ compiler, and there is none here"
    say(f"dskit with {', '.join(COMPILED)} under torch.compile: the first run compiles")
    # the default limit would send an op with many shapes back to plain torch, in silence
    with ops.use(dict.fromkeys(COMPILED, "compile")), torch._dynamo.config.patch(recompile_limit=64):
        first = seconds(lambda: run(prompts.draw(*row), args.output_len))
        second = seconds(lambda: run(prompts.draw(*row), args.output_len))
        found = timed(run, prompts, row, args)
    compiled = {"implementation": "compile", "ops": list(COMPILED), "compile_s": max(0.0, first - second)}
    return [compiled | found], None


def peer_rows(llm: LLM, prompts: Prompts, rows: list, args: Any) -> dict[str, Any]:
    """transformers at the same rows; `decode_tok_s` is null with a reason where it was not measured."""
    peer: dict[str, Any] = {"name": "transformers", "decode_tok_s": None, "runs": [], "reason": None}
    if not args.peer:
        return peer | {"reason": "left out by --no-peer"}
    try:
        import transformers
    except ModuleNotFoundError:
        return peer | {"reason": 'transformers is not installed; pip install "dskit-llm[dev]"'}
    say("transformers, V4 at the same widths")
    dtype = llm.model.numerics.compute  # of the operands of our matrix products
    run = transformers_run(llm.config, dtype, llm.device)
    measured = [timed(run, prompts, row, args) for row in rows if row[1] <= 200]
    name = f"transformers {transformers.__version__} DeepseekV4ForCausalLM"
    return peer | {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "decode_tok_s": measured[0]["decode_tok_s"],
        "runs": measured,
    }


class Calls(TorchDispatchMode):
    """Counts the torch operations that run while it is entered."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def torch_calls_per_step(run: Run, prompts: Prompts) -> float:
    """Torch operations by token of one stream (without a draft: by step), from 5 tokens less 1."""
    counts = []
    for new_tokens in (1, 5):
        with Calls() as calls:
            run(prompts.draw(1, 64), new_tokens)
        counts.append(calls.count)
    return (counts[1] - counts[0]) / 4


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def show(report: dict[str, Any]) -> None:
    """Print the report as a table, and the reasons for what is missing."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table("", "streams", "prompt", "first s", "tok/s", "spread", "calls", "compile s", box=SIMPLE)
    rows = [(row["implementation"], row) for row in report["runs"]]
    for name, row in rows + [("transformers", row) for row in report["peer"]["runs"]]:
        low, high = row["decode_tok_s_spread"]
        times = f"{row['ttft_s']:.3f}", f"{row['decode_tok_s']:.1f}", f"{low:.1f}-{high:.1f}"
        calls = row.get("torch_calls_per_step")
        rest = f"{calls:.0f}" if calls else "", f"{row['compile_s']:.1f}" if "compile_s" in row else ""
        table.add_row(name, str(row["streams"]), str(row["prompt_tokens"]), *times, *rest)
    console = Console()
    console.print(table)
    console.print("first s: seconds to the first token; calls: torch operations per decode step")
    env = report["env"]
    console.print(f"{env['device']}, torch {env['torch']}, {env['threads']} threads, commit {env['commit']}")
    if report["ratio"]:
        console.print(f"one stream: {report['ratio']:.2f} times {report['peer']['name']}")
    for reason in filter(None, (report["compile_reason"], report["peer"]["reason"])):
        console.print(reason)
