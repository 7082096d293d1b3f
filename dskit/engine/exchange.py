"""The experts of all ranks as one: rows travel to the ranks that hold their experts, and the answers back.

Idea: a layer's E routed experts lie in P physical slots, equally many on each rank of the group: rank r holds
the slots from r * P / size on. P - E slots are replicas, second copies of some experts. The engine hands each
MoE layer an `Exchange`, which turns the router's experts into slots and carries rows there and back.

    dispatch   a row goes once to every rank that holds one of its slots, with its slots there and its weights
    (experts)  the layer computes what the slots here say of the rows that have come
    combine    the answers go back and are laid out for moe.combine, which adds them up in float32

On the way back a rank adds up what its experts say of a row, so that one row per rank returns; the sum over
ranks is in ascending order. In steady numerics each expert's answer returns by itself, and they are added up
in the router's order, as without ranks: then the bits depend neither on the number of ranks, nor on where
experts are and which replica answers.

Rows go out as they are: in release numerics, where they are rounded already, as FP8 codes with their scales,
which restores the same bits. Everything about a row is one parcel of bytes, since Gloo carries no FP8.

Replacing slot maps: a `SlotMap` is data, and the only thing that knows where an expert is. Between two steps
(`Engine.between_steps`), on every rank: copy the weights into their new slots, the rows `[slot]` of weight
and scale in `MoE.experts.w13` and `.w2`, then call `Exchange.map.replace_(phys2log)`. The tensors keep their
addresses. A map that names an expert nowhere is refused and leaves the old one. `Exchange.load` counts what
each slot has computed.

Implementations: `torch` sends as many rows as there are, which the hosts tell each other. `triton` writes
into a window of the peers' memory (window.py) that has room for as many rows of each rank as they agreed on;
no host waits, so that CUDA graphs can hold it. `deepep` is another library's (deepep.py). Whatever the way, a
slot of -1 is no choice, and a row of nothing but -1 is no row.

Shapes: x_TD, expert_TJ, weight_TJ (T may be 0); S rows sent, R received.
State: slot maps and counts live on the model's device; `Peers.rows` is set before a step, on all ranks alike.
Errors: ValueError for a map that cannot be; AssertionError for more rows than `max_rows`, a bug of the
engine; whatever torch.distributed raises when a peer is gone or silent.
Source: engine.md sections 11.3, 12.1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dskit import ops
from dskit.engine import deepep, eplb
from dskit.engine.window import Apart, Window, open_window
from dskit.layers.linear import Numerics, decode, encode
from dskit.layers.moe import MoE
from dskit.model import Model

logger = logging.getLogger("dskit.engine")
RECEIVED = 16384
ALIKE = -1


@dataclass(eq=False)
class Peers:
    """The ranks that share experts: which of them this is, and the group that carries rows (None: alone).

    window: of this rank into the others' memory; `apart` says why there is none.
    rows: as many as any of them brings to the step at hand; ALIKE: all bring as many as this one; None: that
    is not agreed. live: on the device, how many of the rows at hand are some (None: all).
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    max_rows: int = 1 << 30
    window: Window | None = None
    apart: str = "none was opened"
    rows: int | None = None
    live: Tensor | None = None

    def open(self, model: Model, rows: int) -> None:
        """Open the window for steps of so many rows of a rank, all ranks at once; where it cannot be, `apart`
        says why.

        It has room for RECEIVED rows at most: beyond, what fixed sizes make of rows that do not come costs
        more than it saves.
        """
        weight, how = model.norm.weight, model.numerics
        choices = max(module.gate.k for module in model.modules() if isinstance(module, MoE))
        try:
            self.window = open_window(self.group, weight.device, min(rows, RECEIVED // self.size),
                                      len(weight), choices, how.dtype, how.steady)
        except Apart as why:
            self.apart = str(why)
            logger.info("rows travel by %s: %s", dist.get_backend(self.group), why)

    def direct(self, numerics: Numerics) -> bool:
        """Whether kernels write into the window, as they are chosen now: then a graph can hold a step."""
        if self.window is None:
            return False
        there, back = dispatch, combine
        row = torch.empty(1, 1, dtype=numerics.dtype, device=self.window.own.device)
        args = row, row.long(), row.float(), 1, format_of(numerics), self, 1
        choices = [op.selected["decode"][0] for op in (there, back)]
        return (all(choice in ("triton", "auto") for choice in choices)
                and not any(op.aside("triton") for op, choice in zip((there, back), choices, strict=True)
                            if choice == "auto")
                and there.implementation("triton").why_not(args, {}) is None)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """While a graph is captured, which repeats what is run now: no other rank takes part."""
        self.live = self.window.live
        self.window.alone.fill_(1)
        try:
            yield
        finally:
            self.live = None
            self.window.alone.fill_(0)


# ---- where experts are -------------------------------------------------------------------------------------


def layout(experts: int, size: int, redundant: int = 0) -> list[int]:
    """The expert of each physical slot at the start, with at least `redundant` replicas."""
    return eplb.spread(experts, eplb.slots_for(experts, redundant, size), size)


def held(experts: int, peers: Peers, redundant: int = 0) -> list[int]:
    """The expert of each slot of this rank at the start."""
    every = layout(experts, peers.size, redundant)
    each = len(every) // peers.size
    return every[peers.rank * each : (peers.rank + 1) * each]


class SlotMap:
    """Where a layer's experts are: phys2log [P], log2phys [E, P - E + 1] (-1 behind the last), count [E]."""

    def __init__(self, phys2log: Sequence[int], experts: int, device: torch.device | str = "cpu"):
        replicas = len(phys2log) - experts + 1
        self.phys2log = torch.empty(len(phys2log), dtype=torch.int64, device=device)
        self.log2phys = torch.empty(experts, max(replicas, 0), dtype=torch.int64, device=device)
        self.count = torch.empty(experts, dtype=torch.int64, device=device)
        self.replace_(phys2log)

    def replace_(self, phys2log: Sequence[int]) -> None:
        """Take over another map, in place; raises ValueError, and changes nothing, if it cannot be."""
        slots, experts = len(self.phys2log), len(self.count)
        where: list[list[int]] = [[] for _ in range(experts)]
        if len(phys2log) != slots or not all(0 <= expert < experts for expert in phys2log):
            raise ValueError(f"a map of {slots} slots over {experts} experts, not {list(phys2log)}")
        for slot, expert in enumerate(phys2log):
            where[expert].append(slot)
        if nowhere := [expert for expert, found in enumerate(where) if not found]:
            raise ValueError(f"expert {nowhere[0]} is in no slot of {list(phys2log)}")
        width = self.log2phys.shape[1]
        self.phys2log.copy_(torch.tensor(phys2log))
        self.log2phys.copy_(torch.tensor([found + [-1] * (width - len(found)) for found in where]))
        self.count.copy_(torch.tensor([len(found) for found in where]))

    def slots(self, expert_TJ: Tensor, rank: int) -> Tensor:
        """A physical slot for each choice; replicas take turns from row to row and from rank to rank."""
        if self.log2phys.shape[1] == 1:  # no replicas: one launch instead of five in every layer
            return self.log2phys[:, 0][expert_TJ]
        row = torch.arange(rank, rank + expert_TJ.shape[0], device=expert_TJ.device)[:, None]
        return self.log2phys[expert_TJ, row % self.count[expert_TJ]]


# ---- there and back ----------------------------------------------------------------------------------------


@dataclass
class Trip:
    """What the way back needs: rows are sent and received in the order of ranks, then of tokens.

    token_S: whose row each sent one is; slot_SJ, slot_RJ: slots at the receiver, -1 for those elsewhere.
    """

    tokens: int
    token_S: Tensor
    slot_SJ: Tensor
    slot_RJ: Tensor
    sent: list[int]
    received: list[int]


@ops.op("exchange.dispatch", grad=False)
def dispatch(x_TD: Tensor, slot_TJ: Tensor, weight_TJ: Tensor, slots: int, fmt: str | None, peers: Peers,
             rows: int | None = None, load_P: Tensor | None = None) -> tuple[Tensor, Tensor, Trip]:
    """Rows that come here, their weights, and where they came from: (x_RD, weight_RJ, trip).

    slot_TJ: physical slots, -1 for none; `slots` of them are on each rank. fmt: x is rounded in this format.
    rows: as many as any rank brings, where that is agreed. load_P: gets what comes to each slot here added.
    trip.slot_RJ: slots here of the rows that came.
    """
    assert x_TD.shape[0] <= peers.max_rows, f"{x_TD.shape[0]} rows, but a step has {peers.max_rows} at most"
    rank_K = torch.arange(peers.size, device=x_TD.device)
    owner_TJ = slot_TJ.div(slots, rounding_mode="floor")  # -1 stays -1
    goes_KT = (owner_TJ == rank_K[:, None, None]).any(dim=-1)
    to_S, token_S = goes_KT.nonzero(as_tuple=True)
    there_SJ = owner_TJ[token_S] == to_S[:, None]
    slot_SJ = (slot_TJ[token_S] - slots * to_S[:, None]).where(there_SJ, -1)
    row = (x_TD,) if fmt is None else encode(x_TD, fmt)
    parts = [*(part[token_S] for part in row), slot_SJ.int(), weight_TJ[token_S]]
    sent_K = goes_KT.sum(dim=1)
    sent, received = sent_K.tolist(), _swap(sent_K, None, None, peers).tolist()
    *row, slot_RJ, weight_RJ = _open(_swap(_parcel(parts), sent, received, peers), parts)
    x_RD, slot_RJ = row[0] if fmt is None else decode(*row, fmt, x_TD.dtype), slot_RJ.long()
    eplb.count(slot_RJ, load_P)
    return x_RD, weight_RJ, Trip(x_TD.shape[0], token_S, slot_SJ, slot_RJ, sent, received)


@ops.op("exchange.combine", grad=False)
def combine(y: Tensor, trip: Trip, each: bool, peers: Peers) -> tuple[Tensor, Tensor]:
    """Answers go home: (rows, place), as moe.combine adds them up, place [T, ranks or J].

    y: an answer [R, D] for each row that came, or, with `each`, one for each of its choices, [R * J, D]: then
    every answer travels by itself, and the places are in the router's order. What has no answer points to a
    row of zeros.
    """
    if not isinstance(trip, Trip):
        raise ValueError("these rows came by another implementation of exchange.dispatch; choose the same")
    if each:
        here_RJ, there_SJ = trip.slot_RJ >= 0, trip.slot_SJ >= 0
        y = y[here_RJ.flatten()]
        back = [int(part.sum()) for part in here_RJ.split(trip.received)]
        home = [int(part.sum()) for part in there_SJ.split(trip.sent)]
        sent, choice = there_SJ.nonzero(as_tuple=True)
        token, width = trip.token_S[sent], there_SJ.shape[1]
    else:
        back, home, token, width = trip.received, trip.sent, trip.token_S, peers.size
        choice = torch.repeat_interleave(torch.tensor(home, device=token.device))
    rows = _swap(y, back, home, peers)
    place = torch.full((trip.tokens, width), len(rows), device=token.device)
    place[token, choice] = torch.arange(len(rows), device=token.device)
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))), place


