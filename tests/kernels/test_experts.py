"""Experts beyond their case table: every way of multiplying them, and what an operand of codes holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import dskit.model  # noqa: F401 - registers the ops
from dskit.kernels import common, experts, grouped, moe, operands  # noqa: F401 - moe registers them
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


@pytest.mark.slow
def test_what_cannot_be_folded_is_done_again(device, monkeypatch):
    """Tile by tile, where grouped.py has marked them: here all."""
    def mark(x, xs, words, scale, tile, *_):
        tile[:, 3] = tile[:, 0] < len(words)

    monkeypatch.setattr(grouped, "multiply", mark)
    monkeypatch.setattr(common, "capability", lambda tensor: 90)
    shape = {"rows": 2, "width": 256, "experts": 1, "k": 1, "inner": 256, "extreme": 1}
    args = CASES.make(shape, Maker(device))
    config = experts._grouped("codes", 4)
    with common.trial({f"{NAME}/up": config, f"{NAME}/down": config}):
        assert_close(outputs(experts.experts(*args)), CASES.oracle(args), CASES.classes, "extreme scales")


@pytest.mark.parametrize(("sm", "fmt", "channels", "taken"), [
    (0, "fp4", 256, 0), (89, "fp4", 256, 0), (90, "fp4", 256, 3), (90, "fp4", 384, 0), (90, "fp8", 256, 0),
    (100, "fp4", 256, 0)])
def test_only_hopper_groups_tiles_of_many_tokens(monkeypatch, sm, fmt, channels, taken):
    """Whatever a table says: other GPUs have no such products, other formats no such codes."""
    monkeypatch.setattr(common, "capability", lambda tensor: sm)
    weight = SimpleNamespace(weight=torch.empty(16), scale=torch.empty(1), fmt=fmt, block=(32, 32), experts=4,
                             in_features=channels, out_features=128)
    numerics = SimpleNamespace(token=False, steady=False)
    with common.trial({f"{NAME}/{part}": experts._grouped("codes", 4) for part in ("up", "down")}):
        for part, group in (("up", 64), ("down", 1)):
            assert experts._configuration(part, 512, 128, weight, 64, group, numerics)["groups"] == taken


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


def test_rows_of_an_engine_hold_every_channel_at_each_place_of_their_token(device):
    place = torch.tensor([[0, 4], [5, 1], [2, 3]], device=device)
    x = torch.randn(3, 416, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    rows = operands.spread(x, 8, 256, True, place)[place].float()
    folded, scale = operands.folded(x, 256, 1, True, place)
    folded = folded[place].float() * scale[place][..., None]
    want = torch.nn.functional.pad(x, (0, 96)).float().sort(1).values[:, None].expand(-1, 2, -1)
    assert torch.equal(rows.sort(2).values, want)
    assert (folded.sort(2).values - want).abs().max() <= want.abs().max() / 16


def test_rows_that_nobody_here_wants_are_left_alone(device):
    place, rows = torch.tensor([[0, 4], [5, 1], [2, 3]], device=device), torch.tensor([4], device=device)
    x = torch.randn(3, 416, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    for given in ((8, 256, True, place), (8, 256)):
        assert torch.equal(operands.spread(x, *given, rows=rows)[:4], operands.spread(x, *given)[:4])
    for given in ((256, 1, True, place), (256, 2)):
        for some, all_ in zip(operands.folded(x, *given, rows=rows), operands.folded(x, *given), strict=True):
            assert torch.equal(some[:4].view(torch.uint8), all_[:4].view(torch.uint8))
    x[2] = torch.nan  # of no row that is wanted
    two = torch.tensor([2], device=device)
    assert operands.spread(x, 8, 256, rows=two)[:2].isfinite().all()


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("rows", [1, 7, 21])
def test_the_tiles_of_few_slots_are_those_of_many(device, rows, first):
    """As far as there are any; then they say that they are none."""
    topk, E = Maker(device).integers(7, rows, 3, low=-1), 5
    for tokens, tokens2 in ((1, 2), (3, 3), (8, 5)):
        _, _, end, *found = experts._plan(topk, E, first, tokens, tokens2)
        for tile, width in zip(found, (tokens, tokens2), strict=True):
            want = experts._tiles(end, topk.numel(), width)
            want = want[want[:, 0] < E]
            assert torch.equal(tile[: len(want)], want) and (tile[len(want) :, 0] == E).all()
