"""Between host and device without waiting: a copy takes its place in the device's queue, and that is all.

An ordinary copy to or from a GPU waits until everything queued before it has been done, which would undo
planning ahead. These go through pinned memory; only `Fetch.wait` waits, and for nothing queued after it.

Errors: none of its own. On a CPU there is nothing to do.
Source: engine.md section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
