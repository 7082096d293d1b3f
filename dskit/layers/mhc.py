"""mHC: manifold-constrained hyper-connections, N residual streams instead of one.

Idea: the residual is N parallel copies. A sublayer reads one weighted sum of them and writes back to all; in
between the copies are mixed by an N x N matrix that is made doubly stochastic, so that mixing neither grows
nor shrinks the state. All weights are computed per token from the state. In V4.1 a sublayer reads with the
weights that the sublayer before it computed.

    m = (f fn^T) / sqrt(mean(f^2) + eps),  f = all streams in a row
    read p = sigmoid(m scale + base) + hc_eps,  write q = 2 sigmoid(...),  mix C = sinkhorn(...)
    x = sum_j p_j X_j,   X'_k = q_k y + sum_j C_jk X_j           (the sum runs over the FIRST index of C)

Between two sublayers stand a write, new weights, a read and a norm, all over the same streams: `boundary`.

Shapes: X_TND, p_TN and q_TN and C_TNN float32, x_TD, y_TD; fn [(2+N)N, N*D], base [(2+N)N], scale [3].
Errors: none of its own.
Numerics: float32 inside, one rounding of X', of x as it is read and of x as it is normed. Rounded streams
may be held in float32 (a CPU then widens them once, not at every use).
Kernel: kernels/mhc.py (mhc.mixes, mhc.sinkhorn, mhc.read, mhc.write, mhc.boundary)
Source: model.md 3.6; config fields hc_mult, hc_sinkhorn_iters, hc_eps.
Try: notebooks/04_mhc.ipynb
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.linear import matmul, sigmoid
from dskit.layers.norm import cast, ordered, rms, up


@ops.op("mhc.sinkhorn")
def sinkhorn(B_TNN: Tensor, iters: int, eps: float) -> Tensor:
    """Softmax of the rows, then `iters` rounds of normalising; the last step makes the columns sum to one."""
    C = B_TNN.softmax(dim=-1) + eps
    C = C / (C.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        C = C / (C.sum(dim=-1, keepdim=True) + eps)
        C = C / (C.sum(dim=-2, keepdim=True) + eps)
    return C


@ops.op("mhc.mixes")
def mixes(X_TND: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iters: int,
          row_tile: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Read, write and mix weights (p_TN, q_TN, C_TNN) of a sublayer, from the state before it."""
    N = X_TND.shape[1]
    f = up(X_TND).flatten(1)
    m = matmul(f, fn, f.dtype, row_tile) * torch.rsqrt(f.pow(2).mean(dim=-1, keepdim=True) + eps)
    pq, B = torch.addcmul(base, m, scale[_which(N, scale.device)]).split((2 * N, N * N), dim=-1)
    p, q = sigmoid(pq, row_tile is not None).split(N, dim=-1)
    return p + hc_eps, 2 * q, sinkhorn(B.unflatten(-1, (N, N)), iters, hc_eps)


@functools.cache
def _which(N: int, device: torch.device) -> Tensor:
    """Which of the three scales (read, write, mix) belongs to each logit, [(2+N)N]."""
    with torch.inference_mode(False):  # it outlives the step that first asks for it
        return torch.tensor([0] * N + [1] * N + [2] * N * N, device=device)


@ops.op("mhc.read")
def read(p_TN: Tensor, X_TND: Tensor, dtype: torch.dtype) -> Tensor:
    """x_TD = sum of the streams under the read weights."""
    return cast((p_TN[:, None] @ up(X_TND)).squeeze(1), dtype)


@ops.op("mhc.write")
def write(y_TD: Tensor, X_TND: Tensor, q_TN: Tensor, C_TNN: Tensor, dtype: torch.dtype) -> Tensor:
    """The next state: a sublayer's output spread by q, plus the streams mixed by C transposed."""
    spread = q_TN[..., None] * up(y_TD)[:, None]
    return cast(torch.baddbmm(spread, C_TNN.transpose(1, 2), up(X_TND)), dtype)


@ops.op("mhc.boundary")
def boundary(y_TD: Tensor | None, X_TND: Tensor, p_TN: Tensor | None, q_TN: Tensor | None,
             C_TNN: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor, gain_D: Tensor, eps: float,
             hc_eps: float, iters: int, dtype: torch.dtype, row_tile: int | None = None
             ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one sublayer to the next: (X', held as X is; normed x_TD of `dtype`; the next p, q and C).

    y, q, C: what the sublayer behind has to write, None when nothing is. p: the weights that it left to read
    with; None reads with the new ones (V4).
    """
    X = X_TND if y_TD is None else cast(write(y_TD, X_TND, q_TN, C_TNN, dtype), X_TND.dtype)
    p, q, C = mixes(X, fn, base, scale, eps, hc_eps, iters, row_tile)
    x = read(p if p_TN is None else p_TN, X, dtype)
    return X, rms(x, gain_D, eps, dtype, **ordered(row_tile is not None)), p, q, C


def first_read(T: int, N: int, device: torch.device) -> Tensor:
    """Read weights of the very first sublayer: a plain copy of stream 0."""
    p = torch.zeros(T, N, device=device)
    p[:, :1].fill_(1)
    return p


def add_parameters(module: nn.Module, config: ModelConfig, parts: tuple[str, ...]) -> None:
    """Give a block the parameters `<part>_fn`, `<part>_base`, `<part>_scale` of its sublayers, float32."""
    N = config.hc_mult
    for part in parts:
        for name, shape in (("fn", ((2 + N) * N, N * config.hidden_size)), ("base", ((2 + N) * N,)),
                            ("scale", (3,))):
            module.register_parameter(f"{part}_{name}", nn.Parameter(torch.zeros(shape), requires_grad=False))


def add_collapse(module: nn.Module, config: ModelConfig) -> None:
    """V4: parameters of the final read, `hc_head_fn`, `hc_head_base`, `hc_head_scale`."""
    N = config.hc_mult
    for name, shape in (("fn", (N, N * config.hidden_size)), ("base", (N,)), ("scale", (1,))):
        module.register_parameter(f"hc_head_{name}", nn.Parameter(torch.zeros(shape), requires_grad=False))


def collapse_weights(X_TND: Tensor, module: nn.Module, config: ModelConfig,
                     row_tile: int | None = None) -> Tensor:
    """V4: read weights p_TN of the final collapse (not normalised to sum one)."""
    f = up(X_TND).flatten(1)
    m = matmul(f, module.hc_head_fn, f.dtype, row_tile)
    m = m * torch.rsqrt(f.pow(2).mean(dim=-1, keepdim=True) + config.rms_norm_eps)
    return sigmoid(m * module.hc_head_scale + module.hc_head_base, row_tile is not None) + config.hc_eps
