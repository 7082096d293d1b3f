"""Every kernel compiles for a GPU that is not here, within its registers and its shared memory.

The interpreter accepts what a compiler refuses, so the ops that ask the compiler for most are compiled for
sm_90 in the default run, at one of their released widths; under `slow` all ops, at all shapes, and for sm_80
at all released ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from dskit.bench.offline import LEFT_OUT, Launches, instructions
from dskit.kernels import common
from dskit.testing import all_cases

SWITCHES = ("TRITON_INTERPRET", "DSKIT_USE")
HARD = ("mhc.boundary", "mla.attend_cached", "moe.experts")


def survey(*words: str, ops: tuple[str, ...] = ()) -> list[dict]:
    """The report of processes of their own, since kernels that are interpreted cannot be compiled."""
    clean = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    ops = ops or tuple(sorted(all_cases()))
    parts = [["--op", ",".join(ops[i::2])] for i in (0, 1)]
    command = [sys.executable, "-m", "dskit.bench.offline", *words]
    running = [subprocess.Popen([*command, *part], env=clean, stdout=subprocess.PIPE, text=True)
               for part in parts]
    rows = []
    for process in running:
        rows += (part := json.loads(process.communicate()[0]))
        assert process.returncode == int(any("error" in row for row in part))
    return rows


def failures(rows: list[dict]) -> str:
    return "\n".join(f"{row['op']} at {row['shape']}: {row['error']}" for row in rows if "error" in row)


def check(rows: list[dict], ops: set[str]) -> None:
    """Everything compiles, within a thread's registers."""
    assert not failures(rows), failures(rows)
    assert {row["op"] for row in rows} <= ops
    assert all(0 < row["registers"] <= 255 for row in rows if "kernel" in row)


def refusals(rows: list[dict]) -> list[dict]:
    return [row for row in rows if not row.get("refused", LEFT_OUT).startswith(LEFT_OUT)]


def test_the_hardest_ops_compile_for_sm_90():
    rows = survey("--arch", "90", "--shapes", "one", ops=HARD)
    check(rows, set(HARD))
    assert not refusals(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shapes"), [("90", "frozen"), ("90", "edges"), ("80", "frozen")])
@pytest.mark.timeout(1800)
def test_every_configuration_compiles(arch, shapes):
    rows = survey("--arch", arch, "--shapes", shapes)
    check(rows, set(all_cases()))
    assert arch != "90" or shapes != "frozen" or not refusals(rows), f"sm_90 is the target: {refusals(rows)}"


def test_instructions_are_counted():
    ptx = """
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];
        @%p1 ld.global.L1::evict_first.b16 { %rs1 }, [ %rd2 ];
        cp.async.cg.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x10, %r6;
        wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd4, %rd5, 1, 1, 1, 0, 0;
        st.global.v2.b32 [ %rd6 + 0 ], { %r7, %r8 };
    """
    assert instructions(ptx) == {"wgmma": 1, "mma": 0, "cp_async": 1, "tma": 0,
                                 "load_bits": 128, "store_bits": 64}
    assert instructions("cp.async.ca.shared.global [ %r5 ], [ %rd3 ], 0x4;")["load_bits"] == 32


def test_interpreting_and_compiling_exclude_each_other(monkeypatch):
    monkeypatch.setattr(common, "INTERPRET", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        Launches(90)
