"""`dskit doctor`: what this machine can do, one line per check, and how to mend what it cannot.

Idea: a check is a function that returns its finding: `ok`, `warn` (works, but not fully) or `fail` (dskit
cannot run). Checks are ordered from the ground up, so the first bad line is usually the cause of those
below it.

With `--plan` nothing is checked: engine/plan.py says what a model would take, and this prints it.

Units: memory and disk in GB (1e9 bytes), times in seconds.
Errors: a check that raises is a `fail` with the exception's text; exit code 1 if any check fails, else 0.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dskit

TESTED_PYTHON = ((3, 11), (3, 13))
TESTED_TORCH = ((2, 11), (2, 13))
OPTIONAL = {  # import name: (extra, what it enables)
    "gradio": ("serve", "the chat page"),
    "fastapi": ("serve", "the API"),
    "openai": ("serve", "dskit chat --url"),
    "jupyterlab": ("notebook", "the notebooks"),
    "ipywidgets": ("notebook", "widgets in notebooks"),
    "matplotlib": ("train", "plots"),
    "tensorboard": ("train", "training scalars for TensorBoard"),
    "xgrammar": ("grammar", "structured output"),
    "transformers": ("dev", "the peer of dskit bench"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is empty when nothing needs mending."""

    check: str
    status: str
    detail: str
    remedy: str = ""


def python() -> Finding:
    """Python inside the tested range."""
    return _within("python", platform.python_version(), TESTED_PYTHON, "make setup PYTHON=python3.12")


