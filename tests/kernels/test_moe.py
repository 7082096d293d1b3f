"""What the case table does not say of moe.combine: places that are none."""

import pytest
import torch

pytest.importorskip("triton")

import dskit.model  # noqa: F401 - registers the ops
from dskit import ops
from dskit.kernels import moe


@pytest.mark.parametrize("bad", [-1, 7, 1 << 40])
@pytest.mark.parametrize("width", [5, 64, 1100])
def test_a_place_beyond_the_rows_reads_nothing_and_makes_its_token_nan(device, bad, width):
    y = torch.randn(9, width, device=device)[:7]  # 7 rows; what lies behind them is none
    place = torch.tensor([[0, 6], [3, 3], [2, 5]], device=device)
    shared = torch.randn(3, width, device=device)
    want = ops.find("moe.combine").reference(y, place, shared, torch.float32)
    assert torch.allclose(moe.combine(y, place, shared, torch.float32), want)
    place[1, 1] = bad
    got = moe.combine(y, place, shared, torch.float32)
    assert got[1].isnan().all() and torch.allclose(got[[0, 2]], want[[0, 2]])
