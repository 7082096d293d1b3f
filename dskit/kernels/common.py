"""What kernels share: the numbers that a GPU and the interpreter must agree on, and who may run.

Idea
    The interpreter computes in numpy: it multiplies bfloat16 bit patterns, truncates where a GPU rounds, and
    rounds e4m3 wrongly at carries.  So every kernel widens to float32 as it loads (`ld`), multiplies through
    `dot`, and rounds with the functions below, whose interpreter branch is exact integer arithmetic.

Tuning
    A kernel file has a table by rows, CONFIGS = {most rows: {"BLOCK_M": 64, "num_warps": 4, ...}, ...}, its
    default, and CANDIDATES = {name: (config, ...)}, the 4 to 12 configurations worth timing, each with the
    same words as the default and right at any size; one that asks for too much is left out when timed.
    The wrapper takes `config = tuned(name, (rows, *widths), up_to(CONFIGS, rows))` and launches with it.
    `name` is the op's, or "<op>/<part>" where an op launches several kernels that are tuned apart; `widths`
    is whatever else the choice depends on.  `dskit bench tune` times the candidates at the frozen shapes and
    writes the winners to tuned.json; `python -m dskit.bench.offline --candidates` compiles them.  Where a
    caller wants the same bits in any batch (`row_tile`, `steady`) the default of one fixed row count is
    taken, without `tuned`.

Shapes
    Elementwise on any block; `dot` [M, K] x [K, N] -> [M, N] float32.

Units
    Scales are E8M0 bytes: 2^(byte - 127).

Errors
    `refuse` returns the reason why Triton cannot run on these tensors, or None; `require` raises ValueError
    naming the argument.  Importing this module without Triton raises ImportError with the remedy.

Source
    kernels.md 3.1 and 3.2: what the interpreter does, measured.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError as error:
    raise ImportError("the triton kernels need the package triton: pip install 'dskit-llm[triton]' "
                      "(Linux only)") from error

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
INTERP = tl.constexpr(INTERPRET)
TUNED = Path(__file__).parent / "tuned.json"  # GPU -> kernel -> the run, and its fastest configurations
_absent: dict[str, int] = {}  # capability and multiprocessors of a GPU that is only compiled for
_trials: list[tuple[dict, dict]] = []  # configurations that are tried out, and what has been asked for

Config = TypeVar("Config")
Key = tuple[int | str, ...]


# ---- on the host -------------------------------------------------------------------------------------------

def refuse(*tensors: torch.Tensor | None, sm: int = 80) -> str | None:
    """Why Triton cannot run on these tensors here, or None: interpreted anywhere, compiled from sm_80 on."""
    if INTERPRET:
        return None
    if _absent:
        return None if _absent["sm"] >= sm else f"sm_{_absent['sm']}; the kernel needs sm_{sm} or later"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 was set after dskit.kernels was imported; set it before, and start again"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cuda":
            return f"a tensor is on {tensor.device}; compiled kernels need a GPU, TRITON_INTERPRET=1 a CPU"
        if capability(tensor) < sm:
            return f"the GPU is sm_{capability(tensor)}, the kernel needs sm_{sm} or later"
    return None


def capability(tensor: torch.Tensor) -> int:
    """The number behind sm_ of the GPU that holds a tensor, or that is compiled for; 0 when interpreted."""
    if INTERPRET or _absent:
        return _absent.get("sm", 0)
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def too_wide(*given: torch.Tensor | torch.dtype | None) -> str | None:
    """Why a kernel that computes in float32 cannot take these tensors and dtypes, or None."""
    dtypes = [one.dtype if isinstance(one, torch.Tensor) else one for one in given]
    return "it computes in float32, and float64 was asked for" if torch.float64 in dtypes else None


def pretend(sm: int, processors: int) -> None:
    """From now on compile for a GPU that is not here, its tensors on the CPU (bench/offline.py)."""
    _absent.update(sm=sm, processors=processors)


def processors(tensor: torch.Tensor) -> int:
    """Multiprocessors of the GPU that holds a tensor; 4 when interpreted, so that loops are walked."""
    if _absent:
        return _absent["processors"]
    return 4 if INTERPRET else torch.cuda.get_device_properties(tensor.device).multi_processor_count


def require(condition: bool, argument: str, problem: str) -> None:
    """Raise ValueError naming the argument unless the condition holds."""
    if not condition:
        raise ValueError(f"{argument} {problem}")


def layout(fmt: str) -> tuple[str, int]:
    """(kind, channels of a group) of a quantisation format, for `restored` and its kin.

    Raises ValueError for a format that is unknown or whose groups are no power of two.
    """
    kind, _, size = fmt.partition("_")
    known = fmt in ("fp4_32", "fp4_16") or (kind == "fp8" and size.isdigit() and int(size) == pow2(int(size)))
    require(known, "fmt", f"is {fmt!r}; choose fp8_<power of two>, fp4_32 or fp4_16")
    return kind if kind == "fp8" else fmt, int(size)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [rows, K] whose channels lie side by side; copied only when they do not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def pow2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return triton.next_power_of_2(max(1, n))


# ---- on the host: configurations ---------------------------------------------------------------------------

def up_to(table: Mapping[int, Config], rows: int) -> Config:
    """The entry of a table by rows whose limit is the least to hold so many."""
    return table[min(most for most in table if rows <= most)]


def tuned(name: str, key: Key, default: Config) -> Config:
    """The configuration of a kernel at (rows, *widths): the one measured on this kind of GPU for these widths
    at the nearest rows, else the default.
    """
    if _trials:
        use, asked = _trials[-1]
        asked[name] = key, default
        return use.get(name, default)
    if INTERPRET or _absent:
        return default
    return _measured(name, key) or default


@contextlib.contextmanager
def trial(use: Mapping[str, Any]) -> Iterator[dict[str, tuple[Key, Any]]]:
    """While it lasts, kernels take these configurations by name, others their defaults; gives what was asked
    for, name -> (key, default).
    """
    asked: dict[str, tuple[Key, Any]] = {}
    _trials.append((dict(use), asked))
    try:
        yield asked
    finally:
        _trials.pop()


@functools.lru_cache(1 << 12)
def _measured(name: str, key: Key) -> Any:
    rows, *widths = key
    by_rows = _tables().get((name, *widths))
    return by_rows and by_rows[min(by_rows, key=lambda size: abs(math.log(size / max(rows, 1))))]


@functools.cache
def _tables() -> dict[tuple, dict[int, Any]]:
    """(name, *widths) -> rows -> configuration, as measured on GPUs of this name."""
    tables: dict[tuple, dict[int, Any]] = {}
    measured = json.loads(TUNED.read_text()).get(torch.cuda.get_device_name(), {})
    for name, found in measured.items():
        for size in found["sizes"]:
            rows, *widths = size["key"]
            tables.setdefault((name, *widths), {})[rows] = size["config"]
    return tables


# ---- in kernels: loading, rounding -------------------------------------------------------------------------

@triton.jit
def ld(ptr, mask=None, other=0.0):
    """Load and widen to float32 at once: the interpreter must never compute in bfloat16."""
    value = tl.load(ptr) if mask is None else tl.load(ptr, mask=mask, other=other)
    return value.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, float32 sums; operands stay narrow on a GPU and are widened (exactly) when interpreted."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def to_bf16(x):
    """float32 -> bfloat16, to nearest, ties to even."""
    if INTERP:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def rounded_bf16(x):
    """float32 -> the nearest bfloat16 value as float32, in one instruction: the high half of a pair."""
    if INTERP:
        value = to_bf16(x).to(tl.float32)
    else:
        value = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=f,f", [x],
                                          dtype=tl.float32, is_pure=True, pack=1)
    return value


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 -> `dtype` (float32, bfloat16, float16), to nearest, ties to even."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    return x.to(dtype)


@triton.jit
def nearest(x):
    """float32 of magnitude below 2^22 -> nearest integer as float32, ties to even."""
    magic = 12582912.0  # 1.5 * 2^23: from here on float32 has no fraction
    return (x + magic) - magic


@triton.jit
def _round(x, lowest: tl.constexpr, magic: tl.constexpr):
    """x to the nearest value of a format with few mantissa bits, ties to even.

    With m bits the step is 2^-m of the power of two at or below |x|, which is at least `lowest`, where the
    subnormals begin.  Beside that power times `magic` = 1.5 * 2^(23 - m) float32 itself has that step, so
    adding it rounds.  A zero keeps its sign, a NaN stays one.
    """
    bits = x.to(tl.int32, bitcast=True)
    big = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), lowest) * magic
    value = ((x + big) - big).to(tl.int32, bitcast=True)
    return ((value & 0x7FFFFFFF) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _within(x, largest: tl.constexpr):
    return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def e4m3(x):
    """float32 -> nearest e4m3 value as float32, ties to even, saturating at 448."""
    return _round(_within(x, 448.0), 0.015625, 1572864.0)  # 2^-6, 1.5 * 2^20


@triton.jit
def e2m1(x):
    """float32 -> nearest e2m1 value as float32, ties to even, saturating at 6."""
    return _round(_within(x, 6.0), 1.0, 6291456.0)  # 1.5 * 2^22


# ---- in kernels: codes -------------------------------------------------------------------------------------

@triton.constexpr_function
def _casts_fp8():
    """Whether the machine compiled for has casts to and from e4m3; without them integers do the same."""
    return not INTERPRET and tl.target_info.cuda_capability_geq(8, 9)


@triton.jit
def e4m3_code(x):
    """float32 -> uint8 code of the nearest e4m3 value, saturating at 448."""
    if _casts_fp8():
        return _within(x, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _e4m3_code(x)


@triton.jit
def _e4m3_code(x):
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    value = tl.abs(e4m3(x))
    normal = (value.to(tl.int32, bitcast=True) >> 20) - 960  # exponent bias 127 becomes 7
    small = ((value + 0.015625).to(tl.int32, bitcast=True) >> 20) - 968  # subnormals count steps of 2^-9
    code = tl.where(value < 0.015625, small, tl.minimum(normal, 0x7F))  # a NaN is 0x7F
    return (code | sign).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """uint8 code -> its e4m3 value, float32."""
    if _casts_fp8():
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return _from_e4m3(code)


@triton.jit
def _from_e4m3(code):
    code = code.to(tl.int32)
    value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value * 1.329227995784916e36)  # 2^(127 - 7)


@triton.jit
def e2m1_code(x):
    """float32 -> code 0..15 (uint8) of the nearest e2m1 value, saturating at 6."""
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    value = tl.abs(e2m1(x))
    normal = (value.to(tl.int32, bitcast=True) >> 22) - 252  # exponent bias 127 becomes 1
    code = tl.where(value < 1.0, tl.where(value > 0.0, 1, 0), tl.minimum(normal, 7))
    return (code | sign).to(tl.uint8)


@triton.jit
def from_e2m1(code):
    """Code 0..15 -> its e2m1 value, float32: its bits read as float32's, whose bias is 126 larger."""
    code = code.to(tl.int32)
    value = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    return value * 8.507059173023462e37  # 2^(127 - 1)