ops.implement("exchange.dispatch", "deepep", when=deepep.why_not)(deepep.dispatch)
ops.implement("exchange.combine", "deepep", when=deepep.why_not_back)(deepep.combine)


def _parcel(parts: list[Tensor]) -> Tensor:
    """Tensors with a row for each of the same things as bytes side by side."""
    whole = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return torch.cat([part.view(torch.uint8) for part in whole], dim=1)


def _open(parcel: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The inverse of `_parcel`, with other rows."""
    widths = [part.shape[1] * part.element_size() for part in like]
    copies = (part.clone(memory_format=torch.contiguous_format) for part in parcel.split(widths, dim=1))
    return [copy.view(part.dtype) for copy, part in zip(copies, like, strict=True)]


def _swap(rows: Tensor, sent: list[int] | None, received: list[int] | None, peers: Peers) -> Tensor:
    """All to all: rows in runs, one for each rank; None: one row for each."""
    if peers.group is None:
        return rows
    found = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=peers.group)
    return found


# ---- what a layer gets -------------------------------------------------------------------------------------


def format_of(numerics: Numerics) -> str | None:
    """What rows travel in; None: as they are."""
    return numerics.activation_format if numerics.release else None


class Exchange:
    """Carries the rows of one MoE layer to its experts and back."""

    def __init__(self, map: SlotMap, peers: Peers, numerics: Numerics):
        self.map, self.peers, self.each = map, peers, numerics.steady
        self.fmt = format_of(numerics)
        self.slots = len(map.phys2log) // peers.size
        self.load = torch.zeros(self.slots, dtype=torch.int64, device=map.count.device)

    def dispatch(self, x_TD: Tensor, expert_TJ: Tensor, weight_TJ: Tensor
                 ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Rows for the experts here, their slots (-1: none) and weights, [R, J], and what `combine` needs.

        In steady numerics each choice is a row of its own, [R * J, 1].
        """
        slot_TJ, peers = self.map.slots(expert_TJ, self.peers.rank), self.peers
        rows = len(x_TD) if peers.rows == ALIKE else peers.rows
        x, weight, trip = dispatch(x_TD, slot_TJ, weight_TJ, self.slots, self.fmt, peers, rows, self.load)
        slot = trip.slot_RJ
        if self.each:
            x, slot, weight = x.repeat_interleave(slot.shape[1], 0), slot.view(-1, 1), weight.view(-1, 1)
        return x, slot, weight, trip

    def combine(self, y: Tensor, trip: Any) -> tuple[Tensor, Tensor]:
        """Their answers -> what came back to this rank's tokens: (rows, place_TK) for moe.combine."""
        return combine(y, trip, self.each, self.peers)


def attach(model: Model, peers: Peers, redundant: int = 0) -> dict[str, Exchange]:
    """Give every MoE layer its exchange, the draft's too; by the layer's name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            experts, device = module.gate.weight.shape[0], module.gate.weight.device
            slots = SlotMap(layout(experts, peers.size, redundant), experts, device)
            found[name] = module.exchange = Exchange(slots, peers, model.numerics)
    return found
