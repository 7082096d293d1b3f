"""`dskit bench exchange`: rows to the experts of other GPUs and back, written directly and by NCCL.

Idea: each rank brings as many rows, and every row has slots on every rank, so that each peer gets all of
them. Three ways to carry them, each there (dispatch), back (combine) and both in turn:

    triton   rows written into the peers' memory (kernels/exchange.py), in a CUDA graph
    nccl     the same bytes by all_to_all_single and nothing else, in a CUDA graph
    torch    the op's reference: codes, counts that hosts wait for, two all_to_all_single; launched eagerly

First what the kernels bring is compared, bit by bit, with what the reference brings; `--prove` lets auto take
them where that holds. Ranks are processes that the command starts, one for each GPU here, or torchrun.

Shapes: one row per way and number of rows.
Units: microseconds, the median of 20 samples of rank 0; GB/s: bytes that a rank sends to its peers, codes,
scales, slots and weights there and bfloat16 back, over the time.
Errors: exit code 3 where there are no two GPUs (0 with --allow-no-gpu), 1 where the kernels are wrong or the
GPUs cannot write into each other's memory.
Source: kernels.md 4.4 and 5.4.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from dskit import ops
from dskit.bench.environment import deliver, header, say
from dskit.bench.kernels import NO_GPU
from dskit.bench.steps import show
from dskit.bench.timing import Device
from dskit.engine.exchange import Peers
from dskit.engine.window import Apart, open_window
from dskit.layers.linear import quantize
from dskit.layers.moe import combine as add_up

Row = dict[str, Any]
OPS = ("exchange.dispatch", "exchange.combine")
FORMAT, SLOTS, CHOICES = "fp8_32", 128, 6  # of the released models; slots of a rank
SAMPLES = 20
SAMPLE_US = 3000  # least length of a sample
INTERVAL = "one dispatch, one combine, or both in turn, many of them between two events"


def main(args: Any, command: str) -> int:
    """Measure on the GPUs that are here, or say that there are not two."""
    count = torch.cuda.device_count()
    if "RANK" not in os.environ and count < 2:
        print(f"bench: an exchange needs two GPUs of one node; here are {count}; nothing was measured")
        return 0 if args.allow_no_gpu else NO_GPU
    rows = found(args, count)
    if rows is None:  # a rank that torchrun has started, and not the first
        return 0
    settings, defaults = asdict(args), asdict(type(args)())
    report = {"rows": rows, "env": header("cuda", settings, defaults, INTERVAL)}
    deliver(report, args, "exchange", command, show)
    right = all(row["right"] is True for row in rows if row["way"] == "triton")
    if args.prove:
        prove(right)
    return int(not right)


def found(args: Any, count: int) -> list[Row] | None:
    """What rank 0 has measured; None on another rank."""
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
        return measure(rank, size, store, args)
    store = dist.TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    context = processes.get_context("spawn")
    others = [context.Process(target=join, args=(rank, count, store.port, args)) for rank in range(1, count)]
    for process in others:
        process.start()
    try:
        return measure(0, count, store, args)
    finally:
        for process in others:
            process.join(30)
            process.kill()


def join(rank: int, size: int, port: int, args: Any) -> None:
    """What a started process runs."""
    measure(rank, size, dist.TCPStore("127.0.0.1", port, size, is_master=False), args)


def prove(right: bool) -> None:
    """Let auto take both kernels on this kind of GPU, or no more."""
    gpu = "sm_{}{}".format(*torch.cuda.get_device_capability())
    proven = json.loads(ops.PROVEN.read_text())
    named = proven.setdefault(gpu, {"gpu": torch.cuda.get_device_name(), "ops": []})
    named["ops"] = sorted({*named["ops"]} - {*OPS} | ({*OPS} if right else set()))
    ops.PROVEN.write_text(json.dumps(proven, indent=1) + "\n")


# ---- a rank ------------------------------------------------------------------------------------------------


def measure(rank: int, size: int, store: dist.Store, args: Any) -> list[Row] | None:
    """All rows; on rank 0."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.zeros(1, device="cuda"))
    peers = Peers(rank, size, dist.group.WORLD, max_rows=max(args.rows))
    try:
        peers.window = open_window(peers.group, torch.device("cuda", local), peers.max_rows, args.width,
                                   CHOICES, torch.bfloat16, each=True)
    except Apart as why:
        peers.apart = str(why)
    rows = [row for count in args.rows for row in Course(peers, count, args).run()]
    dist.destroy_process_group()
    return None if rank else rows


