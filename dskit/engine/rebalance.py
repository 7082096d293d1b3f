"""Rebalancing: experts change their slots while requests are served.

Idea: what dskit/engine/eplb.py decides is carried out between steps, on every rank after the same one:

    step n              all ranks gather the rows of the last steps; out of balance: rank 0 plans, in a thread
    step n + interval/8 rank 0 sends its plan to all, since other hosts might round to another one
    the steps after     two layers each: the experts that a rank lacks come in one all-to-all into a staging
                        buffer, then go to their slots, and the layer's map is switched in place

Whatever fails on a rank before a layer moves, every rank hears of before anything is overwritten: the layer
keeps its map and its weights, and nothing is tried for ten intervals. A rank that is gone ends the group, as
in any step. No step sees new weights under an old map, and what a row is answered depends on neither.

Units: bytes and milliseconds as the names say; a balance is mean over busiest rank, 1 at best.
State: a Rebalancer counts for layers of equally many experts, the model's own; its `draft` is another, for
the draft's, with plans of its own.
Errors: whatever torch.distributed raises when a rank is gone or silent.
Source: engine.md section 12.5.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dskit.engine import eplb
from dskit.engine.config import EngineConfig
from dskit.engine.exchange import Exchange, Peers, SlotMap, attach
from dskit.model import Model

logger = logging.getLogger("dskit.engine")

REPORT = 128  # steps from one look at the balance to the next
LAYERS_AT_ONCE = 2  # that move between two steps
REST = 10  # intervals without another try after a failure


@dataclass
class Record:
    """One rebalance: the balance before and, measured at the next look, after it, and what it has cost."""

    step: int
    before: float
    after: float | None = None
    layers: int = 0
    moved_bytes: int = 0  # received by this rank
    stall_ms: float = 0.0


class Parcel:
    """The experts of one layer on their way to their slots: nothing is overwritten before `unpack`.

    `stacks` are the bytes of a rank's slots, [slots, bytes of one part of an expert] each.
    """

    def __init__(self, stacks: Sequence[Tensor], moves: eplb.Transfers, peers: Peers):
        self.stacks, self.peers, each = stacks, peers, len(stacks[0])
        first = peers.rank * each
        here = lambda slot: first <= slot < first + each  # noqa: E731
        out = sorted((to // each, to, source) for source, to in moves.sends if here(source))
        come = sorted((source // each, to) for source, to in moves.sends if here(to))
        copies = [(source - first, to - first) for source, to in moves.copies if here(to)]
        self.twins = [(source - first, to - first) for source, to in moves.twins if here(to)]
        self.targets = [to - first for _, to in come] + [to for _, to in copies]
        self.sent, self.received = ([sum(row[0] == rank for row in rows) for rank in range(peers.size)]
                                    for rows in (out, come))
        self.out = self._take([source - first for _, _, source in out])
        self.rows = self.out.new_empty(len(come) + len(copies), self.out.shape[1])
        self.rows[len(come) :] = self._take([source for source, _ in copies])

    @property
    def arriving(self) -> Tensor:
        """The rows that other ranks fill."""
        return self.rows[: sum(self.received)]

    def travel(self) -> None:
        """Send and receive; every rank of the group takes part."""
        dist.all_to_all_single(self.arriving, self.out, self.received, self.sent, group=self.peers.group)

    def unpack(self) -> None:
        """Put what has come into the slots."""
        ends = list(accumulate(stack.shape[1] for stack in self.stacks))
        for stack, part in zip(self.stacks, self.rows.tensor_split(ends[:-1], dim=1), strict=True):
            stack[self.targets] = part
            for source, target in self.twins:
                stack[target] = stack[source]

    def _take(self, slots: list[int]) -> Tensor:
        return torch.cat([stack[slots] for stack in self.stacks], dim=1)


def stacks_of(experts: nn.Module) -> list[Tensor]:
    """A layer's stacked weights and scales as bytes, [slots, ...] each, in place."""
    return [parameter.data.flatten(1).view(torch.uint8) for parameter in experts.parameters()]


