"""Rows to the experts of other ranks and back: here ranks are threads."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dskit import ops
from dskit.config import preset
from dskit.engine import exchange
from dskit.engine.exchange import Exchange, Peers, SlotMap, held, layout
from dskit.layers.linear import Numerics
from dskit.layers.moe import MoE
from tests.engine.threads import on_ranks

EXPERTS, PER_TOKEN = 7, 3  # of which no number of ranks below has equally many


@pytest.fixture(scope="module", params=["exact", "release", "steady"])
def whole(request):
    """A layer with all experts, in three numerics."""
    config = preset("tiny")
    numerics = Numerics.of(config, "exact" if request.param == "exact" else "release",
                           batch_invariant=request.param == "steady")
    layer = MoE(config, 0, numerics, (EXPERTS, PER_TOKEN))
    random = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        value = torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5
        parameter.data = value.to(torch.bfloat16).to(parameter.dtype)
    return layer


def of_rank(whole: MoE, slots: SlotMap, peers: Peers) -> MoE:
    """The layer of one rank: it has the experts of its own slots only."""
    layer = MoE(preset("tiny"), 0, whole.numerics, (EXPERTS, PER_TOKEN))
    layer.gate, layer.shared_experts = whole.gate, whole.shared_experts
    layer.exchange = Exchange(slots, peers, whole.numerics)
    first = peers.rank * layer.exchange.slots
    mine = slots.phys2log[first : first + layer.exchange.slots].tolist()
    layer.experts.hold(mine)
    for name in ("w13", "w2"):
        getattr(layer.experts, name).weight.data = getattr(whole.experts, name).weight[mine]
    return layer


def rows_of(counts: list[int], width: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(sum(counts))
    return [torch.randn(n, width, generator=random).to(torch.bfloat16) for n in counts]


@pytest.mark.parametrize("counts", [[5, 0], [0, 0, 1], [4, 9, 1, 0], [1, 1]], ids=str)
@pytest.mark.parametrize("redundant", [0, 5])
def test_ranks_together_give_what_one_gives_alone(whole, counts, redundant, monkeypatch):
    rows = rows_of(counts, whole.gate.weight.shape[1])
    rows = [x.to(whole.numerics.dtype) for x in rows]

    def work(peers):
        slots = SlotMap(layout(EXPERTS, peers.size, redundant), EXPERTS)
        x = rows[peers.rank]
        return of_rank(whole, slots, peers)(x, torch.zeros(len(x), dtype=torch.int64))

    with torch.no_grad():
        results = on_ranks(len(counts), work, monkeypatch)
        for x, y in zip(rows, results, strict=True):
            want = whole(x, torch.zeros(len(x), dtype=torch.int64))
            assert y.shape == want.shape and y.dtype == want.dtype
            if whole.numerics.steady:
                assert torch.equal(y, want), "the same bits on any number of ranks"
            elif len(x):
                off = (y.double() - want.double()).norm() / want.double().norm()
                assert off < (1e-6 if whole.numerics.name == "exact" else 8e-3)


@pytest.mark.parametrize("fmt", [None, "fp8_32"])
@pytest.mark.parametrize("choices", ["one rank", "one slot", "none", "any"])
def test_a_row_goes_once_to_each_rank_that_has_a_slot_for_it(choices, fmt, monkeypatch):
    size, slots, T = 3, 2, 6
    random = torch.Generator().manual_seed(1)
    slot = {
        "one rank": torch.tensor([[2, 3]] * T),
        "one slot": torch.tensor([[5, -1]] * T),
        "none": torch.full((T, 2), -1),
        "any": torch.rand(T, size * slots, generator=random).argsort(dim=1)[:, :2],
    }[choices]
    x = torch.randint(-7, 8, (T, 64), generator=random).float()  # FP8 holds these
    weight = torch.rand(T, 2, generator=random)

    def work(peers):
        mine = slice(peers.rank * 2, peers.rank * 2 + 2)
        got, w, trip = exchange.dispatch(x[mine], slot[mine], weight[mine], slots, fmt, peers)
        return got, w, trip.slot_RJ

    for rank, (got, w, local) in enumerate(on_ranks(size, work, monkeypatch)):
        here = slot.div(slots, rounding_mode="floor") == rank
        token = here.any(dim=1).nonzero().squeeze(1)
        assert torch.equal(got, x[token]) and torch.equal(w, weight[token])
        assert torch.equal(local, torch.where(here, slot - rank * slots, -1)[token])


def test_rounded_rows_travel_as_codes_and_arrive_with_the_same_bits(monkeypatch):
    numerics = Numerics.of(preset("tiny"), "release")
    x = numerics.activation(torch.randn(40, 96) * torch.logspace(-30, 30, 40)[:, None])
    x[3], x[5, ::2] = 0, -0.0

    def work(peers):
        slot = torch.full((40, 1), 1 - peers.rank)
        return exchange.dispatch(x, slot, torch.ones(40, 1), 1, numerics.activation_format, peers)[0]

    for got in on_ranks(2, work, monkeypatch):
        assert got.dtype == x.dtype and torch.equal(got, x)


def test_more_rows_than_a_step_may_have_are_a_bug():
    with pytest.raises(AssertionError, match="9 rows"):
        exchange.dispatch(torch.zeros(9, 4), torch.zeros(9, 1).long(), torch.zeros(9, 1), 1, None,
                          Peers(max_rows=8))


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="it is installed")
def test_deepep_says_that_it_is_not_installed():
    with ops.use(exchange="deepep"), pytest.raises(ops.Unsupported, match="deep_ep is not installed"):
        exchange.dispatch(torch.zeros(1, 4), torch.zeros(1, 1).long(), torch.zeros(1, 1), 1, None, Peers())


def test_a_layout_has_every_expert_and_equally_many_slots_on_each_rank():
    for experts, size, redundant in ((8, 2, 0), (7, 4, 0), (7, 3, 4), (1, 4, 0), (384, 64, 60)):
        every = layout(experts, size, redundant)
        assert set(every) == set(range(experts))
        assert len(every) % size == 0 and experts + redundant <= len(every) < experts + redundant + size
        assert [e for rank in range(size) for e in held(experts, Peers(rank, size), redundant)] == every


def test_a_map_is_replaced_in_place_and_one_that_cannot_be_changes_nothing():
    slots = SlotMap([0, 1, 2, 0], 3)
    at = [slots.phys2log.data_ptr(), slots.log2phys.data_ptr(), slots.count.data_ptr()]
    slots.replace_([2, 2, 0, 1])
    assert at == [slots.phys2log.data_ptr(), slots.log2phys.data_ptr(), slots.count.data_ptr()]
    assert slots.log2phys.tolist() == [[2, -1], [3, -1], [0, 1]] and slots.count.tolist() == [1, 1, 2]
    for bad in ([0, 1, 2], [0, 1, 1, 0], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="slot"):
            slots.replace_(bad)
        assert slots.phys2log.tolist() == [2, 2, 0, 1]


def test_replicas_take_turns_and_every_choice_finds_its_expert():
    slots = SlotMap([0, 1, 2, 0, 0, 2], 3)
    topk = torch.tensor([[0, 2]] * 12)
    for rank in range(3):
        found = slots.slots(topk, rank)
        assert torch.equal(slots.phys2log[found], topk)
        assert torch.bincount(found[:, 0], minlength=6).tolist() == [4, 0, 0, 4, 4, 0]
        assert torch.bincount(found[:, 1], minlength=6).tolist() == [0, 0, 6, 0, 0, 6]


def test_what_each_slot_has_computed_is_counted(whole, monkeypatch):
    x = rows_of([6], whole.gate.weight.shape[1])[0].to(whole.numerics.dtype)
    ids = torch.zeros(6, dtype=torch.int64)

    def work(peers):
        layer = of_rank(whole, SlotMap(layout(EXPERTS, 2), EXPERTS), peers)
        layer(x, ids)
        return layer.exchange.load

    with torch.no_grad():
        load = torch.cat(on_ranks(2, work, monkeypatch))
        topk, _ = whole.gate(x, ids, None)
    logical = torch.zeros(EXPERTS, dtype=torch.int64).index_add(0, torch.tensor(layout(EXPERTS, 2)), load)
    assert torch.equal(logical, 2 * torch.bincount(topk.flatten(), minlength=EXPERTS))
