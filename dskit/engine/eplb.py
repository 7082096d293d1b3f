"""EPLB: which slot holds which expert, so that no rank has much more to do than the others.

Idea: some experts are asked far more often than others, and a step takes as long as its busiest rank. R extra
slots hold second and third copies of busy experts; a planner, shown the rows that each expert received,
decides which experts get them (replication) and which rank gets which slots (placement).

    classic     counts alone: a copy more for the expert with the most rows per copy, then each copy, heaviest
                first, to the rank with the fewest rows
    step-aware  the peaks of single steps: a copy more where it lowers their sum most, then each copy to the
                rank where it raises their sum least (experts that are busy at the same time go apart)

Rank r holds the slots [r P / ranks, (r + 1) P / ranks) of every layer. Everything here is data: the plans,
and the transfers that lead from one to the next; dskit/engine/rebalance.py carries them out.

Shapes: S steps, L layers, E experts, P = E + R slots. rows_SLP, rows_SLE: rows received; phys2log_LP: the
expert in each slot; count_LE: copies of each expert.
Units: a balance is the mean over the busiest of the ranks' rows, 1 at best.
State: Load counts the rows of one rank.
Errors: ValueError when the slots cannot be dealt out evenly or do not suffice.
Source: engine.md section 12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 100  # steps that a plan looks back on


# ---- what is counted -------------------------------------------------------------------------------------


def count(slot_RJ: Tensor, load_P: Tensor | None) -> None:
    """Add the rows that have come to each slot; -1 is none."""
    if load_P is not None:
        slot = slot_RJ.flatten()
        load_P.index_add_(0, slot.clamp(min=0), (slot >= 0).to(load_P.dtype))


class Load:
    """Rows that the local slots of each layer received, step by step: a ring of the last ones.

    The exchange adds the rows of the step that runs to `now_LP`. Padding and dummy rows are sent nowhere, so
    they never count.
    """

    def __init__(self, layers: int, slots: int, device: torch.device | str = "cpu", steps: int = WINDOW):
        self.now_LP = torch.zeros(layers, slots, dtype=torch.int64, device=device)
        self.ring_SLP = self.now_LP.new_zeros(steps, layers, slots)
        self.steps = 0

    def push(self) -> None:
        """The step has ended and counts."""
        self.ring_SLP[self.steps % len(self.ring_SLP)] = self.now_LP
        self.now_LP.zero_()
        self.steps += 1

    def drop(self) -> None:
        """The step has ended and does not count."""
        self.now_LP.zero_()

    def forget(self, layer: int) -> None:
        """The slots of a layer hold other experts from here on."""
        self.ring_SLP[:, layer] = 0


def balance(rows_SLP: Tensor, ranks: int) -> Tensor:
    """Mean over busiest rank, [L], each the sum over the steps; 1 where nothing was received."""
    mean_SL, peak_SL = _mean_and_peak(rows_SLP, ranks)
    return torch.where(peak_SL.sum(0) > 0, mean_SL.sum(0) / peak_SL.sum(0), 1.0)


def overall(rows_SLP: Tensor, ranks: int) -> float:
    """The balance of all layers as one: a step waits for the busiest rank of each."""
    mean_SL, peak_SL = _mean_and_peak(rows_SLP, ranks)
    return float(mean_SL.sum() / peak_SL.sum()) if peak_SL.any() else 1.0


def _mean_and_peak(rows_SLP: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    load_SLr = rows_SLP.double().unflatten(-1, (ranks, -1)).sum(-1)
    return load_SLr.mean(-1), load_SLr.amax(-1)


def by_expert(rows_SLP: Tensor, phys2log_LP: Tensor, experts: int) -> Tensor:
    """Rows of each expert [S, L, E], from those of the slots that hold it."""
    rows_SLE = rows_SLP.new_zeros(*rows_SLP.shape[:2], experts)
    return rows_SLE.scatter_add(2, phys2log_LP.expand_as(rows_SLP), rows_SLP)


def by_slot(rows_SLE: Tensor, phys2log_LP: Tensor) -> Tensor:
    """Rows that each slot would receive [S, L, P], if copies shared evenly."""
    share_SLE = rows_SLE.double() / copies(phys2log_LP, rows_SLE.shape[-1])
    return share_SLE.gather(2, phys2log_LP.expand(len(rows_SLE), -1, -1))


# ---- layouts ---------------------------------------------------------------------------------------------


def slots_for(experts: int, extra: int, ranks: int) -> int:
    """P: the experts and at least `extra` slots more, evenly over the ranks."""
    return -(-(experts + extra) // ranks) * ranks


def spread(experts: int, slots: int, ranks: int) -> list[int]:
    """The layout before anything is known, phys2log [P]: extras are dealt out over the ranks.

    The first slots of a rank hold experts in ascending order; its extras are the first of the next rank's.
    """
    per, extra = _check(experts, slots, ranks), slots - experts
    extras = [extra // ranks + (rank < extra % ranks) for rank in range(ranks)]
    first = [sum(per - n for n in extras[:rank]) for rank in range(ranks + 1)]
    layout = []
    for rank, n in enumerate(extras):
        layout += range(first[rank], first[rank + 1])
        following = first[(rank + 1) % ranks]
        layout += [(following + i) % experts for i in range(n)]
    return layout


def copies(phys2log_LP: Tensor, experts: int) -> Tensor:
    """count [L, E]: slots that hold each expert."""
    ones = torch.ones_like(phys2log_LP)
    return ones.new_zeros(len(phys2log_LP), experts).scatter_add(1, phys2log_LP, ones)


def settled(old_P: Tensor, new_P: Tensor, ranks: int) -> Tensor:
    """The new layout, its experts in other slots of the same rank: what a rank holds already stays put."""
    layout = []
    for old, new in zip(old_P.view(ranks, -1).tolist(), new_P.view(ranks, -1).tolist(), strict=True):
        kept = [expert if expert in new and not new.remove(expert) else None for expert in old]
        layout += [new.pop(0) if expert is None else expert for expert in kept]
    return torch.tensor(layout)


def _check(experts: int, slots: int, ranks: int) -> int:
    """Slots of a rank; raises ValueError."""
    if slots % ranks:
        raise ValueError(f"{slots} slots cannot be dealt out evenly to {ranks} ranks; see slots_for")
    if slots < experts:
        raise ValueError(f"{experts} experts do not fit {slots} slots; every expert needs one")
    return slots // ranks


# ---- planners --------------------------------------------------------------------------------------------


def step_aware(rows_SLE: Tensor, slots: int, ranks: int) -> Tensor:
    """phys2log [L, P] that keeps the sum of the steps' peaks low."""
    return _plan(rows_SLE.double(), slots, ranks, _relief, _peaks)


