"""Products with FP8 weights beyond their case tables: every way of multiplying, whatever would be chosen."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import dskit.model  # noqa: F401 - registers the ops
from dskit.kernels import common, gemm
from dskit.testing import Maker, all_cases, assert_close

WAYS = {(c["way"], c["turned"], c["tall"], c["tma"]): c  # warps and stages mean nothing here
        for name in gemm.CANDIDATES for c in gemm.CANDIDATES[name]}


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
