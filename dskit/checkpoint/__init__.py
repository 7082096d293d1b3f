"""Checkpoints: read and write the released format, and make any preset from a seed.

Everything here is a stream of weights (what it is, its stored tensor, its scales) from a source into a sink:

    sources    files.Folder(path).weights()    draw.weights(config, seed)    place.weights(model)
    sinks      place.build(config, ...)        write.write(config, ..., folder)

    load = Folder -> build      random = draw -> build      save = model -> write
    write_random = draw -> write                            convert = Folder -> write

One weight is in flight at a time, so nothing is ever held twice. Read in this order: spec (which tensors
there are), files (reading and checks), names (other spellings), place (into and out of a model), draw, write;
standalone reads drafts that come alone.

Errors: CheckpointError names file, tensor, what was found and what was expected; ConfigError the field.
Source: model.md sections 2.5 and 4, appendix B.

    model = checkpoint.load("tiny", device="cpu")
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dskit.checkpoint import draw, place
from dskit.checkpoint.files import CheckpointError, Folder
from dskit.checkpoint.place import Tables
from dskit.checkpoint.spec import NBYTES, Held, layout, spec, stored_form
from dskit.checkpoint.standalone import Standalone, is_standalone
from dskit.checkpoint.write import SHARD_SIZE, Report, convert, write
from dskit.config import PRESETS, PRESETS_DIR, ModelConfig, preset
from dskit.layers.engram import folding
from dskit.layers.linear import Numerics
from dskit.model import Model

__all__ = ["CheckpointError", "Report", "Standalone", "Tables", "configuration", "convert", "default_device",
           "is_drawn", "load", "locate", "random", "save", "spec", "write_random"]

Device = str | torch.device


def load(source: str | Path, *, device: Device | None = None, numerics: str = "release", seed: int = 0,
         batch_invariant: bool = False, storage: str | None = None, dtype: torch.dtype | None = None,
         held: Held | None = None, tables: Tables | None = None,
         progress: Callable[[float], None] | None = None) -> Model:
    """A model from a preset's name, a checkpoint folder, or a Hugging Face id (`owner/name`).

    Presets other than `demo` have random weights, drawn from `seed`. numerics: "release", "token" or "exact".
    storage: "packed", "shared" or "expanded" weights (place.py); device: a GPU if there is one, else the CPU.
    dtype: of the operands of products, in exact numerics of every value, where not the default.
    held: which experts one rank of several has (spec.layout); the others are not read.
    tables: where Engram tables go, if not where the model is.
    progress: told what share of the weights is there, after each.
    """
    if is_drawn(source):
        return random(preset(str(source)), numerics=numerics, seed=seed, device=device,
                      batch_invariant=batch_invariant, storage=storage, dtype=dtype, held=held, tables=tables,
                      progress=progress)
    files = Folder(locate(source))
    files.check()
    device, how, storage = _how(files.config, numerics, device, batch_invariant, storage, dtype, held, tables)
    stream = _counted(files.weights(held, tables), files.config, held, progress)
    return place.build(files.config, how, stream, device=device, storage=storage, fold=files.fold, held=held,
                       tables=tables)


def random(config: ModelConfig, *, numerics: str = "release", seed: int = 0, device: Device | None = None,
           batch_invariant: bool = False, storage: str | None = None, dtype: torch.dtype | None = None,
           calm: bool = False, held: Held | None = None, tables: Tables | None = None,
           progress: Callable[[float], None] | None = None) -> Model:
    """A model with random weights, drawn on the device; `calm` as in draw.weights, the rest as in `load`."""
    device, how, storage = _how(config, numerics, device, batch_invariant, storage, dtype, held, tables)
    stream = draw.weights(config, seed, device=device, calm=calm, held=held, tables=tables)
    stream = _counted(stream, config, held, progress)
    fold = folding(config) if config.engram_layer_ids else None
    return place.build(config, how, stream, device=device, storage=storage, fold=fold, held=held,
                       tables=tables)


def _counted(stream: place.Stream, config: ModelConfig, held: Held | None,
             progress: Callable[[float], None] | None) -> place.Stream:
    """The stream; `progress` hears how far it is."""
    total, done = sum(1 for _ in layout(config, held)), 0
    for item in stream:
        yield item
        del item  # before the next one is read
        done += 1  # noqa: SIM113 - enumerate would keep the item
        if progress is not None:
            progress(done / total)


def save(model: Model, folder: str | Path, shard_size: int = SHARD_SIZE) -> Path:
    """Write a model in the released format; weights that it holds as numbers are packed on the way."""
    return write(model.config, place.weights(model), folder, shard_size)


def write_random(config: ModelConfig, folder: str | Path, seed: int = 0, shard_size: int = SHARD_SIZE, *,
                 calm: bool = False, device: Device = "cpu") -> Path:
    """Write a random checkpoint, drawn on `device`; loading it there gives what `random` gives there."""
    return write(config, draw.weights(config, seed, device=device, calm=calm), folder, shard_size)


def configuration(source: str | Path) -> ModelConfig:
    """The configuration of a preset or a checkpoint folder, without a look at the weights."""
    if is_drawn(source):
        return preset(str(source))
    return ModelConfig.from_folder(locate(source, ["*.json"]))


def locate(source: str | Path, patterns: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """The folder of a source that has files: the demo's, the one named, or a download from Hugging Face.

    patterns: the files that are needed of it.
    """
    name = str(source)
    if name == "demo":
        if not list((PRESETS_DIR / name).glob("*.safetensors")):
            raise CheckpointError("the demo has no weights here; `dskit train demo` makes them",
                                  file=PRESETS_DIR / name, found="no *.safetensors", expected="two shards")
        return PRESETS_DIR / name
    if Path(name).expanduser().is_dir():
        if is_standalone(folder := Path(name).expanduser()):
            Standalone(folder).refuse()
        return folder
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _download(name, patterns)
    presets = ", ".join(PRESETS)
    raise CheckpointError("no such model", file=name, found="no folder of this name",
                          expected=f"a preset ({presets}), a folder, or a Hugging Face id owner/name")


def _download(name: str, patterns: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError("a Hugging Face id, but `pip install huggingface_hub` is needed to download it",
                              file=name, found="no folder of this name",
                              expected="a folder, or the package") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client raises a dozen kinds, none of which says what to do
        raise CheckpointError("the download from Hugging Face failed; a folder with its files can be named "
                              f"instead ({type(error).__name__}: {error})", file=name) from error


def is_drawn(source: str | Path) -> bool:
    """Whether a source has no files: a preset whose weights are random."""
    name = str(source)
    return name != "demo" and (name in PRESETS or re.fullmatch(r"slice:\d+", name) is not None)


def default_device(device: Device | None) -> torch.device:
    """The device asked for, or a GPU if there is one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _how(config: ModelConfig, numerics: str, device: Device | None, batch_invariant: bool,
         storage: str | None, dtype: torch.dtype | None, held: Held | None, tables: Tables | None
         ) -> tuple[torch.device, Numerics, str]:
    """(device, numerics, storage) with defaults filled in; CheckpointError when the weights do not fit."""
    device = default_device(device)
    how = Numerics.of(config, numerics, device=device, batch_invariant=batch_invariant, compute=dtype)
    how = how if how.release or dtype is None else replace(how, dtype=dtype)
    storage = storage or ("packed" if device.type == "cuda" and how.release else "expanded")
    needed, there = model_bytes(config, how, storage, device, held, tables), _memory(device)
    if needed > there:
        raise CheckpointError(f"the weights do not fit on {device}",
                              found=f"{there / 2**30:.1f} GiB of memory",
                              expected=f"{needed / 2**30:.1f} GiB ({storage} weights)")
    return device, how, storage


def model_bytes(config: ModelConfig, numerics: Numerics, storage: str, device: torch.device,
                held: Held | None = None, tables: Tables | None = None) -> int:
    """Bytes of a model's weights on a device; Engram tables are always packed, and may lie elsewhere."""
    tables, total = tables or Tables(), 0
    for weight in layout(config, held):
        if weight.table:
            weight = weight._replace(shape=(tables.rows_on(device, weight), weight.shape[1]))
        if weight.fmt in ("fp8", "fp4") and storage == "expanded":
            total += _count(weight.shape) * (numerics.held if config.quantized else numerics.compute).itemsize
        else:
            stored = stored_form(weight, config).values()
            total += sum(_count(shape) * NBYTES[dtype] for dtype, shape in stored)
    return total


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