def classic(rows_SLE: Tensor, slots: int, ranks: int) -> Tensor:
    """phys2log [L, P] that keeps the ranks' rows over all steps even."""
    return _plan(rows_SLE.double().sum(0, keepdim=True), slots, ranks, _share, _rows)


PLANNERS: dict[str, Callable[[Tensor, int, int], Tensor]] = {"step-aware": step_aware, "classic": classic}


def replan(rows_SLP: Tensor, phys2log_LP: Tensor, experts: int, ranks: int, planner: str) -> Tensor:
    """The next phys2log [L, P]; a layer that would not gain keeps what it has."""
    rows_SLE, slots = by_expert(rows_SLP, phys2log_LP, experts), phys2log_LP.shape[1]
    plan_LP = PLANNERS[planner](rows_SLE, slots, ranks)
    now_L, then_L = (balance(by_slot(rows_SLE, layout), ranks) for layout in (phys2log_LP, plan_LP))
    gains = (then_L > now_L).tolist()
    return torch.stack([settled(old, new, ranks) if gain else old
                        for old, new, gain in zip(phys2log_LP, plan_LP, gains, strict=True)])


def _plan(rows_SLE: Tensor, slots: int, ranks: int, need: Callable, cost: Callable) -> Tensor:
    """Each copy more to the expert of the largest `need`, ties to the one with most rows per copy; then each
    copy, heaviest first, to the rank of least `cost` that has room; last, ties go to the lower number.
    """
    S, L, E = rows_SLE.shape
    per, every_L = _check(E, slots, ranks), torch.arange(L)
    count_LE = torch.ones(L, E, dtype=torch.int64)
    for _ in range(slots - E):
        need_LE = need(rows_SLE, count_LE)
        share_LE = rows_SLE.sum(0) / count_LE
        most = need_LE >= need_LE.amax(1, keepdim=True)
        count_LE[every_L, share_LE.where(most, -1.0).argmax(1)] += 1

    expert_LP = torch.arange(E).expand(L, E).flatten().repeat_interleave(count_LE.flatten()).view(L, slots)
    share_LES = (rows_SLE / count_LE).permute(1, 2, 0)
    heaviest = share_LES.sum(2).gather(1, expert_LP).argsort(dim=1, descending=True, stable=True)
    expert_LP = expert_LP.gather(1, heaviest)

    load_LrS = share_LES.new_zeros(L, ranks, S)
    peak_L1S = share_LES.new_zeros(L, 1, S)
    held_Lr = torch.zeros(L, ranks, dtype=torch.int64)
    layout_Lrp = torch.empty(L, ranks, per, dtype=torch.int64)
    for expert_L in expert_LP.T:
        then_LrS = load_LrS + share_LES[every_L, expert_L][:, None]
        cost_Lr = cost(load_LrS, then_LrS, peak_L1S).masked_fill(held_Lr == per, torch.inf)
        rank_L = cost_Lr.argmin(1)
        load_LrS[every_L, rank_L] = then_LrS[every_L, rank_L]
        peak_L1S = torch.maximum(peak_L1S, load_LrS[every_L, rank_L][:, None])
        layout_Lrp[every_L, rank_L, held_Lr[every_L, rank_L]] = expert_L
        held_Lr[every_L, rank_L] += 1
    return layout_Lrp.flatten(1)


