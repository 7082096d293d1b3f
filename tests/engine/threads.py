"""Ranks as threads of one process: collectives of torch.distributed over a table that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dskit.engine.exchange import Peers


class Table:
    """A group: what each rank brings, by rank; everybody waits for everybody."""

    def __init__(self, size: int):
        self.barrier, self.brought = threading.Barrier(size, timeout=20), [None] * size
        self.rank = threading.local()

    def trade(self, mine: Any, take: Callable[[list, int], None]) -> None:
        """Show `mine` to all; `take` what is there, by rank, for this one."""
        me = self.rank.now
        self.brought[me] = mine
        self.barrier.wait()
        take(self.brought, me)
        self.barrier.wait()


def all_to_all_single(found, rows, received, sent, group):
    parts = rows.split(sent or [1] * len(group.brought))
    group.trade(parts, lambda all, me: torch.cat([parts[me] for parts in all], out=found))


def all_gather(found, mine, group):
    group.trade(mine, lambda all, me: [one.copy_(theirs) for one, theirs in zip(found, all, strict=True)])


def all_reduce(value, op, group):
    assert op == dist.ReduceOp.MIN
    group.trade(value.clone(), lambda all, me: value.copy_(torch.stack(all).amin(0)))


def broadcast(value, source, group):
    group.trade(value, lambda all, me: value.copy_(all[source]))


def on_ranks(size: int, work: Callable[[Peers], Any], monkeypatch: pytest.MonkeyPatch) -> list:
    """`work(peers)` in a thread of each rank; what they give, by rank."""
    table, results = Table(size), [None] * size
    for stand_in in (all_to_all_single, all_gather, all_reduce, broadcast):
        monkeypatch.setattr(dist, stand_in.__name__, stand_in)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)

    def run(rank):
        table.rank.now = rank
        try:
            results[rank] = work(Peers(rank, size, table))
        except BaseException as error:
            results[rank] = error
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [r for r in results if isinstance(r, BaseException)]
    for error in sorted(broken, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
