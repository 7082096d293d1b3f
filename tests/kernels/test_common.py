"""The numbers that every kernel shares, over all codes and all rounding boundaries.

The same tests run interpreted on a CPU, where the helpers are integer arithmetic, and compiled on a GPU,
where some are casts.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from dskit.kernels import common
from dskit.layers import linear

BLOCK = 4096
NARROW = torch.arange(256, dtype=torch.int32).to(torch.uint8)
E4M3 = NARROW.view(torch.float8_e4m3fn).float()
E2M1 = torch.tensor([*linear.E2M1_VALUES, *(-v for v in linear.E2M1_VALUES)])


@triton.jit
def _apply_kernel(x_ptr, y_ptr, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(y_ptr + at, FUNCTION(x), mask=at < n)


@triton.jit
def _restored_kernel(x_ptr, y_ptr, KIND: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(y_ptr + at, common.restored(common.ld(x_ptr + at), KIND))


@triton.jit
def _widened(x):
    return x.to(tl.float32)


def apply(function, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A helper of one argument over all elements of x, on the device, brought back."""
    x, y = x.to(device), torch.empty(x.numel(), dtype=dtype, device=device)
    _apply_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), function, BLOCK)
    return y.cpu()


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits, or both NaN."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = [t.contiguous().view(views[t.itemsize]) for t in (got, want)]
    wrong = (bits[0] != bits[1]) & ~(got.isnan() & want.isnan() if got.is_floating_point() else False)
    at = int(wrong.nonzero()[0]) if wrong.any() else 0
    assert not wrong.any(), f"{int(wrong.sum())} differ, the first at {at}: {got[at]}, not {want[at]}"


def boundaries(values: torch.Tensor) -> torch.Tensor:
    """Values of a format, the midpoints between them, the neighbours of both, and what lies outside."""
    values = torch.unique(values[values.isfinite()])
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    far = torch.full_like(points, torch.inf)
    outside = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-45, 449.0, 480.0, 1e9, 3e38, -3e38, torch.nan])
    return torch.cat((points, torch.nextafter(points, far), torch.nextafter(points, -far), outside))


def test_bfloat16_rounds_as_torch_does(device):
    codes = torch.arange(1 << 16, dtype=torch.int32)
    exact = (codes << 16).view(torch.float32)
    finite = exact[exact.isfinite()]
    middle = (finite.view(torch.int32) + 0x8000).view(torch.float32)
    near = [(middle.view(torch.int32) + step).view(torch.float32) for step in (-1, 1)]
    x = torch.cat((exact, middle, *near))
    same(apply(common.to_bf16, x, torch.bfloat16, device), x.bfloat16())


def test_every_bfloat16_is_read_exactly(device):
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if os.environ.get("TRITON_INTERPRET") == "1":  # which misreads subnormals
        codes = codes[(codes.float().abs() >= 2.0**-126) | (codes == 0)]
    same(apply(_widened, codes, torch.float32, device), codes.float())


def test_e4m3_at_every_boundary(device):
    x = boundaries(E4M3)
    same(apply(common.e4m3, x, torch.float32, device), linear.e4m3(x))
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for function in (common.e4m3_code, common._e4m3_code):
        got = apply(function, x, torch.uint8, device)
        same(torch.where(x.isnan(), 0x7F, got), torch.where(x.isnan(), 0x7F, want))
        assert (got[x.isnan()] & 0x7F == 0x7F).all()


def test_every_e4m3_code_is_read_exactly(device):
    for function in (common.from_e4m3, common._from_e4m3):
        same(apply(function, NARROW, torch.float32, device), E4M3)


def test_e2m1_at_every_boundary(device):
    x = boundaries(E2M1)
    same(apply(common.e2m1, x, torch.float32, device), linear.e2m1(x))
    finite = x[~x.isnan()]
    value = linear.e2m1(finite)
    want = torch.bucketize(value.abs(), E2M1[:8]) + 8 * value.signbit()
    same(apply(common.e2m1_code, finite, torch.uint8, device), want.to(torch.uint8))


def test_every_e2m1_code_is_read_exactly(device):
    same(apply(common.from_e2m1, NARROW[:16], torch.float32, device), E2M1)


