"""The caches of the engine: blocks of global memory that grow with a sequence, slots of rings that do not.

A block spans all source layers for `block_size` positions: entry j of ratio r lies in block
j*r // block_size. A slot holds one request's rings: the newest window vectors of every layer, and the (v, g)
of compression groups that are still open. Block 0 and slot 0 are never handed out; they are what a missing
entry points at, and stay zero.

Shapes: entries [num_blocks * block_size / r, H], keys [..., index_head_dim], windows [slots * ring, H], or
uint8 [..., bytes of a packed row] (layers/cache.py); carries [slots * ring, 2, width] float32.
Units: positions, blocks, slots; bytes where a name ends in _bytes.
Errors: ValueError when something is freed twice, for an unknown cache_storage, and for exact numerics packed.
Source: engine.md section 6; model.md section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from dskit.config import ModelConfig
from dskit.engine.host import send
from dskit.layers.cache import Packing
from dskit.layers.linear import Numerics
from dskit.layers.mla import Memory

LEAST_BACKTRACK = 6  # rows beyond the window that every ring holds


class Pool:
    """Numbered resources `first` .. `first + total - 1`; what was freed last is reused last.

    A number that is handed out has one holder; `share` adds holders, and the last `free` gives it back.
    """

    def __init__(self, total: int, first: int = 1):
        self.total = total
        self._free = deque(range(first, first + total))
        self._holders: dict[int, int] = {}
        self.on_free: Callable[[int], None] | None = None  # told of every number that is given back

    @property
    def free_count(self) -> int:
        """How many can be handed out now."""
        return len(self._free)

    @property
    def numbers(self) -> set[int]:
        """Those that are out."""
        return set(self._holders)

    def holders(self, number: int) -> int:
        """How many hold this number; 0 when it is free."""
        return self._holders.get(number, 0)

    def take(self, count: int) -> list[int] | None:
        """`count` numbers, or None when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, numbers: Iterable[int]) -> None:
        """One holder more for each number; raises ValueError for one that is not out."""
        for number in numbers:
            self._require(number, "shared")
            self._holders[number] += 1

    def free(self, numbers: Iterable[int]) -> None:
        """One holder less for each number; raises ValueError for one that is not out."""
        for number in numbers:
            self._require(number, "freed")
            self._holders[number] -= 1
            if not self._holders[number]:
                del self._holders[number]
                self._free.append(number)
                if self.on_free is not None:
                    self.on_free(number)

    def _require(self, number: int, verb: str) -> None:
        if number not in self._holders:
            raise ValueError(f"{type(self).__name__}: {number} is {verb}, but was not handed out")


class Blocks(Pool):
    """Cache blocks of `block_size` positions; several sequences and the prefix tree may hold one."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks)
        self.block_size = block_size

    def alloc(self, k: int) -> list[int] | None:
        """k blocks, or None when fewer are free."""
        return self.take(k)


class Slots(Pool):
    """State slots: one per running sequence, and one per snapshot of such a state."""

    def alloc(self) -> int | None:
        """A slot, or None when all are taken."""
        taken = self.take(1)
        return taken[0] if taken else None

    def free(self, slot: int) -> None:
        """Give a slot back."""
        super().free([slot])


def backtrack(config: ModelConfig) -> int:
    """Most tokens that a request may be rolled back; rings hold this many rows beyond what is read."""
    return max(LEAST_BACKTRACK, config.dspark_block_size + 1)


def members(config: ModelConfig, ratio: int) -> int:
    """Tokens that one entry is pooled from: the group, and in V4's ratio 4 the group before it too."""
    return 2 * ratio if not config.is_v41 and ratio == 4 else ratio


def window_ring(config: ModelConfig) -> int:
    """Rows of a window ring."""
    return config.sliding_window + backtrack(config)


def carry_ring(config: ModelConfig, ratio: int) -> int:
    """Rows of a compressor ring."""
    return members(config, ratio) + backtrack(config) - 1


