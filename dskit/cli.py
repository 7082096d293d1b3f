"""The command line: `dskit COMMAND`, where each command imports only its own room.

Idea: the first word is looked up in a table, which costs nothing; then tyro turns the dataclass of that
command (`dskit/flags.py`) into flags. SGLang's spellings are accepted, and a flag of vLLM or SGLang that
dskit does not have is answered with the reason.

Errors: three lines on stderr, `error:`, `because:`, `try:`. Exit codes: 0 success, 1 the work failed,
2 wrong usage, 3 the environment cannot do it, 4 not enough memory, 130 interrupted. `--debug` shows the
traceback as well. Results go to stdout, progress to stderr; with `--json` stdout holds one JSON document
and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dskit import __version__

Args = TypeVar("Args")
FAILED, USAGE, ENVIRONMENT, MEMORY, INTERRUPTED = 1, 2, 3, 4, 130


class CliError(Exception):
    """A failure that the reader can act on; `code` is the exit code."""

    def __init__(self, what: str, because: str, remedy: str, code: int = USAGE):
        super().__init__(what)
        self.what, self.because, self.remedy, self.code = what, because, remedy, code


# ---- the commands --------------------------------------------------------------------------------


def serve(argv: list[str]) -> int:
    """Serve a model: the OpenAI API and the chat page."""
    from dskit.flags import ServeArgs

    args = parse(ServeArgs, "serve", argv)
    choose_kernels(args.kernels)
    from dskit.serve import server

    return server.main(args)


def chat(argv: list[str]) -> int:
    """Chat in the terminal, here or with a running server."""
    from dskit.flags import ChatArgs

    args = parse(ChatArgs, "chat", argv)
    choose_kernels(args.kernels)
    from dskit import terminal

    return terminal.main(args)


def bench(argv: list[str]) -> int:
    """Measure speed: of the model, of every kernel, and what changed between two runs."""
    name = next(iter(argv), "")
    if name in ("", "-h", "--help"):
        rows = [f"  {bench:<10} {run.__doc__.splitlines()[0]}" for bench, run in BENCHES.items()]
        print("\n".join([f"usage: dskit bench {{{','.join(BENCHES)}}} [-h] [OPTIONS]", "", *rows]))
        return 0 if name else USAGE
    if name not in BENCHES:
        raise CliError(
            f"there is no dskit bench {name}", f"there are {', '.join(BENCHES)}", "dskit bench latency demo"
        )
    return BENCHES[name](argv[1:])


def bench_latency(argv: list[str]) -> int:
    """Time to first token and tokens per second of one stream and of eight, beside transformers."""
    from dskit.flags import LatencyArgs

    args = parse(LatencyArgs, "bench latency", argv)
    choose_kernels(args.kernels)
    from dskit.bench import latency

    return latency.main(args, shlex.join(["dskit", "bench", "latency", *argv]))


def bench_throughput(argv: list[str]) -> int:
    """Tokens per second of many prompts at once."""
    from dskit.flags import ThroughputArgs

    args = parse(ThroughputArgs, "bench throughput", argv)
    choose_kernels(args.kernels)
    from dskit.bench import steps

    return steps.main(args, shlex.join(["dskit", "bench", "throughput", *argv]))


def bench_prefill(argv: list[str]) -> int:
    """New tokens per second behind a cached beginning, by requests at a time."""
    from dskit.flags import PrefillArgs

    args = parse(PrefillArgs, "bench prefill", argv)
    choose_kernels(args.kernels)
    from dskit.bench import steps

    return steps.main(args, shlex.join(["dskit", "bench", "prefill", *argv]))


def bench_decode(argv: list[str]) -> int:
    """Time of a step while so many requests decode."""
    from dskit.flags import DecodeArgs

    args = parse(DecodeArgs, "bench decode", argv)
    choose_kernels(args.kernels)
    from dskit.bench import steps

    return steps.main(args, shlex.join(["dskit", "bench", "decode", *argv]))


def bench_serve(argv: list[str]) -> int:
    """What clients of a server see, at a rate or so many at a time."""
    from dskit.flags import ServingArgs

    args = parse(ServingArgs, "bench serve", argv)
    choose_kernels(args.kernels)
    from dskit.bench import serving

    return serving.main(args, shlex.join(["dskit", "bench", "serve", *argv]))


def bench_startup(argv: list[str]) -> int:
    """Seconds until a new process has written its first token."""
    from dskit.flags import StartupArgs

    args = parse(StartupArgs, "bench startup", argv)
    choose_kernels(args.kernels)
    from dskit.bench import steps

    return steps.main(args, shlex.join(["dskit", "bench", "startup", *argv]))


def bench_layer(argv: list[str]) -> int:
    """One layer in a step: its kernels, the formulas, the compiler, beside its floor."""
    from dskit.flags import LayerArgs

    args = parse(LayerArgs, "bench layer", argv)
    choose_kernels(args.kernels)
    from dskit.bench import layer

    return layer.main(args, shlex.join(["dskit", "bench", "layer", *argv]))


def bench_exchange(argv: list[str]) -> int:
    """Rows to the experts of other GPUs and back: written directly, and by NCCL."""
    from dskit.flags import ExchangeArgs

    args = parse(ExchangeArgs, "bench exchange", argv)
    from dskit.bench import exchange

    return exchange.main(args, shlex.join(["dskit", "bench", "exchange", *argv]))


def bench_kernels(argv: list[str]) -> int:
    """Every op's kernel at its released widths, beside its floor, its peers and torch.compile."""
    from dskit.flags import KernelsArgs

    args = parse(KernelsArgs, "bench kernels", argv)
    from dskit.bench import kernels

    return kernels.main(args, shlex.join(["dskit", "bench", "kernels", *argv]))