class Rebalancer:
    """Counts what the experts of an expert group receive, and moves them: `after_step` on every rank.

    exchanges: of the layers, by their names in the model.
    interval: steps from one try to the next; None: only count, and look at the balance.
    """

    draft: Rebalancer | None = None

    def __init__(self, model: nn.Module, exchanges: dict[str, Exchange], *, interval: int | None = None,
                 min_balance: float = 0.9, algorithm: str = "step-aware"):
        self.exchanges = list(exchanges.values())
        self.experts = [model.get_submodule(name).experts for name in exchanges]
        self.peers = self.exchanges[0].peers
        self.load = eplb.Load(len(exchanges), self.exchanges[0].slots, self.exchanges[0].load.device)
        for exchange, now_P in zip(self.exchanges, self.load.now_LP, strict=True):
            exchange.load = now_P
        self.interval, self.min_balance, self.algorithm = interval, min_balance, algorithm
        self.steps, self._next = 0, max(1, interval // 4) if interval else None
        self.balance, self.rows_LE = 1.0, torch.zeros(len(exchanges), self._E, dtype=torch.int64)
        """Of the last look: over all layers; rows that each expert received in the window."""
        self.records: deque[Record] = deque(maxlen=64)
        self._totals = {"eplb_rebalances": 0, "eplb_failures": 0, "eplb_moved_bytes": 0, "eplb_stall_ms": 0.0}
        self._thread = ThreadPoolExecutor(1, "dskit-eplb")  # of rank 0
        self._plan: Future | None = None  # there
        self._adopt_at: int | None = None  # the step after which its plan is sent to all
        self._moves: deque[tuple[int, Tensor]] = deque()  # layer, its next phys2log

    @classmethod
    def of(cls, model: Model, peers: Peers, cfg: EngineConfig) -> Rebalancer:
        """For a rank's part of a model, whose MoE layers get their exchanges."""
        exchanges = attach(model, peers, cfg.num_redundant_experts)
        how = {"interval": cfg.eplb_interval if cfg.enable_eplb else None,
               "min_balance": cfg.eplb_min_balance, "algorithm": cfg.eplb_algorithm}
        own = {name: exchange for name, exchange in exchanges.items() if name.startswith("layers.")}
        made = cls(model, own, **how)
        if cfg.drafts:
            made.draft = cls(model, {n: e for n, e in exchanges.items() if n not in own}, **how)
        return made

    def stats(self) -> dict[str, float]:
        """The balance at the last look; rebalances, failures, and what they have cost this rank."""
        if self.draft is None:
            return {"eplb_balance": self.balance, **self._totals}
        totals = {name: value + self.draft._totals[name] for name, value in self._totals.items()}
        return {"eplb_balance": self.balance, "eplb_draft_balance": self.draft.balance, **totals}

    def close(self) -> None:
        """Plan no more."""
        self._thread.shutdown(cancel_futures=True)
        if self.draft is not None:
            self.draft.close()

    def warm_up(self) -> None:
        """Look once, which takes long at first, and forget what has been received; on every rank."""
        self.look()
        self.load.drop()
        if self.draft is not None:
            self.draft.warm_up()

    def after_step(self, counts: bool = True) -> None:
        """A step has ended on all ranks; `counts`: its rows are of the kind to prepare for.

        What the draft received for it is seen at the next one, since the draft guesses behind the step.
        """
        self._after_step(counts)
        if self.draft is not None:
            self.draft.after_step(counts)

    def _after_step(self, counts: bool) -> None:
        self.load.push() if counts else self.load.drop()
        self.steps += 1
        begin = time.perf_counter()
        if self._moves:
            self._move()
        elif self._adopt_at is not None:
            if self.steps < self._adopt_at:
                return
            self._adopt()
        elif self._next is not None and self.steps >= self._next:
            self._ask()
        elif self.steps % REPORT == 0:
            self.look()
            return
        else:
            return
        stall_ms = 1e3 * (time.perf_counter() - begin)
        self._totals["eplb_stall_ms"] += stall_ms
        if self.records:
            self.records[-1].stall_ms += stall_ms

    # ---- looking and planning ------------------------------------------------------------------------------

    def look(self) -> Tensor:
        """Rows of all slots of the group [S, L, P], on every rank; brings what is known up to date."""
        mine = self.load.ring_SLP
        parts = [torch.empty_like(mine) for _ in range(self.peers.size)]
        dist.all_gather(parts, mine, group=self.peers.group)
        rows_SLP = torch.cat(parts, dim=2)
        rows_LE = eplb.by_expert(rows_SLP.sum(0, keepdim=True), self._layout(), self._E)[0]
        self.rows_LE, self.balance = rows_LE.cpu(), eplb.overall(rows_SLP, self.peers.size)
        if self.records and self.records[-1].after is None and not self._moves:
            self.records[-1].after = self.balance
        return rows_SLP

    def _ask(self) -> None:
        rows_SLP = self.look()
        self._next = self.steps + self.interval
        if self.balance >= self.min_balance:
            return
        self.records.append(Record(self.steps, self.balance))
        self._adopt_at = self.steps + max(1, self.interval // 8)
        if self.peers.rank == 0:
            self._plan = self._thread.submit(eplb.replan, rows_SLP.cpu(), self._layout().cpu(), self._E,
                                             self.peers.size, self.algorithm)

    def _adopt(self) -> None:
        """Take over the plan of rank 0; one that it could not make is -1."""
        self._adopt_at, plan_LP = None, torch.full_like(self._layout(), -1)
        if self.peers.rank == 0:
            try:
                plan_LP.copy_(self._plan.result())
            except Exception:
                logger.exception("no plan for the experts")
        dist.broadcast(plan_LP, dist.get_global_rank(self.peers.group, 0), group=self.peers.group)
        if (plan_LP < 0).any():
            self._rest("rank 0 could not plan")
            return
        changed = (plan_LP != self._layout()).any(dim=1).tolist()
        self._moves.extend((layer, plan_LP[layer].cpu()) for layer, moves in enumerate(changed) if moves)
        self._totals["eplb_rebalances"] += bool(self._moves)

    @property
    def _E(self) -> int:
        return len(self.exchanges[0].map.count)

    def _layout(self) -> Tensor:
        return torch.stack([exchange.map.phys2log for exchange in self.exchanges])

    # ---- moving --------------------------------------------------------------------------------------------

    def _move(self) -> None:
        for _ in range(min(LAYERS_AT_ONCE, len(self._moves))):
            layer, new_P = self._moves.popleft()
            if not self._rehouse(layer, new_P):
                self._moves.clear()
                self._rest(f"layer {layer} could not be moved on some rank")
                return

    def _rehouse(self, layer: int, new_P: Tensor) -> bool:
        """Move a layer's experts; False, and nothing has changed, if some rank could not prepare it."""
        try:
            parcel = self._pack(layer, new_P)
        except Exception:
            logger.exception("layer %d keeps its experts where they are", layer)
            parcel = None
        ready = torch.tensor(int(parcel is not None), device=self.load.now_LP.device)
        dist.all_reduce(ready, dist.ReduceOp.MIN, group=self.peers.group)
        if not ready:
            return False
        parcel.travel()
        parcel.unpack()
        self.exchanges[layer].map.replace_(new_P.tolist())
        self.experts[layer].held = new_P.chunk(self.peers.size)[self.peers.rank].tolist()
        self.load.forget(layer)
        self.records[-1].layers += 1
        self.records[-1].moved_bytes += parcel.arriving.numel()
        self._totals["eplb_moved_bytes"] += parcel.arriving.numel()
        return True

    def _pack(self, layer: int, new_P: Tensor) -> Parcel:
        """Everything that can fail on one rank alone; on a GPU it has happened when this returns."""
        old_P = self.exchanges[layer].map.phys2log.cpu()
        SlotMap(new_P.tolist(), self._E)
        stacks = stacks_of(self.experts[layer])
        parcel = Parcel(stacks, eplb.transfers(old_P, new_P, self.peers.size), self.peers)
        if parcel.rows.is_cuda:
            torch.cuda.synchronize(parcel.rows.device)
        return parcel

    def _rest(self, why: str) -> None:
        self._next = self.steps + REST * self.interval
        self._totals["eplb_failures"] += 1
        logger.error("%s; no rebalance before step %d", why, self._next)