@triton.jit
def from_e8m0(byte):
    """E8M0 byte -> 2^(byte - 127), float32; byte 0 is 2^-127, a subnormal, and 255 NaN."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_byte(scale):
    """A power of two (float32, normal) -> its E8M0 byte."""
    return ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)


@triton.jit
def scale_fp8(amax):
    """Smallest power of two s with max(amax, 1e-4) <= 448 s, in integers."""
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)  # 448 = 1.75 * 2^8
    return ((bits + (0x7FFFFF - 0x600000 - (8 << 23))) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_fp4(amax):
    """Smallest power of two s with max(amax, 6 * 2^-126) <= 6 s, in integers."""
    bits = tl.maximum(amax, 7.052966104933725e-38).to(tl.int32, bitcast=True)  # 6 = 1.5 * 2^2
    return ((bits + (0x7FFFFF - 0x400000 - (2 << 23))) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_fp4e(amax):
    """The e4m3 scale of a group of 16 in e2m1: max(amax, 6 * 2^-9) / 6, rounded."""
    return e4m3(tl.div_rn(tl.maximum(amax, 0.01171875), 6.0))


@triton.jit
def inverse(scale):
    """1 / s of a power of two, exactly (2^-126 .. 2^126)."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def over(x, scale):
    """x / scale, to nearest, of an e4m3 scale [groups, 1]; x finite.

    With few bits in the scale the remainder x - q scale is exact, and q + remainder / scale is never half-way
    between two floats: three operations for what a division takes ten and a branch.  Only a negative zero
    would lose its sign to the remainder, a positive one.
    """
    if INTERP:  # whose fma rounds twice
        quotient = tl.div_rn(x, scale.broadcast_to(x.shape))
    else:
        back = tl.div_rn(1.0, scale).broadcast_to(x.shape)
        rough = x * back
        quotient = tl.fma(tl.fma(-rough, scale.broadcast_to(x.shape), x), back, rough)
        quotient = tl.where(x == 0.0, x, quotient)
    return quotient