class Course:
    """One number of rows, on one rank: the arguments, and the ways to carry them."""

    def __init__(self, peers: Peers, rows: int, args: Any):
        self.peers, self.rows, self.device = peers, rows, Device()
        random = torch.Generator("cuda").manual_seed(args.seed * 1000 + peers.rank)
        self.x = torch.randn(rows, args.width, generator=random, device="cuda", dtype=torch.bfloat16)
        self.x = quantize(self.x, FORMAT, torch.bfloat16)
        slot = torch.rand(rows, SLOTS, generator=random, device="cuda").argsort(1)[:, :CHOICES]
        self.slot = slot + SLOTS * ((torch.arange(CHOICES, device="cuda") + peers.rank) % peers.size)
        self.weight = torch.rand(rows, CHOICES, generator=random, device="cuda")
        self.bytes = {"there": args.width + args.width // 32 + 12 * CHOICES, "back": 2 * args.width}

    def run(self) -> list[Row]:
        """A row for each way."""
        right, rows = None, []
        with torch.inference_mode():
            if self.peers.window is not None:
                right = self.right()
                rows.append(self.row("triton", self.triton(), right, graph=True))
            rows.append(self.row("nccl", self.nccl(), None, graph=True))
            rows.append(self.row("torch", self.torch(), None, graph=False))
        return rows

    def row(self, way: str, calls: dict[str, Callable], right: bool | None, graph: bool) -> Row:
        """The times of one way."""
        us = {name: self.us(call, graph) for name, call in calls.items()}
        if self.peers.rank == 0:
            say(f"{self.rows} rows by {way}: {us['there']:.1f} us there, {us['back']:.1f} back ({right=})")
        sent = {name: self.rows * (self.peers.size - 1) * each for name, each in self.bytes.items()}
        sent["both"] = sent["there"] + sent["back"]
        return {"rows": self.rows, "way": way, **{f"{name}_us": us[name] for name in sent},
                **{f"{name}_gb_s": sent[name] / us[name] / 1e3 for name in sent}, "graph": graph,
                "right": right}

    def us(self, call: Callable, graph: bool) -> float:
        """Microseconds of one call; all ranks call as often."""
        for _ in range(3):
            call()
        count, work = 10, call
        for _ in range(2):  # a first guess says how many calls make a sample
            work = self.device.capture([call], count).replay if graph else partial(repeat, call, count)
            samples = [self.sample(work) / count for _ in range(3)]
            least = torch.tensor(min(samples), device="cuda")
            dist.all_reduce(least, dist.ReduceOp.MIN)
            again, count = count, max(4, min(200, round(SAMPLE_US / least.item())))
        return statistics.median(self.sample(work) / again for _ in range(SAMPLES))

    def sample(self, work: Callable) -> float:
        """Microseconds of the work, which all ranks begin together."""
        dist.barrier()
        return self.device.between(work, cold=False)

    # ---- the ways ------------------------------------------------------------------------------------------

    def by(self, kernel: bool) -> tuple[Callable, Callable]:
        """(dispatch, combine) of an implementation, as functions of what they need."""
        which = "triton" if kernel else "torch"
        there, back = (ops.find(name).implementation(which).function for name in OPS)
        return (lambda: there(self.x, self.slot, self.weight, SLOTS, FORMAT, self.peers, self.rows),
                lambda y, trip, each=False: back(y, trip, each, self.peers))

    def right(self) -> bool:
        """Whether the kernels bring, twice, what the reference brings."""
        want, *others = [self.brought(kernel) for kernel in (False, True, True)]
        same = torch.tensor([all(map(torch.equal, want, one)) for one in others], device="cuda").all().int()
        dist.all_reduce(same, dist.ReduceOp.MIN)
        return bool(same)

    def brought(self, kernel: bool) -> list[Tensor]:
        """What came here, and what comes back of it: sums, and each choice's share by itself."""
        there, back = self.by(kernel)
        x, weight, trip = there()
        here = (trip.slot_RJ >= 0).any(dim=1)
        found = [part[here].clone() for part in (x, weight, trip.slot_RJ)]
        for each in (False, True):
            share = weight if each else weight.sum(1, keepdim=True)
            y = (x[:, None] * share[:, :, None]).to(x.dtype).flatten(0, 1)  # of what is no row, anything
            found.append(add_up.reference(*back(y, trip, each), None, x.dtype))
            if each is False:
                _, weight, trip = there()  # dispatch and combine take turns
        return found

    def triton(self) -> dict[str, Callable]:
        """Direct writes."""
        there, back = self.by(kernel=True)
        _, _, trip = there()
        y = torch.randn(self.peers.size * self.rows, self.x.shape[1], device="cuda", dtype=torch.bfloat16)
        return {"there": there, "back": lambda: back(y, trip), "both": lambda: back(y, there()[2])}

    def nccl(self) -> dict[str, Callable]:
        """The same bytes."""
        each = {name: torch.empty(2, self.peers.size * self.rows, size, dtype=torch.uint8, device="cuda")
                for name, size in self.bytes.items()}
        calls = {name: partial(dist.all_to_all_single, *pair) for name, pair in each.items()}
        return calls | {"both": lambda: (calls["there"](), calls["back"]())}

    def torch(self) -> dict[str, Callable]:
        """The reference."""
        there, back = self.by(kernel=False)
        x, _, trip = there()
        return {"there": there, "back": lambda: back(x, trip), "both": lambda: back(x, there()[2])}


def repeat(call: Callable, count: int) -> None:
    """Call so often."""
    for _ in range(count):
        call()
