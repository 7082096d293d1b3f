"""Rows to the ranks that hold their experts, and answers back, written straight into the peers' memory.

Idea
    Programs share the rows of a step, or parts of rows, the same way on every rank.  Each writes its own to
    whichever rank has a slot for them, raises its flag at every peer, waits until the same program of every
    peer has raised its flag here, and restores the codes that those have written.  So nobody waits for all,
    and nobody asks a host: row t of rank k lies at k * rows + t, whether it came or not.

        dispatch   x -> FP8 codes and scales, or x as it is -> peers | flags | codes -> x
        combine    answers -> the ranks that asked, where moe.combine finds them | flags

    What is run for itself alone, as a graph is captured, touches no peer, and takes what their rows left here
    for none; and a graph, which has more rows than there are, reads how many are live.

    More programs than find room at once do no harm: they start in order on every rank, so that those which
    wait find their peers at work.  A flag counts turns, which every rank takes in the same order;
    engine/window.py says why two sets of buffers are not needed.

Shapes
    x_TD, slot_TJ (of all ranks, -1 for none), weight_TJ -> x_RD, weight_RJ, trip.slot_RJ (of this one),
    R = ranks * rows; what no row came to holds anything.  y [R, D], or [R * J, D] (`each`).

Units
    Bytes per row and rank that it goes to: D + D / 32 + 12 J there, 2 D back.

Errors
    ValueError names an argument whose shape does not fit.  A peer that never comes is waited for until the
    engine ends the window: what comes back then is of no use.

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


def _cut(tile: int, tiles: int, programs: int, num_warps: int, turn: int = 1 << 16) -> dict[str, int]:
    """Channels that a program holds at a time, how often for an item, most programs, items of a turn."""
    return {"tile": tile, "tiles": tiles, "programs": programs, "turn": turn, "num_warps": num_warps}


# most rows of a rank -> how they are cut; what waits costs nothing where there is more to run
FEW = {8: _cut(1024, 1, 256, 4), 64: _cut(2048, 1, 256, 8), 256: _cut(8192, 1, 128, 16)}
CONFIGS = {"exchange.dispatch": {**FEW, 1 << 62: _cut(1024, 5, 8192, 4, 1)},
           "exchange.combine": {**FEW, 1 << 62: _cut(1024, 5, 1056, 4)}}


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
def _await(flags_ptr, ended_ptr, due, size, RANK: tl.constexpr, FLAGS: tl.constexpr, PEERS: tl.constexpr):
    """Wait until the same program of every peer has told so `due` times, or the window has ended."""
    k = tl.arange(0, PEERS)
    peer = (k < size) & (k != RANK)
    nothing = tl.full((PEERS,), 0, tl.int64)
    flag_ptr = flags_ptr + k * FLAGS + tl.program_id(0)
    least = due - 1
    while least < due:
        count = tl.atomic_add(flag_ptr, nothing, mask=peer, sem="acquire", scope="sys")
        ended = tl.load(ended_ptr, volatile=True) != 0
        least = tl.where(ended, due, tl.min(tl.where(peer, count, due), axis=0))
    tl.debug_barrier()


@triton.jit
def _within(base, at):
    """Where a part of the window begins that lies at an address."""
    return tl.multiple_of((base + at).to(tl.pointer_type(tl.uint8)), 16)


# ---- there -------------------------------------------------------------------------------------------------

@triton.jit
def _channels(item, i, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr):
    """Groups and channels [groups, GROUP] of tile i of an item: a row has PARTS items of TILES tiles."""
    PARTS: tl.constexpr = (D + TILE * TILES - 1) // (TILE * TILES)
    group = (item % PARTS * TILES + i) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    return group, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _row_of(item, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    PARTS: tl.constexpr = (D + TILE * TILES - 1) // (TILE * TILES)
    return tl.cast(item // PARTS, tl.int64)


@triton.jit
def _send(x_ptr, asked_ptr, weight_ptr, out_ptr, address_ptr, rows_at, slots_at, weights_at, item, T, rows,
          slots, stride_x, stride_row, size, RANK: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
          J: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
          BLOCK_J: tl.constexpr):
    """A part of a row to every rank that has a slot for it; with each part, since its flag is for it alone,
    the slots that say whether it came.
    """
    t = _row_of(item, D, TILE, TILES)
    row = RANK * rows + t
    j = tl.arange(0, BLOCK_J)
    inside = j < tl.where(t < T, J, 0)
    asked = tl.load(asked_ptr + t * J + j, mask=inside, other=-1)
    weight = tl.load(weight_ptr + t * J + j, mask=inside, other=0.0)
    xs, bases, widths = (), (), ()
    for i in tl.static_range(TILES):
        group, channel = _channels(item, i, D, TILE, TILES, GROUP)
        xs += (tl.load(x_ptr + t * stride_x + channel, mask=channel < tl.where(t < T, D, 0), other=0.0),)
    for k in tl.static_range(SIZE):
        bases += (tl.load(address_ptr + k),)
    for k in tl.static_range(SIZE):
        reach = J if k == RANK else tl.where(size > 0, J, 0)
        here = (asked >= k * slots) & (asked < (k + 1) * slots)
        slot = tl.where(here & (j < reach), asked - k * slots, -1)
        widths += (tl.where(tl.max(slot, axis=0) >= 0, D, 0),)
        slot_ptr = _within(bases[k], slots_at).to(asked_ptr.dtype) + row * J
        tl.store(slot_ptr + j, slot, mask=j < reach)
        share_ptr = _within(bases[k], weights_at).to(weight_ptr.dtype) + row * J
        tl.store(share_ptr + j, weight, mask=j < reach)
    for i in tl.static_range(TILES):
        group, channel = _channels(item, i, D, TILE, TILES, GROUP)
        if KIND is not None:
            value, scale = scaled(xs[i].to(tl.float32), KIND)
            code, byte = e4m3_code(value), scale_byte(scale, KIND).reshape(TILE // GROUP)
        for k in tl.static_range(SIZE):
            there = _within(bases[k], rows_at)
            if KIND is None:
                tl.store(there.to(x_ptr.dtype) + row * D + channel, xs[i], mask=channel < widths[k])
            elif k == RANK:
                tl.store(out_ptr + row * D + channel, xs[i], mask=channel < widths[k])
            else:
                tl.store(there + row * stride_row + channel, code, mask=channel < widths[k])
                tl.store(there + row * stride_row + D + group, byte, mask=group * GROUP < widths[k])


@triton.jit
def _receive(codes_ptr, came_ptr, slot_ptr, load_ptr, out_ptr, item, rows, stride_row, size,
             RANK: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
             GROUP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_J: tl.constexpr):
    """The slots of the same row of every rank, which its first part counts, and the same part of it, of peers
    from its codes.
    """
    PARTS: tl.constexpr = (D + TILE * TILES - 1) // (TILE * TILES)
    t = _row_of(item, D, TILE, TILES)
    j = tl.arange(0, BLOCK_J)
    widths = ()
    for k in tl.static_range(SIZE):
        at = (k * rows + t) * J + j
        reach = J if k == RANK else tl.where(size > 0, J, 0)
        slot = tl.load(came_ptr + at, mask=j < reach, other=-1)
        tl.store(slot_ptr + at, slot, mask=j < J)
        if load_ptr is not None:
            counted = (slot >= 0) & (item % PARTS == 0)
            tl.atomic_add(load_ptr + slot, tl.full((BLOCK_J,), 1, tl.int64), mask=counted, sem="relaxed")
        widths += (tl.where(tl.max(slot, axis=0) >= 0, D, 0),)
    for k in tl.static_range(SIZE):
        if KIND is not None and k != RANK:
            row, codes, bytes_ = k * rows + t, (), ()
            there = codes_ptr + row * stride_row
            for i in tl.static_range(TILES):
                group, channel = _channels(item, i, D, TILE, TILES, GROUP)
                codes += (tl.load(there + channel, mask=channel < widths[k], other=0),)
                bytes_ += (tl.load(there + D + group, mask=group * GROUP < widths[k], other=0),)
            for i in tl.static_range(TILES):
                group, channel = _channels(item, i, D, TILE, TILES, GROUP)
                x = from_e4m3(codes[i]) * scale_value(bytes_[i], KIND)[:, None]
                tl.store(out_ptr + row * D + channel, narrow(x, out_ptr.dtype.element_ty),
                         mask=channel < widths[k])


@triton.jit
def _dispatch_kernel(x_ptr, asked_ptr, weight_ptr, out_ptr, address_ptr, flags_ptr, codes_ptr, came_ptr,
                     slot_ptr, load_ptr, seen_ptr, flags_at, rows_at, slots_at, weights_at, T, rows, slots,
                     stride_x, stride_row, live_ptr, alone_ptr, ended_ptr, turns, each, RANK: tl.constexpr,
                     SIZE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
                     GROUP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_J: tl.constexpr,
                     FLAGS: tl.constexpr, PEERS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr):
    """In turns of `each` items: what came in the last one is taken in while the next one travels."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    items = rows * ((D + TILE * TILES - 1) // (TILE * TILES))
    seen = tl.load(seen_ptr + program)
    size = tl.where(tl.load(alone_ptr) == 0, SIZE, 0)  # of those that are written to and waited for
    if live_ptr is not None:
        T = tl.minimum(tl.load(live_ptr).to(tl.int32), T)
    for turn in range(turns + 1):
        first = turn * each * programs + program
        if SEND and turn < turns:
            for item in range(first, tl.minimum(first + each * programs, items), programs):
                _send(x_ptr, asked_ptr, weight_ptr, out_ptr, address_ptr, rows_at, slots_at, weights_at, item,
                      T, rows, slots, stride_x, stride_row, size, RANK, SIZE, D, J, KIND, GROUP, TILE, TILES,
                      BLOCK_J)
            _raise(address_ptr, flags_at, size, RANK, FLAGS, PEERS)
        first -= each * programs
        if RECEIVE and turn > 0:
            _await(flags_ptr, ended_ptr, seen + turn, size, RANK, FLAGS, PEERS)
            for item in range(first, tl.minimum(first + each * programs, items), programs):
                _receive(codes_ptr, came_ptr, slot_ptr, load_ptr, out_ptr, item, rows, stride_row, size, RANK,
                         SIZE, D, J, KIND, GROUP, TILE, TILES, BLOCK_J)
    if RECEIVE:
        tl.store(seen_ptr + program, tl.where(size > 0, seen + turns, seen))


