"""Sliding window: every layer remembers its own last W tokens at full resolution.

Idea: each token leaves one vector that is key and value for all heads. A request keeps the newest ones
in a ring of `window + backtrack` rows, the slot of position p being p mod ring. A step that adds few
rows writes them and reads the ring; a longer one reads the line [what the ring held | new rows] and
then commits the newest rows. Reading is by index in both cases, in ascending position, so prefill and
decode add up in the same order.

Shapes: ring [slots * ring, H], new rows [T, H], read [T, W] (rows of the line, -1 where no entry is). A row
is numbers or the bytes of a packed cache (cache.py): both are moved alike.
State: rings belong to the engine; a plan is made once per step and serves all layers.
Errors: none of its own.
Kernel: kernels/cache.py (cache.write_, which writes the rows of a decode step as it makes them)
Source: model.md 3.7, 5.1; engine.md 6.
Try: notebooks/02_sliding_window.ipynb
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dskit.layers.norm import cast


@dataclass
class RingPlan:
    """How one step's rows meet the rings of its requests.

    read [T, W]: rows of the line that each query sees, ascending position, -1 for none.
    history: ring rows that precede the new ones in the line; None when rows are written first.
    kept, slots: which new rows are committed (None: all), and to which ring rows.
    """

    read: Tensor
    history: Tensor | None
    kept: Tensor | None
    slots: Tensor


def remember_(ring: Tensor | None, new: Tensor, plan: RingPlan) -> Tensor:
    """Commit new rows to the ring and return the line [S, ...] that `plan.read` points into.

    Without a ring (whole sequences at once, as in training) the new rows are the line.
    """
    if ring is None:
        return new
    if plan.history is None:
        ring.index_copy_(0, plan.slots, cast(new, ring.dtype))
        return ring
    line = torch.cat((ring[plan.history], cast(new, ring.dtype)))
    kept = new if plan.kept is None else new[plan.kept]
    ring.index_copy_(0, plan.slots, cast(kept, ring.dtype))
    return line
