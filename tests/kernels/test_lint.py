"""What every kernel file keeps to: rounding and products by common.py, its sections, a case table per op."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dskit.engine.sampler
import dskit.kernels
import dskit.model  # noqa: F401 - the engine and the model register the ops
from dskit import ops
from dskit.testing import all_cases

FILES = sorted(Path(dskit.kernels.__file__).parent.glob("[!_]*.py"))
NARROW = ("tl.bfloat16", "tl.float8e4nv")


def _stem(path: Path) -> str:
    return path.stem


def offences(source: str) -> list[str]:
    """Casts to types that the interpreter truncates or old GPUs lack, and products that it gets wrong."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        given = [ast.unparse(value) for value in (*call.args, *(word.value for word in call.keywords))]
        cast = isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cast")
        if (cast and any(value in NARROW for value in given)) or ast.unparse(call.func) == "tl.dot":
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize("source", ["y = (a + b).to(tl.bfloat16)", "y = x.to(tl.float8e4nv, bitcast=True)",
                                    "tl.cast(x, dtype=tl.bfloat16)", "acc = tl.dot(a, b, acc)"])
def test_the_lint_finds_what_it_looks_for(source):
    assert offences(source) and not offences("y = dot(to_bf16(a), b, acc).to(tl.float32)")


@pytest.mark.parametrize("path", FILES, ids=_stem)
def test_rounding_and_products_are_those_of_common(path):
    found = [] if path.stem == "common" else offences(path.read_text())
    assert not found, f"{path.name}: narrow, to_bf16, e4m3_code, from_e4m3, dot of common.py do this: {found}"


@pytest.mark.parametrize("path", FILES, ids=_stem)
def test_a_kernel_file_says_shapes_errors_and_source(path):
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    there = re.findall(r"^(Shapes|Errors|Source)\b", text, re.MULTILINE)
    missing = {"Shapes", "Errors", "Source"}.difference(there)
    assert not missing, f"{path.name} has no section {missing}"


def _kernels() -> dict[str, ops.Implementation]:
    """All but those between ranks, which tests/kernels/test_exchange.py calls on several."""
    found = {}
    for name, op in ops.all_ops().items():
        if name.startswith("exchange."):
            continue
        try:
            found[name] = op.implementation("triton")
        except ops.UnknownImplementation:
            continue
    return found


def test_every_kernel_has_a_case_table():
    missing = _kernels().keys() - all_cases().keys()
    assert not missing, f"no cases in dskit/testing for {sorted(missing)}"


def test_every_table_has_edges_and_every_gradient_that_is_offered_is_compared():
    cases = all_cases()
    for name, kernel in _kernels().items():
        assert cases[name].edges, f"{name} has no edge shapes"
        assert not kernel.grad or cases[name].grads, f"{name} offers gradients; its cases name none"