def test_operands_of_an_fp8_product_are_exact(device):
    for function, code in ((common.e2m1_low, NARROW & 15), (common.e2m1_high, NARROW >> 4)):
        same(apply(function, NARROW, torch.float32, device), E2M1[code.long()] / 64)
    x = boundaries(E4M3)
    same(apply(common.e4m3_operand, x[~x.isnan()], torch.float32, device), linear.e4m3(x[~x.isnan()]))


def test_every_e8m0_byte_is_read_exactly_and_written_back(device):
    values = linear.scale_values(NARROW)
    same(apply(common.from_e8m0, NARROW, torch.float32, device), values)
    same(apply(common.e8m0_byte, values[1:255], torch.uint8, device), NARROW[1:255])


def test_scales_are_the_references_around_every_power_of_two(device):
    powers = torch.tensor([m * 2.0**e for e in range(-140, 126) for m in (1.0, 1.5, 1.75)])
    x = torch.cat((powers, torch.nextafter(powers, 2 * powers), torch.nextafter(powers, 0 * powers)))
    floors = {"fp8": 1e-4, "fp4": 6 * 2.0**-126, "fp4e": 6 * 2.0**-9}
    fp8 = linear.scale_for(x.clamp(min=floors["fp8"]), 448.0)
    fp4 = linear.scale_for(x.clamp(min=floors["fp4"]), 6.0)
    same(apply(common.scale_fp8, x, torch.float32, device), fp8)
    same(apply(common.scale_fp4, x, torch.float32, device), fp4)
    same(apply(common.scale_fp4e, x, torch.float32, device), linear.e4m3(x.clamp(min=floors["fp4e"]) / 6))
    for scale in (fp8, fp4):
        same(apply(common.inverse, scale, torch.float32, device), 1 / scale)


@pytest.mark.parametrize("fmt", ["fp8_32", "fp8_64", "fp8_128", "fp4_32", "fp4_16"])
def test_groups_are_restored_as_the_reference_does_it(fmt, device):
    kind, size = common.layout(fmt)
    sizes = torch.logspace(-42, 38, 128, base=10.0)[:, None] if kind != "fp4_16" else 1.0
    x = (torch.randn(128, size) * sizes).to(device)
    x[5], x[6, 1:] = 0, -0.0
    y = torch.empty_like(x)
    _restored_kernel[(1,)](x, y, kind, 128, size)
    same(y.cpu().flatten(), linear.quantize(x.cpu(), fmt, torch.float32).flatten())


@pytest.mark.parametrize("fmt", ["fp8_32", "fp4_32", "fp4_16"])
def test_a_nan_stays_one_and_leaves_its_group_alone(fmt, device):
    kind, size = common.layout(fmt)
    x = torch.randn(8, size).to(device)
    plain, y = x.clone(), torch.empty_like(x)
    x[:, 3], plain[:, 3] = torch.nan, 0
    _restored_kernel[(1,)](x, y, kind, 8, size)
    want = linear.quantize(plain.cpu(), fmt, torch.float32)
    want[:, 3] = torch.nan
    same(y.cpu().flatten(), want.flatten())


def test_softplus_over_all_magnitudes(device):
    size = torch.logspace(-30, 4, 3000, base=10.0)
    x = torch.cat((size, -size, torch.linspace(-20, 25, 3000), torch.tensor([0.0, 20.0, 1e30, -1e30])))
    want = torch.nn.functional.softplus(x.double())
    got = apply(common.log1p_exp, x, torch.float32, device).double()
    assert ((got - want).abs() <= 4e-7 * want + 1e-38).all()


@pytest.mark.parametrize("fmt", ["fp9_32", "fp8", "fp8_48", "fp8_0", "fp4_64", ""])
def test_a_format_that_no_kernel_knows_is_named(fmt):
    with pytest.raises(ValueError, match=f"fmt is {fmt!r}; choose"):
        common.layout(fmt)


def test_rows_are_viewed_where_they_can_be():
    x = torch.arange(48.0).view(2, 3, 8)
    for view, shares in ((x, True), (x[..., :5], True), (x[..., ::2], False), (x.transpose(0, 1), False)):
        rows = common.rows_of(view)
        assert torch.equal(rows, view.reshape(-1, view.shape[-1])) and rows.stride(1) == 1
        assert (rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == shares
