"""The experts' products for many tokens, with a warp that brings beside groups that multiply, for Hopper.

Idea
    With dozens of tokens for each expert three things take about as long: bringing weights and tokens,
    restoring codes, and multiplying.  So they run side by side.  One warp has an engine copy steps into a
    ring of buffers; GROUPS groups of four warps take 64 weight rows each out of the same step, restore them
    in registers and multiply them by the same tokens, each at its own pace:

        bring      | 64 tokens and 16 more | 64 weight rows | 64 | 64 |    a ring of STAGES
        multiply   wait, restore, multiply, let go; at the end of a tile scales, activation, answer

    A program keeps its processor and takes one tile after the other.  Tiles of an expert are neighbours, so
    that its tokens stay in the L2; a stage of 192 rows needs them a third as often as one of 64.

    Of a group's rows the first 32 and the second 32, which `up` takes of gate and of up, stand in turns of
    eight, so that a thread has both numbers of a pair.  A thread reads eight words of a row at once, and
    `operands` lays tokens out for that (`wide`), in the plan's order, since an engine gathers no rows.

    Scales are folded without a look at them beforehand.  A tile where they were too far apart is marked, and
    experts.py does it again.

Shapes
    x [rows, K] in the plan's order, e4m3 with scales [rows] or bfloat16; words [experts, features, K / 8];
    tiles [tiles, 4]: expert, first row, last row + 1, mark.

Units
    A step is 256 channels: 4 KB of 32 weight rows, 20 KB of 80 tokens in e4m3, 40 KB in bfloat16.

Errors
    Gluon, in which this is written, is compiled only: `takes` says for what.  experts.py has kernels for the
    rest and for the interpreter.

Source
    kernels.md 1.8, 2.3.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dskit.kernels import common, moe, operands
from dskit.kernels.hopper import _barriers, engine_copy

STEP, GROUPS = gl.constexpr(256), 3
REGISTERS = 152, 40  # a thread that multiplies, one that brings
SPAN, UNIT = gl.constexpr(operands.SPAN.value), gl.constexpr(2.0**64)
LIFTING = gl.constexpr(operands._lifting())
FIRST, SECOND = gl.constexpr(operands._restoring(8, 0)), gl.constexpr(operands._restoring(8, 1))
from_e8m0, restored, clamped, sigmoid = (gluon.jit(helper.fn) for helper in (
    common.from_e8m0, common.restored, moe._clamped, moe._sigmoid))

# Layouts of four warps.  32 rows of 32 words, the same by groups of four words, 32 rows of sums.
WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 32]))
GROUPED = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 1, 0]], [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[8, 0, 0], [16, 0, 0]], [], [32, 8, 4]))
BYTES = gl.constexpr(gl.SliceLayout(2, GROUPED.value))
SUMS_64 = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [],
    [32, 64]))
SUMS_16 = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]))
LINE = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))  # 64 bytes of each token
E4M3_64, E4M3_16, BF16_64, BF16_16 = (
    gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, depth]))
    for depth in (32, 16) for width in (64, 16))
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _item(tile_ptr, item, N, UP: gl.constexpr, GROUPS: gl.constexpr):
    """(the tile, its expert, first and last row + 1, the first feature) of an item."""
    ROWS: gl.constexpr = 32 * GROUPS if UP else 64 * GROUPS
    across = gl.cdiv(N, ROWS)
    tile_ptr += 4 * (item // across)
    return tile_ptr, gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), item % across * ROWS


@gluon.jit
def _pair(expert, feature, N, UP: gl.constexpr, group):
    """(the feature that a group begins at; where its first and its second 32 weight rows do).

    Beyond an expert's features it multiplies the last ones again, and writes nothing.
    """
    if UP:
        feature += 32 * group
        row = expert * 2 * N + gl.minimum(feature, N - 32)
        return feature, row, row + N
    else:
        feature += 64 * group
        row = expert * N + gl.minimum(feature, N - 64)
        return feature, row, row + 32


# ---- bring -------------------------------------------------------------------------------------------------

@gluon.jit
def _bring(ring, x_desc, x2_desc, w_desc, tile_ptr, items, N, K: gl.constexpr, UP: gl.constexpr,
           GROUPS: gl.constexpr):
    x, x2, w, full, empty = ring
    STAGES: gl.constexpr = x.shape[0]
    FEW: gl.constexpr = x_desc.block_type.nbytes + 2 * GROUPS * w_desc.block_type.nbytes
    MANY: gl.constexpr = FEW + x2_desc.block_type.nbytes
    n = 0  # steps so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, expert, begin, end, feature = _item(tile_ptr, item, N, UP, GROUPS)
        more = end - begin > 64
        for step in range(K // STEP):
            stage = n % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            mbarrier.expect(bar, FEW, pred=end - begin <= 64)
            mbarrier.expect(bar, MANY, pred=more)
            engine_copy(x_desc, [begin, step * STEP], bar, x.index(stage))
            engine_copy(x2_desc, [begin + 64, step * STEP], bar, x2.index(stage), more)
            for group in gl.static_range(GROUPS):
                unused, first, second = _pair(expert, feature, N, UP, group)
                at = 2 * (stage * GROUPS + group)
                engine_copy(w_desc, [first, step * (STEP // 8)], bar, w.index(at))
                engine_copy(w_desc, [second, step * (STEP // 8)], bar, w.index(at + 1))
            n += 1


# ---- multiply ----------------------------------------------------------------------------------------------

@gluon.jit
def _scales(s_ptr, row, step, K: gl.constexpr):
    """Scale bytes of 32 rows of a step; beyond the last step those of the last."""
    r = row + gl.arange(0, 32, gl.SliceLayout(1, BYTES))
    g = gl.minimum(step, K // STEP - 1) * 8 + gl.arange(0, 8, gl.SliceLayout(0, BYTES))
    return gl.load(s_ptr + r[:, None] * (K // 32) + g[None, :]).to(gl.int32)


@gluon.jit
def _first(s_ptr, row, K: gl.constexpr, LAYOUT: gl.constexpr):
    """The first scale byte of 32 rows."""
    r = row + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    return gl.load(s_ptr + r * (K // 32)).to(gl.int32)[:, None]


@gluon.jit
def _each(group):
    """What each word's group has."""
    return gl.convert_layout(group[:, :, None].broadcast_to(32, 8, 4).reshape([32, 32]), WORDS)


