"""Experts beyond their case table: every way of multiplying them, and what an operand of codes holds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import dskit.model  # noqa: F401 - registers the ops
from dskit.kernels import common, experts, moe, operands  # noqa: F401 - moe registers them
from dskit.layers.linear import quantize
from dskit.testing import Maker, all_cases, assert_close, outputs

NAME = "moe.experts"
CASES = all_cases()[NAME]
SHAPE = {"rows": 9, "width": 160, "experts": 2, "k": 2, "inner": 64}  # more than a tile of 8, cut last steps
WAYS = {"numbers": (experts._config("numbers", 8, 64, 128, 4, 3, more=8),) * 2,
        "codes": (experts._config("windows", 8, 64, 512, 4, 4, more=8),
                  experts._config("codes", 8, 64, 256, 4, 4, more=8))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scales", ["alike", pytest.param("extreme", marks=pytest.mark.slow)])
def test_every_way_is_right(device, way, scales):
    """Extreme scales are too far apart to be folded into codes."""
    args = CASES.make(SHAPE | ({"extreme": 1} if scales == "extreme" else {}), Maker(device))
    up, down = WAYS[way]
    with common.trial({f"{NAME}/up": up, f"{NAME}/down": down}) as asked:
        assert_close(outputs(experts.experts(*args)), CASES.oracle(args), CASES.classes, way)
    assert {f"{NAME}/up", f"{NAME}/down"} <= asked.keys()


def test_one_scale_a_token(device):
    """Sums of many codes inside an FP8 tensor core move the roundings of h: right to a hundredth."""
    args = CASES.make(SHAPE | {"token": 1}, Maker(device))
    want, got = CASES.oracle(args)[0].float(), experts.experts(*args).float()
    assert (got - want).square().mean().sqrt() <= 1e-2 * want.square().mean().sqrt()


@pytest.mark.parametrize(("windows", "lost"), [(2, 2**-22), (1, 2**-17)])
def test_one_scale_holds_what_was_rounded_by_groups(device, windows, lost):
    """But what is far below a row's largest number."""
    maker = Maker(device)
    x = maker.normal(3, 512) * 2.0 ** maker.integers(9, 3, 16, low=-8).repeat_interleave(32, 1)
    x = quantize.reference(x, "fp8_32", torch.bfloat16).float()
    found, scale = operands.folded(x, 256, windows)
    found = found.float().view(3, windows, 512)
    found = found[:, 0] + found[:, 1:].sum(1) * operands.LOWER.value
    found = (found * scale[:, None]).sort(dim=1).values  # in whatever order
    assert ((found - x.sort(dim=1).values).abs() / x.abs().amax(1, keepdim=True)).max() <= lost