# ---- in kernels: two numbers in a word ---------------------------------------------------------------------
# Rotation works on pairs of channels, a byte of e2m1 and a word of bfloat16 hold two: the first is the lower.

@triton.jit
def _join(low, high):
    return low.to(tl.uint32) | (high.to(tl.uint32) << 16)


@triton.jit
def bf16_pair(a, b):
    """Two float32 -> word of two bfloat16 (uint32), each to nearest, ties to even."""
    if INTERP:
        return _join(to_bf16(a).to(tl.uint16, bitcast=True), to_bf16(b).to(tl.uint16, bitcast=True))
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.uint32,
                                         is_pure=True, pack=1)


@triton.jit
def from_bf16_pair(word):
    """Inverse of bf16_pair: (a, b), float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def fp16_pair(a, b):
    """Two float32 -> word of two float16 (uint32), each to nearest, ties to even."""
    if INTERP:
        a, b = a.to(tl.float16), b.to(tl.float16)
        return _join(a.to(tl.uint16, bitcast=True), b.to(tl.uint16, bitcast=True))
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.uint32,
                                         is_pure=True, pack=1)


@triton.jit
def from_fp16_pair(word):
    """Inverse of fp16_pair: (a, b), float32."""
    low, high = (word & 0xFFFF).to(tl.uint16), (word >> 16).to(tl.uint16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fp32_pair(a, b):
    """Two float32 -> word of both (int64)."""
    low, high = a.to(tl.uint32, bitcast=True).to(tl.uint64), b.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (low | (high << 32)).to(tl.int64, bitcast=True)


@triton.jit
def from_fp32_pair(word):
    """Inverse of fp32_pair: (a, b)."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_pair(a, b):
    """Two float32 of magnitude up to 448 -> their e4m3 codes, uint16."""
    if _casts_fp8():
        return tl.inline_asm_elementwise("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [a, b],
                                         dtype=tl.uint16, is_pure=True, pack=1)
    else:
        return e4m3_code(a).to(tl.uint16) | (e4m3_code(b).to(tl.uint16) << 8)


