"""Memory that the GPUs of one NVLink domain write to each other directly: a window into every rank.

Idea: each rank has one run of bytes that its peers see at addresses of their own (symmetric memory of torch;
multicast is not used). Kernels write rows there and raise flags behind them (kernels/exchange.py), so nothing
waits for a host and a step can be a CUDA graph. Its parts have room for the largest step, since whoever
writes does not ask how much comes from others:

    flags      [2, ranks, PROGRAMS] int64   arrivals there and back: how often each program there has written
    rows       [ranks * max_rows] rows      as numbers, or as FP8 codes with their scales behind them
    slots      [ranks * max_rows, J] int64  of those rows, at this rank; -1: none, and a row of nothing but -1
                                            is none
    weights    [ranks * max_rows, J] float32
    answers    [1 + n, D]                   row 0 is zeros; n = ranks * max_rows, or J * max_rows (`each`)

Order: dispatch and combine take turns on one stream of each rank. Then no part is written while it is read: a
rank's next rows leave after its combine, which has seen flags that every peer raises once it has read the
last ones.

Shapes: J is the most choices of a row.
Units: `at` is bytes from the begin.
State: one window per expert group, for all layers; `seen` counts what each program here has awaited; while
`alone` is 1 no peer is written to or waited for; `live`: rows that are some, of those of a graph; `ended`: 1
once nobody is waited for again.
Errors: Apart says why the ranks of a group have no window.
Source: engine.md section 11.3, kernels.md 5.4.
"""

from __future__ import annotations

import math
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PROGRAMS = 8192  # flags of a peer; more programs than that never run
ALIGN = 256


class Apart(RuntimeError):
    """The ranks cannot write into each other's memory; the message says why."""


class Window:
    """`own`: this rank's bytes, at first all zero; address_K: where they and those of its peers begin."""

    def __init__(self, own: Tensor, address_K: Tensor, at: dict[str, int], max_rows: int):
        self.own, self.address_K, self.at, self.max_rows = own, address_K, at, max_rows
        self.seen = torch.zeros(2, PROGRAMS, dtype=torch.int64, device=own.device)
        self.alone = torch.zeros(1, dtype=torch.int32, device=own.device)
        self.live = torch.zeros(1, dtype=torch.int64, device=own.device)
        self.ended = torch.zeros(1, dtype=torch.int32, device=own.device)
        on_gpu = own.is_cuda
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=on_gpu)
        self._aside = torch.cuda.Stream(own.device) if on_gpu else None

    def end(self) -> None:
        """Let nothing here wait for peers any more, as one is gone; from any thread, while kernels wait."""
        with torch.cuda.stream(self._aside):  # a copy, for which a GPU full of waiting programs has room
            self.ended.copy_(self._one, non_blocking=True)

    def part(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """The begin of a part of this rank's bytes as a tensor."""
        begin = self.at[name]
        return self.own[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def measured(size: int, max_rows: int, width: int, choices: int, dtype: torch.dtype, each: bool
             ) -> tuple[dict[str, int], int]:
    """(where the parts of a window begin, bytes in all)."""
    rows, row = size * max_rows, width * dtype.itemsize
    parts = {
        "flags": 2 * size * PROGRAMS * 8,
        "rows": rows * row,
        "slots": rows * choices * 8,
        "weights": rows * choices * 4,
        "answers": (1 + max_rows * (choices if each else size)) * row,
    }
    at, end = {}, 0
    for name, nbytes in parts.items():
        at[name], end = end, end + -(-nbytes // ALIGN) * ALIGN
    return at, end


def open_window(group: dist.ProcessGroup, device: torch.device, max_rows: int, width: int, choices: int,
                dtype: torch.dtype, each: bool) -> Window:
    """The window of this rank; every rank of the group asks for it at once, and gets it or Apart."""
    import torch.distributed._symmetric_memory as symmetric

    ranks = meet(group, device)
    at, nbytes = measured(len(ranks), max_rows, width, choices, dtype, each)
    own, handle, why = None, None, None
    try:
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(own, group)
        own.zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        why = f"symmetric memory: {str(error).splitlines()[0]}"
    _agree(group, why)  # and nobody's flags are raised before all bytes are zero
    address_K = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    found = Window(own, address_K, at, max_rows)
    found.handle = handle  # which keeps the peers' memory mapped
    return found


def meet(group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """What the ranks say of their GPUs, all of which reach each other's memory; Apart where they do not."""
    ranks = _gathered(group, _card(device))
    _agree(group, _apart(ranks, device))
    return ranks


def _gathered(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    found = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _agree(group: dist.ProcessGroup, why: str | None) -> None:
    """Apart, if any rank has a reason; the first one's."""
    for rank, reason in enumerate(_gathered(group, why)):
        if reason is not None:
            raise Apart(f"rank {rank} of the group says: {reason}")


def _card(device: torch.device) -> dict[str, str | None]:
    """What the others need to know about this rank's device."""
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return {"host": socket.gethostname(), "card": card}


def _apart(ranks: list[dict[str, Any]], device: torch.device) -> str | None:
    """Why this device cannot write to those of the others, or None."""
    if device.type != "cuda":
        return f"it is on {device}, and only GPUs write into each other's memory"
    if len(hosts := {rank["host"] for rank in ranks}) > 1:
        return f"the group is spread over {len(hosts)} nodes"
    here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    own = torch.cuda.current_device() if device.index is None else device.index
    for rank, card in enumerate(rank["card"] for rank in ranks):
        if card not in here:
            return f"it does not see the GPU of rank {rank}; look at CUDA_VISIBLE_DEVICES"
        if here[card] != own and not torch.cuda.can_device_access_peer(own, here[card]):
            return f"its GPU has no peer access to that of rank {rank}"
    return None
