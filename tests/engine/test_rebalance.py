"""Rebalancing: weights and maps change together, on all ranks or on none; here ranks are threads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from dskit.engine import eplb, rebalance
from dskit.engine.exchange import Exchange, Peers, SlotMap, layout
from dskit.engine.rebalance import Parcel, Rebalancer
from tests.engine.test_eplb import layouts
from tests.engine.threads import on_ranks

LAYERS, EXPERTS, EXTRA = 5, 6, 2


def tagged(layer: int, expert: int) -> list[torch.Tensor]:
    """Weights that say whose they are, of two dtypes and shapes."""
    tag = 10 * layer + expert
    return [torch.full((2, 3), tag, dtype=torch.bfloat16), torch.full((5, 1), tag, dtype=torch.uint8)]


class Experts(nn.Module):
    """The slots of one rank."""

    def __init__(self, layer: int, held: list[int]):
        super().__init__()
        self.held = held
        for name, parts in zip("ab", zip(*(tagged(layer, e) for e in held), strict=True), strict=True):
            self.register_parameter(name, nn.Parameter(torch.stack(parts), requires_grad=False))

    def check(self, layer: int) -> None:
        """Every slot holds what it should."""
        for slot, expert in enumerate(self.held):
            for found, wanted in zip(self.parameters(), tagged(layer, expert), strict=True):
                assert torch.equal(found[slot], wanted), (layer, slot, expert)


class Rank:
    """A rank of a model without a model: its layers' experts and maps, and a load that says who is busy."""

    def __init__(self, peers: Peers, **options):
        numerics = SimpleNamespace(steady=True, release=False)
        start = layout(EXPERTS, peers.size, EXTRA)
        self.peers, each = peers, len(start) // peers.size
        held = start[peers.rank * each : (peers.rank + 1) * each]
        exchanges = {f"layers.{l}.ffn": Exchange(SlotMap(start, EXPERTS), peers, numerics)
                     for l in range(LAYERS)}
        self.model = nn.ModuleDict({"layers": nn.ModuleList(
            nn.ModuleDict({"ffn": nn.ModuleDict({"experts": Experts(l, held)})}) for l in range(LAYERS))})
        for l in range(LAYERS):  # attributes, as a MoE layer has them
            self.model.layers[l].ffn.experts = self.model.layers[l].ffn["experts"]
        self.rebalancer = Rebalancer(self.model, exchanges, **options)
        self.seen: list[list] = []

    def step(self, number: int) -> None:
        """One step of random rows, most of them for one expert, which changes now and then."""
        random = torch.Generator().manual_seed(number)
        for l, exchange in enumerate(self.rebalancer.exchanges):
            asked = torch.randint(EXPERTS, (60, 1), generator=random)
            asked[:20] = (number // 40 + l) % EXPERTS
            slot = exchange.map.slots(asked, 0) - self.peers.rank * exchange.slots
            here = slot[(slot >= 0) & (slot < exchange.slots)]
            exchange.load += torch.bincount(here, minlength=exchange.slots)
        self.rebalancer.after_step()
        self.seen.append([exchange.map.phys2log.tolist() for exchange in self.rebalancer.exchanges])
        self.check()

    def check(self) -> None:
        """Maps, tables and weights agree."""
        for l, exchange in enumerate(self.rebalancer.exchanges):
            layout, experts = exchange.map.phys2log.tolist(), self.rebalancer.experts[l]
            first = self.peers.rank * exchange.slots
            assert experts.held == layout[first : first + exchange.slots]
            assert int(exchange.map.count.min()) >= 1 and int(exchange.map.count.sum()) == len(layout)
            experts.check(l)


def steps(count: int, **options):
    """Work of a rank: so many steps; gives the rank."""

    def work(peers: Peers) -> Rank:
        rank = Rank(peers, **options)
        for number in range(count):
            rank.step(number)
        rank.rebalancer.close()
        return rank

    return work


# ---- weights on their way --------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_parcels_bring_every_slot_its_expert(case):
    old, new, _, ranks = case
    moves, each, parcels = eplb.transfers(old, new, ranks), len(old) // ranks, []
    for rank in range(ranks):
        held = Experts(0, old[rank * each : (rank + 1) * each].tolist())
        parcels.append((held, Parcel(rebalance.stacks_of(held), moves, Peers(rank, ranks))))
    for rank, (held, parcel) in enumerate(parcels):
        sent = [other.out.split(other.sent)[rank] for _, other in parcels]
        assert [len(rows) for rows in sent] == parcel.received
        parcel.arriving.copy_(torch.cat(sent))
        held.check(0)  # nothing is overwritten so far
        parcel.unpack()
        held.held = new[rank * each : (rank + 1) * each].tolist()
        held.check(0)


# ---- on ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", eplb.PLANNERS)
def test_ranks_move_experts_together_and_the_balance_rises(algorithm, monkeypatch):
    ranks = on_ranks(4, steps(60, interval=16, min_balance=0.99, algorithm=algorithm), monkeypatch)
    assert all(rank.seen == ranks[0].seen for rank in ranks)  # the same maps after every step
    records = ranks[0].rebalancer.records
    assert len(records) >= 2 and records[0].layers and records[0].after > records[0].before
    assert sum(rank.rebalancer.stats()["eplb_moved_bytes"] for rank in ranks) > 0
    changes = [sum(a != b for a, b in zip(*pair, strict=True))
               for pair in zip(ranks[0].seen, ranks[0].seen[1:], strict=False)]
    assert 0 < max(changes) <= rebalance.LAYERS_AT_ONCE


def test_the_first_try_comes_after_a_quarter_of_the_interval_and_the_plan_an_eighth_later(monkeypatch):
    (rank, _) = on_ranks(2, steps(24, interval=32, min_balance=1.0), monkeypatch)
    moved = [number for number, pair in enumerate(zip(rank.seen, rank.seen[1:], strict=False), 2)
             if pair[0] != pair[1]]
    assert rank.rebalancer.records[0].step == 8 and moved[0] == 13


def test_nothing_moves_when_the_balance_is_good_enough_or_nobody_asks_for_it(monkeypatch):
    for options in ({"interval": 8, "min_balance": 0.1}, {"interval": None}):
        (rank, _) = on_ranks(2, steps(rebalance.REPORT + 2, **options), monkeypatch)
        assert rank.seen[0] == rank.seen[-1] and not rank.rebalancer.records
        assert 0.1 < rank.rebalancer.balance < 1  # it was looked at
        rows = rank.rebalancer.rows_LE
        assert rows.shape == (LAYERS, EXPERTS) and (rows.sum(1) == 60 * eplb.WINDOW).all()


def test_steps_that_do_not_count_leave_no_trace(monkeypatch):
    def work(peers):
        rank = Rank(peers)
        rank.rebalancer.exchanges[0].load += 5
        rank.rebalancer.after_step(counts=False)
        rank.rebalancer.look()
        return rank

    (rank, _) = on_ranks(2, work, monkeypatch)
    assert rank.rebalancer.rows_LE.sum() == 0 and rank.rebalancer.balance == 1


# ---- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_cannot_prepare_a_layer_stops_the_rest_everywhere(culprit, monkeypatch):
    pack = Rebalancer._pack

    def fail(self, layer, new):
        if self.peers.rank == culprit and layer == 2:
            raise MemoryError("no room for the staging buffer")
        return pack(self, layer, new)

    monkeypatch.setattr(Rebalancer, "_pack", fail)
    ranks = on_ranks(3, steps(60, interval=8, min_balance=1.0), monkeypatch)
    assert all(rank.seen == ranks[0].seen for rank in ranks)
    assert {rank.rebalancer.stats()["eplb_failures"] for rank in ranks} == {1}
    start, end = ranks[0].seen[0], ranks[0].seen[-1]
    assert end[0] != start[0] and end[2:] == start[2:]  # two layers have moved before, and no other has
    assert ranks[0].seen[7:] == [end] * len(ranks[0].seen[7:])  # it rests for ten intervals


def test_a_planner_that_fails_leaves_everything_as_it_is(monkeypatch):
    def broken(*_):
        raise ArithmeticError("no plan")

    monkeypatch.setattr(eplb, "replan", broken)
    ranks = on_ranks(2, steps(40, interval=8, min_balance=1.0), monkeypatch)
    assert {rank.rebalancer.stats()["eplb_failures"] for rank in ranks} == {1}
    assert all(rank.seen[0] == rank.seen[-1] for rank in ranks)


def test_after_its_rest_it_tries_again(monkeypatch):
    pack, calls = Rebalancer._pack, []

    def fail_once(self, layer, new):
        if self.peers.rank == 1:
            calls.append(layer)
            if len(calls) == 1:
                raise MemoryError
        return pack(self, layer, new)

    monkeypatch.setattr(Rebalancer, "_pack", fail_once)
    (rank, _) = on_ranks(2, steps(70, interval=4, min_balance=1.0), monkeypatch)
    assert rank.rebalancer.stats()["eplb_failures"] == 1 and rank.rebalancer.stats()["eplb_rebalances"] > 1
    assert rank.seen[0] == rank.seen[40] != rank.seen[-1]