@triton.jit
def from_e4m3_pair(code):
    """Inverse of e4m3_pair: (a, b), float32."""
    if _casts_fp8():
        return from_fp16_pair(tl.inline_asm_elementwise("cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [code],
                                                        dtype=tl.uint32, is_pure=True, pack=1))
    else:
        return from_e4m3((code & 0xFF).to(tl.uint8)), from_e4m3((code >> 8).to(tl.uint8))


@triton.jit
def e2m1_pair(a, b):
    """Two float32 of magnitude below 7 * 2^-14 -> word of float16: the nearest e2m1 values times 2^-14.

    There a float16 has the exponents of an e2m1, subnormals included, and more mantissa, so that rounding is
    an addition.  The first rounding, to float16, leaves ties alone where a and b were bfloat16 over a scale.
    """
    word = fp16_pair(a, b)
    size = word & 0x7FFF7FFF
    return ((size + 0x00FF00FF + ((size >> 9) & 0x00010001)) & 0x7E007E00) | (word & 0x80008000)


@triton.jit
def e2m1_byte(word):
    """What e2m1_pair gives -> its two codes, uint8."""
    code = ((word >> 9) & 0x00070007) | ((word >> 12) & 0x00080008)
    return (code | (code >> 12)).to(tl.uint8)


@triton.jit
def from_e2m1_byte(byte):
    """Two e2m1 codes (uint8) -> (a, b) times 2^-14, float32."""
    byte = byte.to(tl.uint32)
    code = byte | (byte << 12)
    return from_fp16_pair(((code & 0x00070007) << 9) | ((code & 0x00080008) << 12))


# ---- in kernels: operands of an FP8 product ----------------------------------------------------------------
# Interpreted they are float32 values, which `dot` takes as well.  They need sm_89, as the product does.

@triton.jit
def e4m3_operand(x):
    """float32 -> the nearest e4m3 values, saturating at 448."""
    if INTERP:
        return e4m3(x)
    else:
        return _within(x, 448.0).to(tl.float8e4nv)


