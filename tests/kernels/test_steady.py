"""Numerics that ask for it get a row's sums in the same order, however many rows there are."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("triton")

import dskit.model  # noqa: F401 - has all ops, whose kernels are imported next
from dskit import ops
from dskit.kernels import cache, compress, engram, norm
from dskit.layers.cache import Packing
from dskit.layers.norm import RMSNorm
from dskit.testing import Maker, outputs

COUNTS = 1, 2, 8, 32, 128, 512


def calls(width: int, rows: int, device: str):
    """(kernel file, op, arguments of the first rows, which of the results have a row each)."""
    m = Maker(device)
    x, gain = m.normal(rows, width), m.normal(width, dtype=torch.float32)
    packing = Packing(512, "fp8_32", 0, torch.bfloat16)
    v, weight = m.normal(rows, 512), m.normal(512, dtype=torch.float32)
    turn = torch.polar(torch.ones(rows, 32, device=device), m.normal(rows, 32, dtype=torch.float32))
    line, read = m.normal(rows, 2, 1024, dtype=torch.float32), m.integers(rows, rows, 8)
    X, key, value = m.normal(rows, 4, width), m.normal(rows, 4, width), m.normal(rows, width)
    q, k = m.normal(4, width, dtype=torch.float32), m.normal(4, width, dtype=torch.float32)
    slots = torch.arange(rows, device=device)

    def bytes_(n: int) -> torch.Tensor:
        return torch.zeros(n, packing.nbytes, dtype=torch.uint8, device=device)

    return {
        "norm.rms": (norm, lambda n: (x[:n], gain, 1e-6, torch.bfloat16)),
        "cache.ready": (cache, lambda n: (v[:n], weight, 1e-6, turn[:n], packing, True)),
        "cache.write_": (cache, lambda n: (bytes_(n), v[:n], weight, 1e-6, turn[:n], slots[:n], packing)),
        "compress.pool": (compress, lambda n: (line, read[:n], 512, torch.bfloat16)),
        "engram.gate": (engram, lambda n: (X[:n], key[:n], value[:n], q, k, 1e-6)),
    }


NAMES = list(calls(64, 1, "cpu"))


def steadily(name: str, args: tuple) -> torch.Tensor:
    return outputs(ops.find(name).implementation("triton").function(*args, steady=True))[0]


@pytest.mark.parametrize("name", NAMES)
def test_no_table_is_asked_for_so_many_rows(name, device, monkeypatch):
    def asked(*_):
        raise LookupError("a configuration for so many rows")

    module, given = calls(64, 3, device)[name]
    monkeypatch.setattr(module, "tuned", asked)
    steadily(name, given(3))
    with pytest.raises(LookupError):
        ops.find(name).implementation("triton").function(*given(3))


def test_every_op_that_can_be_steady_is_tested():
    """Or has tiles of fixed rows (row_tile), as products have."""
    able = {name for name, op in ops.all_ops().items()
            if "steady" in inspect.signature(op.reference).parameters}
    elsewhere = {"mla.attend_cached", "moe.route", "moe.swiglu", "moe.swiglu_quantize"}
    assert able - elsewhere == set(NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_do_not_depend_on_how_many_there_are(name):
    """At the released width and V4's, where a row's sum takes several warps."""
    for width in (5120, 4096):
        _, given = calls(width, 4096, "cuda")[name]
        whole = steadily(name, given(4096))
        for count in COUNTS:
            assert torch.equal(steadily(name, given(count)), whole[:count]), f"{count} rows of {width}"


def test_an_implementation_that_knows_of_no_order_is_not_asked_for_one(monkeypatch):
    """Somebody's own norm of four arguments, as in the notebooks, where bits may depend on the batch."""
    def simple(x, gain_D, eps, dtype):
        return (x * gain_D / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(dtype)

    monkeypatch.setattr(ops.find("norm.rms").implementations["torch"], "function", simple)
    x = torch.randn(3, 8)
    with ops.use({"norm.rms": "torch"}):
        y = RMSNorm(8, 1e-6, torch.float32)(x)
        assert torch.allclose(y.pow(2).mean(-1), torch.ones(3), atol=1e-3)
        with pytest.raises(TypeError, match="steady"):
            RMSNorm(8, 1e-6, torch.float32, steady=True)(x)
