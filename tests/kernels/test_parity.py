"""Every Triton implementation beside its reference, at every shape of its case table.

On a CPU the interpreter runs the edge shapes; on a GPU the compiled kernels run those and the
released widths.
"""

from __future__ import annotations

import time

import pytest
import torch

import dskit.engine.sampler
import dskit.model  # noqa: F401 - these two register the ops
from dskit import ops
from dskit.testing import all_cases, check, check_gradients

TABLE = all_cases()


def _has_kernel(name: str) -> bool:
    try:
        ops.find(name).implementation("triton")
    except ops.UnknownImplementation:
        return False
    return True


KERNELS = [name for name in TABLE if _has_kernel(name)]


def _params(which: str, *, grad: bool = False) -> list:
    names = [n for n in KERNELS if not grad or (TABLE[n].grads and ops.find(n).implementation("triton").grad)]
    return [pytest.param(name, shape, id=f"{name}-{i}")
            for name in names for i, shape in enumerate(getattr(TABLE[name], which))]


@pytest.mark.parametrize(("name", "shape"), _params("edges"))
def test_edges(name: str, shape: dict, device: torch.device) -> None:
    check(TABLE[name], shape, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape"), _params("frozen"))
def test_frozen(name: str, shape: dict, device: torch.device) -> None:
    """Where tests side by side fill the GPU's memory, one waits for the others and tries again."""
    for wait in (2, 10, 30):
        try:
            return check(TABLE[name], shape, device=device, on_device=True)
        except torch.OutOfMemoryError:
            pass
        finally:
            torch.cuda.empty_cache()
        time.sleep(wait)
    return check(TABLE[name], shape, device=device, on_device=True)


@pytest.mark.parametrize(("name", "shape"), _params("edges", grad=True))
def test_gradients(name: str, shape: dict, device: torch.device) -> None:
    check_gradients(TABLE[name], shape, device=device)
