"""The header of a result: commit, machine, versions, configuration, and whether a user gets this.

Idea: a figure answers four questions or it is worth nothing: which commit, which configuration, which
interval was timed, and does a user get this without asking. Names of hosts, users and folders stay out,
so that a result can be shown to others.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

import dskit

SWITCHES = ("DSKIT_USE", "DSKIT_AUTOTUNE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET")


def environment(
    llm: Any, settings: dict[str, Any], defaults: dict[str, Any], interval: str
) -> dict[str, Any]:
    """Header of a result for a loaded LLM."""
    return header(llm.device, settings, defaults, interval) | {"config": asdict(llm.config)}


def header(
    device: torch.device | str, settings: dict[str, Any], defaults: dict[str, Any], interval: str
) -> dict[str, Any]:
    """Header of a result: `settings` are the flags used, `defaults` a user's."""
    switches = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    return {
        "commit": commit(),
        "dskit": dskit.__version__,
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "settings": settings,
        "switches": switches,
        "defaults": settings == defaults and not switches,
        "interval": interval,
    }


def commit() -> str:
    """Commit of the running code, with `-dirty` when files of the package were changed; outside a checkout
    what DSKIT_COMMIT says, else the version.
    """
    elsewhere = os.environ.get("DSKIT_COMMIT") or f"version {dskit.__version__}"
    folder = Path(dskit.__file__).parent
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(describe, capture_output=True, text=True)
    except FileNotFoundError:
        return elsewhere
    return found.stdout.strip() if found.returncode == 0 else elsewhere


def device_name(device: torch.device | str) -> str:
    """Name of the GPU, or of the processor."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {os.cpu_count()} cores"


def processor() -> str:
    """Model name of the processor as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def say(line: str) -> None:
    """One line of progress on stderr."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def deliver(report: dict[str, Any], args: Any, label: str, command: str,
            show: Callable[[dict[str, Any]], None]) -> int:
    """Keep a report where `--result-dir` says, then print it, as JSON where asked; the exit status.

    label, command: of the folder, and the command line for its header.
    """
    if args.result_dir:
        say(f"written to {write(report, args.result_dir, label, command)}")
    print(json.dumps(report)) if args.json else show(report)
    return 0


def write(report: dict[str, Any], result_dir: str, label: str, command: str) -> Path:
    """Write run.json (the header) and bench.json (the rest) into a new folder of `result_dir`; returns it.

    command: the command line that made the report, for its header.
    """
    folder = new_folder(result_dir, label)
    header = {"command": command, **report["env"]}
    (folder / "run.json").write_text(json.dumps(header, indent=2) + "\n")
    rest = {name: value for name, value in report.items() if name != "env"}
    (folder / "bench.json").write_text(json.dumps(rest, indent=2) + "\n")
    return folder


def new_folder(result_dir: str, label: str) -> Path:
    """A folder of today's that was not there before."""
    stem = f"{date.today().isoformat()}-{label}"
    folder, n = Path(result_dir) / stem, 1
    while folder.exists():
        n += 1
        folder = Path(result_dir) / f"{stem}-{n}"
    folder.mkdir(parents=True)
    return folder
