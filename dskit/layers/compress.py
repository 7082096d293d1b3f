"""KV compressor: pools groups of `ratio` tokens into one global entry, written once and read by many layers.

Idea: only the KV source layers compress. Of each group of r tokens, every channel takes its own
softmax-weighted mean of the r values; the result is normed and becomes the global key-and-value of all layers
up to the next source. Ratio 1 is a plain projection. V4's ratio 4 overlaps: a token has one role in its own
group and another in the next one, so an entry pools eight slots.

    v = x Wkv,  g = x Wgate (+ ape[position mod r] in V4),  entry = rms( sum_u softmax_u(g) * v )

Shapes: x_TD -> pooled [E, H], one row per group that this step completes, not yet normed or rotated: the
write to the cache does both (cache.write_).
State: (v, g) of the unfinished group wait in a float32 ring per request, [slots * ring, 2, width].
Errors: none of its own.
Numerics: for ratio > 1 products and pooling in float32, bfloat16 just before the norm.
Kernel: kernels/compress.py (compress.project, compress.pool)
Source: model.md 3.8, 6.2; config fields compress_ratios, kv_source_layer_ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.linear import Linear, Numerics, matmul
from dskit.layers.norm import RMSNorm, cast, ordered, up
from dskit.layers.swa import RingPlan, remember_


@dataclass
class GroupPlan:
    """The groups that a step completes, for one ratio.

    ring: where (v, g) of new rows wait; its `read` [E, members] lists each group's rows, -1 where absent.
    turn: rotation of each group's first token. slots [E]: rows of the global pool that the entries fill.
    rows: which rows of the step count, where a prefix's last ones are only there to rebuild its windows.
    """

    ring: RingPlan | None
    turn: Tensor
    slots: Tensor
    rows: Tensor | None = None


@ops.op("compress.project")
def project(x_TD: Tensor, wkv_XD: Tensor, wgate_XD: Tensor, ape_RX: Tensor | None, pos_T: Tensor,
            row_tile: int | None = None) -> Tensor:
    """(v, g) of each row, in float32: line [T, 2, X]; `ape`: what a row's place in its group adds to g."""
    v, g = (matmul(up(x_TD), weight, torch.float32, row_tile) for weight in (wkv_XD, wgate_XD))
    return torch.stack((v, g if ape_RX is None else g + ape_RX[pos_T % len(ape_RX)]), dim=1)


@ops.op("compress.pool")
def pool(line_S2X: Tensor, read_EU: Tensor, width: int, dtype: torch.dtype, steady: bool = False) -> Tensor:
    """Each group's mean of v under the softmax of g over its U members, per channel: [E, width] of `dtype`.

    line: (v, g) by row; read: the members' rows, -1 for one that is absent. Members wider than `width` play
    two roles: in the earlier half of a group their first channels count (those for the next entry), in the
    later half their last (for their own). No row plays the same role twice. steady: as of norm.rms.
    """
    v, g = line_S2X[read_EU.clamp(min=0)].unbind(dim=2)
    g = g.masked_fill(read_EU[..., None] < 0, float("-inf"))
    if v.shape[-1] > width:
        v, g = _roles(v, width), _roles(g, width)
    return cast((g.softmax(dim=1) * v).sum(dim=1), dtype)


def _roles(member: Tensor, width: int) -> Tensor:
    earlier, later = member.chunk(2, dim=1)
    return torch.cat((earlier[..., :width], later[..., -width:]), dim=1)


class Compressor(nn.Module):
    """What completed groups pool to, and the norm of it; `width`: head_dim, for V4's keys index_head_dim."""

    def __init__(self, config: ModelConfig, ratio: int, numerics: Numerics, width: int):
        super().__init__()
        self.ratio, self.numerics, self.width = ratio, numerics, width
        overlaps = not config.is_v41 and ratio == 4
        out, fmt = width * (2 if overlaps else 1), "bf16" if ratio == 1 and config.is_v41 else "fp32"
        self.gated = ratio > 1 or not config.is_v41
        self.wkv = Linear(config.hidden_size, out, numerics, fmt=fmt)
        self.norm = RMSNorm(width, config.rms_norm_eps, numerics.dtype, numerics.steady)
        if self.gated:
            self.wgate = Linear(config.hidden_size, out, numerics, fmt=fmt)
        if not config.is_v41:
            self.ape = nn.Parameter(torch.zeros(ratio, out), requires_grad=False)

    def forward(self, x_TD: Tensor, pos_T: Tensor, carry: Tensor | None, plan: GroupPlan) -> Tensor:
        """x_TD -> pooled [E, width] of the groups that these rows complete, not normed; updates the carry."""
        if not self.gated:
            return self.wkv(x_TD if plan.rows is None else x_TD[plan.rows])
        line = project(x_TD, self.wkv.weight, self.wgate.weight, getattr(self, "ape", None), pos_T,
                       self.numerics.row_tile)
        line = remember_(carry, line, plan.ring)
        return pool(line, plan.ring.read, self.width, self.numerics.dtype,
                    **ordered(self.numerics.steady))
