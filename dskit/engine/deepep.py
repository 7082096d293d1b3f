"""The exchange by DeepEP, where that package is installed: its kernels for many rows, over NVLink and RDMA.

Idea: `deep_ep.Buffer` has an exchange of the same shape: a row goes once to each rank that holds one of its
slots, and one sum per rank and row comes back. What is different: rows travel in bfloat16, which holds what
was rounded to FP8; sums of ranks are rounded to bfloat16 before the shared expert's answer is added; hosts
wait for counts, so that no CUDA graph can hold it. It is chosen by name alone:

    dskit serve flash --dp 16 --ep 16 --kernels exchange=deepep

State: one buffer per group, made when it is first used, by all ranks at once.
Errors: ops.Unsupported without the package, for other dtypes than bfloat16, and in steady numerics, whose
answers do not travel as sums.
Source: `Buffer` in normal mode, deep_ep/buffer.py of DeepEP's repository. Nobody has run it with dskit yet.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dskit.engine import eplb

Peers = Any  # of exchange.py, which registers what is here


@dataclass(eq=False)
class Trip:
    """What the way back needs."""

    slot_RJ: Tensor
    handle: Any


def why_not(x: Tensor, slot: Tensor, weight: Tensor, slots: int, fmt: str | None, peers: Peers, *_: Any
            ) -> str | None:
    """Why it cannot carry these rows, or None."""
    if importlib.util.find_spec("deep_ep") is None:
        return "the package deep_ep is not installed; its repository says how to build it"
    if x.device.type != "cuda" or peers.group is None:
        return "it connects ranks on GPUs"
    if x.dtype != torch.bfloat16:
        return f"it carries bfloat16, and rows are {x.dtype}"
    return None


def why_not_back(y: Tensor, trip: Any, each: bool, peers: Peers) -> str | None:
    """Why it cannot carry these answers, or None."""
    if not isinstance(trip, Trip):
        return "its rows came by another implementation of exchange.dispatch"
    return "it adds up on the way, and steady numerics want every answer by itself" if each else None


@lru_cache
def _buffer(group: dist.ProcessGroup, nbytes: int) -> Any:
    """DeepEP's memory for rows of so many bytes."""
    from deep_ep import Buffer

    configs = Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())
    nvlink = max(config.get_nvl_buffer_size_hint(nbytes, group.size()) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(nbytes, group.size()) for config in configs)
    return Buffer(group, nvlink, rdma)


def dispatch(x_TD: Tensor, slot_TJ: Tensor, weight_TJ: Tensor, slots: int, fmt: str | None, peers: Peers,
             rows: int | None = None, load_P: Tensor | None = None) -> tuple[Tensor, Tensor, Trip]:
    """As exchange.dispatch."""
    buffer, slot = _buffer(peers.group, x_TD.shape[1] * 2), slot_TJ.contiguous()
    per_rank, per_rdma_rank, per_slot, to_rank, _ = buffer.get_dispatch_layout(slot, slots * peers.size)
    x, slot_RJ, weight_RJ, _, handle, _ = buffer.dispatch(
        x_TD.contiguous(), topk_idx=slot, topk_weights=weight_TJ.contiguous(), num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=to_rank, num_tokens_per_expert=per_slot)
    eplb.count(slot_RJ, load_P)
    return x, weight_RJ, Trip(slot_RJ, handle)


def combine(y_RD: Tensor, trip: Trip, each: bool, peers: Peers) -> tuple[Tensor, Tensor]:
    """As exchange.combine: the rows are the tokens."""
    rows, _, _ = _buffer(peers.group, y_RD.shape[1] * 2).combine(y_RD.contiguous(), trip.handle)
    return rows, torch.arange(len(rows), device=rows.device)[:, None]