@gluon.jit
def _codes(words, shift):
    """[32 rows, 32, word, word, half]: codes 4 half .. of each word of a group, as e4m3."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        LIFTING, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words, _each(shift)],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
               gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4)
    return gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))


@gluon.jit
def _numbers(words, byte, HALF: gl.constexpr):
    """[32 rows, 32, code, code]: codes i and i + 4 of half of the words as bfloat16, lowered by 2^64."""
    factor = _each(gl.minimum(byte + operands._lifted(8), 255) * 0x800080)
    a, b, c, d = gl.inline_asm_elementwise(
        SECOND if HALF else FIRST, "=r,=r,=r,=r,r,r,r,r", [words, factor],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def _codes_operand(a, b):
    """Both sides of 32 rows, in turns of eight, and their codes as `folded` lays tokens out."""
    both = gl.join(a, b).reshape([4, 8, 4, 2, 4, 2, 2, 2, 2])  # warp, row, lane, group, code, .., half, side
    return both.permute([0, 8, 1, 7, 6, 5, 3, 2, 4]).reshape([64, STEP])


@gluon.jit
def _numbers_operand(a, b):
    """The same as `spread` lays tokens out, half a step."""
    both = gl.join(a, b).reshape([4, 8, 4, 2, 2, 2, 2, 2, 2])  # warp, row, lane, pair, pair, code, .., side
    return both.permute([0, 8, 1, 7, 6, 3, 4, 2, 5]).reshape([64, STEP // 2])


@gluon.jit
def _times(w, x, acc, SUMS: gl.constexpr, WIDTH: gl.constexpr, USE: gl.constexpr):
    """Begin acc + w x, or w x; WIDTH elements are four bytes."""
    w = gl.convert_layout(w, gl.DotOperandLayout(0, SUMS, WIDTH), assert_trivial=True)
    return warpgroup_mma(w, x, acc, use_acc=USE, is_async=True)


@gluon.jit
def _sums(n, ring, s_ptr, tile_ptr, first, second, K: gl.constexpr, GROUPS: gl.constexpr,
          CODES: gl.constexpr, MORE: gl.constexpr, group: gl.constexpr):
    """Sums over K of 64 tokens and, with MORE, of 16 more; where scales cannot be folded, marks the tile."""
    x_smem, x2_smem, w_smem, full, empty = ring
    STAGES: gl.constexpr = x_smem.shape[0]
    if CODES:
        acc, acc2 = gl.full([64, 64], 0.0, gl.float32, E4M3_64), gl.full([64, 16], 0.0, gl.float32, E4M3_16)
        base, base2 = _first(s_ptr, first, K, BYTES) - SPAN // 2, _first(s_ptr, second, K, BYTES) - SPAN // 2
        furthest = gl.where(gl.maximum(base, base2) > 254 - SPAN - SPAN // 2, SPAN + 1, 0).to(gl.uint32)
        furthest = furthest.broadcast_to(32, 8)
    else:
        acc, acc2 = gl.full([64, 64], 0.0, gl.float32, BF16_64), gl.full([64, 16], 0.0, gl.float32, BF16_16)
    byte, byte2 = _scales(s_ptr, first, 0, K), _scales(s_ptr, second, 0, K)
    for step in range(K // STEP):
        ahead, ahead2 = _scales(s_ptr, first, step + 1, K), _scales(s_ptr, second, step + 1, K)
        stage = n % STAGES
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        at = 2 * (stage * GROUPS + group)
        words, words2 = w_smem.index(at).load(WORDS), w_smem.index(at + 1).load(WORDS)
        x, x2 = x_smem.index(stage).permute((1, 0)), x2_smem.index(stage).permute((1, 0))
        if CODES:  # the tensor core adds a step up, float32 the steps
            byte, byte2 = byte - base, byte2 - base2
            furthest = gl.maximum(furthest, gl.maximum(byte.to(gl.uint32), byte2.to(gl.uint32)))
            w = _codes_operand(_codes(words, byte), _codes(words2, byte2))
            part = _times(w, x, gl.zeros_like(acc), E4M3_64, 4, False)
            if MORE:
                part2 = _times(w, x2, gl.zeros_like(acc2), E4M3_16, 4, False)
                part, part2 = warpgroup_mma_wait(0, deps=(part, part2))
                acc2 += part2
            else:
                part = warpgroup_mma_wait(0, deps=(part,))
            acc += part
        else:
            for half in gl.static_range(2):
                w = _numbers_operand(_numbers(words, byte, half), _numbers(words2, byte2, half))
                acc = _times(w, x.slice(half * (STEP // 2), STEP // 2), acc, BF16_64, 2, True)
                if MORE:
                    acc2 = _times(w, x2.slice(half * (STEP // 2), STEP // 2), acc2, BF16_16, 2, True)
            if MORE:
                acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
        tl.debug_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        byte, byte2 = ahead, ahead2
        n += 1
    if CODES:
        gl.store(tile_ptr + 3 + gl.zeros_like(furthest), 1, mask=furthest > SPAN)
    return acc, acc2


@gluon.jit
def _answer(acc, LAYOUT: gl.constexpr, xs_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, begin, end, feature,
            first, second, N, limit, K: gl.constexpr, LIMITED: gl.constexpr, GROUP: gl.constexpr):
    """Write a tile, up: activated."""
    WIDE: gl.constexpr = acc.shape[1]
    a, b = acc.reshape([4, 2, 8, WIDE]).permute([0, 2, 3, 1]).reshape([32, WIDE, 2]).split()
    a = gl.convert_layout(a, LAYOUT, assert_trivial=True)
    b = gl.convert_layout(b, LAYOUT, assert_trivial=True)
    row = begin + gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
    if xs_ptr is None:
        a, b = a * UNIT, b * UNIT
    else:
        scale = gl.load(xs_ptr + row, row < end, other=0.0)[None, :]
        a *= scale * from_e8m0(_first(s_ptr, first, K, LAYOUT))
        b *= scale * from_e8m0(_first(s_ptr, second, K, LAYOUT))
    if weight_ptr is None:
        _put(a, y_ptr, feature, begin, end, N)
        _put(b, y_ptr, feature + 32, begin, end, N)
    else:
        slot = gl.load(order_ptr + row, row < end, other=0)
        weight = gl.load(weight_ptr + slot, row < end, other=0.0)[None, :]
        gate, linear = a.to(gl.bfloat16).to(gl.float32), b.to(gl.bfloat16).to(gl.float32)
        gate, linear = clamped(gate, linear, limit, LIMITED)
        hidden = (gate * sigmoid(gate) * linear * weight).to(gl.bfloat16).to(gl.float32)
        if GROUP > 0:
            hidden = restored(hidden.reshape([1, GROUP, WIDE]), "fp8").reshape([GROUP, WIDE])
        _put(hidden, y_ptr, feature, begin, end, N)


@gluon.jit
def _put(y, y_ptr, feature, begin, end, N):
    """Write 32 features of each token, if they exist."""
    y = gl.convert_layout(y.to(gl.bfloat16), LINE)
    row = begin + gl.arange(0, y.shape[1], gl.SliceLayout(0, LINE))
    m = feature + gl.arange(0, 32, gl.SliceLayout(1, LINE))
    gl.store(y_ptr + row.to(gl.int64)[None, :] * N + m[:, None], y, (row < end)[None, :] & (m < N)[:, None])


@gluon.jit
def _multiply(ring, xs_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, items, N, limit, K: gl.constexpr,
              GROUPS: gl.constexpr, LIMITED: gl.constexpr, GROUP: gl.constexpr, group: gl.constexpr):
    UP: gl.constexpr = weight_ptr is not None
    CODES: gl.constexpr = xs_ptr is not None
    n = 0  # steps so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, expert, begin, end, feature = _item(tile_ptr, item, N, UP, GROUPS)
        feature, first, second = _pair(expert, feature, N, UP, group)
        if end - begin > 64:
            acc, acc2 = _sums(n, ring, s_ptr, tile, first, second, K, GROUPS, CODES, True, group)
            _answer(acc2, SUMS_16, xs_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, begin + 64, end, feature,
                    first, second, N, limit, K, LIMITED, GROUP)
        else:
            acc, acc2 = _sums(n, ring, s_ptr, tile, first, second, K, GROUPS, CODES, False, group)
        _answer(acc, SUMS_64, xs_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, begin, end, feature, first, second,
                N, limit, K, LIMITED, GROUP)
        n += K // STEP


# ---- both --------------------------------------------------------------------------------------------------

@gluon.jit(do_not_specialize=["tiles", "E"])
def _grouped_fwd_kernel(x_desc, x2_desc, w_desc, xs_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, tiles,
                        E, N, limit, K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
                        LIMITED: gl.constexpr, GROUP: gl.constexpr, MOST: gl.constexpr,
                        REGISTERS: gl.constexpr):
    UP: gl.constexpr = weight_ptr is not None
    at = gl.arange(0, MOST, LIST)
    tiles = gl.sum((gl.load(tile_ptr + 4 * at, at < tiles, other=E) < E).to(gl.int32), 0)
    items = tiles * gl.cdiv(N, 32 * GROUPS if UP else 64 * GROUPS)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 64, STEP], x_desc.layout)
    x2 = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 16, STEP], x2_desc.layout)
    w = gl.allocate_shared_memory(gl.int32, [2 * STAGES * GROUPS, 32, STEP // 8], w_desc.layout)
    ring = x, x2, w, _barriers(STAGES, 1), _barriers(STAGES, GROUPS)
    gl.warp_specialize([
        (_multiply, (ring, xs_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, items, N, limit, K, GROUPS,
                     LIMITED, GROUP, 0)),
        (_multiply, (ring, xs_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, items, N, limit, K, GROUPS,
                     LIMITED, GROUP, 1)),
        (_multiply, (ring, xs_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, items, N, limit, K, GROUPS,
                     LIMITED, GROUP, 2)),
        (_bring, (ring, x_desc, x2_desc, w_desc, tile_ptr, items, N, K, UP, GROUPS)),
    ], [4, 4, 1], [REGISTERS[0], REGISTERS[0], REGISTERS[1]])


# ---- on the host -------------------------------------------------------------------------------------------

def takes(weight: Any, group: int) -> bool:
    """Whether such weights (linear.Experts) are for this kernel, activated in groups that 32 features are."""
    whole = weight.in_features % STEP.value == 0 and weight.out_features % 64 == 0
    return (common.capability(weight.weight) == 90 and weight.fmt == "fp4" and whole and group in (0, 1, 64)
            and weight.weight.data_ptr() % 16 == 0)


def _described(rows: Tensor, height: int, channels: int, dtype: gl.dtype) -> TensorDescriptor:
    """Rows as an engine copies them, a tile of so many at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([height, channels], dtype)
    return TensorDescriptor.from_tensor(rows, [height, channels], layout)


def multiply(x: Tensor, xs: Tensor | None, words: Tensor, scale: Tensor, tile: Tensor, order: Tensor,
             up: tuple | None, y: Tensor, stages: int) -> None:
    """Write y [rows, N] of rows in the plan's order; up = (weight_TJ, limit, group)."""
    K, N, dtype = x.shape[1], y.shape[1], gl.bfloat16 if xs is None else gl.float8e4nv
    share, limit, group = up or (None, 0.0, 0)
    descs = [_described(x, 64, STEP.value, dtype), _described(x, 16, STEP.value, dtype),
             _described(words.flatten(0, 1), 32, STEP.value // 8, gl.int32)]
    _grouped_fwd_kernel[(common.processors(x),)](
        *descs, xs, scale, tile, order, share, y, len(tile), len(words), N, limit, K, stages, GROUPS,
        limit > 0, group, max(1024, common.pow2(len(tile))), REGISTERS, num_warps=4)
