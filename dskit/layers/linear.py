"""Matrix products with FP8 and MXFP4 weights, and every rounding that the release applies.

Idea: weights are stored as narrow codes with one power-of-two scale per block, activations are rounded to
e4m3 per group of channels just before the product. Both products and scales are exact in bfloat16, so a
rounded tensor is held as plain floating point: quantise, restore, and go on.

    s = pow2ceil(max(amax, 1e-4) / 448),   fq8(v)  = e4m3(v / s) * s        per 32 (V4: 64 or 128) channels
    s = pow2ceil(max(amax, 6 2^-126) / 6), fq4(v)  = e2m1(v / s) * s        per 32 channels
    s = e4m3(max(amax, 6 2^-9) / 6),       fq4e(v) = e2m1(v / s) * s        per 16 channels

Shapes: x_TK @ weight_NK.T -> y_TN. FP8 scales are [ceil(N/32), ceil(K/32)], MXFP4 codes [N, K/2] uint8 with
the even channel in the low nibble and scales [N, K/32].
Units: scales are E8M0 bytes: 2^(byte - 127), 255 is NaN.
Errors: ValueError when a width does not suit its format.
Numerics: restored values are exact in float32; sums are float32. "exact" numerics leave every rounding out.
Kernel: kernels/linear.py (linear.quantize, linear.encode, linear.decode), kernels/gemm.py (gemm.fp8)
Source: model.md 3.1, 3.4, 4.3.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.norm import cast

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FEW = 8  # rows: as columns, a library does not lay the weight out anew for them


# ---- scales and codes --------------------------------------------------------------------------------------

def pow2ceil(v: Tensor) -> Tensor:
    """Smallest power of two >= v, from float32 bits (v positive); exp2(ceil(log2)) errs on exact powers."""
    return ((v.float().view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scale_for(amax: Tensor, largest: float) -> Tensor:
    """Smallest power of two s with amax <= s * largest (float32): pow2ceil(amax / largest) in integers.

    Dividing by `largest` takes its exponent off and compares mantissas, so the one addition does both.
    """
    mantissa, exponent = math.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    carry = 0x7FFFFF - int((2 * mantissa - 1) * 2**23) - ((exponent - 1) << 23)
    return ((amax.view(torch.int32) + carry) & 0x7F800000).view(torch.float32)


def e4m3(v: Tensor) -> Tensor:
    """Round to the nearest e4m3 value (ties to even), in v's dtype; clamped first, since casts differ."""
    return v.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(v.dtype)


