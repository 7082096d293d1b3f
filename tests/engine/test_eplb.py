"""EPLB as data: what is counted, where the planners put experts, and how slots come to hold them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dskit.engine import eplb

few = settings(max_examples=25, deadline=None)
DEMO = Path(__file__).with_name("demo_routing.npy")  # see `record`


@st.composite
def loads(draw, most: int = 9) -> tuple[Tensor, int, int]:
    """(rows_SLE, slots, ranks): steps that may be empty, experts that may never be asked, often equal."""
    S, L, E = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, most))
    ranks = draw(st.integers(1, 4))
    slots = eplb.slots_for(E, draw(st.integers(0, 6)), ranks)
    rows = draw(st.lists(st.integers(0, 5) | st.integers(0, 1000), min_size=S * L * E, max_size=S * L * E))
    return torch.tensor(rows).view(S, L, E), slots, ranks


@st.composite
def layouts(draw) -> tuple[Tensor, Tensor, int, int]:
    """(old phys2log [P], new phys2log [P], experts, ranks): any two in which no expert is missing."""
    experts, ranks = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    slots = eplb.slots_for(experts, draw(st.integers(0, 9)), ranks)
    extras = st.lists(st.integers(0, experts - 1), min_size=slots - experts, max_size=slots - experts)
    both = [draw(st.permutations([*range(experts), *draw(extras)])) for _ in range(2)]
    return torch.tensor(both[0]), torch.tensor(both[1]), experts, ranks


def first(rows: Tensor, slots: int, ranks: int) -> Tensor:
    """phys2log [L, P] before anything is known."""
    return torch.tensor(eplb.spread(rows.shape[2], slots, ranks)).expand(rows.shape[1], -1)


# ---- what is counted -------------------------------------------------------------------------------------


def test_the_ring_holds_the_last_steps_and_what_was_dropped_never_counts():
    load = eplb.Load(2, 3, steps=2)
    for step in range(1, 5):
        load.now_LP += step
        load.drop() if step == 3 else load.push()
    assert sorted(load.ring_SLP[:, 0, 0].tolist()) == [2, 4] and load.now_LP.sum() == 0
    load.forget(1)
    assert load.ring_SLP[:, 1].sum() == 0 and load.ring_SLP[:, 0].sum() > 0


@few
@given(loads())
def test_a_balance_is_mean_over_busiest(case):
    rows, slots, ranks = case
    by_slot = eplb.by_slot(rows, first(rows, slots, ranks))
    for layer, found in enumerate(eplb.balance(by_slot, ranks).tolist()):
        per_rank = [part.sum(1) for part in by_slot[:, layer].chunk(ranks, dim=1)]
        busiest = sum(max(step) for step in zip(*per_rank, strict=True))
        mean = rows[:, layer].sum() / ranks
        assert found == pytest.approx(float(mean / busiest) if busiest else 1.0)
        assert 1 / ranks - 1e-9 <= found <= 1 + 1e-9


@few
@given(layouts())
def test_rows_of_slots_and_of_experts_are_two_views_of_one_thing(case):
    layout, _, experts, _ = case
    rows = torch.arange(2 * experts).view(2, 1, experts)
    back = eplb.by_expert(eplb.by_slot(rows, layout[None]), layout[None], experts)
    torch.testing.assert_close(back, rows.double())


# ---- layouts ---------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 8))
def test_the_first_layout_deals_extras_out_over_the_ranks(experts, extra, ranks):
    slots = eplb.slots_for(experts, extra, ranks)
    assert slots % ranks == 0 and experts + extra <= slots < experts + extra + ranks
    layout = eplb.spread(experts, slots, ranks)
    assert set(layout) == set(range(experts))
    if 1 < ranks <= experts and extra <= experts // 2:  # no rank wastes a slot on what it holds already
        for part in torch.tensor(layout).chunk(ranks):
            assert len(set(part.tolist())) == len(part)


@few
@given(layouts())
def test_settling_moves_experts_inside_their_rank_only_and_keeps_what_is_there(case):
    old, new, _, ranks = case
    found = eplb.settled(old, new, ranks)
    for before, wanted, after in zip(old.chunk(ranks), new.chunk(ranks), found.chunk(ranks), strict=True):
        assert sorted(after.tolist()) == sorted(wanted.tolist())
        shared = sum(min(before.tolist().count(e), wanted.tolist().count(e)) for e in set(before.tolist()))
        assert int((before == after).sum()) == shared


@pytest.mark.parametrize("slots, ranks, why",
                         [(10, 4, "evenly to 4 ranks"), (6, 2, "8 experts do not fit 6")])
def test_impossible_slots_are_refused(slots, ranks, why):
    for planner in eplb.PLANNERS.values():
        with pytest.raises(ValueError, match=why):
            planner(torch.ones(1, 1, 8), slots, ranks)
    with pytest.raises(ValueError, match=why):
        eplb.spread(8, slots, ranks)


# ---- planners --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", eplb.PLANNERS)
@few
@given(case=loads())
def test_every_expert_has_a_slot(planner, case):
    rows, slots, ranks = case
    plan = eplb.PLANNERS[planner](rows, slots, ranks)
    assert plan.shape == (rows.shape[1], slots)
    count = eplb.copies(plan, rows.shape[2])
    assert count.min() >= 1 and (count.sum(1) == slots).all()


def peaks(rows: Tensor, counts: tuple[int, ...]) -> float:
    """Sum over the steps of the rows of the busiest copy."""
    return float((rows / torch.tensor(counts)).amax(1).sum())


@pytest.mark.parametrize("planner", eplb.PLANNERS)
@few
@given(case=loads(most=5))
def test_no_other_replication_is_better(planner, case):
    """One extra: the best for any steps. One step: greedy is the best for any number of extras."""
    rows, slots, ranks = case
    S, L, E = rows.shape
    if S > 1 and (planner == "classic" or slots - E != 1):
        rows = rows.sum(0, keepdim=True)
    count = eplb.copies(eplb.PLANNERS[planner](rows, slots, ranks), E)
    every = [c for c in itertools.product(range(1, slots - E + 2), repeat=E) if sum(c) == slots]
    for layer in range(L):
        best = min(peaks(rows[:, layer].double(), c) for c in every)
        assert peaks(rows[:, layer].double(), tuple(count[layer].tolist())) == pytest.approx(best)


@pytest.mark.parametrize("planner", eplb.PLANNERS)
@few
@given(case=loads(most=6))
def test_a_plan_is_near_the_best_placement(planner, case):
    """Brute force over all placements of one step: greedy packing stays within 4/3 + of its peak."""
    rows, slots, ranks = case
    rows, E = rows[:1, :1], rows.shape[2]
    slots = eplb.slots_for(E, 0, min(ranks, 2))
    ranks = min(ranks, 2)
    plan = eplb.PLANNERS[planner](rows, slots, ranks)
    count = eplb.copies(plan, E)[0]
    items = [e for e in range(E) for _ in range(count[e])]
    share = (rows[0, 0].double() / count).tolist()
    whole, per = sum(share[e] for e in items), slots // ranks
    best = min(
        max(part := sum(share[items[i]] for i in chosen), whole - part if ranks == 2 else 0.0)
        for chosen in itertools.combinations(range(slots), per)
    )
    found = max(sum(share[e] for e in part.tolist()) for part in plan[0].chunk(ranks))
    assert best - 1e-9 <= found <= best * 4 / 3 + 1e-9
    if per == 1 or ranks == 1:
        assert found == pytest.approx(best)


def test_experts_that_are_busy_together_go_apart():
    """Experts 0 and 1 are asked in the same steps, 2 and 3 in the others: totals do not tell, steps do."""
    rows = torch.tensor([[[9, 9, 0, 0]], [[0, 0, 9, 9]]])
    left, right = eplb.step_aware(rows, 4, 2)[0].chunk(2)
    assert {len({0, 1} & set(part.tolist())) for part in (left, right)} == {1}
    assert eplb.balance(eplb.by_slot(rows, eplb.step_aware(rows, 4, 2)), 2) == 1


def test_a_tie_at_the_top_is_broken_by_the_rows_of_all_steps():
    """Two experts share every step's peak, so that a copy of either lowers none; the idle ones get none."""
    rows = torch.tensor([[[0, 5, 5, 1]], [[0, 5, 5, 1]]])
    count = eplb.copies(eplb.step_aware(rows, 6, 2), 4)[0]
    assert count.tolist() == [1, 2, 2, 1]


