"""Between host and device without waiting: a copy takes its place in the device's queue, and that is all.

An ordinary copy to or from a GPU waits until everything queued before it has been done, which would undo
planning ahead. These go through pinned memory; only `Fetch.wait` waits, and for nothing queued after it.
What a step needs are some thirty small tensors: a `Parcel` brings them all by one copy, always to one place.

Kernels of Triton, streams and events go to the current GPU of the thread that makes them, which is the first
one until somebody says otherwise, wherever the tensors are: whoever works for a model makes its GPU current.

Errors: ValueError for a parcel that is filled with tensors of other sizes. On a CPU there is nothing to do.
Source: engine.md section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16  # bytes: what kernels like an address to be a multiple of


def current(device: torch.device | str) -> AbstractContextManager:
    """Make a device the current one of this thread meanwhile, if it is a GPU."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def mapped(value: Any, work: Callable[[Tensor], Any]) -> Any:
    """The same structure of dataclasses and containers with `work` done on each tensor in it."""
    if isinstance(value, Tensor):
        return work(value)
    if isinstance(value, dict):
        return {key: mapped(one, work) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(one, work) for one in value)
    if is_dataclass(value):
        return replace(value, **{f.name: mapped(getattr(value, f.name), work) for f in fields(value)})
    return value


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a structure, in the order in which `mapped` meets them."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = vars(value)  # in the order of its fields
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [leaf for one in value if one is not None for leaf in leaves(one)]


class Parcel:
    """A structure like the one given, `value`, whose tensors lie on the device side by side."""

    def __init__(self, like: Any, device: torch.device | str):
        self._spans, size = [], 0
        for leaf in leaves(like):
            self._spans.append(slice(size, size + leaf.nbytes))
            size += -(-leaf.nbytes // ALIGNED) * ALIGNED
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        spans = iter(self._spans)
        self.value = mapped(like, lambda leaf: self._buffer[next(spans)].view(leaf.dtype).view(leaf.shape))

    def fill(self, value: Any) -> Any:
        """Bring host tensors of the same sizes, or one that is there already; gives them as they will be on
        the device.
        """
        if isinstance(value, Tensor):
            return self.value.copy_(value)
        packed = torch.empty(len(self._buffer), dtype=torch.uint8, pin_memory=self._buffer.is_cuda)
        bytes_ = packed.numpy()
        for span, leaf in zip(self._spans, leaves(value), strict=True):
            bytes_[span] = leaf.numpy().reshape(-1).view(np.uint8)
        self._buffer.copy_(packed, non_blocking=True)
        return self.value


def send_all(value: Any, device: torch.device | str) -> Any:
    """A structure of host tensors on the device, by one copy."""
    return Parcel(value, device).fill(value) if torch.device(device).type == "cuda" else value


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on the device."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[Tensor]):
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event = torch.cuda.Event() if tensors[0].is_cuda else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
