"""What the case table of the norms leaves out: no gain, leading axes, each gradient, wrong arguments."""

from __future__ import annotations

import pytest
import torch

import dskit.model  # noqa: F401 - registers the ops
from dskit import ops
from dskit.kernels import norm as kernel
from dskit.layers import norm
from dskit.testing import assert_close

EPS = 1e-20


def test_without_a_gain_and_with_leading_axes(device):
    x = torch.randn(2, 3, 72, device=device, requires_grad=True)
    y = kernel.rms(x, None, EPS, torch.float32)
    want = norm.rms.reference(x.detach().double(), None, EPS, torch.float64)
    assert_close(y.detach(), want, "E", "norm.rms without a gain")
    (got,) = torch.autograd.grad(y.pow(3).sum(), x)
    x = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(norm.rms.reference(x, None, EPS, torch.float64).pow(3).sum(), x)
    assert_close(got, want, "G", "its gradient")


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["sum", "normed", "both"])
def test_each_output_of_the_joined_norm_has_its_own_gradient(used, device):
    x, residual = (torch.randn(5, 64, device=device, requires_grad=True) for _ in range(2))
    found = []
    for run in (kernel.add_rms, norm.add_rms.reference):
        with ops.use("torch"):
            results = run(x, residual, None, EPS, torch.float32)
        total = sum((results[i] * (i + torch.arange(64, device=device))).sum() for i in used)
        found.append(torch.autograd.grad(total, (x, residual)))
    assert_close(*found, "GG", f"norm.add_rms, outputs {used}")


def test_arguments_that_do_not_fit_are_named(device):
    x = torch.randn(3, 64, device=device)
    with pytest.raises(ValueError, match="gain_D must be \\[64\\]"):
        kernel.rms(x, torch.ones(32, device=device), EPS, torch.float32)
    with pytest.raises(ValueError, match="residual must be \\[3, 64\\]"):
        kernel.add_rms(x, x[:2], None, EPS, torch.float32)
    with pytest.raises(ValueError, match="fmt is 'fp8_33'"):
        kernel.rms_quantize(x, None, EPS, "fp8_33", torch.float32)
    with ops.use({"norm.rms": "triton"}), pytest.raises(ops.Unsupported, match="float64"):
        norm.rms(x.double(), None, EPS, torch.float32)
