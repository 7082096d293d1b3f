"""Caches: what tokens leave behind, one vector per row, as plain numbers or as the bytes of the release.

Idea: a vector that later tokens read (window, global entry, index key) is normed, rotated and rounded once. A
cache holds it as numbers that are already rounded, or packed, which takes a half to a quarter of the memory;
both read back the same bits. A cache is one tensor: uint8 rows are packed, others are numbers, and only the
functions of this file tell the difference.

    row = [codes | channels left in bfloat16 | scales | padding to 4 bytes]
    window     512 e4m3, a scale per 32      512 + 16 = 528 bytes    V4: 448 + 2 * 64 + 7 + 1 = 584
    entry      512 e2m1, a scale per 16      256 + 32 = 288
    index key  128 e2m1, a scale per 32       64 +  4 =  68

Shapes: v [..., H] -> rows [..., H] of numbers or [..., nbytes] of uint8; a cache is [S, H] or [S, nbytes].
State: row 0 of every cache is reserved and stays zero; -1 as a row to read stands for it.
Errors: ValueError when a width does not suit its format.
Numerics: norm and rotation each round to bfloat16, as values between operations are.
Kernel: kernels/cache.py (cache.ready, cache.write_, cache.read)
Source: model.md 3.4, 5.1, 5.2, 6.2; config fields head_dim, qk_rope_head_dim, index_head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.linear import Numerics, decode, encode, group_size, quantize
from dskit.layers.norm import RMSNorm, cast, ordered, rms
from dskit.layers.rope import rotate


@dataclass(frozen=True)
class Packing:
    """How a vector of `width` channels is rounded, and which bytes it takes when packed.

    fmt: of the codes (fp8_<group>, fp4_32, fp4_16), None in exact numerics, which round nothing and do not
    pack; tail: last channels, which stay in bfloat16; dtype: of rounded numbers.
    """

    width: int
    fmt: str | None
    tail: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, numerics: Numerics, what: str) -> Packing:
        """The packing of a "window" vector, a global "entry" or an index "key"."""
        width, tail, fmt = config.head_dim, 0, numerics.window_format
        if what == "key":
            width, fmt = config.index_head_dim, "fp4_32"
        elif not config.is_v41:
            tail = config.qk_rope_head_dim
        elif what == "entry":
            fmt = "fp4_16"
        return cls(width, fmt if numerics.release else None, tail, numerics.compute)

    @property
    def coded(self) -> int:
        """Channels that are held as codes."""
        return self.width - self.tail

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Bytes of a row: codes, bfloat16 channels, scales, padding."""
        if self.fmt is None:
            raise ValueError("exact numerics round nothing, so nothing packs: cache_storage='expanded'")
        codes = self.coded if self.fmt.startswith("fp8") else self.coded // 2
        scales = -(-self.coded // group_size(self.fmt))
        return codes, 2 * self.tail, scales, -(codes + 2 * self.tail + scales) % 4

    @property
    def nbytes(self) -> int:
        """Bytes of a packed row."""
        return sum(self.parts)

    def round(self, v: Tensor) -> Tensor:
        """v [..., H] as rounded numbers."""
        if self.fmt is None:
            return v
        if not self.tail:
            return quantize(v, self.fmt, self.dtype)
        codes = quantize(v[..., : self.coded], self.fmt, self.dtype)
        return torch.cat((codes, cast(v[..., self.coded :], self.dtype)), dim=-1)

    def pack(self, v: Tensor) -> Tensor:
        """v [..., H] as bytes [..., nbytes]."""
        codes, scales = encode(v[..., : self.coded], self.fmt)
        tail = v[..., self.coded :].to(torch.bfloat16).view(torch.uint8)
        return F.pad(torch.cat((codes, tail, scales), dim=-1), (0, self.parts[-1]))

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes [..., nbytes] as the numbers that `round` gives, [..., H] of `dtype`."""
        codes, tail, scales, _ = rows.split(self.parts, dim=-1)
        v = decode(codes, scales, self.fmt, dtype)
        if not self.tail:
            return v
        return torch.cat((v, tail.contiguous().view(torch.bfloat16).to(dtype)), dim=-1)


def is_packed(cache: Tensor | None) -> bool:
    """True when a cache holds bytes; without a cache rows are numbers."""
    return cache is not None and cache.dtype == torch.uint8


@ops.op("cache.ready")
def ready(v: Tensor, gain_H: Tensor | None, eps: float, turn_T: Tensor | None, packing: Packing, packed: bool,
          keep: bool = False, steady: bool = False) -> tuple[Tensor, Tensor | None]:
    """v [T, ..., H] normed (with a gain), rotated (with turns) and rounded: rows for a cache.

    -> (rows, with `keep` the normed v as it is before the rotation). steady: as of norm.rms.
    """
    normed = v if gain_H is None else rms(v, gain_H, eps, v.dtype, **ordered(steady))
    turned = normed if turn_T is None else rotate(normed, turn_T)
    return packing.pack(turned) if packed else packing.round(turned), normed if keep else None


@ops.op("cache.write_", grad=False)
def write_(cache: Tensor, v_TH: Tensor, gain_H: Tensor | None, eps: float, turn_T: Tensor | None,
           slots_T: Tensor, packing: Packing, keep: bool = False, steady: bool = False
           ) -> tuple[Tensor, Tensor | None]:
    """`ready`, put in rows `slots` of a cache, which takes the rows' place. A packed cache skips slot -1."""
    rows, normed = ready(v_TH, gain_H, eps, turn_T, packing, is_packed(cache), keep, **ordered(steady))
    if is_packed(cache):  # what is skipped writes the reserved row as it is: no shape depends on the slots
        real, slots_T = slots_T[:, None] >= 0, slots_T.clamp(min=0)
        rows = torch.where(real, rows, cache[slots_T])
    return cache.index_copy_(0, slots_T, cast(rows, cache.dtype)), normed


def store_(cache: Tensor | None, v_TH: Tensor, norm: RMSNorm | None, turn_T: Tensor | None, slots_T: Tensor,
           packing: Packing, keep: bool = False) -> tuple[Tensor, Tensor | None]:
    """`write_` with a norm layer; without a cache (training) the new rows take its place."""
    gain, eps, how = (None, 0.0, {}) if norm is None else (norm.weight, norm.eps, ordered(norm.steady))
    if cache is None:
        return ready(v_TH, gain, eps, turn_T, packing, False, keep, **how)
    return write_(cache, v_TH, gain, eps, turn_T, slots_T, packing, keep, **how)


@ops.op("cache.read", grad=False)
def read(cache: Tensor, rows: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Rows of a cache as numbers, [..., H] of `dtype`; row -1 gives zeros, as the reserved row 0 does."""
    held = cache[rows.clamp(min=0)]
    return packing.unpack(held, dtype) if is_packed(cache) else cast(held, dtype)