def bench_tune(argv: list[str]) -> int:
    """Which configuration of each kernel is the fastest on this GPU: writes the table that kernels read."""
    from dskit.flags import TuneArgs

    args = parse(TuneArgs, "bench tune", argv)
    from dskit.bench import tune

    return tune.main(args)


def bench_engine(argv: list[str]) -> int:
    """What a step costs beside the model: scheduler, pools, prefix tree; on a GPU its idle time."""
    from dskit.flags import EngineArgs

    args = parse(EngineArgs, "bench engine", argv)
    choose_kernels(args.kernels)
    from dskit.bench import engine

    return engine.main(args, shlex.join(["dskit", "bench", "engine", *argv]))


def bench_spec(argv: list[str]) -> int:
    """How many tokens a round with the draft gives, and what that is worth in tokens per second."""
    from dskit.flags import SpecArgs

    args = parse(SpecArgs, "bench spec", argv)
    choose_kernels(args.kernels)
    from dskit.bench import spec

    return spec.main(args, shlex.join(["dskit", "bench", "spec", *argv]))


def bench_compare(argv: list[str]) -> int:
    """Which kernels became faster or slower between two files of records."""
    from dskit.flags import CompareArgs

    args = parse(CompareArgs, "bench compare", argv)
    from dskit.bench import compare

    return compare.main(args)


def profile(argv: list[str]) -> int:
    """Profile a prompt and some decode steps, op by op; or compare two profiles."""
    from dskit.flags import ProfileArgs

    args = parse(ProfileArgs, "profile", argv)
    choose_kernels(args.kernels)
    from dskit.bench import profile as profiles

    return profiles.main(args, shlex.join(["dskit", "profile", *argv]))


def train(argv: list[str]) -> int:
    """Train a model from scratch by a recipe."""
    from dskit.flags import TrainArgs

    args = parse(TrainArgs, "train", argv)
    choose_kernels(args.kernels)
    from dskit.train import trainer

    return trainer.main(args) or 0


def evaluate(argv: list[str]) -> int:
    """Measure a model's skills on held-out questions."""
    from dskit.flags import EvalArgs

    args = parse(EvalArgs, "eval", argv)
    choose_kernels(args.kernels)
    from dskit import evaluate as evaluation

    report = evaluation.main(args)
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def convert(argv: list[str]) -> int:
    """Convert a checkpoint into the released format."""
    from dskit.flags import ConvertArgs

    args = parse(ConvertArgs, "convert", argv)
    if not args.target and not args.dry_run:
        raise CliError("no target folder", "only --dry-run needs none", f"dskit convert {args.source} TARGET")
    from dskit.checkpoint import convert as run

    report = run(args.source, args.target or None, dry_run=args.dry_run, quantize=args.quantize)
    print(json.dumps(report.counts) if args.json else report)
    return 0 if report.complete else FAILED


