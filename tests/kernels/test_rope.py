"""What the case table of the rotation leaves out: kept channels, transposed rows, the way back, refusals."""

from __future__ import annotations

import pytest
import torch

import dskit.model  # noqa: F401 - registers the ops
from dskit import ops
from dskit.kernels import rope as kernel
from dskit.layers import rope
from dskit.testing import assert_close


@pytest.fixture
def turn(device):
    return rope.turns(torch.arange(4, device=device) * 1000, torch.tensor([1.0, 0.1, 0.01], device=device))


def test_turned_back_it_is_what_it_was(turn, device):
    x = torch.randn(4, 2, 3, 10, device=device)
    assert_close(kernel.rotate(kernel.rotate(x, turn), turn, inverse=True), x, "F", "there and back")


def test_kept_channels_are_copied_whatever_they_hold(turn, device):
    x = torch.randn(4, 10, device=device)
    x[:, 0], x[:, 1], x[:, 2] = torch.inf, torch.nan, -0.0
    assert_close(kernel.rotate(x, turn)[:, :4], x[:, :4], "X", "kept channels")
    assert not kernel.rotate(x, turn)[:, 4:].isnan().any()


def test_rows_that_lie_apart_and_a_conjugated_turn(turn, device):
    x = torch.randn(10, 3, 4, device=device).permute(2, 1, 0)
    want = rope.rotate.reference(x.contiguous(), turn, inverse=True)
    assert_close(kernel.rotate(x, turn.conj()), want, "F", "permuted")


def test_arguments_that_do_not_fit_are_named(turn, device):
    x = torch.randn(4, 10, device=device)
    with pytest.raises(ValueError, match="turn_T must be \\[3, pairs\\]"):
        kernel.rotate(x[:3], turn)
    with pytest.raises(ValueError, match="turns 6 channels; x has 4"):
        kernel.rotate(x[:, :4], turn)
    learned = turn.clone().requires_grad_()
    refused = {"float64": (x.double(), turn), "even": (x[:, 1:], turn), "no gradient": (x, learned)}
    for reason, args in refused.items():
        with ops.use({"rope.rotate": "triton"}), pytest.raises(ops.Unsupported, match=reason):
            rope.rotate(*args)
