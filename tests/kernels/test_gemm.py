"""Products with FP8 weights beyond their case tables: every way of multiplying, whatever would be chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import dskit.model  # noqa: F401 - registers the ops
from dskit import ops
from dskit.kernels import common, gemm, gemm_hopper
from dskit.testing import Maker, all_cases, assert_close

WAYS = {(c["way"], c["turned"], c["tall"], c["tma"]): c  # warps and stages mean nothing here
        for name in gemm.CANDIDATES for c in gemm.CANDIDATES[name] if c["way"] not in gemm.HOPPER}


def check(device, op: str, shape: dict, config: dict, part: str = "few") -> None:
    cases = all_cases()[op]
    args = cases.make(shape, Maker(device))
    with common.trial({f"{op}/{part}": config}):
        got = getattr(gemm, op.split(".")[1])(*args)
    assert_close(got, cases.oracle(tuple(args)), cases.classes, f"{config}")


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_right_for_numbers_and_for_codes(device, way):
    for coded in (0, 1):
        check(device, "gemm.fp8", {"rows": 3, "n": 48, "k": 160, "coded": coded}, WAYS[way])


@pytest.mark.parametrize("way", [way for way in WAYS if way[0] != "codes"])
def test_every_way_is_right_for_groups(device, way):
    check(device, "gemm.project", {"rows": 3, "n": 64, "k": 96, "groups": 2}, WAYS[way])


def test_a_wider_scale_may_be_multiplied_as_numbers_too(device):
    shape = {"rows": 3, "n": 40, "k": 256, "block_n": 128, "block_k": 128, "coded": 1}
    check(device, "gemm.fp8", shape, gemm.RESTORED)
    check(device, "gemm.fp8", shape, gemm.WIDE[-1])


# ---- the ways of gemm_hopper.py ----------------------------------------------------------------------------

@pytest.mark.parametrize(("way", "sm", "n", "k", "block", "dtype", "taken"), [
    ("groups", 90, 33, 256, (32, 32), torch.float32, True),
    ("groups", 90, 64, 144, (32, 32), torch.bfloat16, False),
    ("groups", 90, 64, 256, (128, 128), torch.bfloat16, False),
    ("spans", 90, 40, 144, (32, 32), torch.bfloat16, True),
    ("spans", 90, 40, 144, (128, 128), torch.bfloat16, True),
    ("spans", 90, 33, 256, (32, 32), torch.bfloat16, False),
    ("spans", 90, 40, 256, (32, 32), torch.float32, False),
    ("spans", 90, 40, 72, (32, 32), torch.bfloat16, False),
    ("groups", 80, 64, 256, (32, 32), torch.bfloat16, False),
    ("spans", 100, 40, 256, (32, 32), torch.bfloat16, False),
    ("codes", 0, 64, 256, (32, 32), torch.bfloat16, False)])
def test_hoppers_ways_are_for_hopper_and_for_what_an_engine_copies(monkeypatch, way, sm, n, k, block, dtype,
                                                                   taken):
    monkeypatch.setattr(gemm, "capability", lambda tensor: sm)
    x, weight = torch.zeros(3, k, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.uint8)
    assert gemm._for_hopper({"way": way}, x, weight, block, dtype) is taken


@pytest.mark.gpu
@pytest.mark.parametrize("config", [c for way in gemm.HOPPER.values() for c in way], ids=str)
def test_hoppers_ways_are_right_where_tiles_do_not_divide(device, config):
    if common.capability(torch.empty(0, device=device)) != 90:
        pytest.skip("for Hopper only")
    shapes = ((1, 1792, 640), (65, 1760, 1280), (129, 136, 1312), (200, 5120, 640), (513, 1760, 1312))
    for rows, n, k in shapes:
        for more in ({"coded": 1}, {"coded": 0}, {"coded": 1, "block_n": 128, "block_k": 128}):
            part = "few" if rows <= gemm.MANY else "spans" if "block_k" in more else "many"
            check(device, "gemm.fp8", {"rows": rows, "n": n, "k": k} | more, config, part)


# ---- scales of 128 channels, folded of those of 32 ---------------------------------------------------------

def numbers(codes, scale, rows: int, cols: int):
    """What codes and their scales stand for, float64; a scale of byte 0 stands for zero."""
    power = torch.where(scale == 0, 0.0, torch.exp2(scale.double() - 127))
    power = power.repeat_interleave(rows, 0)[: len(codes)].repeat_interleave(cols, 1)[:, : codes.shape[1]]
    return codes.double() * power


def fold(codes, scale, rows: int):
    """(numbers before, numbers after, the largest of each one's span, the new scales)."""
    (M, K), (got, shared) = codes.shape, gemm_hopper.folded(codes, scale, rows)
    before, spans = numbers(codes, scale, rows, 32), -(-K // 128)
    padded = before.new_zeros(scale.shape[0] * rows, spans * 128)
    padded[:M, :K] = before.abs()
    most = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, 128)).amax(dim=(1, 3), keepdim=True)
    most = most.expand(-1, rows, -1, 128).flatten(2).flatten(0, 1)[:M, :K]
    return before, numbers(got, shared, rows, 128), most, shared