def doctor(argv: list[str]) -> int:
    """Check what this machine can do, and how to mend what it cannot."""
    from dskit import doctor as checks
    from dskit.flags import DoctorArgs

    args = parse(DoctorArgs, "doctor", argv)
    choose_kernels(args.kernels)
    return checks.main(args)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": serve,
    "chat": chat,
    "bench": bench,
    "profile": profile,
    "train": train,
    "eval": evaluate,
    "convert": convert,
    "doctor": doctor,
}
BENCHES: dict[str, Callable[[list[str]], int]] = {
    "latency": bench_latency,
    "throughput": bench_throughput,
    "prefill": bench_prefill,
    "decode": bench_decode,
    "serve": bench_serve,
    "startup": bench_startup,
    "layer": bench_layer,
    "kernels": bench_kernels,
    "exchange": bench_exchange,
    "tune": bench_tune,
    "engine": bench_engine,
    "spec": bench_spec,
    "compare": bench_compare,
}


# ---- flags of other engines ----------------------------------------------------------------------

ALIASES = {  # SGLang's spelling, or a second one of vLLM's: ours
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--random-seed": "--seed",
    "--dp-size": "--data-parallel-size",
    "--ep-size": "--expert-parallel-size",
    "--disable-cuda-graph": "--enforce-eager",
    "--attention-backend": "--kernels",
}
MODEL_FLAGS = ("--model", "--model-path")  # here the model is a positional argument
ALREADY = ("--enable-prefix-caching",)  # what they ask for is done anyway
ABSENT = {  # flags of vLLM and SGLang that dskit does not have, and why
    "--tensor-parallel-size": "attention is data parallel here: use --dp and --ep",
    "--pipeline-parallel-size": "every rank has all layers: use --dp and --ep",
    "--gpu-memory-utilization": "caches take what --max-num-seqs and --max-model-len need",
    "--dtype": "weights keep the checkpoint's formats; --numerics exact computes in float32",
    "--kv-cache-dtype": "caches have the release's formats; --numerics exact keeps them in float32",
    "--quantization": "the checkpoint's own quantisation is used",
    "--disable-radix-cache": "here it is called --no-enable-prefix-caching",
    "--speculative-config": "a draft is part of its checkpoint; --speculate and --accept say how it is used",
    "--enable-lora": "adapters are not loaded",
    "--chat-template": "prompts are rendered by deepseek-recipe, which needs no template",
    "--reasoning-parser": "thinking is always split off, by deepseek-recipe",
    "--tool-call-parser": "tool calls are always parsed, by deepseek-recipe",
    "--enable-auto-tool-choice": "the model may always call the tools of a request",
    "--load-format": "checkpoints are safetensors; presets without weights are filled from --seed",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--config": "flags are given on the command line",
    "--role": "this version serves with one engine",
}
ABSENT |= {
    short: ABSENT[long]
    for long, shorts in {
        "--tensor-parallel-size": ("-tp", "--tp", "--tp-size"),
        "--pipeline-parallel-size": ("-pp", "--pp", "--pp-size"),
        "--gpu-memory-utilization": ("--mem-fraction-static",),
    }.items()
    for short in shorts
}


def translate(command: str, argv: list[str]) -> list[str]:
    """Replace other engines' spellings by ours; raise CliError for a flag that has no counterpart."""
    ours: list[str] = []
    model: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        if name in ABSENT:
            raise CliError(f"dskit has no {name}", ABSENT[name], f"dskit {command} --help")
        if name in ALREADY:
            continue
        if name in MODEL_FLAGS:
            model = [value if equals else next(words, "")]
        else:
            ours.append(ALIASES.get(name, name) + equals + value)
    return model + ours


