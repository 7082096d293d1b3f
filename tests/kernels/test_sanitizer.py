"""compute-sanitizer watches every kernel once: no access beyond its tensors.

It comes with CUDA's toolkit. On some virtual machines it cannot attach to the device and says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dskit.testing import all_cases

STEMS = sorted({name.split(".")[0] for name in all_cases()})
TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
ROOT = Path(__file__).parents[2]
ONCE = "tests.kernels.once"
FOUND = 86  # exit code of the tool when it has something to report


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stem", STEMS)
def test_sanitizer_finds_nothing(stem):
    if not Path(TOOL).exists():
        pytest.skip("compute-sanitizer is not installed; it comes with CUDA's toolkit")
    command = [TOOL, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-m", ONCE, stem]
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # in torch's pool, beyond a tensor lies another
    done = subprocess.run(command, env=os.environ | alone, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if "Device not supported" in said or "error 999" in said:
        pytest.skip("compute-sanitizer cannot attach to this device: " + _about("not supported|999", said))
    assert done.returncode == 0, f"{_guilty(said)}: {_about('=====', said)}"
    assert f"op {stem}." in said, "nothing was run"


def _about(pattern: str, said: str) -> str:
    """The first lines that match."""
    return " | ".join([line.strip() for line in said.splitlines() if re.search(pattern, line)][:6])


def _guilty(said: str) -> str:
    """The op whose name was printed before the first report."""
    before = said.split("========= Invalid")[0].split("========= Error")[0]
    return (re.findall(r"^op (\S+)", before, re.MULTILINE) or ["before the first op"])[-1]


def test_the_guilty_op_is_the_last_one_named():
    said = "op a.b\nop c.d\n========= Invalid __global__ write of size 4 bytes\nop e.f\n"
    assert _guilty(said) == "c.d" and _guilty("========= Error: x") == "before the first op"
    assert _about("Invalid", said).endswith("4 bytes")
