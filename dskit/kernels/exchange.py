"""Rows to the ranks that hold their experts, and answers back, written straight into the peers' memory.

Idea
    A fixed number of programs cut the rows of a step between them, each row in pieces, and the same way on
    every rank.  A program writes its pieces to whichever rank has a slot for their row, raises its flag at
    every peer, waits until the same program of every peer has raised its flag here, and restores the codes
    that those have written.  So nobody waits for all, and nobody asks a host: row t of rank k lies at
    k * rows + t, whether it came or not.

        dispatch   x -> FP8 codes and scales, or x as it is -> peers | flags | codes -> x
        combine    answers -> the ranks that asked, where moe.combine finds them | flags

    What is run for itself alone, as a graph is captured, touches no peer; and a graph, which has more rows
    than there are, reads how many are live.

    A program that waits keeps its multiprocessor, so there are fewer of them than those: what runs beside
    and waits for peers as well, such as NCCL, finds room.  A flag counts calls, which every rank makes in
    the same order; engine/window.py says why two sets of buffers are not needed.

Shapes
    x_TD, slot_TJ (of all ranks, -1 for none), weight_TJ -> x_RD, weight_RJ, trip.slot_RJ (of this one),
    R = ranks * rows; what no row came to holds anything.  y [R, D], or [R * J, D] (`each`).

Units
    Bytes per row and rank that it goes to: D + D / 32 + 12 J there, 2 D back.

Errors
    ValueError names an argument whose shape does not fit.  A peer that never comes is waited for for ever:
    the engine's watchdog ends the process.

Source
    kernels.md 5.4; engine.md 11.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels.common import (
    cdiv,
    e4m3_code,
    from_e4m3,
    layout,
    narrow,
    pow2,
    refuse,
    require,
    rows_of,
    scale_byte,
    scale_value,
    scaled,
    too_wide,
    tuned,
    up_to,
)

Peers = Any  # of engine/exchange.py, with a Window of engine/window.py: known by their attributes alone
SPARE = 32  # multiprocessors that are left to others


def _cut(rows: int, piece: int, programs: int, num_warps: int, turn: int = 1 << 20) -> dict[str, int]:
    """Rows of an item, channels of its pieces, programs, items of a turn (else all of a program are one)."""
    return {"rows": rows, "piece": piece, "programs": programs, "turn": turn, "num_warps": num_warps}


# most rows of a rank -> how they are cut
FEW = {8: _cut(1, 512, 96, 4), 64: _cut(1, 2048, 96, 8), 256: _cut(1, 8192, 100, 16)}
CONFIGS = {"exchange.dispatch": {**FEW, 1 << 62: _cut(8, 1024, 100, 16, 4)},
           "exchange.combine": {**FEW, 1 << 62: _cut(8, 1024, 100, 16)}}


@dataclass(eq=False)
class Trip:
    """What the way back needs: the slots asked for and received, and how many rows each rank may bring."""

    asked_TJ: Tensor
    slot_RJ: Tensor
    slots: int
    rows: int


# ---- flags -------------------------------------------------------------------------------------------------

@triton.jit
def _raise(address_ptr, flags_at, size, RANK: tl.constexpr, FLAGS: tl.constexpr, PEERS: tl.constexpr):
    """Tell the same program of every peer that all this one has written is there."""
    tl.debug_barrier()  # what other threads have written comes before the release of those that tell
    k = tl.arange(0, PEERS)
    peer = (k < size) & (k != RANK)
    at = tl.load(address_ptr + k, mask=peer, other=0) + flags_at + (RANK * FLAGS + tl.program_id(0)) * 8
    one = tl.full((PEERS,), 1, tl.int64)
    tl.atomic_add(at.to(tl.pointer_type(tl.int64)), one, mask=peer, sem="release", scope="sys")


@triton.jit
def _await(flags_ptr, due, size, RANK: tl.constexpr, FLAGS: tl.constexpr, PEERS: tl.constexpr):
    """Wait until the same program of every peer has told so `due` times."""
    k = tl.arange(0, PEERS)
    peer = (k < size) & (k != RANK)
    nothing = tl.full((PEERS,), 0, tl.int64)
    flag_ptr = flags_ptr + k * FLAGS + tl.program_id(0)
    least = due - 1
    while least < due:
        count = tl.atomic_add(flag_ptr, nothing, mask=peer, sem="acquire", scope="sys")
        least = tl.min(tl.where(peer, count, due), axis=0)
    tl.debug_barrier()


@triton.jit
def _bytes_of(address_ptr, k, at):
    """Where a part of rank k's window begins."""
    return tl.multiple_of((tl.load(address_ptr + k) + at).to(tl.pointer_type(tl.uint8)), 16)


