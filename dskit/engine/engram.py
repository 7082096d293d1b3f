"""Where the Engram tables lie, and how a step's rows come from there.

Idea: which rows a step reads follows from its token ids alone. So they set out when the step begins, and the
Engram layers find them there: `fetch` starts it, `Lookup.rows` waits for the end. The released tables are
189 GiB, more than one GPU has, so there is a choice of places; each brings the same packed rows to the same
op (engram.gather), so that the numbers are the same bits.

    device   the whole table beside the layer, which reads it itself: small tables
    shard    each rank holds an equal part of the rows. GPUs of one NVLink domain read each other's where they
             are; elsewhere ids travel to the owners, and rows come back (all-to-all)
    host     one copy per node, which all its ranks map, in huge pages where the system gives them; a GPU
             reads it in place over its bus, on a stream of its own
    mmap     the checkpoint's file: the system's page cache holds what was read of late, and nothing else does

Rows in host memory that a GPU cannot read in place are gathered by a thread of the host and copied packed.

Units: bytes; seconds inside, microseconds in `report`.
State: a placement is made before a model is loaded, keeps its tables while it loads (checkpoint.Tables), and
is given to the runner. Ranks of a group load and fetch at the same time, in the same order.
Errors: DoesNotFit, with the numbers and another choice; EngramError for a placement that cannot be had here.
Source: engine.md sections 13, 23.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dskit.checkpoint import Tables
from dskit.checkpoint.spec import NBYTES, Weight, layout, stored_form
from dskit.config import ModelConfig
from dskit.engine import window
from dskit.engine.host import Fetch, send
from dskit.layers.engram import Engram, gather, gather_runs
from dskit.model import Model

logger = logging.getLogger("dskit.engine")
SMALL = 64 << 20  # bytes of tables that are held on every device without a second thought
SPARE = 1.1  # a table in host memory leaves a tenth of its size free
HUGE = 2 << 20  # bytes of a huge page
IN_HUGE = 0.98  # share of a table's resident bytes that has to lie in huge pages
MADV_RANDOM, MADV_COLLAPSE = 1, 25  # of Linux's madvise


class EngramError(ValueError):
    """A placement that this model or machine cannot have."""


class DoesNotFit(MemoryError):
    """The tables are larger than the memory that they should lie in; `remedy` is another choice."""

    def __init__(self, what: str, remedy: str):
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True)
class Ranks:
    """The ranks that share tables: a group for rows, and one for words while tables are loaded."""

    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup, control: dist.ProcessGroup | None = None) -> Ranks:
        """The ranks of a process group of their own; without `control` it carries both."""
        return cls(group, control or group, dist.get_rank(group), dist.get_world_size(group))

    def all(self, value: Any) -> list[Any]:
        """What every rank says, in their order."""
        if self.size == 1:
            return [value]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.control)
        return said

    def swap(self, parts: Tensor, sent: list[int], due: list[int]) -> Tensor:
        """Give every rank its rows of `parts`, `sent` of them each, and get `due` from each."""
        came = parts.new_empty(sum(due), *parts.shape[1:])
        dist.all_to_all_single(came, parts.contiguous(), due, sent, group=self.group)
        return came


# ---- a step's rows -----------------------------------------------------------------------------------------

Coming = Callable[[], tuple[Tensor, "torch.cuda.Event | None"]]  # waits for the host's part of the way


class Waits:
    """How long Engram layers waited for their rows, by the host's clock and by the GPU's."""

    def __init__(self) -> None:
        self.lookups = 0
        self._seconds: Counter[int] = Counter()
        self._events: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()  # whoever asks for the times is another thread

    def host(self, layer: int, seconds: float) -> None:
        """Note a wait of the thread that launches."""
        self._seconds[layer] += seconds

    def gpu(self, layer: int, stream: torch.cuda.Stream, done: torch.cuda.Event) -> None:
        """Let a stream wait for an event, and note for how long it does."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(done)
        after.record(stream)
        with self._lock:
            self._events.append((layer, before, after))
            self._settle()

    def micros(self) -> dict[int, int]:
        """Layer -> microseconds, of all waits that are over."""
        with self._lock:
            self._settle()
            return {layer: round(1e6 * seconds) for layer, seconds in sorted(self._seconds.items())}

    def _settle(self) -> None:
        """Read the events that have come to pass."""
        while self._events and self._events[0][2].query():
            layer, before, after = self._events.popleft()
            self._seconds[layer] += before.elapsed_time(after) / 1e3