def _how(name: str, peers: Peers, rows: int, items: int, D: int, group: int = 1) -> dict[str, int]:
    """How so many rows or answers are cut: the same on every rank."""
    config = tuned(name, (rows, D, peers.size), up_to(CONFIGS[name], rows))
    tile = max(group, min(config["tile"], pow2(D)))
    tiles = min(config["tiles"], cdiv(D, tile))
    items *= cdiv(D, tile * tiles)
    programs = min(config["programs"], items)
    turn = min(config["turn"], cdiv(items, programs))
    return {"tile": tile, "tiles": tiles, "programs": programs, "turn": turn, "items": items,
            "num_warps": min(config["num_warps"], max(1, tile // 128))}


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


@ops.implement("exchange.dispatch", "triton", when=lambda x, slot, weight, slots, fmt, peers, rows, *_:
               _apart(peers, rows, fmt, x, weight))
def dispatch(x_TD: Tensor, slot_TJ: Tensor, weight_TJ: Tensor, slots: int, fmt: str | None, peers: Peers,
             rows: int | None, load_P: Tensor | None = None) -> tuple[Tensor, Tensor, Trip]:
    """(x_RD, weight_RJ, trip): `rows` of each rank, those with no slot here are none."""
    (T, D), J, window, size = x_TD.shape, slot_TJ.shape[1], peers.window, peers.size
    require(rows >= T, "x_TD", f"has {T} rows, {rows} were agreed on")
    require(slot_TJ.shape == weight_TJ.shape == (T, J), "slot_TJ", f"is {tuple(slot_TJ.shape)}, weight_TJ "
            f"{tuple(weight_TJ.shape)}, and there are {T} rows")
    kind, group = layout(fmt) if fmt else (None, 32)
    x, asked, weight = rows_of(x_TD), slot_TJ.contiguous(), weight_TJ.contiguous()
    slot_RJ = asked.new_empty(size * rows, J)
    if kind:
        out = torch.empty(size * rows, D, dtype=x.dtype, device=x.device)
    else:
        out = window.part("rows", x.dtype, size * rows, D)
    trip = Trip(asked, slot_RJ, slots, rows)
    if rows:
        _there(out, trip, x, weight, load_P, (kind, group), peers)
    return out, window.part("weights", torch.float32, size * rows, J), trip


def _there(out: Tensor, trip: Trip, x: Tensor, weight: Tensor, load: Tensor | None,
           fmt: tuple[str | None, int], peers: Peers, send: bool = True, receive: bool = True) -> None:
    """The launch; one half of it, where ranks are one after the other."""
    (T, D), (kind, group), window, J = x.shape, fmt, peers.window, weight.shape[1]
    how, at = _how("exchange.dispatch", peers, trip.rows, trip.rows, D, group), window.at
    _dispatch_kernel[(how["programs"],)](
        x, trip.asked_TJ, weight, out, window.address_K, window.part("flags", torch.int64, 1),
        window.own[at["rows"]:], window.part("slots", torch.int64, 1), trip.slot_RJ, load, window.seen[0],
        at["flags"], at["rows"], at["slots"], at["weights"], T, trip.rows, trip.slots, x.stride(0),
        D + cdiv(D, group), peers.live, window.alone, window.ended,
        cdiv(how["items"], how["programs"] * how["turn"]), how["turn"], peers.rank, peers.size, D, J, kind,
        group, how["tile"], how["tiles"], pow2(J), window.seen.shape[1], max(2, pow2(peers.size)), send,
        receive, num_warps=how["num_warps"])


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
            D: tl.constexpr, CHOICES: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr,
            TILES: tl.constexpr):
    """A part of an answer to rank k, which has asked for it; reach: D, or 0 where it is left alone."""
    a = _row_of(item, D, TILE, TILES)
    there = k * answers + a
    j = tl.arange(0, triton.next_power_of_2(CHOICES))
    slot = tl.load(slot_ptr + there * CHOICES + j, mask=j < CHOICES, other=-1)
    width = tl.where(tl.max(slot, axis=0) >= 0, reach, 0)
    to = 1 + a if EACH else 1 + RANK * answers + a
    to_ptr = _within(tl.load(address_ptr + k), answers_at).to(y_ptr.dtype) + to * D
    ys = ()
    for i in tl.static_range(TILES):
        d, _ = _channels(item, i, D, TILE, TILES, 1)
        ys += (tl.load(y_ptr + there * stride_y + d, mask=d < width, other=0.0),)
    for i in tl.static_range(TILES):
        d, _ = _channels(item, i, D, TILE, TILES, 1)
        tl.store(to_ptr + d, ys[i], mask=d < width)


@triton.jit
def _combine_kernel(y_ptr, slot_ptr, asked_ptr, place_ptr, address_ptr, flags_ptr, seen_ptr, flags_at,
                    answers_at, T, rows, slots, stride_y, live_ptr, alone_ptr, ended_ptr, RANK: tl.constexpr,
                    SIZE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, EACH: tl.constexpr,
                    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_J: tl.constexpr, FLAGS: tl.constexpr,
                    PEERS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr):
    """Answers to the ranks whose rows they are, the next one's first, so that all are busy; then its own."""
    CHOICES: tl.constexpr = 1 if EACH else J  # of an answer
    program, programs = tl.program_id(0), tl.num_programs(0)
    seen = tl.load(seen_ptr + program)
    size = tl.where(tl.load(alone_ptr) == 0, SIZE, 0)
    live = T if live_ptr is None else tl.load(live_ptr).to(tl.int32)
    if SEND:
        answers = rows * J if EACH else rows  # of a rank
        items = answers * ((D + TILE * TILES - 1) // (TILE * TILES))
        for item in range(program, items, programs):
            for step in tl.static_range(1, SIZE):
                _return(y_ptr, slot_ptr, address_ptr, answers_at, item, (RANK + step) % SIZE, answers,
                        stride_y, tl.where(size > 0, D, 0), RANK, D, CHOICES, EACH, TILE, TILES)
            if item + programs >= items:
                _raise(address_ptr, flags_at, size, RANK, FLAGS, PEERS)
            _return(y_ptr, slot_ptr, address_ptr, answers_at, item, RANK, answers, stride_y, D, RANK, D,
                    CHOICES, EACH, TILE, TILES)
        for first in range(program * 64, T, programs * 64):
            _places(asked_ptr, place_ptr, first, T, live, slots, rows, SIZE, J, BLOCK_J, EACH, 64)
    if RECEIVE:
        _await(flags_ptr, ended_ptr, seen + 1, size, RANK, FLAGS, PEERS)
        tl.store(seen_ptr + program, tl.where(size > 0, seen + 1, seen))


@ops.implement("exchange.combine", "triton", when=lambda y, trip, each, peers: refuse(y) if isinstance(
               trip, Trip) else "its rows came by another implementation of exchange.dispatch")
def combine(y: Tensor, trip: Trip, each: bool, peers: Peers) -> tuple[Tensor, Tensor]:
    """(rows, place) for moe.combine: answers of this rank's tokens; row 0 is zeros.

    y: an answer for each row that a rank may bring, or `each` of its choices.
    """
    (T, J), size, rows, D = trip.asked_TJ.shape, peers.size, trip.rows, y.shape[1]
    answers = rows * J if each else rows
    require(len(y) == size * answers, "y", f"has {len(y)} rows, not {size * answers}")
    place = torch.empty(T, J if each else size, dtype=torch.int64, device=y.device)
    if rows:
        _back(place, trip, rows_of(y), each, peers)
    return peers.window.part("answers", y.dtype, 1 + (answers if each else size * rows), D), place


def _back(place: Tensor, trip: Trip, y: Tensor, each: bool, peers: Peers, send: bool = True,
          receive: bool = True) -> None:
    """The launch; one half of it, where ranks are one after the other."""
    (T, J), window, D = trip.asked_TJ.shape, peers.window, y.shape[1]
    how = _how("exchange.combine", peers, trip.rows, len(y) // peers.size, D)
    flags = peers.size * window.seen.shape[1]
    _combine_kernel[(how["programs"],)](
        y, trip.slot_RJ, trip.asked_TJ, place, window.address_K,
        window.part("flags", torch.int64, 2, flags)[1], window.seen[1], window.at["flags"] + 8 * flags,
        window.at["answers"], T, trip.rows, trip.slots, y.stride(0), peers.live, window.alone, window.ended,
        peers.rank, peers.size, D, J, each, how["tile"], how["tiles"], pow2(J), window.seen.shape[1],
        max(2, pow2(peers.size)), send, receive, num_warps=how["num_warps"])