def balances(seen: Tensor, later: Tensor, extra: int, ranks: int) -> list[float]:
    """Of later steps: the first layout, and plans made from those seen before (step-aware, classic)."""
    E = seen.shape[2]
    slots = eplb.slots_for(E, extra, ranks)
    plans = [first(seen, slots, ranks)]
    plans += [planner(seen, slots, ranks) for planner in eplb.PLANNERS.values()]
    return [float(eplb.balance(eplb.by_slot(later, plan), ranks).mean()) for plan in plans]


@pytest.mark.parametrize("experts, extra, ranks, gain",
                         [(384, 64, 64, 0.3), (384, 32, 4, 0.02), (384, 0, 64, 0.1), (16, 4, 4, 0.1)])
def test_planners_level_skewed_loads(experts, extra, ranks, gain):
    """Loads of Gamma(0.5), 16 steps: both planners gain, the step-aware one as much or more; most of it comes
    from the extras.
    """
    mean = torch.distributions.Gamma(0.5, 1.0).sample((1, 2, experts))
    rows = torch.poisson(50 * mean.expand(16, -1, -1))
    start, aware, classic = balances(rows, rows, extra, ranks)
    assert aware >= classic - 0.01 and classic > start + gain
    if extra == 64:
        assert aware > balances(rows, rows, 0, ranks)[1] + 0.1