def parse(kind: type[Args], command: str, argv: list[str]) -> Args:
    """Turn the words after the command into its dataclass; wrong usage becomes a CliError."""
    import tyro

    ours = translate(command, argv)
    style = (tyro.conf.FlagCreatePairsOff,)  # --json and --no-ui, without their useless opposites
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, prog=f"dskit {command}", args=ours, config=style)
    except SystemExit as end:
        if not end.code:
            raise
        lines = [line.strip("│╭╰╮╯─ ") for line in printed.getvalue().splitlines()]
        said = [line for line in lines[1:] if line and not line.startswith("For full helptext")]
        because = " ".join(said) or "the arguments do not fit"
        raise CliError("wrong usage", because, f"dskit {command} --help") from None


def choose_kernels(words: str | None) -> None:
    """Apply `--kernels moe=compile,mla=torch`."""
    if words:
        from dskit import ops

        ops.choose_by_flag(words)


# ---- errors --------------------------------------------------------------------------------------

EXTRAS = {  # top-level package of an import that failed: the extra that installs it
    **dict.fromkeys(("fastapi", "uvicorn", "gradio", "openai", "starlette"), "serve"),
    **dict.fromkeys(("tensorboard", "matplotlib"), "train"),
    **dict.fromkeys(("ipywidgets", "jupyterlab", "IPython"), "notebook"),
    "triton": "triton",
    "xgrammar": "grammar",
    "transformers": "dev",
}
CODES = {  # class name of an exception of dskit: exit code
    **dict.fromkeys(("ConfigError", "EngramError", "PlanError", "UnknownOp", "UnknownImplementation"), USAGE),
    "Unsupported": ENVIRONMENT,
}


def explain(error: BaseException) -> CliError | None:
    """The three lines and the exit code of a known error; None means it is a bug of ours."""
    if isinstance(error, CliError):
        return error
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").split(".")[0])):
        return CliError(
            str(error), f"it comes with the extra [{extra}]", f'pip install "dskit-llm[{extra}]"', ENVIRONMENT
        )
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return CliError(
            "not enough memory",
            str(error),
            getattr(error, "remedy", "a smaller --max-model-len or --max-num-seqs"),
            MEMORY,
        )
    if type(error).__module__.split(".")[0] == "openai" and getattr(error, "request", None) is not None:
        return CliError(
            f"no answer from {error.request.url}", str(error), "dskit serve demo, or another --url", FAILED
        )
    if type(error).__module__.startswith("dskit.") or isinstance(error, (OSError, ValueError)):
        cause = (
            f"{type(error.__cause__).__name__}: {error.__cause__}"
            if error.__cause__
            else type(error).__name__
        )
        return CliError(str(error), cause, "dskit doctor", CODES.get(type(error).__name__, FAILED))
    return None


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    try:
        return dispatch([word for word in argv if word != "--debug"])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        known = explain(error)
        if debug or known is None:
            traceback.print_exc()
        if known is None:
            return FAILED
        print(f"error: {known.what}\n  because: {known.because}\n  try: {known.remedy}", file=sys.stderr)
        return known.code


def dispatch(argv: list[str]) -> int:
    """Find the command that the first word names, and hand it the rest."""
    parser = argparse.ArgumentParser(prog="dskit", description=HEADLINE, epilog=table(), add_help=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"dskit {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND")
    first, rest = argv[:1], argv[1:]
    name = parser.parse_args(first).command
    if name is None:
        parser.print_help(sys.stderr)
        return USAGE
    if name not in COMMANDS:
        raise CliError(f"dskit has no command {name!r}", f"there are {', '.join(COMMANDS)}", "dskit --help")
    return COMMANDS[name](rest)


HEADLINE = "DeepSeek-V4.1-Flash as a kit of parts: read it, run it, serve it, train a small one."


def table() -> str:
    """One line per command."""
    rows = [f"  {name:<9} {run.__doc__.splitlines()[0]}" for name, run in COMMANDS.items()]
    return "\n".join(
        ["commands:", *rows, "", "dskit COMMAND --help shows a command's flags; --debug shows tracebacks."]
    )
