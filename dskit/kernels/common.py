"""What kernels share: the numbers that a GPU and the interpreter must agree on, and who may run.

Idea
    The interpreter computes in numpy: it multiplies bfloat16 bit patterns, truncates where a GPU rounds, and
    rounds e4m3 wrongly at carries.  So every kernel widens to float32 as it loads (`ld`), multiplies through
    `dot`, and rounds with the functions below, whose interpreter branch is exact integer arithmetic.

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

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the triton kernels need the package triton: pip install 'dskit-llm[triton]' "
                      "(Linux only)") from error

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
INTERP = tl.constexpr(INTERPRET)
_absent: dict[str, int] = {}  # capability and multiprocessors of a GPU that is only compiled for


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
        have = 10 * torch.cuda.get_device_capability(tensor.device)[0]
        have += torch.cuda.get_device_capability(tensor.device)[1]
        if have < sm:
            return f"the GPU is sm_{have}, the kernel needs sm_{sm} or later"
    return None


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


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def pow2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return triton.next_power_of_2(max(1, n))


# ---- in kernels: loading, rounding -------------------------------------------------------------------------

@triton.jit
def ld(ptr, mask=None, other=0.0):
    """Load and widen to float32 at once: the interpreter must never compute in bfloat16."""
    return tl.load(ptr, mask=mask, other=other).to(tl.float32)


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
def e4m3(x):
    """float32 -> nearest e4m3 value as float32, ties to even, saturating at 448."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)  # below 2^-6 steps stay 2^-9
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    back = ((257 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / step
    return nearest(x * back) * step


@triton.jit
def e2m1(x):
    """float32 -> nearest e2m1 value as float32, ties to even, saturating at 6."""
    x = tl.minimum(tl.maximum(x, -6.0), 6.0)
    size = tl.abs(x)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    back = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    return nearest(x * back) * step


# ---- in kernels: codes -------------------------------------------------------------------------------------

@triton.jit
def e4m3_code(x):
    """float32 -> uint8 code of the nearest e4m3 value, saturating at 448."""
    if INTERP:
        value = tl.abs(e4m3(x))
        sign = ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        bits = value.to(tl.int32, bitcast=True)
        normal = (bits >> 20) - (120 << 3)
        small = (value * 512.0).to(tl.int32)  # subnormals count in steps of 2^-9
        return (tl.where(value < 0.015625, small, normal) | sign).to(tl.uint8)
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code):
    """uint8 code -> its e4m3 value, float32."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_code(x):
    """float32 -> code 0..15 (uint8) of the nearest e2m1 value, saturating at 6."""
    value = tl.abs(e2m1(x))
    sign = ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    small = (value * 2.0).to(tl.int32)  # 0 .. 4 stand for 0, 0.5, 1, 1.5, 2
    code = tl.where(value <= 2.0, small, tl.where(value < 3.5, 5, tl.where(value < 5.0, 6, 7)))
    return (code | sign).to(tl.uint8)


@triton.jit
def from_e2m1(code):
    """Code 0..15 -> its e2m1 value, float32: read as an e4m3 subnormal it is the value times 2^-6."""
    code = code.to(tl.int32)
    as_e4m3 = (((code & 7) << 2) | ((code & 8) << 4)).to(tl.uint8)
    return from_e4m3(as_e4m3) * 64.0


@triton.jit
def from_e8m0(byte):
    """E8M0 byte -> 2^(byte - 127), float32; byte 0 is 2^-127, a subnormal."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
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
def inverse(scale):
    """1 / s of a power of two, exactly (2^-126 .. 2^126)."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def log1p_exp(x):
    """softplus(x) = log(1 + exp(x)); x itself above 20, exp(x) far below."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)
