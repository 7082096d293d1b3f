"""The caches of the engine: blocks of global memory that grow with a sequence, slots of rings that do not.

A block spans all source layers for `block_size` positions: entry j of ratio r lies in block
j*r // block_size. A slot holds one request's rings: the newest window vectors of every layer, and the (v, g)
of compression groups that are still open. Block 0 and slot 0 are never handed out; they are what a missing
entry points at, and stay zero.

Shapes: entries [num_blocks * block_size / r, H], keys [..., index_head_dim], windows [slots * ring, H],
carries [slots * ring, 2, width] float32.
Units: positions, blocks, slots; bytes where a name ends in _bytes.
Errors: ValueError when something is freed twice.
Source: engine.md section 6; model.md section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from dskit.config import ModelConfig
from dskit.layers.linear import Numerics
from dskit.layers.mla import Memory


class Pool:
    """Numbered resources 1 .. total; freed ones go to the back, so what was freed last is reused last."""

    def __init__(self, total: int):
        self.total = total
        self._free = deque(range(1, total + 1))
        self._taken: set[int] = set()

    @property
    def free_count(self) -> int:
        """How many can be handed out now."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` numbers, or None when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._taken.update(taken)
        return taken

    def free(self, numbers: Iterable[int]) -> None:
        """Give numbers back; raises ValueError for one that is not out."""
        for number in numbers:
            if number not in self._taken:
                raise ValueError(f"{type(self).__name__}: {number} is freed, but was not handed out")
            self._taken.remove(number)
            self._free.append(number)


class Blocks(Pool):
    """Cache blocks of `block_size` positions."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks)
        self.block_size = block_size

    def alloc(self, k: int) -> list[int] | None:
        """k blocks, or None when fewer are free."""
        return self.take(k)


class Slots(Pool):
    """State slots, one per running sequence."""

    def alloc(self) -> int | None:
        """A slot, or None when all are taken."""
        taken = self.take(1)
        return taken[0] if taken else None

    def free(self, slot: int) -> None:
        """Give a slot back."""
        super().free([slot])


def backtrack(config: ModelConfig) -> int:
    """Most tokens that a request may be rolled back; rings hold this many rows beyond what is read."""
    return max(6, config.dspark_block_size + 1)


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
             device: torch.device | str, drafts: bool = False) -> Memory:
    """Zeroed caches for `num_blocks` blocks and `num_slots` slots, plus the reserved block and slot 0."""
    memory, slots = Memory(), num_slots + 1

    def zeros(*shape: int, dtype: torch.dtype = numerics.compute) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    layers = config.num_hidden_layers + (config.num_nextn_predict_layers if drafts else 0)
    for layer in range(layers):
        memory.windows[layer] = zeros(slots * window_ring(config), config.head_dim)
    for source in config.kv_source_layer_ids:
        ratio = config.ratio(source)
        rows = (num_blocks + 1) * (block_size // ratio)
        memory.entries[source] = zeros(rows, config.head_dim)
        twice = 2 if members(config, ratio) > ratio else 1
        if ratio > 1 or not config.is_v41:
            memory.carries[source] = zeros(slots * carry_ring(config, ratio), 2, twice * config.head_dim,
                                           dtype=torch.float32)
        if source in config.index_source_layer_ids:
            memory.keys[source] = zeros(rows, config.index_head_dim)
            if not config.is_v41:
                memory.index_carries[source] = zeros(slots * carry_ring(config, ratio), 2,
                                                     twice * config.index_head_dim, dtype=torch.float32)
    return memory


def memory_bytes(memory: Memory) -> int:
    """Bytes that the caches take."""
    tables = (memory.windows, memory.entries, memory.keys, memory.carries, memory.index_carries)
    return sum(t.nbytes for table in tables for t in table.values())