# ---- there -------------------------------------------------------------------------------------------------

@triton.jit
def _tile(item, D: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr):
    """Rows [ROWS] of an item, and its groups: whose they are among those, which of the row's, their channels
    [groups, GROUP].
    """
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    EACH: tl.constexpr = PIECE // GROUP
    t = tl.cast(item // PIECES * ROWS, tl.int64) + tl.arange(0, ROWS)
    g = tl.arange(0, ROWS * EACH)
    group = item % PIECES * EACH + g % EACH
    row = tl.cast(item // PIECES * ROWS, tl.int64) + g // EACH
    return t, row, group, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _some(slot, EACH: tl.constexpr):
    """For each of a row's groups [ROWS * EACH] whether any of its slots is one."""
    some = (tl.max(slot, axis=1) >= 0).to(tl.int32)
    return some[:, None].broadcast_to(slot.shape[0], EACH).reshape(slot.shape[0] * EACH) > 0


@triton.jit
def _send(x_ptr, asked_ptr, weight_ptr, address_ptr, rows_at, slots_at, weights_at, item, T, rows, slots,
          stride_x, stride_row, size, RANK: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
          J: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
          BLOCK_J: tl.constexpr):
    """A piece of some rows to every rank that has a slot for them; with each piece, since its flag is for it
    alone, the slots that say what came.
    """
    EACH: tl.constexpr = PIECE // GROUP
    t, row, group, channel = _tile(item, D, ROWS, PIECE, GROUP)
    j = tl.arange(0, BLOCK_J)[None, :]
    choice = t[:, None] * J + j
    inside = (j < J) & (t[:, None] < T)
    asked = tl.load(asked_ptr + choice, mask=inside, other=-1)
    weight = tl.load(weight_ptr + choice, mask=inside, other=0.0)
    x = tl.load(x_ptr + row[:, None] * stride_x + channel, mask=(channel < D) & (row[:, None] < T), other=0.0)
    if KIND is not None:
        value, scale = scaled(x.to(tl.float32), KIND)
        code, byte = e4m3_code(value), scale_byte(scale, KIND).reshape(ROWS * EACH)
    row += RANK * rows
    choice += RANK * rows * J
    for k in tl.static_range(SIZE):
        inside = (j < J) & (t[:, None] < (rows if k == RANK else tl.where(size > 0, rows, 0)))
        slot = tl.where(inside & (asked >= k * slots) & (asked < (k + 1) * slots), asked - k * slots, -1)
        some = _some(slot, EACH)
        there = _bytes_of(address_ptr, k, rows_at)
        inner = (channel < D) & some[:, None]
        if KIND is None:
            tl.store(there.to(x_ptr.dtype) + row[:, None] * D + channel, x, mask=inner)
        else:
            there += row * stride_row
            tl.store(there[:, None] + channel, code, mask=inner)
            tl.store(there + D + group, byte, mask=(group * GROUP < D) & some)
        tl.store(_bytes_of(address_ptr, k, slots_at).to(asked_ptr.dtype) + choice, slot, mask=inside)
        tl.store(_bytes_of(address_ptr, k, weights_at).to(weight_ptr.dtype) + choice, weight, mask=inside)


@triton.jit
def _restore(codes_ptr, slot_ptr, out_ptr, item, rows, stride_row, OWN: tl.constexpr, RANK: tl.constexpr,
             SIZE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
             ROWS: tl.constexpr, PIECE: tl.constexpr, BLOCK_J: tl.constexpr):
    """The same piece of the same rows of this rank (`OWN`), or of every other, from its codes."""
    t, row, group, channel = _tile(item, D, ROWS, PIECE, GROUP)
    j = tl.arange(0, BLOCK_J)[None, :]
    inside = (j < J) & (t[:, None] < rows)
    for k in tl.static_range(SIZE):
        if (k == RANK) == OWN:
            slot = tl.load(slot_ptr + (k * rows + t[:, None]) * J + j, mask=inside, other=-1)
            some = _some(slot, PIECE // GROUP)
            there = codes_ptr + (k * rows + row) * stride_row
            code = tl.load(there[:, None] + channel, mask=(channel < D) & some[:, None], other=0)
            byte = tl.load(there + D + group, mask=(group * GROUP < D) & some, other=0)
            x = narrow(from_e4m3(code) * scale_value(byte, KIND)[:, None], out_ptr.dtype.element_ty)
            tl.store(out_ptr + (k * rows + row[:, None]) * D + channel, x, mask=(channel < D) & some[:, None])


@triton.jit
def _dispatch_kernel(x_ptr, asked_ptr, weight_ptr, out_ptr, address_ptr, flags_ptr, codes_ptr, slot_ptr,
                     seen_ptr, flags_at, rows_at, slots_at, weights_at, T, rows, slots, stride_x, stride_row,
                     live_ptr, alone_ptr, turns, RANK: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                     J: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
                     PIECE: tl.constexpr, BLOCK_J: tl.constexpr, TURN: tl.constexpr, FLAGS: tl.constexpr,
                     PEERS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr):
    """In turns of TURN items: what came in the last one is restored while the next one travels."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    items = tl.cdiv(rows, ROWS) * ((D + PIECE - 1) // PIECE)
    seen = tl.load(seen_ptr + program)
    size = tl.where(tl.load(alone_ptr) == 0, SIZE, 0)  # of those that are written to and waited for
    if live_ptr is not None:
        T = tl.minimum(tl.load(live_ptr).to(tl.int32), T)
    for turn in range(turns + 1):
        first = turn * TURN * programs + program
        if SEND and turn < turns:
            for item in range(first, tl.minimum(first + TURN * programs, items), programs):
                _send(x_ptr, asked_ptr, weight_ptr, address_ptr, rows_at, slots_at, weights_at, item, T, rows,
                      slots, stride_x, stride_row, size, RANK, SIZE, D, J, KIND, GROUP, ROWS, PIECE, BLOCK_J)
            _raise(address_ptr, flags_at, size, RANK, FLAGS, PEERS)
        first -= TURN * programs
        if RECEIVE and turn > 0:
            for own in tl.static_range(1, -1, -1):
                if own == 0:
                    _await(flags_ptr, seen + turn, size, RANK, FLAGS, PEERS)
                if KIND is not None:
                    for item in range(first, tl.minimum(first + TURN * programs, items), programs):
                        _restore(codes_ptr, slot_ptr, out_ptr, item, rows, stride_row, own == 1, RANK, SIZE,
                                 D, J, KIND, GROUP, ROWS, PIECE, BLOCK_J)
    if RECEIVE:
        tl.store(seen_ptr + program, tl.where(size > 0, seen + turns, seen))


def _how(name: str, peers: Peers, rows: int, answers: int, D: int, group: int = 1
         ) -> tuple[int, dict[str, int]]:
    """(items, how they are cut): the same on every rank."""
    config = tuned(name, (rows, D, peers.size), up_to(CONFIGS[name], rows))
    piece = max(group, min(config["piece"], pow2(D)))
    items = cdiv(answers, config["rows"]) * cdiv(D, piece)
    programs = max(1, min(config["programs"], peers.window.processors - SPARE, items))
    warps = min(config["num_warps"], max(1, config["rows"] * piece // 128))
    return items, config | {"piece": piece, "programs": programs, "num_warps": warps}


def _apart(peers: Peers, rows: int | None, fmt: str | None, *tensors: Tensor) -> str | None:
    """Why these ranks do not write into each other's memory, or None."""
    if peers.window is None:
        return f"the ranks have no window into each other's memory: {peers.apart}"
    if rows is None:
        return "it is not agreed how many rows a rank brings"
    if rows > peers.window.max_rows:
        return f"{rows} rows, and the window has room for {peers.window.max_rows}"
    if fmt and not fmt.startswith("fp8"):
        return f"rows are rounded as {fmt}; they travel as fp8 or as they are"
    return too_wide(*tensors) or refuse(*tensors)


@ops.implement("exchange.dispatch", "triton", when=lambda x, slot, weight, slots, fmt, peers, rows:
               _apart(peers, rows, fmt, x, weight))
def dispatch(x_TD: Tensor, slot_TJ: Tensor, weight_TJ: Tensor, slots: int, fmt: str | None, peers: Peers,
             rows: int | None, send: bool = True, receive: bool = True) -> tuple[Tensor, Tensor, Trip]:
    """(x_RD, weight_RJ, trip): `rows` of each rank, those with no slot here are none.

    send, receive: one half alone, where the ranks are one after the other.
    """
    (T, D), J, window, size = x_TD.shape, slot_TJ.shape[1], peers.window, peers.size
    require(rows >= T, "x_TD", f"has {T} rows, {rows} were agreed on")
    require(slot_TJ.shape == weight_TJ.shape == (T, J), "slot_TJ", f"is {tuple(slot_TJ.shape)}, weight_TJ "
            f"{tuple(weight_TJ.shape)}, and there are {T} rows")
    kind, group = layout(fmt) if fmt else (None, 32)
    x, asked, weight = rows_of(x_TD), slot_TJ.contiguous(), weight_TJ.contiguous()
    slot_RJ = window.part("slots", torch.int64, size * rows, J)
    if kind:
        out = torch.empty(size * rows, D, dtype=x.dtype, device=x.device)
    else:
        out = window.part("rows", x.dtype, size * rows, D)
    items, how = _how("exchange.dispatch", peers, rows, rows, D, group)
    if rows:
        _dispatch_kernel[(how["programs"],)](
            x, asked, weight, out, window.address_K, window.part("flags", torch.int64, 1), window.own[
                window.at["rows"]:], slot_RJ, window.seen[0], window.at["flags"], window.at["rows"],
            window.at["slots"], window.at["weights"], T, rows, slots, x.stride(0), D + cdiv(D, group),
            peers.live, window.alone, cdiv(items, how["programs"] * how["turn"]), peers.rank, size, D, J,
            kind, group, how["rows"], how["piece"], pow2(J), how["turn"], window.seen.shape[1],
            max(2, pow2(size)), send, receive, num_warps=how["num_warps"])
    return out, window.part("weights", torch.float32, size * rows, J), Trip(asked, slot_RJ, slots, rows)


# ---- back --------------------------------------------------------------------------------------------------

@triton.jit
def _places(asked_ptr, place_ptr, first, T, live, slots, rows, SIZE: tl.constexpr, J: tl.constexpr,
            BLOCK_J: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr):
    """Where tokens' answers will be: of each choice, or of each rank; 0 where there is none."""
    t = tl.cast(first, tl.int64) + tl.arange(0, TOKENS)
    j = tl.arange(0, BLOCK_J)[None, :]
    at = t[:, None] * J + j
    inside = (j < J) & (t[:, None] < T)
    asked = tl.load(asked_ptr + at, mask=(j < J) & (t[:, None] < live), other=-1)
    if EACH:
        tl.store(place_ptr + at, tl.where(asked >= 0, 1 + at, 0), mask=inside)
    else:
        for k in tl.static_range(SIZE):
            mine = (asked >= k * slots) & (asked < (k + 1) * slots)
            goes = tl.max(mine.to(tl.int32), axis=1) > 0
            tl.store(place_ptr + t * SIZE + k, tl.where(goes, 1 + k * rows + t, 0), mask=t < T)


@triton.jit
def _return(y_ptr, slot_ptr, address_ptr, answers_at, item, k, answers, stride_y, reach, RANK: tl.constexpr,
            D: tl.constexpr, CHOICES: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr,
            PIECE: tl.constexpr):
    """A piece of some answers to rank k, which has asked for them; reach: D, or 0 where it is left alone."""
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    BLOCK: tl.constexpr = triton.next_power_of_2(CHOICES)
    a = tl.cast(item // PIECES * ROWS, tl.int64) + tl.arange(0, ROWS)
    d = item % PIECES * PIECE + tl.arange(0, PIECE)[None, :]
    j = tl.arange(0, BLOCK)[None, :]
    there = k * answers + a[:, None]
    slot = tl.load(slot_ptr + there * CHOICES + j, mask=(j < CHOICES) & (a[:, None] < answers), other=-1)
    width = tl.where(tl.max(slot, axis=1) >= 0, reach, 0)[:, None]
    y = tl.load(y_ptr + there * stride_y + d, mask=d < width, other=0.0)
    to = (1 + a if EACH else 1 + RANK * answers + a)[:, None]
    tl.store(_bytes_of(address_ptr, k, answers_at).to(y_ptr.dtype) + to * D + d, y, mask=d < width)


@triton.jit
def _combine_kernel(y_ptr, slot_ptr, asked_ptr, place_ptr, address_ptr, flags_ptr, seen_ptr, flags_at,
                    answers_at, T, rows, slots, stride_y, live_ptr, alone_ptr, RANK: tl.constexpr,
                    SIZE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, EACH: tl.constexpr,
                    ROWS: tl.constexpr, PIECE: tl.constexpr, BLOCK_J: tl.constexpr, FLAGS: tl.constexpr,
                    PEERS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr):
    """Answers to the ranks whose rows they are, the next one's first, so that all are busy; then its own."""
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    CHOICES: tl.constexpr = 1 if EACH else J  # of an answer
    program, programs = tl.program_id(0), tl.num_programs(0)
    seen = tl.load(seen_ptr + program)
    size = tl.where(tl.load(alone_ptr) == 0, SIZE, 0)
    live = T if live_ptr is None else tl.load(live_ptr).to(tl.int32)
    if SEND:
        answers = rows * J if EACH else rows  # of a rank
        items = tl.cdiv(answers, ROWS) * PIECES
        for item in range(program, (SIZE - 1) * items, programs):
            k = (item // items + RANK + 1) % SIZE
            _return(y_ptr, slot_ptr, address_ptr, answers_at, item % items, k, answers, stride_y,
                    tl.where(size > 0, D, 0), RANK, D, CHOICES, EACH, ROWS, PIECE)
        _raise(address_ptr, flags_at, size, RANK, FLAGS, PEERS)
        for item in range(program, items, programs):
            _return(y_ptr, slot_ptr, address_ptr, answers_at, item, RANK, answers, stride_y, D, RANK, D,
                    CHOICES, EACH, ROWS, PIECE)
        for first in range(program * 64, T, programs * 64):
            _places(asked_ptr, place_ptr, first, T, live, slots, rows, SIZE, J, BLOCK_J, EACH, 64)
    if RECEIVE:
        _await(flags_ptr, seen + 1, size, RANK, FLAGS, PEERS)
        tl.store(seen_ptr + program, tl.where(size > 0, seen + 1, seen))


@ops.implement("exchange.combine", "triton", when=lambda y, trip, each, peers: refuse(y) if isinstance(
               trip, Trip) else "its rows came by another implementation of exchange.dispatch")
def combine(y: Tensor, trip: Trip, each: bool, peers: Peers, send: bool = True, receive: bool = True
            ) -> tuple[Tensor, Tensor]:
    """(rows, place) for moe.combine: answers of this rank's tokens; row 0 is zeros.

    y: an answer for each row that a rank may bring, or `each` of its choices.
    """
    (T, J), window, size, rows, D = trip.asked_TJ.shape, peers.window, peers.size, trip.rows, y.shape[1]
    answers = rows * J if each else rows
    require(len(y) == size * answers, "y", f"has {len(y)} rows, not {size * answers}")
    y, flags = rows_of(y), size * window.seen.shape[1]
    place = torch.empty(T, J if each else size, dtype=torch.int64, device=y.device)
    _, how = _how("exchange.combine", peers, rows, size * answers, D)
    if rows:
        _combine_kernel[(how["programs"],)](
            y, trip.slot_RJ, trip.asked_TJ, place, window.address_K,
            window.part("flags", torch.int64, 2, flags)[1], window.seen[1], window.at["flags"] + 8 * flags,
            window.at["answers"], T, rows, trip.slots, y.stride(0), peers.live, window.alone, peers.rank,
            size, D, J, each, how["rows"], how["piece"], pow2(J), window.seen.shape[1], max(2, pow2(size)),
            send, receive, num_warps=how["num_warps"])
    return window.part("answers", y.dtype, 1 + (answers if each else size * rows), D), place