class Lookup:
    """The rows of one step on their way (layers.engram.Found)."""

    def __init__(self, coming: dict[int, Coming], waits: Waits):
        self._coming, self._waits = coming, waits

    def rows(self, layer: int) -> Tensor:
        """The numbers [T, C*Y] of a layer; waits until they are there."""
        begin = time.perf_counter()
        found, done = self._coming[layer]()
        self._waits.host(layer, time.perf_counter() - begin)
        if done is not None:
            stream = torch.cuda.current_stream(found.device)
            self._waits.gpu(layer, stream, done)
            found.record_stream(stream)
        return found


# ---- placements --------------------------------------------------------------------------------------------


class Placement(Tables):
    """Tables of one model in one place: `device`, which is also the base of the others."""

    name = "device"
    joint = False  # whether all ranks take part in a lookup

    def __init__(self, config: ModelConfig, device: torch.device, ranks: Ranks | None = None):
        self.config, self.device, self.ranks = config, device, ranks or Ranks()
        self.waits, self.layers = Waits(), dict[int, Engram]()
        self._worker: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None

    def check(self, files: bool) -> None:
        """Raise DoesNotFit where the tables do not fit, EngramError where they cannot be had so."""
        self._fits(self.device, 1.0)

    def _fits(self, device: torch.device, share: float) -> None:
        """Raise DoesNotFit unless a share of the tables fits in the free memory of a device."""
        need = share * table_bytes(self.config)
        if device.type == "cuda":
            there, spare, where = torch.cuda.mem_get_info(device)[0], 1.0, f"the memory of {device}"
        else:
            there, spare, where = memory_available(), SPARE, "host memory"
        if need * spare > there:
            others = ", ".join(name for name in PLACEMENTS if name != self.name)
            raise DoesNotFit(f"engram_placement {self.name!r} needs {_gib(need * spare)} of {where} for "
                             f"tables of {_gib(need)}, and {_gib(there)} are available",
                             f"another --engram-placement: {others}")

    def keep(self, weight: Weight, tensor: Tensor, scale: Tensor | None, device: torch.device
             ) -> tuple[Tensor, Tensor | None]:
        """The rows on the device, in memory of their own: a mapped file may change."""
        codes, scales = (t if t is None or t.is_cuda else t.to(device, copy=True) for t in (tensor, scale))
        return codes, scales

    def serve(self, model: Model) -> Placement:
        """Take over the lookups of a loaded model; all ranks have loaded then."""
        self.layers = {i: model.layers[i].engram for i in self.config.engram_layer_ids}
        self.ranks.all(None)
        return self

    def fetch(self, gram_TQ: Tensor) -> Lookup | None:
        """Start to bring the rows of n-grams [T, Q]; None: the layers find them in their own tables."""
        return None

    def settle(self) -> None:
        """Wait until the thread that looks up has nothing to do."""
        if self._worker is not None:
            self._worker.submit(int).result()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this process or node gives to the tables; a page cache is the system's."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Codes and scales of every table."""
        return [t for e in self.layers.values() for t in (e.embed.weight, e.embed.scale) if t is not None]

    def report(self) -> dict[str, Any]:
        """Where the tables are, their bytes and how many are resident, tokens looked up, waits per layer."""
        return {"placement": self.name, "bytes": self.nbytes, "resident_bytes": self.nbytes,
                "huge_fraction": None, "lookups": self.waits.lookups, "wait_us": self.waits.micros()}

    def stats(self) -> dict[str, int]:
        """What is counted while serving: bytes, tokens looked up, microseconds waited."""
        return {"engram_bytes": self.nbytes, "engram_lookups": self.waits.lookups,
                "engram_wait_us": sum(self.waits.micros().values())}

    def close(self) -> None:
        """End the thread that looks up."""
        self.layers = {}
        if self._worker is not None:
            self._worker.shutdown()


