"""The ranks of one engine: who they are, what they agree on before a step, how a silent one is noticed.

Idea: each rank is a process with the whole attention and a part of the experts (DEP: attention data parallel,
experts parallel). It schedules its own requests; the model's exchange (exchange.py) is what binds the ranks
of an expert group, contiguous runs of `ep` ranks, to the same layers at the same time. So before every step
each rank contributes a row of integers and receives the rows of all, in one message over a control group of
Gloo, which does not wait for the device:

    kind      what this rank has planned: IDLE, DECODE, PREFILL, or STOP (the group is to end)
    rows      of its plan
    wants     it could start a prompt now: a vote for what the next step is
    running   sequences that decode
    rounds    sequences whose next token it chooses: so many the draft may guess for
    epoch     number of the agreement; a rank that has skipped one is found out here, on every rank

Experts too: weights are placed by physical slot from the start; exchange.py says how a slot map is replaced.

Units: seconds.
State: one `Group` per process at a time; the process group is torch.distributed's default one until `leave`.
Errors: GroupError for sizes that do not fit and ranks out of step; whatever
torch.distributed raises when a rank is gone (at once) or silent (after `timeout`).
Source: engine.md sections 4.4, 11.1, 11.2, 23.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dskit.engine.exchange import Peers

logger = logging.getLogger("dskit.engine")
IDLE, DECODE, PREFILL, STOP = range(4)
LOADING = 600.0  # until all ranks have come and loaded


class GroupError(RuntimeError):
    """The ranks cannot work together, or have ceased to."""


@dataclass(frozen=True)
class Parallel:
    """How many ranks there are, and how many of them share one set of experts."""

    dp: int = 1
    ep: int = 1
    timeout: float = 60.0
    """After so long without a sign of a rank the group ends."""

    def __post_init__(self):
        for name in ("dp", "ep"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise GroupError(f"{name} is {value!r}; it must be a positive integer")
        if self.dp % self.ep:
            raise GroupError(f"ep is {self.ep}, dp {self.dp}: expert groups are runs of ep ranks, so dp must "
                             "be a multiple of ep")
        if not self.timeout > 0:
            raise GroupError(f"the timeout is {self.timeout!r}; it must be seconds above 0")


@dataclass(frozen=True)
class Row:
    """What a rank says before a step; all integers."""

    kind: int
    rows: int
    wants: int
    running: int
    rounds: int
    epoch: int


class Group:
    """This process among the ranks; `peers` are those that share its experts, itself included."""

    def __init__(self, parallel: Parallel, rank: int, device: torch.device,
                 store: dist.Store):
        self.parallel, self.rank, self.size, self.device = parallel, rank, parallel.dp, device
        self.epoch = 0
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.size,
                                timeout=timedelta(seconds=LOADING))
        limit = timedelta(seconds=parallel.timeout)
        self.loading = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOADING))
        self.control = dist.new_group(backend="gloo", timeout=limit)
        self.tables = dist.new_group(backend=backend, timeout=limit)  # rows of Engram tables, beside a step
        self.peers = Peers()
        for first in range(0, self.size, parallel.ep):  # every rank takes part in making every group
            run = list(range(first, first + parallel.ep))
            made = dist.new_group(run, backend=backend, timeout=limit) if parallel.ep > 1 else None
            if rank in run:
                self.peers = Peers(rank - first, parallel.ep, made)
        for made in filter(None, (self.tables, self.peers.group)):  # NCCL connects when first used: now
            dist.all_reduce(torch.zeros(1, device=device), group=made)

    def agree(self, kind: int, rows: int, wants: bool, running: int, rounds: int) -> list[Row]:
        """One message: this rank's row goes to all, and all rows come back."""
        self.epoch += 1
        mine = torch.tensor(astuple(Row(kind, rows, int(wants), running, rounds, self.epoch)))
        table = torch.empty(self.size, len(mine), dtype=torch.int64)
        dist.gather(mine, list(table) if self.rank == 0 else None, dst=0, group=self.control)
        dist.broadcast(table, 0, group=self.control)
        found = [Row(*row) for row in table.tolist()]
        if len({row.epoch for row in found}) > 1:
            raise GroupError(f"the ranks are out of step: epochs {[row.epoch for row in found]}")
        if len(kinds := {row.kind for row in found} - {IDLE, STOP}) > 1:
            raise GroupError(f"the ranks have planned different steps: {sorted(kinds)}")
        return found

    def meet(self) -> None:
        """Wait until all ranks are here, as long as loading may take: what they do then they do at once."""
        dist.barrier(group=self.loading)

    def leave(self) -> None:
        """Take this process out; the others must do so too."""
        dist.destroy_process_group()


class Watchdog:
    """Notices that this process makes no steps any more, whatever its threads wait for.

    Half-way to the timeout it prints where every thread is; at the timeout it calls `stuck`.
    """

    def __init__(self, timeout: float, stuck: Callable[[], None]):
        self._timeout, self._stuck = timeout, stuck
        self._last, self._over = time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, name="dskit-watchdog", daemon=True).start()

    def beat(self) -> None:
        """A step has been made."""
        self._last = time.monotonic()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        told = 0.0
        while not self._over.wait(self._timeout / 20):
            silent = time.monotonic() - self._last
            if silent > self._timeout / 2 and told != self._last:
                told = self._last
                logger.error("no step for %.1f s; the threads of process %d:", silent, os.getpid())
                faulthandler.dump_traceback(sys.__stderr__)
            if silent > self._timeout:
                self._stuck()
                return
