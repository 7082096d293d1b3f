"""Mixture of experts: each token picks a few small networks and is answered by their weighted sum.

Idea: a router scores all experts, g = sqrt(softplus(x Wg)); a bias that only serves load
balance is added for the choice, not for the weights. Each chosen expert is a clamped SwiGLU;
one shared expert answers every token.

    idx = top-J of g + bias,   rho = g[idx] / sum g[idx] * routed_scaling_factor
    f(x; rho) = ( rho * silu(min(x W1, lim)) * clamp(x W3, -lim, lim) ) W2
    y = sum_i f_idx_i(x; rho_i) + f_shared(x; 1)

Shapes: x_TD -> y_TD; topk_TJ int64, weight_TJ float32; experts w13 [E, 2I, D] (w1 rows first), w2 [E, D, I].
Errors: none of its own.
Numerics: router in float32; the weighted activation is rounded once, then again to e4m3 for w2; experts add
up in float32 in slot order.
Kernel: kernels/moe.py (moe.route, moe.swiglu, moe.experts)
Source: model.md 3.11, 6.2; config fields n_routed_experts, num_experts_per_tok, swiglu_limit.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.linear import Experts, Linear, Numerics, matmul, silu, softplus
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


@ops.op("moe.swiglu")
def swiglu(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
           steady: bool = False) -> Tensor:
    """weight * silu(min(gate, limit)) * clamp(linear, -limit, limit), rounded once; limit 0: unclamped."""
    gate, linear = up(gate), up(linear)
    if limit > 0:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    hidden = silu(gate, steady) * linear
    return cast(hidden if weight is None else hidden * weight, dtype)


@ops.op("moe.experts")
def experts(x_TD: Tensor, topk_TJ: Tensor, weight_TJ: Tensor, w13: Experts, w2: Experts, limit: float,
            numerics: Numerics) -> Tensor:
    """Sum of each token's experts, float32 [T, D]. x_TD is rounded already. Rows are sorted by expert, each
    expert sees its own, and the results return to slot order; one token alone needs no sorting.
    """
    T, J = topk_TJ.shape
    expert, weight, order = topk_TJ.flatten(), weight_TJ.flatten(), None
    if T > 1:
        order = expert.argsort(stable=True)
        expert, weight = expert[order], weight[order]
    rows = x_TD[order // J] if order is not None else x_TD.expand(T * J, -1)
    gate, linear = each_expert(rows, w13, expert, numerics.dtype).chunk(2, dim=-1)
    hidden = swiglu(gate, linear, weight[:, None], limit, numerics.dtype, numerics.steady)
    y = up(each_expert(numerics.activation(hidden), w2, expert, numerics.dtype))
    if order is not None:
        y = torch.empty_like(y).index_copy(0, order, y)
    return y.unflatten(0, (T, J)).sum(dim=1)


@ops.op("moe.each_expert")
def each_expert(x_RK: Tensor, weight: Experts, expert_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row through its expert; neighbours with the same expert go together -> [R, N] of `dtype`."""
    parts, start = [], 0
    for expert, run in itertools.groupby(expert_R.tolist()):
        stop = start + len(list(run))
        parts.append(matmul(x_RK[start:stop], weight.dense(expert), dtype, weight.numerics.row_tile))
        start = stop
    return torch.cat(parts) if parts else x_RK.new_empty(0, weight.out_features, dtype=dtype)


class Gate(nn.Module):
    """Router weights; `bias` serves text tokens, `bias_vl` image tokens, `tid2eid` V4's first layers."""

    def __init__(self, config: ModelConfig, numerics: Numerics, n_experts: int, k: int, hashed: bool):
        super().__init__()
        self.k, self.config, self.row_tile = k, config, numerics.row_tile
        self.weight = nn.Parameter(torch.empty(n_experts, config.hidden_size), requires_grad=False)
        if hashed:
            self.tid2eid = nn.Parameter(torch.zeros(config.vocab_size, k, dtype=torch.int64),
                                        requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.zeros(n_experts), requires_grad=False)
            if config.is_v41:
                self.bias_vl = nn.Parameter(torch.zeros(n_experts), requires_grad=False)

    def forward(self, x_TD: Tensor, ids_T: Tensor, image_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """x_TD -> (topk_TJ, weight_TJ)."""
        logit = matmul(up(x_TD), up(self.weight), torch.float32, self.row_tile)
        logit = logit if self.config.gate_temp == 1 else logit / self.config.gate_temp
        fixed = self.tid2eid[ids_T] if hasattr(self, "tid2eid") else None
        bias = getattr(self, "bias", None)
        if image_T is not None and hasattr(self, "bias_vl"):
            bias = torch.where(image_T[:, None], self.bias_vl, self.bias)
        return route(logit, bias, self.k, self.config.norm_topk_prob, self.config.routed_scaling_factor,
                     fixed, self.row_tile is not None)


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
        hidden = swiglu(self.w1(x_TD), self.w3(x_TD), None, self.limit, self.numerics.dtype,
                        self.numerics.steady)
        return self.w2(self.numerics.activation(hidden))


class RoutedExperts(nn.Module):
    """Stacked weights of the routed experts."""

    def __init__(self, config: ModelConfig, numerics: Numerics, n_experts: int):
        super().__init__()
        D, width, block = config.hidden_size, config.moe_intermediate_size, config.weight_block_size
        self.w13 = Experts(n_experts, D, 2 * width, numerics, fmt=config.expert_dtype, block=block)
        self.w2 = Experts(n_experts, width, D, numerics, fmt=config.expert_dtype, block=block)


class MoE(nn.Module):
    """Router, routed experts and the shared expert of one layer; `sizes` overrides (experts, per token)."""

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
        routed = experts(x, topk, weight, self.experts.w13, self.experts.w2, self.limit, self.numerics)
        return (routed + up(self.shared_experts(x))).to(self.numerics.dtype)
