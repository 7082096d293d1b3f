"""How public kernel libraries are called for the same work as an op, for figures beside ours.

Idea
    A peer takes an op's arguments, brings them into the form that its library wants, and returns a call; only
    the call is timed.  Where a library computes something else (no clamp, wider scales, other noise), `note`
    says so and travels with the figure; where its result can be compared, it is.  dskit depends on none of
    them: a library that is not installed is "not measured", with the reason.  tile-kernels and sgl-deep-gemm
    pin different versions of apache-tvm-ffi; install each set in a folder of its own and measure twice.

Shapes
    Those of the op of the same name.

Errors
    `of` raises ValueError for a peer that nobody knows; what a library raises is its record's reason.

Source
    The libraries' signatures: flashinfer-python 0.6.13, liger-kernel 0.8.5, sgl-deep-gemm 0.1.3,
    tile-kernels 2.1.0, and torch itself for cuBLAS; products and attention stand in matrix_peers.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dskit.testing import outputs

Call = Callable[[], Any]
MODULES = {"flashinfer-python": "flashinfer", "humming-kernels": "humming", "liger-kernel": "liger_kernel",
           "sgl-deep-gemm": "deep_gemm", "sgl-flash-mla": "flash_mla", "tile-kernels": "tile_kernels",
           "torch": "torch"}


@dataclass(frozen=True)
class Peer:
    """One library's way to do an op's work.

    prepare(*arguments of the op) gives the call.  compare: the call's result as tensors like the op's
    outputs, None where an output has no counterpart; without it nothing is compared.
    """

    op: str
    packages: tuple[str, ...]
    function: str
    prepare: Callable[..., Call]
    note: str = ""
    compare: Callable[[Any], tuple[Tensor | None, ...]] | None = None
    limit: float = 1e-2  # of the relative RMS

    @property
    def name(self) -> str:
        """What tells it from other peers of the op."""
        return f"{' + '.join(self.packages)}: {self.function}"

    def missing(self) -> str | None:
        """Why it cannot be measured here, or None."""
        absent = [name for name in self.packages if importlib.util.find_spec(MODULES[name]) is None]
        return f"{', '.join(absent)} is not installed" if absent else None

    @property
    def compiles(self) -> bool:
        """Whether its first call may compile for a minute."""
        return self.packages != ("torch",)

    def header(self, ready: dict[str, str | None] | None = None) -> dict[str, Any]:
        """Its part of a record, nothing measured yet; `ready`: why those that ran before may not be timed."""
        reason = self.missing()
        versions = None if reason else ", ".join(importlib.metadata.version(name) for name in self.packages)
        if reason is None and ready is not None and self.compiles:
            reason = ready.get(f"{self.op} {self.name}", "its first call did not end while there was time")
        return {"name": self.name, "version": versions, "note": self.note, "status": "not_measured",
                "reason": reason, "us": None, "graph": None, "rel_rms": None}


PEERS: list[Peer] = []


def peer(op: str, packages: str, function: str, **rest) -> Callable:
    """Register a function that prepares a peer's call."""

    def register(prepare: Callable[..., Call]) -> Callable[..., Call]:
        PEERS.append(Peer(op, tuple(packages.split()), function, prepare, **rest))
        return prepare

    return register


def of(op: str, choice: str = "auto") -> list[Peer]:
    """The peers of an op: all of them ("auto"), none ("none"), or those of one package."""
    if choice not in ("auto", "none", *MODULES):
        raise ValueError(f"no peer is called {choice!r}; choose auto, none or one of {', '.join(MODULES)}")
    return [one for one in PEERS if one.op == op and (choice == "auto" or choice in one.packages)]


# ---- norm and quantise -------------------------------------------------------------------------------------

@peer("norm.rms", "flashinfer-python", "norm.rmsnorm", compare=outputs)
def _(x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype, steady: bool = False) -> Call:
    from flashinfer import norm

    return lambda: norm.rmsnorm(x, gain_D, eps)


@peer("norm.rms", "liger-kernel", "rms_norm_forward", compare=lambda result: outputs(result)[:1])
def _(x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype, steady: bool = False) -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, gain_D, eps, 0.0, "llama", None)