@triton.jit
def e2m1_low(byte):
    """The e2m1 in the low half of bytes, times 2^-6: its bits read as e4m3's, subnormals included."""
    if INTERP:
        return from_e2m1(byte & 15) * 0.015625
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b; shl.b32 a, $1, 2; shl.b32 b, $1, 4; and.b32 b, b, 0x80808080;"
            " lop3.b32 $0, a, 0x1C1C1C1C, b, 0xEA;}", "=r,r", [byte], dtype=tl.float8e4nv, is_pure=True,
            pack=4)


@triton.jit
def e2m1_high(byte):
    """The e2m1 in the high half of bytes, times 2^-6."""
    if INTERP:
        return from_e2m1(byte >> 4) * 0.015625
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b; shr.b32 a, $1, 2; and.b32 b, $1, 0x80808080;"
            " lop3.b32 $0, a, 0x1C1C1C1C, b, 0xEA;}", "=r,r", [byte], dtype=tl.float8e4nv, is_pure=True,
            pack=4)


# ---- in kernels: groups of channels that share a scale -----------------------------------------------------
# KIND is what `layout` makes of a format's name: fp8, fp4_32 (both with E8M0 scales) or fp4_16 (e4m3 scales).

@triton.jit
def scaled(x, KIND: tl.constexpr):
    """(x / scale, scale [groups, 1]) of a float32 tile [groups, size]: what remains is to round."""
    amax = tl.max(tl.abs(x), axis=1, keep_dims=True)
    if KIND == "fp4_16":
        scale = scale_fp4e(amax)
        value = over(x, scale)
    else:
        scale = scale_fp8(amax) if KIND == "fp8" else scale_fp4(amax)
        value = x * inverse(scale)
    return value, scale


@triton.jit
def _e4m3_of_scaled(x):
    """e4m3 of what a scale keeps within 448: by casts where there are some, in far fewer instructions."""
    if _casts_fp8():
        return x.to(tl.float8e4nv).to(tl.float32)
    else:
        return e4m3(x)


@triton.jit
def restored(x, KIND: tl.constexpr):
    """A float32 tile [groups, size], quantised group by group and restored."""
    value, scale = scaled(x, KIND)
    return (_e4m3_of_scaled(value) if KIND == "fp8" else e2m1(value)) * scale


@triton.jit
def scale_byte(scale, KIND: tl.constexpr):
    """A scale as it is stored."""
    return e4m3_code(scale) if KIND == "fp4_16" else e8m0_byte(scale)


@triton.jit
def scale_value(byte, KIND: tl.constexpr):
    """Inverse of scale_byte, float32."""
    return from_e4m3(byte) if KIND == "fp4_16" else from_e8m0(byte)


@triton.jit
def pack(code):
    """e2m1 codes [groups, size] -> bytes [groups, size / 2], the even channel in the low nibble."""
    even, odd = tl.split(code.reshape(code.shape[0], code.shape[1] // 2, 2))
    return even | (odd << 4)


@triton.jit
def unpack(byte):
    """Inverse of pack."""
    return tl.interleave(byte & 15, byte >> 4)


# ---- in kernels: functions ---------------------------------------------------------------------------------

@triton.jit
def log1p_exp(x):
    """softplus(x) = log(1 + exp(x)); x itself above 20, exp(x) far below."""
    if INTERP:
        e = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + e
        small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    else:  # a GPU's own exponential loses digits as x grows
        small = libdevice.log1p(libdevice.exp(tl.minimum(x, 20.0)))
    return tl.where(x > 20.0, x, small)


# ---- in kernels: drawing -----------------------------------------------------------------------------------

GREEDY_BELOW = tl.constexpr(1e-5)  # a temperature


@triton.jit
def softmax_scale(temperature):
    """What a logit is multiplied by before exp2, float32: log2(e) over the temperature, none if greedy."""
    return (1.4426950408889634 / tl.where(temperature < GREEDY_BELOW, 1.0, temperature)).to(tl.float32)


@triton.jit
def first_beyond(weight, target):
    """The first index whose cumulative weight (float64) exceeds the target, else the last that weighs."""
    i = tl.arange(0, weight.shape[0])
    first = tl.min(tl.where((tl.cumsum(weight) > target) & (weight > 0), i, weight.shape[0]))
    last = tl.max(tl.where(weight > 0, i, 0))
    return tl.where(first < weight.shape[0], first, last)
