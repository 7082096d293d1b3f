"""The prefix tree: prompts that begin alike share the cache blocks of their common beginning.

Idea: block i of a sequence has the key h_i = hash(h_{i-1}, its token ids), h_{-1} = hash(namespace). Equal
keys mean equal tokens from the first one on, so a dictionary from keys to nodes is the whole tree: a prompt
is matched by looking its keys up, one after the other, until one is missing. What a block holds (compressed
KV, index keys) follows from these tokens alone and may be read by any sequence. Windows do not: they belong
to a state slot. A node may keep a copy of the state as it was at its end, a snapshot; then a sequence can go
on from there as if it had computed everything itself (exact). Without one, the windows have to be rebuilt
from the last tokens of the prefix (replay, approximate).

Every node is one holder of its block, every sequence on its path another. A node that no sequence holds is
idle. Idle nodes are kept in the order in which they were let go, children before parents, so that the first
one is always a leaf and the one to evict next.

Units: blocks, snapshots (state slots), positions.
State: changed by the scheduler only; what is held is released once, as all blocks of a sequence.
Errors: ValueError from the pools when something is let go twice.
Source: engine.md section 7.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b

from dskit.engine.pools import Blocks, Slots
from dskit.engine.seq import Sequence


class Node:
    """One whole block of some prefix: its key, the block, and the slot of the state at its end (0: none)."""

    __slots__ = ("block", "key", "snapshot")

    def __init__(self, key: bytes, block: int):
        self.key, self.block, self.snapshot = key, block, 0


def chain(seq: Sequence, count: int, size: int) -> list[bytes]:
    """Keys of the first `count` blocks of a sequence's tokens; kept in `seq.keys`."""
    keys = seq.keys
    while len(keys) < count:
        before = keys[-1] if keys else blake2b(seq.request.cache_salt.encode(), digest_size=16).digest()
        tokens = array("q", seq.tokens[len(keys) * size : (len(keys) + 1) * size])
        keys.append(blake2b(before + tokens.tobytes(), digest_size=16).digest())
    return keys[:count]


class PrefixTree:
    """Nodes by key; `blocks` is the pool that sequences use too, `snapshots` one of its own."""

    def __init__(self, blocks: Blocks, snapshots: Slots):
        self.blocks, self.snapshots = blocks, snapshots
        self.nodes: dict[bytes, Node] = {}
        self.of_block: dict[int, Node] = {}
        self.idle: OrderedDict[bytes, Node] = OrderedDict()  # longest unused first
        self.saved: OrderedDict[bytes, Node] = OrderedDict()  # nodes with a snapshot, longest unused first
        self.evictions = 0
        self.epoch = 0  # how often everything was forgotten

    def find(self, seq: Sequence, limit: int) -> list[Node]:
        """The longest known prefix of a sequence, `limit` tokens at most, as a path of nodes."""
        path = []
        for key in chain(seq, limit // self.blocks.block_size, self.blocks.block_size):
            if (node := self.nodes.get(key)) is None:
                break
            path.append(node)
        return path

    def hold(self, path: list[Node]) -> None:
        """Make a sequence a holder of these blocks."""
        self.blocks.share(node.block for node in path)
        for node in path:
            self.idle.pop(node.key, None)
        if path and path[-1].snapshot:
            self.saved.move_to_end(path[-1].key)

    def release(self, blocks: list[int]) -> None:
        """Let go of all blocks of a sequence, the last one first; those in the tree may now be idle."""
        for block in reversed(blocks):
            self.blocks.free([block])
            node = self.of_block.get(block)
            if node is None or self.blocks.holders(block) > 1:
                continue
            if self.nodes.get(node.key) is node:
                self.idle[node.key] = node
            else:  # cleared while it was held
                self._give_back(node)

    def publish(self, seq: Sequence) -> None:
        """Put the whole blocks that a sequence has computed into the tree.

        Where another sequence was first, its block is taken and the own one, with equal contents, freed.
        """
        whole = seq.num_computed // self.blocks.block_size
        for i, key in enumerate(chain(seq, whole, self.blocks.block_size)[len(seq.path) :], len(seq.path)):
            own, node = seq.blocks[i], self.nodes.get(key)
            if node is None:
                node = self.nodes[key] = self.of_block[own] = Node(key, own)
                self.blocks.share([own])
            elif node.block != own:
                self.hold([node])
                self.blocks.free([own])
                seq.blocks[i] = node.block
            seq.path.append(node)

    def evict(self, count: int) -> None:
        """Give up to `count` blocks of idle nodes back to the pool, longest unused first."""
        for _ in range(min(count, len(self.idle))):
            self._remove(next(iter(self.idle.values())))
            self.evictions += 1

    def drop(self, path: list[Node]) -> None:
        """Forget those nodes of a released path that nobody else holds: what they hold may be wrong."""
        for node in reversed(path):
            if node.key in self.idle:
                self._remove(node)

    def clear(self) -> None:
        """Forget everything: after other kernels or weights, what is cached is not what they would give."""
        for node in list(self.idle.values()):
            self._remove(node)
        for node in list(self.saved.values()):
            self.forget(node)
        self.nodes = {}  # what is still held goes when it is let go
        self.epoch += 1

    # ---- snapshots ---------------------------------------------------------------------------------------

    def room(self) -> int | None:
        """A slot for a new snapshot, taken from the one that has not been used for longest if need be."""
        if not self.snapshots.free_count and self.saved:
            self.forget(next(iter(self.saved.values())))
        return self.snapshots.alloc()

    def keep(self, node: Node, slot: int) -> None:
        """Attach a snapshot to the node at whose end it was taken."""
        if node.snapshot or self.nodes.get(node.key) is not node:  # another came first, or it is cleared
            self.snapshots.free(slot)
            return
        node.snapshot = slot
        self.saved[node.key] = node

    def forget(self, node: Node | None) -> None:
        """Give up a node's snapshot, if it has one."""
        if node is not None and node.snapshot:
            del self.saved[node.key]
            self.snapshots.free(node.snapshot)
            node.snapshot = 0

    def _remove(self, node: Node) -> None:
        """Take an idle node out of the tree and give its block back."""
        del self.idle[node.key], self.nodes[node.key]
        self.forget(node)
        self._give_back(node)

    def _give_back(self, node: Node) -> None:
        del self.of_block[node.block]
        self.blocks.free([node.block])
