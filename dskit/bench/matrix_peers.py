"""Peers of the kernels that multiply: FP8 products, index scores, attention, experts.

Idea
    These libraries hold coarser scales or larger caches than the release, so weights and caches are converted
    once, outside of what is timed, and `note` says what is different.  Where the same numbers remain, the
    result is compared; a requantised operand is off by a few percent.

Shapes
    Those of the op of the same name.

Errors
    ValueError for a call that the library has no form for; it becomes its record's reason.

Source
    The libraries' signatures: sgl-deep-gemm 0.1.3, sgl-flash-mla 1.0.0, humming-kernels 0.1.20.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dskit.bench.peers import Call, peer
from dskit.layers.linear import decode, unpack_fp8
from dskit.layers.rope import rotate
from dskit.testing import outputs

FP8 = torch.float8_e4m3fn
PAGE = 64  # entries of a page in these libraries' caches
BLOCKS = "scales for 128 channels of x and 128 x 128 weights"


def _codes(v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(e4m3, float32 scales) of v [..., K], a scale for so many channels."""
    groups = v.float().unflatten(-1, (-1, size))
    scale = groups.abs().amax(dim=-1).clamp(min=1e-4) / 448
    return (groups / scale[..., None]).to(FP8).flatten(-2), scale


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [N, K], float32 scales [N / 128, K / 128])."""
    blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-4) / 448
    return (blocks / scale).to(FP8).view(weight.shape), scale[:, 0, :, 0].contiguous()


def _columns(scale: Tensor) -> Tensor:
    """Scales [T, groups] laid out by columns of a multiple of four, as deep_gemm reads them."""
    columns = scale.new_zeros(scale.shape[1], -(-len(scale) // 4) * 4).T[: len(scale)]
    return columns.copy_(scale)


def _numbers(x: Tensor, x_scale: Tensor | None, block: tuple[int, int], held: torch.dtype) -> Tensor:
    x = x if x_scale is None else decode.reference(x, x_scale, f"fp8_{block[1]}", held)
    return x.flatten(0, -2)


# ---- products ----------------------------------------------------------------------------------------------

@peer("gemm.fp8", "sgl-deep-gemm", "fp8_gemm_nt", note=BLOCKS, compare=outputs, limit=0.1)
def _(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, block: tuple[int, int],
      dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Call:
    import deep_gemm

    codes, scales = _codes(_numbers(x, x_scale, block, held), 128)
    narrow, wide = (codes, _columns(scales)), _blocks(unpack_fp8(weight, scale, block, held))
    out = torch.empty(len(codes), len(weight), dtype=torch.bfloat16, device=weight.device)

    def call() -> Tensor:
        deep_gemm.fp8_gemm_nt(narrow, wide, out)
        return out

    return call


@peer("gemm.fp8", "torch", "_scaled_mm", note="a scale for each row of x and of the weight", compare=outputs,
      limit=0.1)
def _(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, block: tuple[int, int],
      dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Call:
    a, a_scale = _codes(_numbers(x, x_scale, block, held), x.shape[-1])
    b, b_scale = _codes(unpack_fp8(weight, scale, block, held), x.shape[-1])
    return lambda: torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale.T, out_dtype=torch.bfloat16)


@peer("gemm.project", "sgl-deep-gemm", "fp8_einsum", note=BLOCKS, compare=outputs, limit=0.1)
def _(o_TAH: Tensor, weight: Tensor, scale: Tensor | None, block: tuple[int, int], groups: int,
      dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Call:
    import deep_gemm

    rows = _codes(o_TAH.unflatten(1, (groups, -1)).flatten(2), 128)
    codes, scales = _blocks(unpack_fp8(weight, scale, block, held))
    wide = codes.unflatten(0, (groups, -1)), scales.unflatten(0, (groups, -1))
    out = o_TAH.new_empty(len(o_TAH), groups, len(weight) // groups)

    def call() -> Tensor:
        deep_gemm.fp8_einsum("bhr,hdr->bhd", rows, wide, out)
        return out

    return call


@peer("gemm.project", "torch", "cuBLAS bf16", note="weights restored to bfloat16", compare=lambda y:
      (y.transpose(0, 1),))
def _(o_TAH: Tensor, weight: Tensor, scale: Tensor | None, block: tuple[int, int], groups: int,
      dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Call:
    o_GTX = o_TAH.unflatten(1, (groups, -1)).flatten(2).transpose(0, 1).contiguous()
    w_GXO = unpack_fp8(weight, scale, block, held).unflatten(0, (groups, -1)).transpose(1, 2)
    return lambda: torch.bmm(o_GTX, w_GXO)


# ---- index scores ------------------------------------------------------------------------------------------

@peer("indexer.scores_cached", "sgl-deep-gemm", "fp8_paged_mqa_logits",
      note="keys of 132 bytes in FP8, float32 scores, which end where a request does")
def _(q_BQXY: Tensor, weight_BQX: Tensor, pool: Tensor, table_BS: Tensor, visible_BQ: Tensor, packing: Any,
      dtype: torch.dtype, row_tile: int | None = None, block_BQC: Tensor | None = None,
      size: int = 1, run: int = 1) -> Call:
    import deep_gemm

    (B, Q, X, Y), S, pages = q_BQXY.shape, table_BS.shape[1], len(pool) // PAGE
    if Q > 2 or Y != 128 or len(pool) % PAGE or block_BQC is not None:
        raise ValueError("one or two rows of a request, of 128 channels, whole pages, no candidates")
    cache = torch.empty(pages, PAGE * (Y + 4), dtype=torch.uint8, device=pool.device)
    for some in torch.arange(pages).split(1 << 13):
        keys = pool[PAGE * int(some[0]): PAGE * (int(some[-1]) + 1)]
        codes, scales = _codes(packing.unpack(keys, torch.float32), Y)
        here = slice(int(some[0]), int(some[-1]) + 1)
        cache[here, : PAGE * Y] = codes.view(torch.uint8).view(-1, PAGE * Y)
        cache[here, PAGE * Y:] = scales.view(torch.uint8).view(-1, PAGE * 4)
    cache, q = cache.view(pages, PAGE, 1, Y + 4), q_BQXY.to(FP8)
    weight, table = weight_BQX.float().view(B * Q, X), (table_BS[:, ::PAGE] // PAGE).int()
    length = visible_BQ.int().contiguous()
    plan = deep_gemm.get_paged_mqa_logits_metadata(
        length, PAGE, torch.cuda.get_device_properties(pool.device).multi_processor_count)
    return lambda: deep_gemm.fp8_paged_mqa_logits(q, cache, weight, length, table, plan, S)


# ---- attention ---------------------------------------------------------------------------------------------

ATTENTION = "queries come rotated, outputs are not rotated back"


@peer("mla.attend_cached", "sgl-flash-mla", "flash_mla_with_kvcache",
      note=f"a step of decoding over V4's cache, 584 bytes for each entry of either kind; {ATTENTION}")
def _(q_TAH: Tensor, turn_T: Tensor, window_SH: Tensor, read_TW: Tensor, entries_SH: Tensor | None,
      chosen_TK: Tensor | None, sink_A: Tensor, dtype: torch.dtype, packings: Any = None,
      fmt: str | None = None, steady: bool = False) -> Call:
    import flash_mla

    q, pages = rotate.reference(q_TAH, turn_T)[:, None].bfloat16(), _pages(window_SH, packings[0])
    more = {} if entries_SH is None else {"extra_k_cache": _pages(entries_SH, packings[1]),
                                          "extra_indices_in_kvcache": chosen_TK.int()[:, None]}
    if len(q) > 1024:
        raise ValueError("this one is for decoding")
    read, plan, width = read_TW.int()[:, None], flash_mla.get_mla_metadata()[0], q.shape[-1]
    return lambda: flash_mla.flash_mla_with_kvcache(
        q, pages, None, None, width, plan, softmax_scale=width**-0.5, is_fp8_kvcache=True, indices=read,
        attn_sink=sink_A, use_legacy=True, **more)


def _restored(cache: Tensor, packing: Any) -> Tensor:
    return packing.unpack(cache, torch.float32) if cache.dtype == torch.uint8 else cache.float()


def _pages(cache: Tensor, packing: Any) -> Tensor:
    """A cache as V4's pages: of each entry 448 codes and 64 bfloat16, behind all of them their scales."""
    numbers = _restored(cache, packing)
    groups = numbers[:, :448].unflatten(1, (7, 64))
    power = (groups.abs().amax(dim=-1).clamp(min=1e-4) / 448).log2().ceil()
    codes = (groups * torch.exp2(-power)[..., None]).to(FP8).flatten(1).view(torch.uint8)
    entry = torch.cat((codes, numbers[:, 448:].bfloat16().view(torch.uint8)), dim=1)
    scales = torch.nn.functional.pad((power + 127).to(torch.uint8), (0, 1))
    pitch = -(-PAGE * 584 // 576) * 576
    pages = torch.zeros(len(cache) // PAGE, pitch, dtype=torch.uint8, device=cache.device)
    pages[:, : PAGE * 576] = entry.view(len(pages), -1)
    pages[:, PAGE * 576: PAGE * 584] = scales.view(len(pages), -1)
    return pages.as_strided((len(pages), PAGE, 1, 584), (pitch, 584, 584, 1))


@peer("mla.attend_cached", "sgl-flash-mla", "flash_mla_sparse_fwd",
      note=f"a prefill over keys that are restored to bfloat16 before; {ATTENTION}")
def _(q_TAH: Tensor, turn_T: Tensor, window_SH: Tensor, read_TW: Tensor, entries_SH: Tensor | None,
      chosen_TK: Tensor | None, sink_A: Tensor, dtype: torch.dtype, packings: Any = None,
      fmt: str | None = None, steady: bool = False) -> Call:
    import flash_mla

    if len(q_TAH) <= 1024:
        raise ValueError("this one is for a prefill")
    keys, read = _restored(window_SH, packings[0]), read_TW
    if chosen_TK is not None:
        keys = torch.cat((keys, _restored(entries_SH, packings[1])))
        read = torch.cat((read_TW, torch.where(chosen_TK < 0, -1, chosen_TK + len(window_SH))), dim=1)
    keys = keys[:, None].bfloat16()
    q, index, width = rotate.reference(q_TAH, turn_T).bfloat16(), read.int()[:, None], q_TAH.shape[-1]
    return lambda: flash_mla.flash_mla_sparse_fwd(q, keys, index, width**-0.5, width, sink_A, use_legacy=True)


# ---- experts -----------------------------------------------------------------------------------------------

def _humming(group: int | None, layout: str) -> Callable[..., Call]:
    """Two products with the activation between; activations in FP8 by groups of so many channels, or bf16."""

    def prepare(x_TD: Tensor, topk_TJ: Tensor, weight_TJ: Tensor, shared_TD: Tensor | None, w13: Any, w2: Any,
                limit: float, numerics: Any, part: tuple[int, int] | None = None) -> Call:
        from humming import dtypes
        from humming.forward import humming_forward, may_process_input
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from humming.tune import get_heuristics_config

        if part is not None or w13.scale.shape[-1] * 16 != w13.weight.shape[-1]:
            raise ValueError("here it is called for MXFP4 experts, and for all of them")
        weights = HummingWeightSchema(b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0,
                                      weight_scale_group_size=32)
        inputs = (HummingInputSchema(a_dtype=dtypes.bfloat16) if group is None else
                  HummingInputSchema(a_dtype=dtypes.float8e4m3, input_scale_group_size=group))
        stages: list[tuple] = []
        device, rows = x_TD.device, topk_TJ.numel()
        for stack in (w13, w2):
            E, n, k = stack.weight.shape[0], stack.weight.shape[1], 2 * stack.weight.shape[2]
            held = {"weight": stack.weight.view(torch.int32), "weight_scale": stack.scale}
            config, tensors = prepare_and_transform_humming_tensors(
                held, n, k, weights, inputs, num_experts=E, torch_dtype=torch.bfloat16)
            tuning = get_heuristics_config(config, shape_m=rows, gemm_type=layout)
            out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
            stages.append((config, tensors, tuning, out))
        x, placed = _placed(x_TD, topk_TJ, E, layout, [stage[2] for stage in stages])
        codes, *scales = may_process_input(stages[0][0], x)
        scales = next((scale for scale in scales if scale is not None), None)
        locks, chosen = torch.zeros(2048, dtype=torch.int32, device=device), json.dumps({"gemm_type": layout})
        silu = f"fminf(a, {limit}f) / (1.f + __expf(-fminf(a, {limit}f)))"
        formula = f"{silu} * fminf(fmaxf(b, {-limit}f), {limit}f)"

        def product(i: int, rows: Tensor, scale: Tensor | None) -> Tensor:
            config, tensors, tuning, out = stages[i]
            humming_forward(config, rows, **tensors, outputs=out, input_scale=scale, locks=locks,
                            compute_config=chosen, tuning_config=json.dumps(tuning), **placed[i])
            return out

        def call() -> Tensor:
            hidden, *found = may_process_input(stages[1][0], product(0, codes, scales),
                                               activation_type="binary_split", activation_impl=formula)
            return product(1, hidden, next((scale for scale in found if scale is not None), None))

        return call

    return prepare


def _placed(x_TD: Tensor, topk_TJ: Tensor, experts: int, layout: str, tunings: list[dict]
            ) -> tuple[Tensor, list[dict[str, Any]]]:
    """The rows of the first product, and for both which rows belong to which expert."""
    from humming.testing.data import generate_moe_tensors

    rows, J = topk_TJ.numel(), topk_TJ.shape[1]
    if layout == "grouped_contiguous":
        order = topk_TJ.flatten().argsort(stable=True)
        ends = topk_TJ.flatten().bincount(minlength=experts).cumsum(0)
        where = {"expert_layout": torch.nn.functional.pad(ends, (1, 0)), "valid_shape_m": rows}
        return x_TD[order // J].contiguous(), [where, where]
    placed = []
    for tuning, slots in zip(tunings, (J, 1), strict=True):
        found = generate_moe_tensors(topk_TJ.int(), experts, layout, tuning["block_shape"][0])[2:]
        placed.append(dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), found, strict=True))
                      | {"top_k": slots, "valid_shape_m": rows})
    return x_TD, placed


PRODUCTS = "no routing weights, no sum over a token's experts and no shared expert"
peer("moe.experts", "humming-kernels", "humming_forward, FP8 activations by 32",
     note=f"float32 scales of activations; {PRODUCTS}")(_humming(32, "grouped_contiguous"))
peer("moe.experts", "humming-kernels", "humming_forward, bf16 activations",
     note=f"activations in bfloat16; {PRODUCTS}")(_humming(None, "indexed"))
