"""Create .venv and install dskit into it: what `make setup`, `make demo` and `make test` do first.

Idea: standard library only, since nothing else is installed yet. torch comes first, because its build
decides what may be pinned after it; then dskit itself, editable, so that a changed layer is what runs
next. Where pip looks for packages is pip's own business: its settings, its environment, and PIP_ARGS.

Usage: python tools/install.py dev|serve|notebook [--browser]
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONTAINS = {"serve": ("serve", "dev"), "notebook": ("notebook", "dev"), "dev": ("dev",)}
DESCRIBE_TORCH = """
import importlib.metadata, torch
pins = [r for r in importlib.metadata.requires("torch") or [] if r.startswith("triton") and "extra" not in r]
print(torch.__version__, torch.version.cuda or "-", "own" if pins else "-")
"""


def main() -> None:
    """Parse the arguments, install what is missing, say what was found."""
    parser = argparse.ArgumentParser(description="Create .venv and install dskit into it.")
    parser.add_argument("extra", choices=sorted(CONTAINS))
    parser.add_argument("--browser", action="store_true", help="also Debian's chromium, for the browser test")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036, an older one is what this line is for
        stop(
            f"dskit needs Python 3.11 or newer, this is {sys.version.split()[0]}",
            "make setup PYTHON=python3.12",
        )
    if not is_current(options.extra):
        create_venv()
        install(options.extra)
        stamp(options.extra).write_text(fingerprint())
    if options.browser:
        find_browser()


def create_venv() -> None:
    """Make .venv unless a usable one is there; a broken one is replaced."""
    if (
        PYTHON.exists()
        and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    ):
        return
    say(f"creating .venv with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True)
    if made.returncode:
        stop(
            f"python -m venv failed: {(made.stdout + made.stderr).strip()}",
            "apt-get install python3-venv (Debian, Ubuntu)",
        )


def install(extra: str) -> None:
    """Install torch, then dskit with one extra, under the constraints that fit this machine."""
    driver = has_nvidia_driver()
    say(
        "NVIDIA driver: "
        + ("found, torch as pip finds it" if driver else "none, torch as constraints.txt pins it")
    )
    pip("torch>=2.11", without={"torch", "triton"} if driver else {"triton"})
    version, cuda, own_triton = run_python(DESCRIBE_TORCH).split()
    say(f"torch {version}: " + (f"CUDA {cuda} build" if cuda != "-" else "CPU build"))
    if driver and cuda == "-":
        say("this build cannot use the GPU: pip's settings lead to CPU wheels; README.md, 'Which torch'")
    if not driver and cuda != "-":
        say("it works without a GPU, but the CPU build is far smaller; README.md, 'Which torch'")
    free = {"torch"} if driver else set()
    pip("-e", f".[{extra}]", without=free | ({"triton"} if own_triton == "own" else set()))


def pip(*what: str, without: set[str]) -> None:
    """Run pip install with constraints.txt less the packages named; stop with pip's exit code if it fails."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if re.split("==", line)[0] not in without]
    constraints = VENV / "constraints.txt"
    constraints.write_text("\n".join(kept) + "\n")
    arguments = shlex.split(os.environ.get("PIP_ARGS", ""))
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [PYTHON, "-m", "pip", "install", *quiet, "-c", constraints, *arguments, *what]
    say("pip install " + " ".join(what))
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        stop(
            f"pip install {' '.join(what)} failed with exit code {code}",
            "the same command again, with PIP_ARGS=-v",
        )


def find_browser() -> None:
    """Find chromium, or install Debian's where apt-get can be used; without one the browser test skips."""
    if shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome"):
        return
    if not (shutil.which("apt-get") and os.geteuid() == 0):
        say("no chromium here, and apt-get cannot be used: the browser test will be skipped")
        return
    say("apt-get install chromium, for the browser test")
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "-qq", "update"], **quiet)
    if subprocess.run(
        ["apt-get", "-qq", "install", "-y", "--no-install-recommends", "chromium"], **quiet
    ).returncode:
        stop("apt-get could not install chromium", "install chromium by hand, then make test")


def has_nvidia_driver() -> bool:
    """Whether a loaded NVIDIA driver shows on this machine; the tool alone is no driver."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def fingerprint() -> str:
    """Hash of everything that decides what is installed."""
    text = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    return hashlib.sha256(text + str(has_nvidia_driver()).encode()).hexdigest()


def is_current(extra: str) -> bool:
    """Whether this extra, or one that contains it, was installed from the present files."""
    stamps = [stamp(name) for name in CONTAINS[extra]]
    return PYTHON.exists() and any(path.exists() and path.read_text() == fingerprint() for path in stamps)


def stamp(extra: str) -> Path:
    """Path of the file that records a finished installation."""
    return VENV / f"installed-{extra}"


def run_python(code: str) -> str:
    """Output of a snippet run by the environment's Python."""
    return subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout


def say(line: str) -> None:
    """One line of progress."""
    print(f"setup: {line}", file=sys.stderr, flush=True)


def stop(what: str, remedy: str) -> None:
    """End with the error and what to try."""
    sys.exit(f"error: {what}\n  try: {remedy}")


if __name__ == "__main__":
    main()
