"""RMSNorm: divide a vector by its root mean square, then scale each channel by a learned gain.

Idea: y = gain * x / sqrt(mean(x^2) + eps). Normalise first, then multiply by the gain, then round once; eps
is 1e-20 in V4.1 and only guards exact zeros, so a zero vector stays zero.

Shapes: x [..., D] -> [..., D] in the dtype asked for; gain [D]. What follows or precedes the norm on the hot
path, an addition or the rounding of a product's input, is joined to it in an op of its own.
Errors: none of its own.
Numerics: statistic and gain in float32 (float64 stays float64), one rounding at the end; `steady`: summed in
the same order however many rows there are.
Kernel: kernels/norm.py (norm.rms, norm.add_rms, norm.rms_quantize)
Source: model.md 3.3, config field rms_norm_eps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dskit import ops


def up(x: Tensor) -> Tensor:
    """x in float32 at least: bfloat16 is widened, float64 stays."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, without a call when it is already: a decode step on a CPU pays per call."""
    return x if x.dtype == dtype else x.to(dtype)


def ordered(steady: bool) -> dict[str, bool]:
    """What a call says where sums must have one order; else nothing, which any implementation understands."""
    return {"steady": True} if steady else {}


@ops.op("norm.rms")
def rms(x: Tensor, gain_D: Tensor | None, eps: float, dtype: torch.dtype, steady: bool = False) -> Tensor:
    """RMSNorm over the last axis, [..., D] -> [..., D] of `dtype`; without a gain only the division."""
    wide = up(x)
    gain = None if gain_D is None else cast(gain_D, wide.dtype)
    return cast(F.rms_norm(wide, (x.shape[-1],), gain, eps), dtype)


@ops.op("norm.add_rms")
def add_rms(x: Tensor, residual: Tensor, gain_D: Tensor | None, eps: float,
            dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x + residual, rounded to their dtype; the RMSNorm of that sum in `dtype`), both [..., D]."""
    total = x + residual
    return total, rms(total, gain_D, eps, dtype)


@ops.op("norm.rms_quantize")
def rms_quantize(x: Tensor, gain_D: Tensor | None, eps: float, fmt: str,
                 dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x in `dtype`; that, quantised in `fmt` and restored), both [..., D] of `dtype`."""
    normed = rms(x, gain_D, eps, dtype)
    return normed, ops.find("linear.quantize")(normed, fmt, dtype)  # linear.py builds on this file


class RMSNorm(nn.Module):
    """RMSNorm with the gain of the checkpoint."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, steady: bool = False):
        super().__init__()
        self.eps, self.dtype, self.steady = eps, dtype, steady
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D] in the dtype of values."""
        return rms(x, self.weight, self.eps, self.dtype, **ordered(self.steady))