@peer("norm.add_rms", "flashinfer-python", "norm.fused_add_rmsnorm", note="in place")
def _(x: Tensor, residual: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> Call:
    from flashinfer import norm

    x, residual = x.clone(), residual.clone()
    return lambda: norm.fused_add_rmsnorm(x, residual, gain_D, eps)


@peer("norm.add_rms", "tile-kernels", "quant.norm_forward", compare=lambda result: (result[2], result[0]))
def _(x: Tensor, residual: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> Call:
    from tile_kernels import quant

    return lambda: quant.norm_forward(x, gain_D, eps, residual=residual)


@peer("norm.rms_quantize", "tile-kernels", "quant.norm_forward_and_per_token_cast",
      note="writes codes and scales instead of restored numbers: 3 bytes a channel fewer",
      compare=lambda result: (result[1], None))
def _(x: Tensor, gain_D: Tensor, eps: float, fmt: str, dtype: torch.dtype) -> Call:
    from tile_kernels import quant

    _only("fp8_32", fmt)
    return lambda: quant.norm_forward_and_per_token_cast(x, gain_D, eps, "e4m3", 32, round_sf=True,
                                                         with_out_bf16=True)


@peer("linear.quantize", "tile-kernels", "quant.per_token_cast_and_cast_back", note="in place")
def _(v: Tensor, fmt: str, dtype: torch.dtype) -> Call:
    from tile_kernels import quant

    kind, size = _format(fmt)
    rows = v.flatten(0, -2).clone()
    e4m3_scales = fmt == "fp4_16"
    return lambda: quant.per_token_cast_and_cast_back(rows, kind, size, not e4m3_scales, e4m3_scales)


@peer("linear.encode", "tile-kernels", "quant.per_token_cast",
      note="scales in float32 unless the format has e4m3 scales",
      compare=lambda result: (result[0].view(torch.uint8), None), limit=0.02)
def _(v: Tensor, fmt: str) -> Call:
    from tile_kernels import quant

    kind, size = _format(fmt)
    rows, e4m3_scales = v.flatten(0, -2), fmt == "fp4_16"
    return lambda: quant.per_token_cast(rows, kind, size, round_sf=not e4m3_scales, use_e4m3_sf=e4m3_scales)


def _format(fmt: str) -> tuple[str, int]:
    """tile-kernels' words for one of our formats."""
    kind, size = fmt.split("_")
    return {"fp8": "e4m3", "fp4": "e2m1"}[kind], int(size)


def _only(wanted: str, fmt: str) -> None:
    if fmt != wanted:
        raise ValueError(f"this library does {wanted} here, not {fmt}")


@peer("rope.rotate", "tile-kernels", "transform.apply_rotary",
      note="in place, and only the rotated channels are read and written")
def _(x: Tensor, turn_T: Tensor, inverse: bool = False) -> Call:
    from tile_kernels import transform

    table = torch.cat((turn_T.real, turn_T.imag), dim=-1).float().contiguous()
    own = x.clone()
    part = (own if own.dim() == 3 else own[:, None])[..., -table.shape[-1]:]
    return lambda: transform.apply_rotary(part, table, interleaved=True, conjugate=inverse)


# ---- mHC ---------------------------------------------------------------------------------------------------

@peer("mhc.write", "flashinfer-python", "mhc.mhc_post", compare=outputs)
def _(y_TD: Tensor, X_TND: Tensor, q_TN: Tensor, C_TNN: Tensor, dtype: torch.dtype) -> Call:
    from flashinfer import mhc

    return lambda: mhc.mhc_post(y_TD, X_TND, q_TN, C_TNN)


@peer("mhc.write", "liger-kernel", "mhc_post_res_fwd", note="its coefficients are laid out the other way",
      compare=outputs)
def _(y_TD: Tensor, X_TND: Tensor, q_TN: Tensor, C_TNN: Tensor, dtype: torch.dtype) -> Call:
    from liger_kernel.ops import mhc

    turned, out = C_TNN.transpose(1, 2).contiguous(), torch.empty_like(X_TND)
    return lambda: mhc.mhc_post_res_fwd(X_TND, y_TD, q_TN.contiguous(), turned, out=out)


@peer("mhc.write", "tile-kernels", "mhc.mhc_post_fwd", compare=lambda result: (result[0],))
def _(y_TD: Tensor, X_TND: Tensor, q_TN: Tensor, C_TNN: Tensor, dtype: torch.dtype) -> Call:
    from tile_kernels import mhc

    q, C = q_TN.contiguous()[None, ..., None], C_TNN.contiguous()[None]
    return lambda: mhc.mhc_post_fwd(y_TD[None], X_TND[None], q, C)


@peer("mhc.read", "liger-kernel", "mhc_pre_fwd", compare=outputs)
def _(p_TN: Tensor, X_TND: Tensor, dtype: torch.dtype) -> Call:
    from liger_kernel.ops import mhc

    out = torch.empty_like(X_TND[:, 0])
    return lambda: mhc.mhc_pre_fwd(X_TND, p_TN, out=out)


@peer("mhc.read", "tile-kernels", "mhc.mhc_pre_apply_mix_fwd", compare=outputs)
def _(p_TN: Tensor, X_TND: Tensor, dtype: torch.dtype) -> Call:
    from tile_kernels import mhc

    out = torch.empty_like(X_TND[:, 0])

    def call() -> Tensor:
        mhc.mhc_pre_apply_mix_fwd(X_TND, p_TN, out)
        return out

    return call


@peer("mhc.sinkhorn", "tile-kernels", "mhc.mhc_sinkhorn_fwd", compare=outputs)
def _(B_TNN: Tensor, iters: int, eps: float) -> Call:
    from tile_kernels import mhc

    out = torch.empty_like(B_TNN)

    def call() -> Tensor:
        mhc.mhc_sinkhorn_fwd(B_TNN, out, iters, eps)
        return out

    return call


def _splits(rows: int) -> int:
    """How many parts the mixes' product is cut into; the best of 1 to 16 on an H200 at 1, 32, 128, 4096."""
    return 16 if rows <= 512 else 2


def _mixes(X_TND: Tensor, fn: Tensor) -> Call:
    """deep_gemm's product of the flattened streams with fn and their sums of squares, in parts."""
    import deep_gemm

    T, parts = X_TND.shape[0], _splits(X_TND.shape[0])
    dots = torch.empty(parts, T, fn.shape[0], device=fn.device)
    squares = torch.empty(parts, T, device=fn.device)

    def call(X: Tensor = X_TND) -> tuple[Tensor, Tensor]:
        deep_gemm.tf32_hc_prenorm_gemm(X.flatten(1), fn, dots, squares, parts)
        return dots, squares

    return call


@peer("mhc.mixes", "sgl-deep-gemm flashinfer-python", "tf32_hc_prenorm_gemm, mhc_pre_big_fuse",
      note="tf32 products; it also reads the streams with the new weights",
      compare=lambda result: (None, result[0].flatten(1), result[1]))
def _(X_TND: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iters: int,
      row_tile: int | None = None) -> Call:
    product, finish = _mixes(X_TND, fn), _flashinfer_mixes(X_TND, base, scale, eps, hc_eps, iters)
    return lambda: finish(X_TND, *product())


def _flashinfer_mixes(X_TND: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float,
                      iters: int) -> Callable[..., tuple[Tensor, ...]]:
    """The rest of the mixes and the read: (q, C, x)."""
    from flashinfer import mhc

    width, parts = X_TND[0].numel(), _splits(X_TND.shape[0])
    return lambda X, dots, squares: mhc.mhc_pre_big_fuse(
        dots, squares, X, scale, base, width, rms_eps=eps, mhc_pre_eps=hc_eps, mhc_sinkhorn_eps=hc_eps,
        mhc_post_mult_value=2.0, sinkhorn_repeat=iters, num_splits=parts)


BOUNDARY = "four kernels; tf32 products; reads with the new weights, as V4 does, so that x is another"


@peer("mhc.boundary", "sgl-deep-gemm flashinfer-python",
      "mhc_post, tf32_hc_prenorm_gemm, mhc_pre_big_fuse, rmsnorm", note=BOUNDARY,
      compare=lambda result: (result[0], None, None, result[1].flatten(1), result[2]))
def _(y_TD: Tensor, X_TND: Tensor, p_TN: Tensor, q_TN: Tensor, C_TNN: Tensor, fn: Tensor, base: Tensor,
      scale: Tensor, gain_D: Tensor, eps: float, hc_eps: float, iters: int, dtype: torch.dtype,
      row_tile: int | None = None) -> Call:
    from flashinfer import mhc, norm

    product, finish = _mixes(X_TND, fn), _flashinfer_mixes(X_TND, base, scale, eps, hc_eps, iters)
    q, C = q_TN.contiguous(), C_TNN.contiguous()

    def call() -> tuple[Tensor, ...]:
        X = mhc.mhc_post(y_TD, X_TND, q, C)
        q_next, C_next, x = finish(X, *product(X))
        return X, q_next, C_next, norm.rmsnorm(x, gain_D, eps)

    return call


@peer("mhc.boundary", "tile-kernels sgl-deep-gemm flashinfer-python",
      "mhc_post_fwd, tf32_hc_prenorm_gemm, mhc_pre_big_fuse_fwd, rmsnorm", note=BOUNDARY,
      compare=lambda result: (result[0], None, None, result[1], result[2].view(-1, 4, 4)))
def _(y_TD: Tensor, X_TND: Tensor, p_TN: Tensor, q_TN: Tensor, C_TNN: Tensor, fn: Tensor, base: Tensor,
      scale: Tensor, gain_D: Tensor, eps: float, hc_eps: float, iters: int, dtype: torch.dtype,
      row_tile: int | None = None) -> Call:
    from flashinfer import norm
    from tile_kernels import mhc

    product, (T, N, D) = _mixes(X_TND, fn), X_TND.shape
    q, C = q_TN.contiguous()[None, ..., None], C_TNN.contiguous()[None]
    q_next, C_next = torch.empty(T, N, device=fn.device), torch.empty(T, N * N, device=fn.device)
    x = torch.empty(T, D, dtype=X_TND.dtype, device=fn.device)

    def call() -> tuple[Tensor, ...]:
        X = mhc.mhc_post_fwd(y_TD[None], X_TND[None], q, C)[0]
        mhc.mhc_pre_big_fuse_fwd(*product(X), scale, base, X, q_next, C_next, x, eps, hc_eps, hc_eps, 2.0,
                                 iters, n_splits=_splits(T))
        return X, q_next, C_next, norm.rmsnorm(x, gain_D, eps)

    return call


# ---- Engram ------------------------------------------------------------------------------------------------

@peer("engram.hash", "tile-kernels", "engram.engram_hash", note="32-bit ids and rows",
      compare=lambda result: (result[0].long(),), limit=0.0)
def _(gram_TQ: Tensor, multiplier_Q: Tensor, prime_SC: Tensor, offset_SC: Tensor) -> Call:
    from tile_kernels import engram

    ids, primes = gram_TQ.int().contiguous(), prime_SC.int()[None].contiguous()
    offsets = offset_SC.int().flatten()[None].contiguous()
    return lambda: engram.engram_hash(ids, multiplier_Q[None].contiguous(), primes, offsets)


@peer("engram.gather", "torch", "index_select",
      note="copies codes and scales as they are, 8-bit, instead of restored numbers")
def _(weight: Tensor, scale: Tensor | None, row_TC: Tensor, dtype: torch.dtype) -> Call:
    rows = row_TC.flatten()
    if scale is None:
        return lambda: weight.index_select(0, rows)
    table = torch.cat((weight.view(torch.uint8), scale.view(torch.uint8)), dim=1)
    return lambda: table.index_select(0, rows)


@peer("engram.gate", "tile-kernels", "engram.engram_gate_fwd", compare=lambda result: (result[0],))
def _(X_TND: Tensor, key_TND: Tensor, value_TD: Tensor, q_weight_ND: Tensor, k_weight_ND: Tensor, eps: float,
      image_T: Tensor | None = None, steady: bool = False) -> Call:
    from tile_kernels import engram

    both = torch.cat((key_TND, value_TD[:, None]), dim=1)
    weight = (q_weight_ND.float() * k_weight_ND.float()).contiguous()
    return lambda: engram.engram_gate_fwd(X_TND, both, weight, eps, 1e-6, False, image_T)


# ---- experts -----------------------------------------------------------------------------------------------

def _route(k: int, normalise: bool, factor: float, bias_E: Tensor | None) -> Callable[[Tensor], tuple]:
    from tile_kernels import moe

    if not normalise:
        raise ValueError("this library always normalises the weights")
    bias = None if bias_E is None else bias_E.float().flatten().contiguous()
    return lambda logit: moe.moe_topk_gate_forward(logit, k, False, 0, factor, 0, bias=bias)


@peer("moe.route", "tile-kernels", "moe.moe_topk_gate_forward", compare=outputs)
def _(logit_TE: Tensor, bias_TE: Tensor | None, k: int, normalise: bool, factor: float,
      fixed_TJ: Tensor | None = None, steady: bool = False) -> Call:
    route = _route(k, normalise, factor, bias_TE)
    return lambda: route(logit_TE)


@peer("moe.gate", "torch tile-kernels", "cuBLAS bf16, moe_topk_gate_forward",
      note="bf16 products summed in float32; where two experts are close the choice may differ")
def _(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, k: int, normalise: bool, factor: float,
      *rest) -> Call:
    route, x = _route(k, normalise, factor, bias_E), x_TD.bfloat16()
    weight = weight_ED.bfloat16().T
    return lambda: route(torch.mm(x, weight, out_dtype=torch.float32))


@peer("moe.gate", "torch", "cuBLAS bf16", note="the product alone, without choice and weights")
def _(x_TD: Tensor, weight_ED: Tensor, *rest) -> Call:
    x, weight = x_TD.bfloat16(), weight_ED.bfloat16().T
    return lambda: torch.mm(x, weight)


@peer("moe.swiglu", "flashinfer-python", "activation.silu_and_mul",
      note="no clamp and no weight; gate and linear lie side by side")
def _(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
      steady: bool = False) -> Call:
    from flashinfer import activation

    both = torch.cat((gate, linear), dim=-1)
    return lambda: activation.silu_and_mul(both)


@peer("moe.swiglu", "tile-kernels", "quant.swiglu_forward", note="gate and linear lie side by side",
      compare=outputs)
def _(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
      steady: bool = False) -> Call:
    from tile_kernels import quant

    both = torch.cat((gate, linear), dim=-1)
    _unweighted(weight)
    return lambda: quant.swiglu_forward(both, "bf16", clamp_value=limit or None)


@peer("moe.swiglu_quantize", "tile-kernels", "quant.swiglu_forward_and_per_token_cast",
      note="writes codes and scales instead of restored numbers; no weight")
def _(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype, fmt: str,
      compute: torch.dtype, steady: bool = False) -> Call:
    from tile_kernels import quant

    _only("fp8_32", fmt)
    both = torch.cat((gate, linear), dim=-1)
    return lambda: quant.swiglu_forward_and_per_token_cast(both, "e4m3", 32, round_sf=True,
                                                           clamp_value=limit or None)


def _unweighted(weight: Tensor | None) -> None:
    if weight is not None:
        raise ValueError("this library weights rows that a plan of its own lays out, not given ones")


# ---- selection, sampling, draft ----------------------------------------------------------------------------

@peer("indexer.topk", "torch", "topk(sorted=False)", note="any order, ties as it likes")
def _(score_BQS: Tensor, k: int) -> Call:
    k = min(k, score_BQS.shape[-1])
    return lambda: torch.topk(score_BQS, k, sorted=False)


@peer("indexer.topk", "flashinfer-python", "top_k", note="any order, ties as it likes")
def _(score_BQS: Tensor, k: int) -> Call:
    import flashinfer

    rows, k = score_BQS.flatten(0, -2), min(k, score_BQS.shape[-1])
    return lambda: flashinfer.top_k(rows, k)


@peer("sampler.draw", "flashinfer-python", "sampling.top_k_top_p_sampling_from_logits",
      note="other noise; temperature and min-p left out; top-k and top-p in joint order")
def _(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, *rest) -> Call:
    from flashinfer import sampling

    vocabulary = logits_RV.shape[-1]
    k, p = top_k_R.int().masked_fill(top_k_R <= 0, vocabulary), top_p_R.float()
    if not bool((k < vocabulary).any() or (p < 1).any()):
        return lambda: sampling.sampling_from_logits(logits_RV)
    return lambda: sampling.top_k_top_p_sampling_from_logits(logits_RV, k, p, filter_apply_order="joint")


@peer("dspark.markov", "torch", "cuBLAS bf16", note="bf16 operands, then an addition", compare=outputs)
def _(base_BV: Tensor, m_BR: Tensor, head_VR: Tensor) -> Call:
    m, head = m_BR.bfloat16(), head_VR.bfloat16().T
    return lambda: base_BV + torch.mm(m, head)


@peer("linear.matmul", "torch", "cuBLAS", note="bf16 operands", compare=outputs)
def _(x: Tensor, weight: Tensor, dtype: torch.dtype, row_tile: int | None = None) -> Call:
    narrow, turned = x.flatten(0, -2).bfloat16(), weight.bfloat16().T
    return lambda: torch.mm(narrow, turned)


from dskit.bench import matrix_peers  # noqa: E402, F401 - registers with `peer` of this file