def _share(rows_SLE: Tensor, count_LE: Tensor) -> Tensor:
    return rows_SLE.sum(0) / count_LE


def _relief(rows_SLE: Tensor, count_LE: Tensor) -> Tensor:
    """How much one copy more of each expert lowers the sum over the steps of the busiest copy's rows."""
    share_SLE = rows_SLE / count_LE
    most, busiest = share_SLE.max(2, keepdim=True)
    second = share_SLE.scatter_(2, busiest, 0.0).amax(2, keepdim=True)
    split = rows_SLE.gather(2, busiest) / (count_LE + 1).expand_as(rows_SLE).gather(2, busiest)
    relief_LS = (most - torch.maximum(second, split)).squeeze(2).T
    return torch.zeros_like(count_LE, dtype=rows_SLE.dtype).scatter_add(1, busiest.squeeze(2).T, relief_LS)


def _peaks(_load_LrS: Tensor, then_LrS: Tensor, peak_L1S: Tensor) -> Tensor:
    return torch.maximum(peak_L1S, then_LrS).sum(2)


def _rows(load_LrS: Tensor, _then_LrS: Tensor, _peak_L1S: Tensor) -> Tensor:
    return load_LrS.sum(2)


# ---- from one layout to the next -------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfers:
    """How the slots of one layer come to hold their new experts; pairs of slots, (from, to).

    `sends` go from rank to rank and `copies` stay inside one; both read what the slots held before. `twins`
    are slots of a rank that receives their expert for another one, and copy from that one.
    """

    sends: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    twins: list[tuple[int, int]]


def transfers(old_P: Tensor, new_P: Tensor, ranks: int) -> Transfers:
    """What must move where. Ranks that hold an expert share the ranks that lack it, in order."""
    old, new = old_P.tolist(), new_P.tolist()
    per, found = len(old) // ranks, Transfers([], [], [])
    wanted: dict[int, list[int]] = {}
    for slot, expert in enumerate(new):
        if old[slot] != expert:
            wanted.setdefault(expert, []).append(slot)
    for expert, slots in wanted.items():
        have = {s // per: s for s in reversed(range(len(old))) if old[s] == expert}  # rank -> its first slot
        holders, lacking = sorted(have), sorted({s // per for s in slots} - set(have))
        senders = [holders[_sender(j, len(holders), len(lacking))] for j in range(len(lacking))]
        source = {rank: have[sender] for rank, sender in zip(lacking, senders, strict=True)}
        first: dict[int, int] = {}
        for slot in slots:
            rank = slot // per
            if rank in have:
                found.copies.append((have[rank], slot))
            elif rank in first:
                found.twins.append((first[rank], slot))
            else:
                first[rank] = slot
                found.sends.append((source[rank], slot))
    return found


def _sender(j: int, senders: int, receivers: int) -> int:
    """Which sender serves receiver j: equal runs, and what is left over in turn."""
    run = receivers // senders
    return j // run if j < senders * run else j - senders * run
