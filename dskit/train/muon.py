"""Muon: momentum whose every matrix is orthogonalised before it is applied.

Idea: the update of a weight matrix is replaced by the nearest (semi-)orthogonal one, found by five
Newton-Schulz steps (in bfloat16 on a GPU), and scaled so that its entries have the size of an Adam update.
Matrices of one shape go through together; a stack of experts counts as that many matrices.

Shapes: parameters [..., N, K]; everything else belongs to AdamW.
Errors: ValueError for a parameter with fewer than two axes.
Source: Jordan et al., "Muon" (2024); scale 0.2 sqrt(max(N, K)) of Liu et al., "Muon is scalable" (2025).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on [M, N, K] matrices at once: singular values go to about one."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16() if update.is_cuda else update
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay."""

    def __init__(self, params, lr: float | Tensor, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        flat = [p for group in self.param_groups for p in group["params"] if p.dim() < 2]
        if flat:
            raise ValueError(f"Muon takes matrices; a parameter of shape {tuple(flat[0].shape)} "
                             "belongs to AdamW")

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Apply one update."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[tuple(p.shape[-2:])].append(p)
            for (rows, cols), params in by_shape.items():
                updates = orthogonalise(torch.cat([
                    self._momentum(p, group["momentum"]).reshape(-1, rows, cols) for p in params]))
                scale = -group["lr"] * 0.2 * max(rows, cols) ** 0.5
                keep = 1 - group["lr"] * group["weight_decay"]
                counts = [p.numel() // (rows * cols) for p in params]
                for p, update in zip(params, updates.split(counts), strict=True):
                    p.mul_(keep).add_(update.view_as(p) * scale)

    def _momentum(self, p: Tensor, beta: float) -> Tensor:
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        buffer.lerp_(p.grad, 1 - beta)
        return p.grad.lerp(buffer, beta)