def coded(device, M: int, K: int, rows: int, low: int, high: int):
    codes = Maker(device).normal(M, K, scale=60.0).clamp(-448, 448)
    codes[:, 32:64] *= 2.0**-13  # a group with hardly anything in it
    scale = torch.randint(low, high, (-(-M // rows), -(-K // 32)), dtype=torch.uint8, device=device)
    return codes.to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize(("M", "K"), [(3, 64), (70, 400)])
@pytest.mark.parametrize(("low", "high"), [(120, 127), (0, 255)])
def test_folding_errs_by_little_of_its_span(device, rows, M, K, low, high):
    before, after, most, shared = fold(*coded(device, M, K, rows, low, high), rows)
    assert after.isfinite().all()
    beyond = (after - before).abs() - torch.maximum(before.abs() * 2**-4, most * 2**-17.8)
    assert (beyond <= 2.0**-136).all()  # half of the least that scales from 2^-126 on can tell apart
    assert (shared > 0).all()


@pytest.mark.parametrize("rows", [1, 32])
def test_folding_alike_scales_changes_nothing(device, rows):
    codes, scale = coded(device, 66, 288, rows, 0, 255)
    scale[:] = torch.repeat_interleave(scale[:, ::4], 4, 1)[:, : scale.shape[1]]
    before, after, _, _ = fold(codes, scale, rows)
    assert torch.equal(before, after)


def test_folding_heeds_numbers_rather_than_scales(device):
    codes = torch.full((2, 128), 448.0, device=device).to(torch.float8_e4m3fn)
    codes[0, :32] = 0.0  # the largest scale has no number
    scale = torch.tensor([[200, 100, 99, 98], [255, 100, 0, 90]], dtype=torch.uint8, device=device)
    before, after, _, shared = fold(codes, scale, 1)
    assert torch.equal(before[0], after[0])
    assert shared.flatten().tolist() == [100, 255]


def test_folding_keeps_what_is_no_number(device):
    codes = torch.full((1, 128), 1.0, device=device)
    codes[0, 7] = float("nan")
    scale = torch.tensor([[120, 127, 110, 127]], dtype=torch.uint8, device=device)
    got, _ = gemm_hopper.folded(codes.to(torch.float8_e4m3fn), scale, 1)
    assert got.float().isnan().nonzero().tolist() == [[0, 7]]


def test_numbers_encoded_with_wider_scales_are_folded(device):
    x = ops.find("linear.quantize").reference(Maker(device).normal(5, 400), "fp8_32", torch.bfloat16)
    codes, scale = ops.find("linear.encode").reference(x, "fp8_32")
    got, shared = gemm_hopper.folded(codes.view(torch.float8_e4m3fn), scale, 1)
    want, wide = ops.find("linear.encode").reference(x, "fp8_128")
    assert torch.equal(got.float(), want.view(torch.float8_e4m3fn).float())
    assert torch.equal(shared, wide.view(torch.uint8))