def torch_version() -> Finding:
    """torch inside the tested range, and which build it is."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found = _within("torch", torch.__version__, TESTED_TORCH, "make setup, which installs a tested version")
    return Finding("torch", found.status, f"{found.detail}, {build} build", found.remedy)


def gpu() -> Finding:
    """Which GPU torch can use, and what the number formats mean there."""
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        free, total = torch.cuda.mem_get_info()
        fp8 = "FP8 in hardware" if (major, minor) >= (8, 9) else "FP8 weights are restored before use"
        fp4 = "FP4 in hardware" if major >= 10 else "FP4 weights are restored before use"
        memory = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        return Finding(
            "gpu", "ok", f"{torch.cuda.get_device_name()}, capability {major}.{minor}, {memory}; {fp8}, {fp4}"
        )
    if Path("/proc/driver/nvidia/version").exists():
        return Finding(
            "gpu", "warn", "a driver is loaded, but this torch is a CPU build", "README.md, 'Which torch'"
        )
    return Finding("gpu", "ok", "none: everything runs on the CPU")


def processor() -> Finding:
    """The processor and torch's threads."""
    import torch

    from dskit.bench.environment import processor as name

    return Finding(
        "cpu", "ok", f"{name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    )


def triton() -> Finding:
    """Whether triton is there, and whether its kernels are compiled or interpreted."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return Finding(
            "triton", "ok", "not installed; the torch ops need none", 'pip install "dskit-llm[triton]"'
        )
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return Finding("triton", "ok", f"{found}, interpreted: right results at no useful speed")
    where = (
        "compiled for the GPU"
        if torch.cuda.is_available()
        else "needs a GPU, or TRITON_INTERPRET=1 to interpret"
    )
    return Finding("triton", "ok", f"{found}, {where}")


def compiler() -> Finding:
    """A C++ compiler, which the implementation `compile` needs on a CPU."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if found:
        return Finding("compiler", "ok", f"{Path(found).name}, for --kernels compile")
    return Finding(
        "compiler", "warn", "no C++ compiler, so no --kernels compile", "apt-get install g++ (Debian, Ubuntu)"
    )


def disk() -> Finding:
    """Room in the working folder and in the cache of Hugging Face."""
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    detail = (
        f"{free:.1f} GB free here; downloads go to {cache}{', but HF_HUB_OFFLINE is set' if offline else ''}"
    )
    if free < 1:
        return Finding("disk", "warn", detail, "free some space, or set HF_HOME to a larger disk")
    return Finding("disk", "ok", detail)


def port() -> Finding:
    """Port 8000, which `dskit serve` takes by default."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)):
            return Finding("port 8000", "ok", "free")
    return Finding("port 8000", "warn", "something listens there already", "dskit serve demo --port 0")


def optional() -> Finding:
    """Optional packages that are missing, and what each would enable."""
    missing = {name: what for name, what in OPTIONAL.items() if importlib.util.find_spec(name) is None}
    if not missing:
        return Finding("extras", "ok", "all optional packages are installed")
    detail = "; ".join(f"no {name}: not {what}" for name, (_, what) in missing.items())
    extras = ",".join(sorted({extra for extra, _ in missing.values()}))
    return Finding("extras", "ok", detail, f'pip install "dskit-llm[{extras}]"')


def ops_table() -> Finding:
    """Which implementation each group of ops would use."""
    from dskit import model, ops  # noqa: F401, importing the model registers its ops

    rows = ops.explain()
    chosen = sorted({str(row["selected"]) for row in rows})
    return Finding("ops", "ok", f"{len(rows)} ops, selected: {', '.join(chosen)}")


def end_to_end() -> Finding:
    """Eight tokens from the tiny model, load included."""
    from dskit.engine.llm import LLM
    from dskit.engine.seq import SamplingParams

    start = time.perf_counter()
    with LLM("tiny") as llm:
        loaded = time.perf_counter()
        result = llm.generate([[3, 4, 5, 6]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[
            0
        ]
    end = time.perf_counter()
    if result.finish_reason != "length":
        return Finding(
            "tiny model", "fail", f"ended with {result.finish_reason}: {result.error}", "dskit doctor --debug"
        )
    return Finding("tiny model", "ok", f"loaded in {loaded - start:.2f} s, 8 tokens in {end - loaded:.2f} s")


CHECKS: tuple[Callable[[], Finding], ...] = (
    *(python, torch_version, gpu, processor, triton, compiler, disk, port, optional, ops_table, end_to_end),
)


def examine() -> list[Finding]:
    """Run every check; one that raises is a finding too."""
    found = []
    for check in CHECKS:
        try:
            found.append(check())
        except Exception as error:
            name = check.__name__.replace("_", " ")
            found.append(Finding(name, "fail", f"{type(error).__name__}: {error}", "make setup"))
    return found


def plan(args: Any) -> int:
    """Print what a model would take on some GPUs; 1 if it does not fit."""
    from dskit import checkpoint
    from dskit.engine.plan import Plan, parse_gpus

    count, machine = parse_gpus(args.gpus, args.machine)
    settings = {"max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len}
    found = Plan(checkpoint.configuration(args.plan), count, machine, **settings)
    print(json.dumps({"model": args.plan, **found.to_dict()}) if args.json else f"{args.plan} on {found}")
    return int(not found.fits)


def main(args: Any) -> int:
    """Print the report, write the bundle if asked for; 1 if any check fails."""
    if args.plan is not None:
        return plan(args)
    findings = examine()
    lines = [f"dskit {dskit.__version__}", *(line(finding) for finding in findings)]
    if args.bundle:
        Path(args.bundle).write_text(scrub("\n".join(lines)) + "\n")
        print(f"written to {args.bundle}", file=sys.stderr)
    if args.json:
        print(json.dumps({"dskit": dskit.__version__, "checks": [asdict(finding) for finding in findings]}))
    else:
        print("\n".join(lines))
    return int(any(finding.status == "fail" for finding in findings))


def line(finding: Finding) -> str:
    """A finding as one line of text."""
    remedy = f"  [try: {finding.remedy}]" if finding.remedy else ""
    return f"{finding.status:<5} {finding.check:<11} {finding.detail}{remedy}"


def scrub(text: str) -> str:
    """Take home folder, user and host name out of a text."""
    home, user, host = str(Path.home()), os.environ.get("USER", ""), socket.gethostname()
    text = text.replace(home, "~")
    for word in filter(None, (user, host)):
        text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])", "...", text)
    return text


def _within(check: str, found: str, tested: tuple[tuple[int, int], tuple[int, int]], remedy: str) -> Finding:
    low, high = (".".join(map(str, end)) for end in tested)
    number = tuple(int(part) for part in found.split(".")[:2])
    if number < tested[0]:
        return Finding(check, "fail", f"{found} is older than {low}", remedy)
    if number > tested[1]:
        return Finding(check, "warn", f"{found} is newer than {high}, the newest tested", remedy)
    return Finding(check, "ok", found)
