"""Mixture of experts: each token picks a few small networks and is answered by their weighted sum.

Idea: a router scores all experts, g = sqrt(softplus(x Wg)); a bias that only serves load
balance is added for the choice, not for the weights. Each chosen expert is a clamped SwiGLU;
one shared expert answers every token.

    idx = top-J of g + bias,   rho = g[idx] / sum g[idx] * routed_scaling_factor
    f(x; rho) = ( rho * silu(min(x W1, lim)) * clamp(x W3, -lim, lim) ) W2
    y = sum_i f_idx_i(x; rho_i) + f_shared(x; 1)

Tokens travel to their experts and back: R = T * J rows, one per token and chosen expert (a "slot"), are
sorted by expert, go through their networks side by side, and are added up where they came from.

    plan      which row is whose: order (row -> slot), place (slot -> row), end (where each expert's rows end)
    permute   rows in that order, each with its weight
    combine   each token's J results, in slot order, and the shared expert's

Where a model's experts lie on several ranks, the engine hands the layer an Exchange (engine/exchange.py):
rows then travel to the ranks that hold their experts, and the answers back, before they are added up.

Shapes: x_TD -> y_TD; topk_TJ int64, weight_TJ float32; experts w13 [E, 2I, D] (w1 rows first), w2 [E, D, I].
Errors: none of its own.
Numerics: router in float32; the weighted activation is rounded once, then again to e4m3 for w2; experts add
up in float32 in slot order.
Kernel: kernels/moe.py (moe.gate, moe.route, moe.plan, moe.permute, moe.swiglu, moe.swiglu_quantize,
moe.combine), kernels/experts.py (moe.experts)
Source: model.md 3.11, 6.2; config fields n_routed_experts, num_experts_per_tok, swiglu_limit.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.linear import Experts, Linear, Numerics, matmul, quantize, silu, softplus
from dskit.layers.norm import cast, up


@ops.op("moe.route")
def route(logit_TE: Tensor, bias_TE: Tensor | None, k: int, normalise: bool, factor: float,
          fixed_TJ: Tensor | None = None, steady: bool = False) -> tuple[Tensor, Tensor]:
    """Logits -> (topk_TJ, weight_TJ). Ties go to the lower expert; `fixed` choices keep their scores."""
    g = softplus(logit_TE, steady).sqrt()
    topk = fixed_TJ
    if topk is None:
        choice = g if bias_TE is None else g + bias_TE
        topk = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weight = g.gather(1, topk)
    if normalise and k > 1:
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
    return topk, weight * factor


@ops.op("moe.gate")
def gate(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, k: int, normalise: bool, factor: float,
         temperature: float = 1.0, fixed_TJ: Tensor | None = None, image_T: Tensor | None = None,
         image_bias_E: Tensor | None = None, row_tile: int | None = None) -> tuple[Tensor, Tensor]:
    """The whole router, x_TD -> (topk_TJ, weight_TJ): float32 logits, then `route`; image rows by a bias of
    their own.
    """
    x = up(x_TD)
    logit = matmul(x, up(weight_ED), x.dtype, row_tile)
    logit = logit if temperature == 1 else logit / temperature
    bias = bias_E
    if image_T is not None and image_bias_E is not None:
        bias = torch.where(image_T[:, None], image_bias_E, bias_E)
    return route(logit, bias, k, normalise, factor, fixed_TJ, row_tile is not None)


@ops.op("moe.swiglu")
def swiglu(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
           steady: bool = False) -> Tensor:
    """weight * silu(min(gate, limit)) * clamp(linear, -limit, limit), rounded once; limit 0: unclamped."""
    gate, linear = up(gate), up(linear)
    if limit > 0:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    hidden = silu(gate, steady) * linear
    return cast(hidden if weight is None else hidden * weight, dtype)


@ops.op("moe.swiglu_quantize")
def swiglu_quantize(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
                    fmt: str, compute: torch.dtype, steady: bool = False) -> Tensor:
    """`swiglu` in `dtype`; that, quantised in `fmt` and restored, in `compute`: the input of w2."""
    return quantize(swiglu(gate, linear, weight, limit, dtype, steady), fmt, compute)


def activate(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, how: Numerics) -> Tensor:
    """The input of w2, rounded where the numerics round it."""
    if how.release:
        return swiglu_quantize(gate, linear, weight, limit, how.dtype, how.activation_format, how.compute,
                               how.steady)
    return swiglu(gate, linear, weight, limit, how.dtype, how.steady)


def by_token(rows: Tensor, how: Numerics) -> Tensor:
    """Rows rounded once more, to e4m3 with one scale a row, where the numerics say so."""
    return quantize(rows, f"fp8_{rows.shape[-1]}", how.compute) if how.token else rows


@ops.op("moe.plan", grad=False)
def plan(topk_TJ: Tensor, n_experts: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows by expert, inside an expert by token: (expert_R, order_R, place_TJ, end_E).

    Row r holds slot order_R[r] = t * J + j, slot (t, j) stands in row place_TJ[t, j], and expert e owns the
    rows before end_E[e] (int32; the others int64) that lower experts leave. Experts are counted from `first`
    on; slots of others, and -1, come last, as expert n_experts.
    """
    local_TJ = topk_TJ - first
    local_TJ = local_TJ.where((local_TJ >= 0) & (local_TJ < n_experts), n_experts)
    expert_R, order_R = local_TJ.flatten().sort(stable=True)
    every_E = torch.arange(n_experts, device=topk_TJ.device)
    end_E = torch.searchsorted(expert_R, every_E, right=True, out_int32=True)
    return expert_R, order_R, order_R.argsort().view_as(topk_TJ), end_E


