"""Rotary embedding: turn pairs of channels by an angle that grows with the position.

Idea: channels (0,1), (2,3), ... of the LAST `qk_rope_head_dim` channels are rotated by position * frequency;
a dot product of two rotated vectors then depends on their distance. Values are rotated too in this model (key
and value are one vector), so the attention output is rotated back by the query's position.

    (a, b) -> (a cos - b sin, a sin + b cos)

Window-only layers use base `rope_theta`; layers that read global KV use `compress_rope_theta` with YaRN,
which divides the slow frequencies by `factor` so that positions beyond the trained length stay in range.

Shapes: x [T, ..., H], turn complex [T, H_rot/2] -> [T, ..., H].
Errors: ConfigError for a rope_scaling that is not YaRN.
Numerics: angles and rotation in float32, one rounding; no magnitude scaling.
Kernel: kernels/rope.py (rope.rotate)
Source: model.md 3.5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dskit import ops
from dskit.config import ConfigError, ModelConfig
from dskit.layers.norm import cast, up


def frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """Radians per position of each channel pair, float32 [H_rot/2]; `compressed` for layers of ratio > 0."""
    width = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    theta = base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    scaling = config.rope_scaling
    if not compressed or not scaling:
        return theta
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        raise ConfigError(f"rope_scaling is {scaling!r}; dskit knows rope_type 'yarn'")

    def pair(turns: float) -> float:  # the channel pair that makes `turns` turns over the original length
        length = scaling["original_max_position_embeddings"]
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair(scaling["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return theta / scaling["factor"] * ramp + theta * (1 - ramp)


def turns(pos_T: Tensor, frequency: Tensor) -> Tensor:
    """What each row is turned by, exp(i angle), complex64 [T, H_rot/2], of integer positions."""
    angle = pos_T[:, None].float() * frequency
    return torch.polar(torch.ones_like(angle), angle)


@ops.op("rope.rotate")
def rotate(x: Tensor, turn_T: Tensor, inverse: bool = False) -> Tensor:
    """Turn the last channels of x [T, ..., H] by its rows' angles; `inverse` turns back. Same dtype out.

    A pair (a, b) is the complex number a + ib, and turning it is one product.
    """
    width = 2 * turn_T.shape[-1]
    turn = turn_T.conj() if inverse else turn_T
    turn = turn.view(-1, *(1,) * (x.dim() - 2), width // 2)
    pairs = torch.view_as_complex(up(x[..., -width:]).unflatten(-1, (-1, 2)))
    return torch.cat((x[..., :-width], cast(torch.view_as_real(pairs * turn).flatten(-2), x.dtype)), dim=-1)
