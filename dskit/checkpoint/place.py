"""Putting weights into a model, and taking them out again in the released form.

Idea: the model is built on the meta device, without memory, and each weight goes to its parameter as it comes
by. Names are attribute paths; only the routed experts differ: all w1 and w3 of a layer are stacked in one
tensor, which is allocated once and filled expert by expert. So nothing is ever held twice. A rank of an
expert-parallel group stacks the experts that it holds, and has no others read.

    packed    codes and scales as stored, restored when used (the default on a GPU)
    shared    packed, but one scale for 128 columns of an FP8 projection: the fastest prefill on a GPU
    expanded  numbers, of the dtype that numerics hold (the default on a CPU and in exact numerics)

Shapes: experts.w13.weight [E, 2I, D], rows of w1, then w3 (MXFP4 [E, 2I, D/2]); experts.w2.weight [E, D, I].
State: the model belongs to the caller; buffers and parameters are on its device when `finish` has run.
Errors: ValueError for an unknown storage; RuntimeError when layout and model disagree, a bug of dskit.
Source: model.md 4.3, 4.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from dskit.checkpoint.files import ROWS_AT_ONCE
from dskit.checkpoint.spec import EXPERT, ROW_GROUP, Held, Weight, layout
from dskit.config import ModelConfig
from dskit.layers.engram import Table
from dskit.layers.linear import (
    Experts,
    Linear,
    Numerics,
    pack_fp4,
    pack_fp8,
    share_scales,
    unpack_fp4,
    unpack_fp8,
)
from dskit.layers.moe import RoutedExperts
from dskit.model import Model

Stream = Iterable[tuple[Weight, Tensor, Tensor | None]]  # weight, stored tensor, scales

STORAGES = ("packed", "shared", "expanded")
SHARED = 128  # columns
_ALIASES = {"markov_head.markov_w1": "markov_head.embed", "markov_head.markov_w2": "markov_head.head"}


class Tables:
    """Where Engram tables go: whole to the model's device, on a CPU left in the file, mapped.

    They may exceed the memory; other places for them are the engine's (engine/engram.py).
    """

    sampled = False  # whether a look at some rows has to do, where reading them all would take minutes

    def share(self, weight: Weight) -> slice:
        """Rows of a table that this process reads, or draws."""
        return slice(0, weight.shape[0])

    def room(self, weight: Weight, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for the codes and scales of those rows, for tables that are drawn."""
        rows = len(range(weight.shape[0])[self.share(weight)])
        widths = weight.shape[1], -(-weight.shape[1] // ROW_GROUP[1])
        return tuple(torch.empty(rows, width, dtype=torch.uint8, device=device) for width in widths)

    def keep(self, weight: Weight, tensor: Tensor, scale: Tensor | None, device: torch.device
             ) -> tuple[Tensor, Tensor | None]:
        """What the model holds of a table of which those rows came by."""
        return tensor.to(device), None if scale is None else _copy(scale, device)

    def rows_on(self, device: torch.device, weight: Weight) -> int:
        """Rows that take memory of the device."""
        return weight.shape[0]


# ---- into the model ----------------------------------------------------------------------------------------

def build(config: ModelConfig, numerics: Numerics, stream: Stream, *, device: torch.device,
          storage: str, fold: np.ndarray | None = None, held: Held | None = None,
          tables: Tables | None = None) -> Model:
    """A model on `device` with the weights of the stream, and the folded vocabulary for its Engram layers."""
    if storage not in STORAGES:
        raise ValueError(f"storage is {storage!r}; choose one of {', '.join(STORAGES)}")
    with torch.device("meta"):
        model = Model(config, numerics)
        for module in model.modules() if held else ():
            if isinstance(module, RoutedExperts):
                module.hold(held(module.w13.experts))
    for weight, tensor, scale in stream:
        place(model, weight, tensor, scale, device=device, storage=storage, tables=tables or Tables())
        del tensor, scale
    finish(model, device)
    model.folding = fold
    return model


def place(model: Model, weight: Weight, tensor: Tensor, scale: Tensor | None, *, device: torch.device,
          storage: str, tables: Tables) -> None:
    """Put one weight where it belongs."""
    if expert := EXPERT.match(weight.name):
        _place_expert(model, expert, weight, tensor, scale, device, storage)
        return
    module, leaf = find(model, weight.name)
    if isinstance(module, Table):
        tensor, scale = tables.keep(weight, tensor, scale, device)
        module.weight, module.scale = _parameter(tensor), None if scale is None else _parameter(scale)
    elif isinstance(module, Linear):
        if weight.shape != (module.out_features, module.in_features):
            raise RuntimeError(f"{weight.name} is {weight.shape} in the layout, but the model's is "
                               f"{(module.out_features, module.in_features)}")
        if scale is not None and storage != "expanded":
            tensor, scale = _copy(tensor, device), _copy(scale, device)
            if storage == "shared" and module.block[1] < SHARED:
                tensor, scale = share_scales(tensor, scale, module.block, SHARED)
                module.block = module.block[0], SHARED
            module.weight, module.scale = _parameter(tensor), _parameter(scale)
        else:
            dtype = torch.float32 if module.fmt == "fp32" else _dtype(module, scale)
            module.weight = _parameter(_numbers(weight, tensor, scale, module, device, dtype))
    else:
        setattr(module, leaf, _parameter(_copy(tensor, device, getattr(module, leaf).dtype)))


def _place_expert(model: Model, expert: re.Match, weight: Weight, tensor: Tensor, scale: Tensor | None,
                  device: torch.device, storage: str) -> None:
    at, number, name = expert[1], int(expert[2]), expert[3]
    held = model.get_submodule(at).held
    slots = [number] if held is None else [slot for slot, one in enumerate(held) if one == number]
    stack = model.get_submodule(f"{at}.{'w2' if name == 'w2' else 'w13'}")
    if scale is None or storage == "expanded":
        tensor, scale = _numbers(weight, tensor, scale, stack, device, _dtype(stack, scale)), None
    elif weight.fmt == "fp8" and tensor.shape[0] % stack.block[0]:
        raise ValueError(f"storage='packed' stacks w1 on w3, yet moe_intermediate_size = {tensor.shape[0]} "
                         f"is no multiple of the block's {stack.block[0]} rows; choose storage='expanded'")
    halves, half = (1, 0) if name == "w2" else (2, 0 if name == "w1" else 1)
    if stack.weight.is_meta:
        stack.weight = _parameter(_stacked(stack.experts, tensor, halves, device))
        stack.scale = None if scale is None else _parameter(_stacked(stack.experts, scale, halves, device))
    for whole, part in ((stack.weight, tensor), (stack.scale, scale)):
        if part is not None:
            for slot in slots:
                _bytes(whole.data[slot].chunk(halves)[half]).copy_(_bytes(part))


def _dtype(module: Linear | Experts, scale: Tensor | None) -> torch.dtype:
    """What numbers are held in: restored codes are exact in less."""
    return module.numerics.compute if scale is None else module.numerics.held


def _stacked(experts: int, part: Tensor, halves: int, device: torch.device) -> Tensor:
    return torch.empty(experts, halves * part.shape[0], part.shape[1], dtype=part.dtype, device=device)


def _numbers(weight: Weight, tensor: Tensor, scale: Tensor | None, module: Linear | Experts,
             device: torch.device, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return _copy(tensor, device, dtype)
    tensor, scale = tensor.to(device), scale.to(device)
    if weight.fmt == "fp4":
        return unpack_fp4(tensor, scale, dtype)
    return unpack_fp8(tensor, scale, module.block, dtype)


def find(model: Model, name: str) -> tuple[nn.Module, str]:
    """(module, attribute) of a released name."""
    for released, own in _ALIASES.items():
        name = name.replace(released, own)
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def finish(model: Model, device: torch.device) -> None:
    """Move the buffers to the device; every parameter must have been placed."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise RuntimeError(f"{len(empty)} parameters are not in the layout: {', '.join(empty[:5])}")


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _copy(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy that owns its memory: a view of a mapped file would change with the file."""
    return tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True)


def _bytes(tensor: Tensor) -> Tensor:
    """One-byte formats as uint8, since not every device copies them under their own name."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


# ---- out of the model --------------------------------------------------------------------------------------

def weights(model: Model) -> Iterator[tuple[Weight, Tensor, Tensor | None]]:
    """The stream of a model, in the released form: what is held as numbers is packed on the way.

    ValueError for one that holds a part of its experts.
    """
    if any(isinstance(module, RoutedExperts) and module.held is not None for module in model.modules()):
        raise ValueError("this model holds the experts of one rank; load it on one (ep=1) to write all of it")
    for weight in layout(model.config):
        tensor, scale = _held(model, weight)
        if weight.table and len(tensor) != weight.shape[0]:
            raise ValueError(f"{weight.name} is spread over ranks, and {len(tensor)} of {weight.shape[0]} "
                             "rows are here; load the model with another engram_placement to save it")
        if scale is None:
            tensor, scale = packed(weight, tensor, model.config)
        yield weight, tensor.detach(), None if scale is None else scale.detach()


def _held(model: Model, weight: Weight) -> tuple[Tensor, Tensor | None]:
    if not (expert := EXPERT.match(weight.name)):
        module, leaf = find(model, weight.name)
        scale = getattr(module, "scale", None) if leaf == "weight" else None
        if isinstance(module, Linear) and scale is not None:  # one for each block again, where they share it
            block = model.config.weight_block_size[1]
            scale = scale.repeat_interleave(module.block[1] // block, 1)[:, : -(-module.in_features // block)]
        return getattr(module, leaf), scale
    stack = model.get_submodule(f"{expert[1]}.{'w2' if expert[3] == 'w2' else 'w13'}")
    halves, half = (1, 0) if expert[3] == "w2" else (2, 0 if expert[3] == "w1" else 1)
    part = int(expert[2])
    scale = None if stack.scale is None else stack.scale[part].chunk(halves)[half]
    return stack.weight[part].chunk(halves)[half], scale


def packed(weight: Weight, numbers: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
    """(stored tensor, scales or None) of a weight given as numbers; Engram tables are packed in parts."""
    if weight.fmt == "fp4":
        return pack_fp4(numbers.float())
    if weight.fmt == "fp8":
        return pack_fp8(numbers, config.weight_block_size)
    if weight.fmt == "row":
        here = Tables()
        return pack_rows(numbers.split(ROWS_AT_ONCE), here.share(weight), here.room(weight, numbers.device))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}[weight.fmt]
    return numbers if not config.quantized else numbers.to(dtype), None


def pack_rows(parts: Iterable[Tensor], rows: slice, room: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(codes, scales) of some rows of an Engram table that comes in parts of consecutive rows."""
    start = 0
    for part in parts:
        first, last = max(start, rows.start), min(start + len(part), rows.stop)
        if first < last:
            mine = pack_fp8(part[first - start : last - start], ROW_GROUP)
            for whole, tensor in zip(room, mine, strict=True):
                whole[first - rows.start : last - rows.start] = tensor.view(torch.uint8)
        start += len(part)
        if start >= rows.stop:
            break
    codes, scales = room
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