@ops.op("moe.permute")
def permute(x_TD: Tensor, weight_TJ: Tensor, order_R: Tensor, place_TJ: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their weights as the plan lays out the rows: (rows_RD, weight_R)."""
    return x_TD[order_R // place_TJ.shape[1]], weight_TJ.take(order_R)


@ops.op("moe.combine")
def combine(y_RD: Tensor, place_TJ: Tensor | None, shared_TD: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Each token's results added up in slot order, then the shared expert's, [T, D] rounded once; without
    places the rows are one token's.
    """
    y_TJD = y_RD[None] if place_TJ is None else y_RD[place_TJ]
    y_TD = up(y_TJD).sum(dim=1)
    return cast(y_TD if shared_TD is None else y_TD + up(shared_TD), dtype)


@ops.op("moe.experts")
def experts(x_TD: Tensor, topk_TJ: Tensor, weight_TJ: Tensor, shared_TD: Tensor | None, w13: Experts,
            w2: Experts, limit: float, numerics: Numerics, part: tuple[int, int] | None = None) -> Tensor:
    """Sum of each token's experts and of the shared expert's answer, [T, D]. x_TD is rounded already.

    part = (first, of how many): w13 and w2 hold the experts from `first` on; others, and -1, say nothing.
    """
    if x_TD.shape[0] == 1 and part is None:  # its rows are in slot order, and nothing is gained by sorting
        expert, place = topk_TJ[0], None
        rows, weight = x_TD.expand(topk_TJ.shape[1], -1), weight_TJ[0]
    else:
        expert, order, place, _ = plan(topk_TJ, w13.experts, part[0] if part else 0)
        rows, weight = permute(x_TD, weight_TJ, order, place)
    gate, linear = each_expert(by_token(rows, numerics), w13, expert, numerics.dtype).chunk(2, dim=-1)
    if numerics.token:
        hidden = swiglu(gate, linear, weight[:, None], limit, numerics.dtype, numerics.steady)
        hidden = by_token(hidden, numerics)
    else:
        hidden = activate(gate, linear, weight[:, None], limit, numerics)
    return combine(each_expert(hidden, w2, expert, numerics.dtype), place, shared_TD, numerics.dtype)


@ops.op("moe.each_expert", traced=False)
def each_expert(x_RK: Tensor, weight: Experts, expert_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row through its expert; neighbours with the same expert go together -> [R, N] of `dtype`.

    What belongs to none of them, the one behind the last, gets zeros.
    """
    parts, start = [], 0
    for expert, run in itertools.groupby(expert_R.tolist()):
        stop = start + len(list(run))
        if expert == weight.experts:
            parts.append(x_RK.new_zeros(stop - start, weight.out_features, dtype=dtype))
        else:
            parts.append(matmul(x_RK[start:stop], weight.dense(expert), dtype, weight.numerics.row_tile))
        start = stop
    return torch.cat(parts) if parts else x_RK.new_empty(0, weight.out_features, dtype=dtype)


class Gate(nn.Module):
    """Router weights; `bias` serves text tokens, `bias_vl` image tokens, `tid2eid` V4's first layers."""

    def __init__(self, config: ModelConfig, numerics: Numerics, n_experts: int, k: int, hashed: bool):
        super().__init__()
        self.k, self.config, self.row_tile = k, config, numerics.row_tile
        self.weight = nn.Parameter(torch.empty(n_experts, config.hidden_size, dtype=numerics.compute),
                                   requires_grad=False)
        if hashed:
            self.tid2eid = nn.Parameter(torch.zeros(config.vocab_size, k, dtype=torch.int64),
                                        requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.zeros(n_experts), requires_grad=False)
            if config.is_v41:
                self.bias_vl = nn.Parameter(torch.zeros(n_experts), requires_grad=False)

    def forward(self, x_TD: Tensor, ids_T: Tensor, image_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """x_TD -> (topk_TJ, weight_TJ)."""
        c = self.config
        fixed = self.tid2eid[ids_T] if hasattr(self, "tid2eid") else None
        return gate(x_TD, self.weight, getattr(self, "bias", None), self.k, c.norm_topk_prob,
                    c.routed_scaling_factor, c.gate_temp, fixed, image_T, getattr(self, "bias_vl", None),
                    self.row_tile)


class SharedExpert(nn.Module):
    """The expert that answers every token."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        super().__init__()
        D, width, block = config.hidden_size, config.moe_intermediate_size, config.weight_block_size
        self.numerics, self.limit = numerics, config.swiglu_limit
        self.w1 = Linear(D, width, numerics, block=block)
        self.w2 = Linear(width, D, numerics, block=block)
        self.w3 = Linear(D, width, numerics, block=block)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Rounded x_TD -> y_TD."""
        return self.w2(activate(self.w1(x_TD), self.w3(x_TD), None, self.limit, self.numerics))


class Exchange(Protocol):
    """What carries rows to the experts of other ranks."""

    def dispatch(self, x_TD: Tensor, topk_TJ: Tensor, weight_TJ: Tensor
                 ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Rows for the experts here: (x_RD, slot_RJ with -1 for none, weight_RJ, what `combine` needs)."""

    def combine(self, y_RD: Tensor, trip: Any) -> tuple[Tensor, Tensor]:
        """What the experts of all ranks said of this rank's tokens: (y_RD, place [T, any number])."""


class RoutedExperts(nn.Module):
    """Stacked weights of the routed experts; `held`: which ones, where they are not all there in order."""

    held: list[int] | None = None

    def __init__(self, config: ModelConfig, numerics: Numerics, n_experts: int):
        super().__init__()
        D, width, block = config.hidden_size, config.moe_intermediate_size, config.weight_block_size
        self.w13 = Experts(n_experts, D, 2 * width, numerics, fmt=config.expert_dtype, block=block)
        self.w2 = Experts(n_experts, width, D, numerics, fmt=config.expert_dtype, block=block)

    def hold(self, experts: list[int]) -> None:
        """Have room for these experts only, in this order; before any weight is placed."""
        self.held, self.w13.experts, self.w2.experts = experts, len(experts), len(experts)


class MoE(nn.Module):
    """Router, routed experts and the shared expert of one layer; `sizes` overrides (experts, per token)."""

    exchange: Exchange | None = None

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics,
                 sizes: tuple[int, int] | None = None):
        super().__init__()
        n_experts, k = sizes or (config.n_routed_experts, config.num_experts_per_tok)
        self.numerics, self.limit, self.layer = numerics, config.swiglu_limit, layer
        self.gate = Gate(config, numerics, n_experts, k,
                         hashed=sizes is None and layer < config.num_hash_layers)
        self.experts = RoutedExperts(config, numerics, n_experts)
        self.shared_experts = SharedExpert(config, numerics)

    def forward(self, x_TD: Tensor, ids_T: Tensor, image_T: Tensor | None = None) -> Tensor:
        """x_TD (normed) -> y_TD."""
        topk, weight = self.gate(x_TD, ids_T, image_T)
        x = self.numerics.activation(x_TD)
        shared, stacks = self.shared_experts(x), (self.experts.w13, self.experts.w2)
        if self.exchange is None:
            return experts(x, topk, weight, shared, *stacks, self.limit, self.numerics)
        rows, slot, weight, trip = self.exchange.dispatch(x, topk, weight)
        y = experts(rows, slot, weight, None, *stacks, self.limit, self.numerics, (0, len(self.gate.weight)))
        return combine(*self.exchange.combine(y, trip), shared, self.numerics.dtype)