def e2m1(v: Tensor) -> Tensor:
    """Round float32 to the nearest e2m1 value, ties to even: steps of 0.5 below 2, 1 below 4, else 2."""
    v = v.clamp(-E2M1_MAX, E2M1_MAX)
    step = (v.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(1.0, 4.0).mul(0.5)
    return v.div(step).round().mul(step)


def _groups(v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(v as [..., groups, size] in float32, zero-padded at the end; the largest magnitude of each group)."""
    short = -v.shape[-1] % size
    v_GS = (F.pad(v, (0, short)) if short else v).float().unflatten(-1, (-1, size))
    return v_GS, v_GS.abs().amax(dim=-1, keepdim=True)


def group_size(fmt: str) -> int:
    """Channels that share a scale in a format; raises ValueError for one that is unknown."""
    kind, _, size = fmt.partition("_")
    if fmt not in ("fp4_32", "fp4_16") and not (kind == "fp8" and size.isdigit() and int(size)):
        raise ValueError(f"fmt is {fmt!r}; choose fp8_<group>, fp4_32 or fp4_16")
    return int(size)


def _scaled(v: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """(v over its scale, the scale) by group, float32 [..., groups, size] and [..., groups, 1]."""
    v_GS, amax = _groups(v, group_size(fmt))
    if fmt.startswith("fp8"):
        scale = scale_for(amax.clamp(min=1e-4), E4M3_MAX)  # so that nothing exceeds what e4m3 holds
    elif fmt == "fp4_16":
        scale = e4m3(amax.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX)
    else:
        scale = scale_for(amax.clamp(min=E2M1_MAX * 2.0**-126), E2M1_MAX)
    return v_GS / scale, scale


@ops.op("linear.quantize")
def quantize(v: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
    """Quantise and restore along the last axis; `fmt` is fp8_<group>, fp4_32 or fp4_16 (e4m3 scales).

    v [..., K] of any float dtype -> [..., K] of `dtype`, which must hold the restored values exactly. A
    gradient passes straight through: the rounding has none of its own.
    """
    if torch.is_grad_enabled() and v.requires_grad:
        return _StraightThrough.apply(v, fmt, dtype)
    return _quantize(v, fmt, dtype)


def _quantize(v: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
    value, scale = _scaled(v, fmt)
    rounded = value.to(torch.float8_e4m3fn).float() if fmt.startswith("fp8") else e2m1(value)
    restored = cast((rounded * scale).flatten(-2), dtype)
    return restored if restored.shape[-1] == v.shape[-1] else restored[..., : v.shape[-1]]


@ops.op("linear.encode", grad=False)
def encode(v: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantise v [..., K] to what is stored: (codes, scales), both uint8, one scale per group.

    Codes are [..., K] in fp8 and [..., K/2] in fp4, the even channel in the low nibble; scales are E8M0, in
    fp4_16 e4m3. Values are finite: fp4 has no NaN.
    """
    if fmt.startswith("fp4") and v.shape[-1] % 2:
        raise ValueError(f"{fmt} packs channels in pairs; the width is {v.shape[-1]}")
    value, scale = _scaled(v, fmt)
    wide = value.flatten(-2)[..., : v.shape[-1]]
    codes = wide.to(torch.float8_e4m3fn).view(torch.uint8) if fmt.startswith("fp8") else _nibbles(e2m1(wide))
    stored = scale.to(torch.float8_e4m3fn) if fmt == "fp4_16" else scale_bytes(scale)
    return codes, stored.view(torch.uint8).squeeze(-1)


@ops.op("linear.decode", grad=False)
def decode(codes: Tensor, scales: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
    """Inverse of `encode`: [..., K] of `dtype`, bit for bit what `quantize` gives."""
    value = codes.view(torch.float8_e4m3fn).float() if fmt.startswith("fp8") else _from_nibbles(codes)
    scale = scales.view(torch.float8_e4m3fn).float() if fmt == "fp4_16" else scale_values(scales)
    return (value * scale.repeat_interleave(group_size(fmt), -1)[..., : value.shape[-1]]).to(dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
        ctx.dtype = v.dtype
        return _quantize(v, fmt, dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.to(ctx.dtype), None, None


# ---- stored weights ----------------------------------------------------------------------------------------

def scale_bytes(scale: Tensor) -> Tensor:
    """E8M0 bytes of power-of-two float32 scales; the exponent field is the byte."""
    return ((scale.float().view(torch.int32) >> 23) & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)


def scale_values(scale: Tensor) -> Tensor:
    """Float32 values of E8M0 scales: byte 0 is 2^-127, byte 255 NaN."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def pack_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Weights [N, K] -> (e4m3 codes [N, K], E8M0 scales [ceil(N/b0), ceil(K/b1)]); block maxima near 448."""
    rows, cols = weight.shape
    padded = F.pad(weight.float(), (0, -cols % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # [n, b0, k, b1]
    scale = pow2ceil(tiles.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-4) * (1 / E4M3_MAX))
    codes = (tiles / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = codes.view(torch.uint8).flatten(2, 3).flatten(0, 1)[:rows, :cols].contiguous()
    return codes.view(torch.float8_e4m3fn), scale_bytes(scale[:, 0, :, 0])


def unpack_fp8(codes: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Inverse of pack_fp8: [N, K] of `dtype`."""
    spread = scale_values(scale).repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return (codes.float() * spread[..., : codes.shape[-2], : codes.shape[-1]]).to(dtype)


def share_scales(codes: Tensor, scale: Tensor, block: tuple[int, int], columns: int) -> tuple[Tensor, Tensor]:
    """FP8 weights [N, K] with one scale for `columns` columns: the largest of those there (codes, scales).

    A tensor core then adds so many products before anything is scaled. Only bits below 2^-10 of a scale are
    lost, which is 2^-19 of the largest value that it reaches: fewer than the tensor core drops as it adds.
    """
    fine = scale_values(scale)
    shared = F.pad(fine, (0, -fine.shape[1] % (columns // block[1]))).unflatten(1, (-1, columns // block[1]))
    shared = scale_bytes(shared.amax(dim=2))
    spread = scale_values(shared).repeat_interleave(block[0], 0).repeat_interleave(columns, 1)
    value = unpack_fp8(codes, scale, block, torch.float32) / spread[: codes.shape[0], : codes.shape[1]]
    return value.to(torch.float8_e4m3fn), shared


def _nibbles(value: Tensor) -> Tensor:
    """Two e2m1 codes a byte, uint8 [..., K/2], of e2m1 values [..., K]: even channels in the low nibble."""
    positive = _e2m1_values(value.device)[: len(E2M1_VALUES)]
    code = torch.bucketize(value.abs(), positive).clamp(max=7) + 8 * torch.signbit(value)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)


def _from_nibbles(packed: Tensor) -> Tensor:
    """Inverse of _nibbles: float32 [..., K]."""
    byte = packed.view(torch.uint8).int()
    return _e2m1_values(packed.device)[torch.stack((byte & 15, byte >> 4), dim=-1)].flatten(-2)


@functools.cache
def _e2m1_values(device: torch.device) -> Tensor:
    """The value of every code."""
    with torch.inference_mode(False):  # it outlives the step that first asks for it
        return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=device)


def pack_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., N, K] -> (two e2m1 codes a byte [..., N, K/2] int8, E8M0 scales [..., N, K/32])."""
    if weight.shape[-1] % 32:
        raise ValueError(f"MXFP4 needs an input width that is a multiple of 32, not {weight.shape[-1]}")
    v_GS, amax = _groups(weight, 32)
    scale = pow2ceil(amax.clamp(min=E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
    packed = _nibbles(e2m1(v_GS / scale).flatten(-2))
    return packed.view(torch.int8), scale_bytes(scale.squeeze(-1))


def unpack_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of pack_fp4: [..., N, K] of `dtype`."""
    value = _from_nibbles(packed)
    return (value.unflatten(-1, (-1, 32)) * scale_values(scale).unsqueeze(-1)).flatten(-2).to(dtype)


# ---- numerics ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Numerics:
    """Which roundings a model applies: all of the release's, those but for one scale a token where the routed
    experts' inputs have one for each group ("token"), or none ("exact").

    dtype: values between operations (bfloat16 in release); compute: operands of a matrix product; held: FP8
    and FP4 weights once restored. Release products have exact bfloat16 operands, so a CPU, where float32 is
    faster, may compute in float32, and yet hold weights in half the bytes.
    row_tile: pad the rows of every product to this multiple, so that a row's bits do not depend on its batch.
    """

    name: str
    dtype: torch.dtype
    compute: torch.dtype
    activation_format: str
    window_format: str
    row_tile: int | None = None
    held: torch.dtype = torch.float32

    @classmethod
    def of(cls, config: ModelConfig, name: str = "release", *, device: str | torch.device = "cpu",
           batch_invariant: bool = False, compute: torch.dtype | None = None) -> Numerics:
        """The named numerics for a config; raises ValueError for an unknown name."""
        if name not in ("release", "token", "exact"):
            raise ValueError(f"numerics is {name!r}; choose 'release', 'token' or 'exact'")
        on_gpu = torch.device(device).type == "cuda"
        if name == "exact":
            dtype, default = torch.float32, torch.float32
        else:
            dtype, default = torch.bfloat16, torch.bfloat16 if on_gpu else torch.float32
        one_row = not config.num_nextn_predict_layers  # a draft has several rows judged at once
        halved = name != "exact" and compute is None and not batch_invariant and one_row
        return cls(name, dtype, compute or default, f"fp8_{config.activation_group}",
                   "fp8_32" if config.is_v41 else "fp8_64", 16 if batch_invariant else None,
                   torch.bfloat16 if halved else compute or default)

    @property
    def steady(self) -> bool:
        """True when a row's bits must not depend on the rows beside it."""
        return self.row_tile is not None

    @property
    def release(self) -> bool:
        """True when the release's roundings apply."""
        return self.name != "exact"

    @property
    def token(self) -> bool:
        """True when the inputs of the routed experts' products have one scale a token."""
        return self.name == "token"

    def activation(self, x: Tensor) -> Tensor:
        """Input of an FP8 or FP4 product: rounded to e4m3 per group, in the compute dtype."""
        return quantize(x, self.activation_format, self.compute) if self.release else x

    def cache(self, v: Tensor, fmt: str) -> Tensor:
        """A cached vector (window, global, index): rounded in `fmt`, in the compute dtype, as it is held."""
        return quantize(v, fmt, self.compute) if self.release else v


# ---- functions of single elements --------------------------------------------------------------------------

def sigmoid(x: Tensor, steady: bool = False) -> Tensor:
    """1 / (1 + exp(-x)); `steady`: an element's bits do not depend on where in the tensor it stands.

    torch.sigmoid, silu and softplus compute the last elements of a tensor in another way than those before,
    which ties a row to its batch; exp and log1p do not. Steady values have no gradient for x below -88.
    """
    return 1 / (1 + torch.exp(-x)) if steady else torch.sigmoid(x)


def silu(x: Tensor, steady: bool = False) -> Tensor:
    """x * sigmoid(x)."""
    return x * sigmoid(x, steady) if steady else F.silu(x)


def softplus(x: Tensor, steady: bool = False) -> Tensor:
    """log(1 + exp(x)); x itself above 20, where float32 sees no difference."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))) if steady else F.softplus(x)


# ---- products ----------------------------------------------------------------------------------------------

@ops.op("linear.matmul")
def matmul(x: Tensor, weight: Tensor, dtype: torch.dtype, row_tile: int | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, summed in float32 -> [..., N] of `dtype`.

    With `row_tile`, rows go through in tiles of exactly that many (zero-padded): a row's bits then do not
    depend on how many others there are.
    """
    if dtype != weight.dtype or (row_tile is None and x.numel() > x.shape[-1]):
        weight = widened(weight)
    if row_tile is None:
        return cast(_product(cast(x, weight.dtype), weight, dtype), dtype)
    rows = x.reshape(-1, x.shape[-1]).to(weight.dtype)
    padded = F.pad(rows, (0, 0, 0, -rows.shape[0] % row_tile))
    tiles = [_product(tile, weight, dtype) for tile in padded.split(row_tile)]
    y = torch.cat(tiles)[: rows.shape[0]] if tiles else rows.new_empty(0, weight.shape[0])
    return y.view(*x.shape[:-1], weight.shape[0]).to(dtype)


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x weight^T; a GPU gives the float32 sums of bfloat16 products without rounding them in between."""
    narrow = weight.is_cuda and weight.dtype == torch.bfloat16 and dtype == torch.float32
    if narrow and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        y = torch.mm(x.reshape(-1, x.shape[-1]), weight.T, out_dtype=dtype)
        return y.view(*x.shape[:-1], weight.shape[0])
    if few(x, weight):
        return torch.mm(weight, x.T).T.contiguous()
    return F.linear(x, weight) if not narrow else F.linear(x.float(), weight.float())


def few(x: Tensor, weight: Tensor) -> bool:
    """Whether a CPU multiplies these rows [T, K] faster as columns."""
    return x.dim() == 2 and 1 < x.shape[0] <= FEW and weight.dtype == torch.float32 and not weight.is_cuda


@ops.op("gemm.fp8")
def fp8(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, block: tuple[int, int],
        dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Tensor:
    """`matmul` with FP8 weights as they are stored: codes [N, K] and scales, one for each block.

    x [..., K] holds rounded numbers (`Numerics.activation`), or codes with scales x_scale, one for each
    block[1] channels. held: what holds a restored weight on the way, exactly.
    """
    if x_scale is not None:
        x = decode(x, x_scale, f"fp8_{block[1]}", held)
    return matmul(x, unpack_fp8(weight, scale, block, held), dtype, row_tile)


def widened(weight: Tensor) -> Tensor:
    """A weight as a CPU multiplies it best: one row alone is bound by reading it, more rows by arithmetic.

    Without units for bfloat16 a product of many rows is ten times slower than in float32.
    """
    return weight.float() if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" else weight


class Linear(nn.Module):
    """A projection without bias, stored as `fmt`: "fp8" (blocks), "bf16" or "fp32".

    `weight` holds either the stored codes with `scale` beside them, or plain numbers with `scale` None: what
    was FP8 in `numerics.held`, the others in the compute dtype. An FP8 product expects
    `Numerics.activation(x)`, rounded once by the caller for all projections that share an input.
    """

    def __init__(self, in_features: int, out_features: int, numerics: Numerics, *, fmt: str = "fp8",
                 block: tuple[int, int] = (32, 32)):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.numerics, self.fmt, self.block = numerics, fmt, block
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=numerics.compute),
                                   requires_grad=False)
        self.scale: nn.Parameter | None = None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [..., K] (rounded already for an FP8 weight) -> [..., N] in the dtype of values, or `dtype`."""
        dtype, row_tile = dtype or self.numerics.dtype, self.numerics.row_tile
        if self.scale is None:
            return matmul(x, self.weight, dtype, row_tile)
        return fp8(x, None, self.weight, self.scale, self.block, dtype, self.numerics.held, row_tile)

    def dense(self) -> Tensor:
        """The weight as numbers [N, K]; stored codes are restored on the way."""
        if self.scale is None:
            return self.weight
        return unpack_fp8(self.weight, self.scale, self.block, self.numerics.held)


class Experts(nn.Module):
    """A layer's routed experts, stacked [E, N, K]: "fp4" codes [E, N, K/2], "fp8" blocks, or numbers."""

    def __init__(self, experts: int, in_features: int, out_features: int, numerics: Numerics, *,
                 fmt: str = "fp4", block: tuple[int, int] = (32, 32)):
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.numerics, self.fmt, self.block = numerics, fmt, block
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, dtype=numerics.compute),
                                   requires_grad=False)
        self.scale: nn.Parameter | None = None

    def dense(self, expert: int | slice = slice(None)) -> Tensor:
        """The weights of one expert [N, K] or several [e, N, K] as numbers."""
        weight = self.weight[expert]
        if self.scale is None:
            return weight
        if self.fmt == "fp4":
            return unpack_fp4(weight, self.scale[expert], self.numerics.held)
        return unpack_fp8(weight, self.scale[expert], self.block, self.numerics.held)
