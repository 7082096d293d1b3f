"""Cases of the ops in layers/moe.py.

Idea
    A choice between scores that lie closer than a sum in float32 is exact differs by luck, so a row whose
    best scores do is replaced by one whose scores do not.  Equal scores stay: they have a right answer.

Shapes
    rows (tokens), width D, experts E, k, inner I; further names mark what is odd about a case.

Errors
    None of its own.

Source
    kernels.md 1.8; the released widths are 5120, 384 experts, 6 a token, 2304 inside.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dskit import ops
from dskit.layers.linear import Experts, Numerics, quantize
from dskit.testing import Cases, Maker, Shape

ROWS = (1, 32, 128, 512, 4096)
APART = 1e-4  # of scores, which are of the order of one
D, E, J, I = 5120, 384, 6, 2304


# ---- router ------------------------------------------------------------------------------------------------

def _settled(logit_TE: Tensor, bias: Tensor | None, k: int) -> Tensor:
    """Rows [T] to take: each its own, or the first whose k + 1 best scores are equal or well apart."""
    choice = F.softplus(logit_TE.double()).sqrt() + (0 if bias is None else bias.double())
    best = choice.sort(dim=1, descending=True).values[:, : k + 1]
    gap = best[:, :-1] - best[:, 1:]
    settled = ((gap > APART) | (gap == 0)).all(dim=1).int()
    rows = torch.arange(len(choice), device=choice.device)
    return torch.where(settled.bool(), rows, settled.argmax()) if len(rows) else rows


def _route(shape: Shape, maker: Maker) -> tuple:
    T, experts, k = shape["rows"], shape["experts"], shape["k"]
    logit = maker.normal(T, experts, dtype=torch.float32, scale=shape.get("scale", 2))
    bias, fixed = maker.normal(experts, dtype=torch.float32, scale=0.1), None
    if shape.get("ties"):
        logit, bias = logit.round(), None
    if shape.get("row_bias"):
        bias = maker.normal(T, experts, dtype=torch.float32, scale=0.1)
    if shape.get("fixed"):
        bias, fixed = None, maker.integers(experts, T, k)
    else:
        rows = _settled(logit, bias, k)
        logit, bias = logit[rows], bias[rows] if bias is not None and bias.dim() == 2 else bias
    return logit, bias, k, not shape.get("plain"), 1.5, fixed


def _gate(shape: Shape, maker: Maker) -> tuple:
    T, width, experts, k = (shape[name] for name in ("rows", "width", "experts", "k"))
    dtype = torch.float32 if shape.get("exact") else torch.bfloat16
    x = maker.normal(T, width, dtype=dtype)
    weight = maker.normal(experts, width, dtype=dtype, scale=width**-0.5)
    bias, image_bias = (maker.normal(experts, dtype=torch.float32, scale=0.1) for _ in range(2))
    fixed = maker.integers(experts, T, k) if shape.get("fixed") else None
    image = maker.integers(2, T) == 1 if shape.get("image") else None
    if shape.get("ties"):
        x, bias = torch.zeros_like(x), bias.mul(8).round().div(8)
    each = bias if image is None else torch.where(image[:, None], image_bias, bias)
    rows = _settled(x.float() @ weight.float().T, each, k)
    image = None if image is None else image[rows]
    return x[rows], weight, bias, k, True, 1.5, shape.get("temperature", 1), fixed, image, image_bias


def _tokens(*counts: int, **more: int) -> tuple[Shape, ...]:
    """The released widths at these many tokens."""
    return tuple({"rows": T, "width": D, "experts": E, "k": J} | more for T in counts)


ROUTE_EDGES = (
    {"rows": 0, "experts": 5, "k": 2}, {"rows": 1, "experts": 1, "k": 1}, {"rows": 2, "experts": 7, "k": 7},
    {"rows": 5, "experts": 24, "k": 3, "ties": 1}, {"rows": 5, "experts": 16, "k": 2, "row_bias": 1},
    {"rows": 3, "experts": 16, "k": 3, "plain": 1}, {"rows": 2, "experts": 12, "k": 3, "fixed": 1},
    {"rows": 2, "experts": 384, "k": 6, "scale": 30},
)
GATE_EDGES = (
    {"rows": 0, "width": 32, "experts": 5, "k": 2}, {"rows": 1, "width": 40, "experts": 7, "k": 7},
    {"rows": 17, "width": 40, "experts": 10, "k": 2, "image": 1},
    {"rows": 2, "width": 300, "experts": 9, "k": 1},
    {"rows": 3, "width": 96, "experts": 5, "k": 2, "ties": 1},
    {"rows": 3, "width": 96, "experts": 6, "k": 2, "fixed": 1, "temperature": 2},
    {"rows": 3, "width": 40, "experts": 70, "k": 6, "exact": 1},
)


# ---- travelling --------------------------------------------------------------------------------------------

def _topk(shape: Shape, maker: Maker) -> Tensor:
    """Different experts for each token; `one`: the same for all tokens."""
    T, experts, k = shape["rows"], shape["experts"], shape["k"]
    rows = 1 if shape.get("one") else T
    return maker.uniform(rows, experts).argsort(dim=1)[:, :k].expand(T, k).contiguous()


def _plan(shape: Shape, maker: Maker) -> tuple:
    """`first`: experts of other ranks are asked as well, and some choices are none."""
    if "first" not in shape:
        return _topk(shape, maker), shape["experts"]
    topk = maker.integers(3 * shape["experts"], shape["rows"], shape["k"], low=-1)
    return topk, shape["experts"], shape["first"]


def _permute(shape: Shape, maker: Maker) -> tuple:
    topk, experts = _plan(shape, maker)
    _, order, place, _ = ops.find("moe.plan").reference(topk, experts)
    return maker.normal(shape["rows"], shape["width"]), maker.uniform(*topk.shape), order, place


def _combine(shape: Shape, maker: Maker) -> tuple:
    T, width, k = shape["rows"], shape["width"], shape["k"]
    *_, place = _permute(shape, maker)
    shared = None if shape.get("no_shared") else maker.normal(T, width)
    if rows := shape.get("held"):  # other ranks' answers, and zeros for those who gave none
        place = place % rows
    return maker.normal(rows or T * k, width), None if shape.get("alone") else place, shared, torch.bfloat16


PLAN_EDGES = (
    {"rows": 0, "experts": 5, "k": 2}, {"rows": 1, "experts": 12, "k": 3}, {"rows": 17, "experts": 6, "k": 6},
    {"rows": 9, "experts": 7, "k": 1, "one": 1}, {"rows": 700, "experts": 3, "k": 3},
    {"rows": 5, "experts": 4, "k": 3, "first": 4}, {"rows": 40, "experts": 30, "k": 4, "first": 0},
    {"rows": 700, "experts": 3, "k": 3, "first": 2},
)
TRAVEL_EDGES = (
    {"rows": 0, "width": 64, "experts": 5, "k": 2}, {"rows": 1, "width": 40, "experts": 8, "k": 3},
    {"rows": 4, "width": 33, "experts": 6, "k": 6},
    {"rows": 2, "width": 1100, "experts": 5, "k": 2, "one": 1},
)
COMBINE_EDGES = (*TRAVEL_EDGES, {"rows": 1, "width": 70, "experts": 8, "k": 3, "alone": 1},
                 {"rows": 3, "width": 48, "experts": 4, "k": 2, "no_shared": 1},
                 {"rows": 5, "width": 40, "experts": 4, "k": 2, "held": 7},
                 {"rows": 2, "width": 40, "experts": 4, "k": 2, "held": 9})


# ---- activation --------------------------------------------------------------------------------------------

def _swiglu(shape: Shape, maker: Maker) -> tuple:
    rows, inner = shape["rows"], shape["inner"]
    dtype = torch.float32 if shape.get("exact") else torch.bfloat16
    gate, linear = maker.normal(rows, 2 * inner, dtype=dtype, scale=6).chunk(2, dim=-1)
    weight = None if shape.get("shared") else maker.uniform(rows, 1)
    return gate, linear, weight, shape.get("limit", 10), dtype


def _swiglu_quantize(shape: Shape, maker: Maker) -> tuple:
    dtype = torch.float32 if shape.get("exact") else torch.bfloat16
    fmt = f"fp8_{shape.get('group', 32)}"
    return *_swiglu({**shape, "exact": 0}, maker), fmt, dtype


SWIGLU_EDGES = (
    {"rows": 0, "inner": 64}, {"rows": 1, "inner": 40}, {"rows": 5, "inner": 96, "shared": 1},
    {"rows": 5, "inner": 64, "exact": 1}, {"rows": 3, "inner": 600, "limit": 0},
)
SWIGLU_FROZEN = tuple({"rows": J * T, "inner": I} for T in ROWS)


# ---- experts -----------------------------------------------------------------------------------------------

def _numerics(shape: Shape) -> Numerics:
    name = "token" if shape.get("token") else "release"
    return Numerics(name, torch.bfloat16, torch.bfloat16, f"fp8_{shape.get('group', 32)}", "fp8_32",
                    held=torch.bfloat16)


def _stack(shape: Shape, maker: Maker, outputs: int, inputs: int) -> Experts:
    """Experts with codes of any bits and scales for results near one; `extreme`: scales 2^-50 .. 2^10."""
    E, fmt, block = shape["experts"], shape.get("fmt", "fp4"), (shape.get("block", 32),) * 2
    with torch.device("meta"):
        stack = Experts(E, inputs, outputs, _numerics(shape), fmt=fmt, block=block)
    if fmt == "bf16":
        weight, scale = maker.normal(E, outputs, inputs, scale=inputs**-0.5), None
    elif fmt == "fp4":
        weight = maker.bytes(E, outputs, inputs // 2).view(torch.int8)
        scale = (E, outputs, inputs // 32)
    else:
        weight = maker.uniform(E, outputs, inputs, low=-448, high=448, dtype=torch.float8_e4m3fn)
        scale = (E, -(-outputs // block[0]), inputs // block[1])
    if scale is not None:
        centre = 127 - round(math.log2(inputs) / 2) - (1 if fmt == "fp4" else 8)
        low, high = (77, 137) if shape.get("extreme") else (centre - 2, centre + 2)
        scale = maker.uniform(*scale, low=low, high=high, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    stack.weight, stack.scale = (None if t is None else nn.Parameter(t, requires_grad=False)
                                 for t in (weight, scale))
    return stack


def _experts(shape: Shape, maker: Maker) -> tuple:
    T, width, inner, k = (shape[name] for name in ("rows", "width", "inner", "k"))
    numerics, total = _numerics(shape), shape.get("total", shape["experts"])
    topk = _topk({**shape, "experts": total}, maker)
    x = quantize.reference(maker.normal(T, width), numerics.activation_format, torch.bfloat16)
    shared = None if shape.get("no_shared") else maker.normal(T, width)
    w13, w2 = _stack(shape, maker, 2 * inner, width), _stack(shape, maker, width, inner)
    part = (shape["first"], total) if "total" in shape else None
    return x, topk, maker.uniform(T, k), shared, w13, w2, 10.0, numerics, part


def _met(shape: Shape) -> float:
    """Experts held here that at least one token meets, on average."""
    return shape["experts"] * (1 - (1 - shape["k"] / shape.get("total", shape["experts"])) ** shape["rows"])


EXPERT_EDGES = (
    {"rows": 0, "width": 128, "experts": 4, "k": 2, "inner": 128},
    {"rows": 1, "width": 128, "experts": 5, "k": 2, "inner": 128},
    {"rows": 3, "width": 160, "experts": 4, "k": 2, "inner": 96, "extreme": 1},
    {"rows": 40, "width": 96, "experts": 2, "k": 1, "inner": 32, "fmt": "fp8", "one": 1, "no_shared": 1},
    {"rows": 5, "width": 128, "experts": 3, "k": 3, "inner": 128, "fmt": "fp8", "group": 64},
    {"rows": 2, "width": 128, "experts": 2, "k": 2, "inner": 128, "fmt": "fp8", "block": 128, "group": 128},
    {"rows": 3, "width": 128, "experts": 3, "k": 2, "inner": 128, "group": 128},
    {"rows": 3, "width": 80, "experts": 3, "k": 2, "inner": 96, "fmt": "bf16"},
    {"rows": 4, "width": 128, "experts": 2, "k": 3, "inner": 128, "first": 3, "total": 7},
    {"rows": 1, "width": 128, "experts": 2, "k": 2, "inner": 128, "first": 2, "total": 4},
)
EXPERT_FROZEN = tuple({"rows": T, "width": D, "experts": E, "k": J, "inner": I} for T in ROWS)


CASES = [
    Cases("moe.route", _route, "XF", ROUTE_EDGES, tuple({"rows": T, "experts": E, "k": J} for T in ROWS),
          nbytes=lambda s: s["rows"] * (4 * s["experts"] + 12 * s["k"]) + 4 * s["experts"],
          flop=lambda s: 12 * s["rows"] * s["experts"], grads=(0,)),
    Cases("moe.gate", _gate, "XF", GATE_EDGES, _tokens(*ROWS),
          nbytes=lambda s: 2 * (s["rows"] + s["experts"]) * s["width"] + 12 * s["rows"] * s["k"],
          flop=lambda s: 2 * s["rows"] * s["experts"] * s["width"], peak="bf16", grads=(0, 1)),
    Cases("moe.plan", _plan, "XXXX", PLAN_EDGES, _tokens(*ROWS),
          nbytes=lambda s: 32 * s["rows"] * s["k"] + 4 * s["experts"]),
    Cases("moe.permute", _permute, "XX", TRAVEL_EDGES, _tokens(*ROWS), rounds=True, grads=(0, 1),
          nbytes=lambda s: s["rows"] * (2 * s["width"] * (1 + s["k"]) + 16 * s["k"])),
    Cases("moe.combine", _combine, "E", COMBINE_EDGES, _tokens(*ROWS), grads=(0,),
          nbytes=lambda s: s["rows"] * (2 * s["width"] * (2 + s["k"]) + 8 * s["k"]),
          flop=lambda s: s["rows"] * s["width"] * (1 + s["k"])),
    Cases("moe.swiglu", _swiglu, "E", SWIGLU_EDGES, SWIGLU_FROZEN, grads=(0, 1),
          nbytes=lambda s: s["rows"] * (6 * s["inner"] + 4), flop=lambda s: 15 * s["rows"] * s["inner"]),
    Cases("moe.swiglu_quantize", _swiglu_quantize, "Q",
          (*SWIGLU_EDGES, {"rows": 2, "inner": 256, "group": 128}), SWIGLU_FROZEN, rounds=True, grads=(0, 1),
          nbytes=lambda s: s["rows"] * (6 * s["inner"] + 4), flop=lambda s: 40 * s["rows"] * s["inner"]),
    Cases("moe.experts", _experts, "G", EXPERT_EDGES, EXPERT_FROZEN, rounds=True, peak="bf16",
          nbytes=lambda s: int(_met(s) * 3 * s["width"] * s["inner"] * 17 / 32 + 6 * s["rows"] * s["width"]),
          flop=lambda s: 6 * s["rows"] * s["k"] * s["width"] * s["inner"]),
]