def allocate(config: ModelConfig, numerics: Numerics, *, num_blocks: int, block_size: int, num_slots: int,
             device: torch.device | str, drafts: bool = False, cache_storage: str | None = None) -> Memory:
    """Zeroed caches for `num_blocks` blocks and `num_slots` slots, plus the reserved block and slot 0.

    cache_storage: "packed" holds vectors as the bytes of the release, "expanded" as rounded numbers, which a
    CPU reads faster; both give the same logits. None: packed on a GPU in release numerics.
    """
    memory, slots = Memory(), num_slots + 1
    on_gpu = torch.device(device).type == "cuda"
    storage = cache_storage or ("packed" if on_gpu and numerics.release else "expanded")
    if storage not in ("packed", "expanded"):
        raise ValueError(f"cache_storage is {cache_storage!r}; choose packed or expanded")

    def vectors(rows: int, what: str) -> torch.Tensor:
        packing = Packing.of(config, numerics, what)
        if storage == "packed":
            return torch.zeros(rows, packing.nbytes, dtype=torch.uint8, device=device)
        return torch.zeros(rows, packing.width, dtype=packing.dtype, device=device)

    def groups(ratio: int, width: int) -> torch.Tensor:
        twice = 2 if members(config, ratio) > ratio else 1
        return torch.zeros(slots * carry_ring(config, ratio), 2, twice * width, device=device)

    layers = config.num_hidden_layers + (config.num_nextn_predict_layers if drafts else 0)
    for layer in range(layers):
        memory.windows[layer] = vectors(slots * window_ring(config), "window")
    for source in config.kv_source_layer_ids:
        ratio = config.ratio(source)
        rows = (num_blocks + 1) * (block_size // ratio)
        memory.entries[source] = vectors(rows, "entry")
        if ratio > 1 or not config.is_v41:
            memory.carries[source] = groups(ratio, config.head_dim)
        if source in config.index_source_layer_ids:
            memory.keys[source] = vectors(rows, "key")
            if not config.is_v41:
                memory.index_carries[source] = groups(ratio, config.index_head_dim)
    return memory


def slot_tables(memory: Memory) -> list[torch.Tensor]:
    """The tensors that are divided into slots."""
    return [t for kind in (memory.windows, memory.carries, memory.index_carries) for t in kind.values()]


def block_tables(memory: Memory) -> list[torch.Tensor]:
    """The tensors that are divided into blocks."""
    return [t for kind in (memory.entries, memory.keys) for t in kind.values()]


def copy(tables: list[torch.Tensor], pairs: dict[int, int], count: int) -> None:
    """Copy whole slots or blocks, target -> source, in tables of `count` of them and the reserved one."""
    if not pairs or not tables:
        return
    index = send(torch.tensor([list(pairs), list(pairs.values())]), tables[0].device)
    for table in tables:
        parts = table.view(torch.uint8).unflatten(0, (count + 1, -1))  # bytes: whatever the rows hold
        parts.index_copy_(0, index[0], parts[index[1]])


def wipe(tables: list[torch.Tensor], numbers: list[int], count: int) -> None:
    """Fill slots or blocks with bytes that are NaN in every format: what reads them is seen."""
    for table in tables if numbers else ():
        table.view(torch.uint8).unflatten(0, (count + 1, -1))[numbers] = 0xFF


def memory_bytes(memory: Memory) -> int:
    """Bytes that the caches take."""
    return sum(t.nbytes for t in slot_tables(memory) + block_tables(memory))


def bytes_by_kind(memory: Memory, layers: int) -> dict[str, int]:
    """The same by kind; `layers` are the model's own, the windows of later ones are the draft's."""
    windows = {n: t.nbytes for n, t in memory.windows.items()}
    kinds = {
        "window": sum(size for n, size in windows.items() if n < layers),
        "global": sum(t.nbytes for t in memory.entries.values()),
        "index": sum(t.nbytes for t in memory.keys.values()),
        "draft": sum(size for n, size in windows.items() if n >= layers),
        "open groups": sum(t.nbytes for t in (*memory.carries.values(), *memory.index_carries.values())),
    }
    return {kind: size for kind, size in kinds.items() if size}
