"""What the case table of cache.py cannot say: odd strides, NaN that must show, a model on the kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dskit import checkpoint, ops
from dskit.kernels import cache as kernel
from dskit.layers.cache import Packing, write_
from dskit.testing import Maker, all_cases, assert_close
from tests import drive, models


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_slice_of_wider_rows_is_read_where_it_lies(first, device):
    wide = torch.randn(5, 71).bfloat16().to(device)
    v, packing = wide[:, first : first + 64], Packing(64, "fp8_32", 0, torch.bfloat16)
    rows, _ = kernel.ready(v, None, 0.0, None, packing, True)
    assert_close(rows, packing.pack(v), "X", f"columns from {first}")


def test_wiped_rows_read_as_nan(device):
    """A freed row is filled with 0xFF, which must show in whoever reads it."""
    for fmt, tail in (("fp8_32", 0), ("fp4_16", 0), ("fp4_32", 0), ("fp8_64", 32)):
        packing = Packing(128, fmt, tail, torch.bfloat16)
        held = torch.full((2, packing.nbytes), 0xFF, dtype=torch.uint8, device=device)
        row = torch.tensor([1], device=device)
        assert kernel.read(held, row, packing, torch.bfloat16).isnan().all(), fmt


def test_a_cache_of_numbers_is_written_too(device):
    """Expanded caches take the same kernel; every slot is real there."""
    shape = {"rows": 4, "width": 96, "bits": 4, "group": 16, "turned": 20, "norm": 1}
    _, *vectors, _, packing, _ = all_cases()["cache.write_"].make(shape, Maker(device))
    slots = torch.tensor([3, 0, 5, 1], device=device)
    found, wanted = (run(torch.zeros(6, 96, device=device), *vectors, slots, packing, True)
                     for run in (kernel.write_, write_.reference))
    assert_close(found, wanted, "QE", "numbers")


def test_a_model_runs_on_the_kernels(device):
    """Prefill and decode of a small model from packed caches, written and read by the kernels."""
    model = checkpoint.load("tiny", device=device)
    ids, schedule = [torch.randint(6, 200, (11,)).tolist()], [{0: 8}, {0: 2}, {0: 1}]
    with ops.use("torch"):
        wanted = drive.play(drive.runner(model, sequences=1, cache_storage="packed"), ids, schedule)
    with ops.use("torch", cache="triton"):
        found = drive.play(drive.runner(model, sequences=1, cache_storage="packed"), ids, schedule)
    assert models.relative_rms(found[0], wanted[0]) < 0.02