@pytest.mark.parametrize("extra, ranks", [(0, 2), (4, 2), (0, 4), (4, 4)])
def test_planners_level_what_the_demo_asks_of_its_experts(extra, ranks):
    """Plans from every other step of recorded routing, judged on the steps between; with few experts on each
    of many ranks, extras pay, and steps tell more than counts.
    """
    rows = torch.from_numpy(np.load(DEMO)).long()
    start, aware, classic = balances(rows[::2], rows[1::2], extra, ranks)
    assert min(aware, classic) > start + 0.03
    if extra and ranks == 4:
        assert aware > classic + 0.01 and aware > balances(rows[::2], rows[1::2], 0, ranks)[1]


def record(llm, tokens: int = 100) -> Tensor:
    """Rows of each expert [S, L, E] in the decode steps of eight answers of a model."""
    from dskit import SamplingParams
    from dskit.viz.notebook import tap

    asked = ["river", "to carry", "bright", "a small boat"]
    prompts = [f"What does the word {word} mean?" for word in asked]
    prompts += ["Add 14 and 27.", "Write a JSON object with a name and an age."]
    prompts += ["Repeat: one two three.", "Hi"]
    with tap(llm, "layers.*.ffn.gate") as seen:
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=0))
    layers = [[topk.flatten().bincount(minlength=llm.config.n_routed_experts) for topk, _ in calls[1:]]
              for calls in seen.values()]
    return torch.stack([torch.stack(steps) for steps in layers], dim=1)


@pytest.mark.slow
def test_the_recording_is_what_the_demo_does(demo):
    """Which experts are busy, and how unevenly, as in the recorded file."""
    now, then = record(demo, 30).double().sum(0), torch.from_numpy(np.load(DEMO)).double().sum(0)
    assert now.shape == then.shape
    alike = torch.cosine_similarity(now - now.mean(1, keepdim=True), then - then.mean(1, keepdim=True))
    assert (alike > 0.8).all()


# ---- from one layout to the next -------------------------------------------------------------------------


@few
@given(layouts())
def test_transfers_lead_from_one_layout_to_the_next(case):
    old, new, _, ranks = case
    per, plan = len(old) // ranks, eplb.transfers(old, new, ranks)
    after = old.clone()
    for source, target in plan.sends + plan.copies:
        after[target] = old[source]
    for source, target in plan.twins:
        after[target] = after[source]
    assert after.tolist() == new.tolist()
    targets = [target for _, target in plan.sends + plan.copies + plan.twins]
    assert sorted(targets) == (old != new).nonzero().flatten().tolist()  # each once, and no other
    assert all(source // per == target // per for source, target in plan.copies + plan.twins)
    arrived = {target for _, target in plan.sends}
    for source, target in plan.sends:  # only what the rank lacks, and once
        assert int(old[source]) not in old.chunk(ranks)[target // per].tolist()
    assert len({(target // per, int(new[target])) for target in arrived}) == len(arrived)


@few
@given(layouts())
def test_ranks_that_hold_an_expert_share_the_sending(case):
    old, new, experts, ranks = case
    per, plan = len(old) // ranks, eplb.transfers(old, new, ranks)
    for expert in range(experts):
        senders = [source // per for source, target in plan.sends if new[target] == expert]
        holders = {slot // per for slot, held in enumerate(old.tolist()) if held == expert}
        load = [senders.count(rank) for rank in holders]
        assert max(load) - min(load) <= 1


def test_nothing_moves_between_equal_layouts():
    layout = torch.tensor(eplb.spread(8, 12, 4))
    assert eplb.transfers(layout, layout, 4) == eplb.Transfers([], [], [])
