"""What the case table of the roundings leaves out: the round trip, leading axes, wrong arguments."""

from __future__ import annotations

import pytest
import torch

import dskit.model  # noqa: F401 - registers the ops
from dskit import ops
from dskit.kernels import linear as kernel
from dskit.layers import linear
from dskit.testing import assert_close

FORMATS = ["fp8_32", "fp8_64", "fp8_128", "fp4_32", "fp4_16"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("which", ["torch", "triton"])
def test_what_is_stored_restores_to_what_quantize_gives(fmt, which, device):
    x = torch.randn(3, 2, 200, device=device) * torch.logspace(-9, 9, 200, device=device)
    x[..., ::9], x[..., 1::9] = 0.0, -0.0
    with ops.use({f"linear.{name}": which for name in ("quantize", "encode", "decode")}):
        codes, scales = linear.encode(x, fmt)
        back = linear.decode(codes, scales, fmt, torch.float32)
        want = linear.quantize(x, fmt, torch.float32)
    assert codes.shape == (3, 2, 200 if fmt.startswith("fp8") else 100)
    assert scales.shape == (3, 2, -(-200 // linear.group_size(fmt)))
    assert codes.dtype == scales.dtype == torch.uint8
    assert_close(back, want, "X", f"{fmt}, {which}")


@pytest.mark.parametrize("fmt", ["fp8_32", "fp4_32"])
def test_stored_weights_and_stored_activations_have_one_layout(fmt):
    weight = torch.randn(4, 64)
    pack = (lambda w: linear.pack_fp8(w, (1, 32))) if fmt == "fp8_32" else linear.pack_fp4
    codes, scales = (t.view(torch.uint8) for t in pack(weight))
    assert_close(linear.encode.reference(weight, fmt), (codes, scales), "XX", fmt)


def test_arguments_that_do_not_fit_are_named(device):
    x = torch.randn(3, 33, device=device)
    for encode in (kernel.encode, linear.encode.reference):
        with pytest.raises(ValueError, match="33"):
            encode(x, "fp4_32")
    with pytest.raises(ValueError, match="fmt is 'fp4_64'"):
        kernel.quantize(x, "fp4_64", torch.float32)
    codes, scales = kernel.encode(x, "fp8_32")
    with pytest.raises(ValueError, match="scales must be \\[3, 2\\]"):
        kernel.decode(codes, scales[:, :1], "fp8_32", torch.float32)
    with ops.use({"linear.quantize": "triton"}), pytest.raises(ops.Unsupported, match="float64"):
        linear.quantize(x.double(), "fp8_32", torch.float32)