class Remote(Placement):
    """What all placements have in common whose rows have a way to go: a thread, and a stream on a GPU."""

    def __init__(self, config: ModelConfig, device: torch.device, ranks: Ranks | None = None):
        super().__init__(config, device, ranks)
        self._worker = ThreadPoolExecutor(1, "dskit-engram")  # one: ranks exchange in the same order
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, gram_TQ: Tensor) -> Lookup:
        """Start to bring the rows of n-grams [T, Q]."""
        starts = {layer: self._start(engram, engram.rows(gram_TQ)) for layer, engram in self.layers.items()}
        return Lookup(starts, self.waits)

    def _start(self, engram: Engram, row_TC: Tensor) -> Coming:
        raise NotImplementedError

    def _read(self, row_TC: Tensor, work: Callable[[], Tensor]) -> Coming:
        """Let the GPU read rows where they are, beside what it does besides."""
        self._follow(row_TC)
        found = self._on_stream(work)
        return lambda: found

    def _on_stream(self, work: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
        """Do something where the device is not held up: on a GPU on a stream of its own."""
        stream = self._stream
        with torch.inference_mode(), torch.cuda.stream(stream) if stream else nullcontext():
            found = work()
            return found, stream.record_event() if stream else None

    def _follow(self, tensor: Tensor) -> None:
        """Let the stream see a tensor that the current stream has just made."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(self._stream)


class Staged(Remote):
    """Tables in host memory: the thread gathers, and a GPU gets the packed rows through pinned memory."""

    def rows_on(self, device: torch.device, weight: Weight) -> int:
        """None of a GPU's memory; all of a CPU's."""
        return 0 if device.type == "cuda" else weight.shape[0]

    def _start(self, engram: Engram, row_TC: Tensor) -> Coming:
        ids = Fetch([row_TC])
        return self._worker.submit(self._on_stream, lambda: self._gather(engram, ids)).result

    def _gather(self, engram: Engram, ids: Fetch) -> Tensor:
        (row_TC,), table = ids.wait(), engram.embed
        if self.device.type == "cpu":
            return gather(table.weight, table.scale, row_TC, table.numerics.dtype)
        codes, scale = (None if t is None else send(_pick(t, row_TC.flatten()), self.device).view(t.dtype)
                        for t in (table.weight, table.scale))
        at_TC = torch.arange(row_TC.numel(), device=self.device).view_as(row_TC)
        return gather(codes, scale, at_TC, table.numerics.dtype)


class Mapped(Staged):
    """`mmap`: the tables are the checkpoint's file."""

    name, sampled = "mmap", True

    def check(self, files: bool) -> None:
        """Needs files."""
        if not files:
            raise EngramError("engram_placement is 'mmap', but this model's weights are drawn from a seed "
                              "and in no file; write them with checkpoint.write_random and name the folder, "
                              "or choose another placement")

    def rows_on(self, device: torch.device, weight: Weight) -> int:
        """None: the system may drop what it holds of the file."""
        return 0

    def keep(self, weight: Weight, tensor: Tensor, scale: Tensor | None, device: torch.device
             ) -> tuple[Tensor, Tensor | None]:
        """The file's own pages, of which each row's are read and none after them."""
        for part in (tensor, scale):
            if part is not None:
                _advise(part, MADV_RANDOM)
        return tensor, scale

    @property
    def nbytes(self) -> int:
        """None but the page cache."""
        return 0

    def report(self) -> dict[str, Any]:
        """Resident is what of the file is mapped now."""
        size = sum(t.nbytes for t in self.tensors())
        resident = min(size, smaps(self.tensors())["Rss"])
        return super().report() | {"bytes": size, "resident_bytes": resident}


class Host(Staged):
    """`host`: one copy per node, made by its first rank and mapped by the others."""

    name = "host"

    def __init__(self, config: ModelConfig, device: torch.device, ranks: Ranks | None = None):
        super().__init__(config, device, ranks)
        nodes = self.ranks.all(_node())
        self.leader = nodes.index(nodes[self.ranks.rank])
        self.alone = nodes.count(nodes[self.ranks.rank]) == 1
        self._held: dict[str, Tensor] = {}  # bytes of each table, the codes first
        self._pinned: list[Tensor] = []

    @property
    def leads(self) -> bool:
        """Whether this rank makes the copy of its node."""
        return self.leader == self.ranks.rank

    def check(self, files: bool) -> None:
        """Needs the memory, and other ranks need Linux to map it."""
        self._fits(torch.device("cpu"), 1.0)
        if not self.alone and not hasattr(os, "memfd_create"):
            raise EngramError("engram_placement is 'host' for several ranks on a node, which share memory by "
                              "memfd_create of Linux; choose 'shard' or 'mmap' here")

    def share(self, weight: Weight) -> slice:
        """All rows for the rank that makes the copy, none for the others."""
        return slice(0, weight.shape[0] if self.leads else 0)

    def room(self, weight: Weight, device: torch.device) -> tuple[Tensor, Tensor]:
        """Drawn rows go to their place at once."""
        codes, scales = super().room(weight, torch.device("meta"))
        if not self.leads:
            return tuple(torch.empty_like(t, device=device) for t in (codes, scales))
        held = self._held[weight.name] = self._reserve(codes.nbytes + scales.nbytes)
        return tuple(part.view(like.shape) for part, like in
                     zip(held.split((codes.nbytes, scales.nbytes)), (codes, scales), strict=True))

    def keep(self, weight: Weight, tensor: Tensor, scale: Tensor | None, device: torch.device
             ) -> tuple[Tensor, Tensor | None]:
        """The node's copy, filled by the rank that makes it; as the GPU sees it, if it can read it there."""
        parts = [t for t in (tensor, scale) if t is not None]
        widths = [t.shape[1] * t.element_size() for t in parts]
        sizes = [weight.shape[0] * width for width in widths]
        if not (drawn := weight.name in self._held):
            self._held[weight.name] = self._reserve(sum(sizes))
        held = self._held[weight.name]
        if self.leads and not drawn:
            for whole, part in zip(held.split(sizes), parts, strict=True):
                whole.copy_(part.reshape(-1).view(torch.uint8))
        self._look_at_pages(weight, held)
        seen = self._seen_by(device, held) if device.type == "cuda" else held
        views = [whole.view(part.dtype).view(weight.shape[0], -1)
                 for whole, part in zip(seen.split(sizes), parts, strict=True)]
        return views[0], views[1] if scale is not None else None

    def _reserve(self, nbytes: int) -> Tensor:
        """The node's memory for a table, as bytes; all ranks of the group call this together."""
        fd = os.memfd_create("dskit-engram") if self.leads and not self.alone else None
        if fd is not None:
            os.ftruncate(fd, nbytes)
        pid, number = self.ranks.all((os.getpid(), fd))[self.leader]
        if self.alone:
            memory = mmap.mmap(-1, nbytes + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mine = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            memory = mmap.mmap(mine, nbytes)
            os.close(mine)
        self.ranks.all(None)  # all have opened it
        if fd is not None:
            os.close(fd)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        skip = -whole.data_ptr() % HUGE if self.alone else 0  # a huge page begins at a multiple of its size
        return whole[skip : skip + nbytes]

    def _look_at_pages(self, weight: Weight, held: Tensor) -> None:
        """Warn when a table that this rank filled does not lie in huge pages."""
        if not self.leads or held.nbytes < HUGE or self._in_huge([held]) >= IN_HUGE:
            return
        _advise(held, MADV_COLLAPSE)
        if (share := self._in_huge([held])) < IN_HUGE:
            knob = f"/sys/kernel/mm/transparent_hugepage/{'enabled' if self.alone else 'shmem_enabled'}"
            now = Path(knob).read_text().strip() if Path(knob).exists() else "absent"
            logger.warning("%s: %.0f %% of it lies in huge pages, so that most rows cost a miss of the TLB; "
                           "%s is '%s', and would have to be %s", weight.name, 100 * share, knob, now,
                           "madvise or always" if self.alone else "advise or always")

    @staticmethod
    def _in_huge(tensors: list[Tensor]) -> float:
        found = smaps(tensors)
        huge = found["AnonHugePages"] + found["ShmemPmdMapped"] + found["FilePmdMapped"]
        return huge / max(1, found["Rss"])

    def _seen_by(self, device: torch.device, held: Tensor) -> Tensor:
        """The same memory as a tensor of the GPU; where the driver will not pin it, itself."""
        status = torch.cuda.cudart().cudaHostRegister(held.data_ptr(), held.nbytes, 0)
        if int(status):
            logger.warning("the driver does not pin %s of host memory (%s), so a thread gathers Engram rows "
                           "and copies them; is locked memory limited (ulimit -l)?", _gib(held.nbytes),
                           status)
            return held
        self._pinned.append(held)
        return torch.as_tensor(_CudaView(held), device=device)

    def _start(self, engram: Engram, row_TC: Tensor) -> Coming:
        if engram.embed.weight.device.type == self.device.type == "cuda":
            table = engram.embed
            return self._read(row_TC, partial(gather, table.weight, table.scale, row_TC,
                                              table.numerics.dtype))
        return super()._start(engram, row_TC)

    @property
    def nbytes(self) -> int:
        """Of the node's copy."""
        return sum(held.nbytes for held in self._held.values())

    def report(self) -> dict[str, Any]:
        """With the share that lies in huge pages."""
        held = list(self._held.values())
        return super().report() | {"resident_bytes": min(self.nbytes, smaps(held)["Rss"]),
                                   "huge_fraction": self._in_huge(held)}

    def close(self) -> None:
        """Let the driver go, then the memory."""
        super().close()
        for held in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(held.data_ptr())
        self._held, self._pinned = {}, []


class Shard(Remote):
    """`shard`: rows in equal runs over the ranks. Where they are exchanged, all take part in every step's."""

    name = "shard"

    def __init__(self, config: ModelConfig, device: torch.device, ranks: Ranks | None = None):
        super().__init__(config, device, ranks)
        self.joint = True  # unless the GPUs read each other's runs
        self._runs: dict[str, list[Tensor]] = {}  # by table: bytes of the codes and scales of every rank
        self._handles: list[Any] = []  # which keep other ranks' memory mapped

    def check(self, files: bool) -> None:
        """Needs ranks, and room for a part."""
        if self.ranks.size < 2:
            raise EngramError("engram_placement is 'shard', which spreads rows over the ranks of a group, "
                              "and there is one rank; choose device, host or mmap")
        self._fits(self.device, 1 / self.ranks.size)
        if self.device.type == "cuda" and self.config.engram_head_dim % 32 == 0:  # the others: small models
            try:
                window.meet(self.ranks.control, self.device)
                self.joint = False
            except window.Apart as apart:
                logger.warning("Engram rows travel by all-to-all: %s", apart)

    def room(self, weight: Weight, device: torch.device) -> tuple[Tensor, Tensor]:
        """Drawn rows go to where the others read them."""
        if self.joint:
            return super().room(weight, device)
        rows = len(range(weight.shape[0])[self.share(weight)])
        return tuple(part[:rows] for part in self._open(weight))

    def keep(self, weight: Weight, tensor: Tensor, scale: Tensor | None, device: torch.device
             ) -> tuple[Tensor, Tensor | None]:
        """This rank's rows, where the others read them if they can."""
        if self.joint or scale is None or weight.name in self._runs:
            return super().keep(weight, tensor, scale, device)
        own = [part[: len(t)].view(t.dtype) for part, t in
               zip(self._open(weight), (tensor, scale), strict=True)]
        for part, t in zip(own, (tensor, scale), strict=True):
            part.copy_(t)
        return own[0], own[1]

    def serve(self, model: Model) -> Placement:
        """Once all ranks have loaded, what they hold may be read."""
        if not self.joint:
            torch.cuda.synchronize(self.device)
        return super().serve(model)

    def report(self) -> dict[str, Any]:
        """With whether rows are read where they are."""
        return super().report() | {"direct": not self.joint}

    def close(self) -> None:
        """Let go of the other ranks' memory."""
        super().close()
        self._runs, self._handles = {}, []

    def _open(self, weight: Weight) -> list[Tensor]:
        """This rank's run of a table: codes and scales, as bytes, in memory that the other GPUs see."""
        per, Y = self._per_rank(weight), weight.shape[1]
        runs = self._shared(per * (Y + Y // 32))
        split = [whole.split((per * Y, per * (Y // 32))) for whole in runs]
        self._runs[weight.name] = [part.view(per, -1) for run in split for part in run]
        return self._runs[weight.name][2 * self.ranks.rank :][:2]

    def _shared(self, nbytes: int) -> list[Tensor]:
        """Bytes of every rank, this one's included; all ranks of the group call this together."""
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._handles.append(handle := symmetric.rendezvous(own, self.ranks.group))
        return [own if rank == self.ranks.rank else handle.get_buffer(rank, own.shape, own.dtype)
                for rank in range(self.ranks.size)]

    def _per_rank(self, weight: Weight) -> int:
        return -(-weight.shape[0] // self.ranks.size)

    def share(self, weight: Weight) -> slice:
        """This rank's run of rows."""
        per = self._per_rank(weight)
        first, last = (min(weight.shape[0], per * (self.ranks.rank + i)) for i in (0, 1))
        return slice(first, last)

    def rows_on(self, device: torch.device, weight: Weight) -> int:
        """A run of them."""
        return self._per_rank(weight)

    def _start(self, engram: Engram, row_TC: Tensor) -> Coming:
        if runs := self._runs.get(f"layers.{engram.layer}.engram.embed.weight"):
            table = engram.embed
            codes = tuple(run.view(table.weight.dtype) for run in runs[::2])
            scales = tuple(run.view(table.scale.dtype) for run in runs[1::2])
            return self._read(row_TC, partial(gather_runs, codes, scales, row_TC, table.numerics.dtype))
        self._follow(row_TC)
        return self._worker.submit(self._on_stream, lambda: self._exchange(engram, row_TC)).result

    def _exchange(self, engram: Engram, row_TC: Tensor) -> Tensor:
        """Ask each row's owner for it; answers come packed, and the op that restores them orders them."""
        table, ranks = engram.embed, self.ranks
        per = -(-table.shape[0] // ranks.size)
        row = row_TC.flatten()
        owner = row // per
        order = owner.argsort(stable=True)
        sent = (owner[:, None] == torch.arange(ranks.size, device=row.device)).sum(dim=0)
        ones = [1] * ranks.size
        due = ranks.swap(sent, ones, ones).tolist()
        sent = sent.tolist()
        asked = ranks.swap(row[order], sent, due) - per * ranks.rank
        parts = [t for t in (table.weight, table.scale) if t is not None]
        packed = torch.cat([_pick(t, asked) for t in parts], dim=1)
        came = ranks.swap(packed, due, sent).split([t.shape[1] * t.element_size() for t in parts], dim=1)
        codes, scale = ([c.contiguous().view(t.dtype) for c, t in zip(came, parts, strict=True)] + [None])[:2]
        at = torch.empty_like(order)
        at[order] = torch.arange(len(order), device=order.device)
        return gather(codes, scale, at.view_as(row_TC), table.numerics.dtype)


PLACEMENTS = {kind.name: kind for kind in (Placement, Shard, Host, Mapped)}


def choose(config: ModelConfig, device: torch.device, name: str | None = None, *, files: bool,
           ranks: Ranks | None = None) -> Placement | None:
    """The placement asked for, or the one that suits this machine; None for a model without Engram.

    files: whether the weights come from some. Raises EngramError and DoesNotFit, before anything is loaded.
    """
    if name == "peer":
        raise EngramError("engram_placement is 'peer'; it is called 'shard', where GPUs read each other's "
                          "rows over NVLink if they can, and else send them by all-to-all")
    if name is not None and name not in PLACEMENTS:
        raise EngramError(f"engram_placement is {name!r}; choose {', '.join(PLACEMENTS)}")
    if not config.engram_layer_ids:
        if name is not None:
            raise EngramError(f"engram_placement is {name!r}, but this model has no Engram layers")
        return None
    ranks = ranks or Ranks()
    if name is None:
        gpu = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
        name = suited(table_bytes(config), gpu, memory_available(), files, ranks.size)
        name = ranks.all(name)[0]  # the same one everywhere
    placement, refused = PLACEMENTS[name](config, device, ranks), None
    try:
        placement.check(files)
    except (EngramError, DoesNotFit) as error:
        refused = error
    others = ranks.all(refused and str(refused))
    if refused is not None:
        raise refused
    if any(others):  # nobody goes on alone
        raise EngramError(f"another rank cannot: {next(filter(None, others))}")
    return placement


def suited(size: int, gpu: float | None, host: float, files: bool, ranks: int) -> str:
    """The placement for tables of `size` bytes on so many ranks, each with a GPU of `gpu` bytes or none."""
    in_host = size * SPARE <= host
    small = size <= SMALL or (ranks == 1 and in_host) if gpu is None else size <= 0.1 * gpu
    if small:
        return "device"
    if gpu is not None and ranks >= 8:
        return "shard"
    return "host" if in_host else "mmap" if files else "shard" if ranks > 1 else "device"


def table_bytes(config: ModelConfig) -> int:
    """Bytes of all Engram tables, as they are stored."""
    forms = [stored_form(weight, config) for weight in layout(config) if weight.table]
    return sum(NBYTES[dtype] * shape[0] * shape[1] for form in forms for dtype, shape in form.values())


# ---- memory of the machine ---------------------------------------------------------------------------------


def memory_available(root: str | Path = "/") -> int:
    """Bytes that this process may still take: what the system has, or less where a cgroup limits it."""
    root, found = Path(root), []
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        found.append(_kilobytes(meminfo.read_text())["MemAvailable"])
    else:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit, used, cache in (("memory.max", "memory.current", "inactive_file"), (
            "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file")):
        most = root / "sys/fs/cgroup" / limit
        if most.exists() and (most := most.read_text().strip()) != "max":
            stat = (root / "sys/fs/cgroup" / limit).with_name("memory.stat").read_text().split()
            droppable = int(stat[stat.index(cache) + 1]) if cache in stat else 0
            found.append(int(most) - int((root / "sys/fs/cgroup" / used).read_text()) + droppable)
    return max(0, min(found))


def smaps(tensors: list[Tensor]) -> Counter[str]:
    """Bytes by kind of the mappings that tensors lie in, each counted once; none where there is no /proc."""
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes and not t.is_cuda]
    found: Counter[str] = Counter()
    path, inside = Path("/proc/self/smaps"), False
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            inside = any(first < stop and start < last for start, stop in spans)
        elif inside and rest.endswith(" kB"):
            found[name[:-1]] += int(rest.split()[0]) << 10
    return found


def _kilobytes(text: str) -> dict[str, int]:
    """Lines of "Name: number kB" as bytes."""
    rows = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows}


def _advise(tensor: Tensor, advice: int) -> None:
    """Tell Linux how memory will be used; it may not listen, which whoever cares looks up in smaps."""
    if not tensor.nbytes or os.name != "posix" or not Path("/proc/self/smaps").exists():
        return
    page = mmap.PAGESIZE
    first = tensor.data_ptr() // page * page
    length = tensor.data_ptr() + tensor.nbytes - first
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)


def _node() -> tuple[str, str]:
    """What ranks have in common that can map each other's memory: the machine and its processes' numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    return (boot.read_text() if boot.exists() else "", os.readlink(space) if space.exists() else "")


class _CudaView:
    """Pinned bytes of the host under the address that a GPU reads them at."""

    def __init__(self, held: Tensor):
        self.held = held  # lives as long as the view
        self.__cuda_array_interface__ = {"shape": (held.numel(),), "typestr": "|u1", "strides": None,
                                         "data": (held.data_ptr(), False), "version": 3}


def _pick(table: Tensor, row: Tensor) -> Tensor:
    """Some rows of a table as bytes."""
    return table.detach().view(torch.uint8)[row]


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.1f} MiB"
