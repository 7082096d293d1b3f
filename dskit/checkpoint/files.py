"""Reading a checkpoint folder: lazily, one weight at a time, and nothing unchecked.

Idea: headers first. Opening a folder reads the index and the header of every shard and finds for each weight
of the layout the tensor that holds it; `check` compares dtypes and shapes, all before the first number is
read. Then `weights` yields one weight after another, its numbers checked as they come by.

Shapes: stored tensors as spec.py lists them.
State: shards stay open, memory-mapped; a yielded tensor may be a view of the file.
Errors: CheckpointError, naming file, tensor, what was found and what was expected.
Source: model.md 2.5, 4.1 to 4.4.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dskit.checkpoint.names import Part, released, unused
from dskit.checkpoint.spec import Held, Weight, layout, spec, stored_form
from dskit.config import ModelConfig
from dskit.layers.engram import folding
from dskit.layers.linear import scale_bytes

if TYPE_CHECKING:
    from dskit.checkpoint.place import Tables

INDEX = "model.safetensors.index.json"
ROWS_AT_ONCE = 1 << 20  # rows of a large table that a check looks at together

# other dtypes that hold the same numbers; a scale in F32 must be a power of two
_ALSO = {"I8": ("U8",), "F8_E8M0": ("U8", "F32"), "BF16": ("F32",), "I64": ("I32",)}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: the message says where, what was found and what was expected."""

    def __init__(self, problem: str, *, file: Path | str | None = None, tensor: str | None = None,
                 found: object = None, expected: object = None):
        self.file, self.tensor, self.found, self.expected = file, tensor, found, expected
        where = "".join(f"{part}: " for part in (file, tensor) if part is not None)
        compared = "" if expected is None else f": found {found}, expected {expected}"
        super().__init__(f"{where}{problem}{compared}")


class Place(NamedTuple):
    """Where a released tensor lies: the shard, its name there, and which part of it."""

    file: str
    stored: str
    part: Part


class Shards:
    """The stored tensors of a folder: `files` says in which shard each of them is."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.files = self._index()
        self._shards = {file: self._open(file) for file in sorted(set(self.files.values()))}

    def _index(self) -> dict[str, str]:
        """Stored name -> shard, from the index, or from the only shard where there is no index."""
        file = self.path / INDEX
        shards = sorted(p.name for p in self.path.glob("*.safetensors"))
        if not file.is_file():
            if len(shards) != 1:
                raise CheckpointError("the index is missing", file=file, found=f"{len(shards)} shards",
                                      expected="the index, or one shard alone")
            return dict.fromkeys(self._open(shards[0]).keys(), shards[0])
        try:
            index = json.loads(file.read_text())["weight_map"]
            names = {str(name): str(shard) for name, shard in index.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the index cannot be read ({error!r})", file=file, found="damaged JSON",
                                  expected='{"weight_map": {tensor: shard}}') from None
        stray = [shard for shard in names.values() if Path(shard).name != shard]
        if stray:
            raise CheckpointError("the index points outside the folder", file=file, found=stray[0],
                                  expected="file names")
        return names

    def _open(self, shard: str):
        file = self.path / shard
        if not file.is_file():
            tensor = next((name for name, at in self.files.items() if at == shard), None)
            raise CheckpointError("the shard is missing", file=file, tensor=tensor, found="no such file",
                                  expected="the shard that the index names")
        try:
            return safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            needed = _header_says(file)
            raise CheckpointError(f"the shard is damaged or cut short ({error})", file=file,
                                  found=f"{file.stat().st_size} bytes",
                                  expected=f"{needed} bytes" if needed else "a safetensors file") from None


class Folder(Shards):
    """An opened checkpoint folder; `config` is the one that its tensors fit.

    places: released name -> Place. unused: stored names without use for text. unmapped, missing: what does
    not fit the layout (`check` raises for them).
    """

    def __init__(self, path: str | Path):
        self.config = ModelConfig.from_folder(path)
        super().__init__(path)
        self._held = {file: frozenset(shard.keys()) for file, shard in self._shards.items()}
        self.places: dict[str, Place] = {}
        self.unused: list[str] = []
        self._expected = spec(self.config)
        self._find_names()
        self._trust_draft_stages()
        self.missing = [name for name in self._expected if name not in self.places]
        self.unmapped = [place.stored for name, place in self.places.items() if name not in self._expected]

    # ---- finding -------------------------------------------------------------------------------------------

    def _find_names(self) -> None:
        for stored, file in self.files.items():
            if stored not in self._held[file]:
                other = next((at for at, names in self._held.items() if stored in names), "no shard")
                self._fail("the tensor is not in the shard that the index names (swapped shards?)", stored,
                           found=f"in {other}", expected=f"in {file}")
            for name, part in [(stored, None)] if stored in self._expected else released(stored, self.config):
                if unused(name):
                    self.unused.append(stored)
                elif name in self.places:
                    self._fail("two tensors have the same meaning", stored,
                               found=f"also {self.places[name].stored}", expected=f"one {name}")
                else:
                    self.places[name] = Place(file, stored, part)
        for file, names in self._held.items():
            for stored in sorted(names - self.files.keys()):
                raise CheckpointError("the shard holds a tensor that the index does not name",
                                      file=self.path / file, tensor=stored)

    def _fail(self, problem: str, stored: str, *, found: object = None, expected: object = None) -> NoReturn:
        raise CheckpointError(problem, file=self.path / self.files[stored], tensor=stored, found=found,
                              expected=expected) from None

    def _trust_draft_stages(self) -> None:
        """V4 files miscount their draft stages, and the first release had another head: ask the tensors."""
        if self.config.is_v41:
            return
        drafts = [name for name in self.places if name.startswith("mtp.")]
        if "mtp.0.main_proj.weight" not in self.places:
            self.unused += [self.places.pop(name).stored for name in drafts]
            drafts = []
        stages = 1 + max((int(name.split(".")[1]) for name in drafts), default=-1)
        if stages != self.config.num_nextn_predict_layers:
            ratios = self.config.compress_ratios[: self.config.num_hidden_layers] + (0,) * stages
            self.config = self.config.replace(num_nextn_predict_layers=stages, compress_ratios=ratios)
            self._expected = spec(self.config)

    # ---- checking ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise CheckpointError for a tensor missing, unexpected or misshapen, and for a wrong tokenizer."""
        for name in self.missing:
            dtype, shape = self._expected[name]
            scale = name.endswith(".scale") and name.removesuffix("scale") + "weight" in self.places
            raise CheckpointError(f"the {'scale of a packed weight' if scale else 'tensor'} is missing",
                                  file=self.path / INDEX, tensor=name, found="nothing",
                                  expected=f"{dtype} {list(shape)}")
        for stored in self.unmapped:
            self._fail(f"unexpected tensor{_hint(stored, self.config)}", stored)
        for name, (dtype, shape) in self._expected.items():
            self._check_header(name, dtype, shape)
        self.fold  # noqa: B018 - the check is in the computing

    def _check_header(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        file, stored, part = self.places[name]
        held = self._shards[file].get_slice(stored)
        allowed = [dtype, *_ALSO.get(dtype, ())]
        if dtype == "F32" and not self.config.quantized:
            allowed.append("BF16")
        if held.get_dtype() not in allowed:
            self._fail("wrong dtype", stored, found=held.get_dtype(), expected=" or ".join(allowed))
        if part is not None:  # a stack of experts, w1 and w3 in one
            shape = (self.config.n_routed_experts, shape[0] * len(part), shape[1])
        if tuple(held.get_shape()) != shape:
            self._fail("wrong shape", stored, found=list(held.get_shape()), expected=list(shape))

    @cached_property
    def fold(self):
        """The folded vocabulary of the tokenizer, int64 [vocab_size]; None without Engram layers."""
        file = self.path / "tokenizer.json"
        if not self.config.engram_layer_ids:
            return None
        if not file.is_file():
            return folding(self.config)
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"the tokenizer cannot be read ({error})", file=file) from None
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        if size > self.config.vocab_size:
            raise CheckpointError("the tokenizer does not belong to the checkpoint", file=file,
                                  found=f"{size} tokens",
                                  expected=f"at most vocab_size = {self.config.vocab_size}")
        try:
            return folding(self.config, tokenizer)
        except ValueError as error:
            raise CheckpointError(str(error), file=file) from None

    # ---- reading -------------------------------------------------------------------------------------------

    def weights(self, held: Held | None = None, tables: Tables | None = None
                ) -> Iterator[tuple[Weight, Tensor, Tensor | None]]:
        """(weight, stored tensor, its scales or None), one at a time in the order of the layout.

        held: which experts are read, as in spec.layout; tables: which rows of Engram tables.
        """
        for weight in layout(self.config, held):
            form = stored_form(weight, self.config).items()
            tensor, scale = ([self.read(name, dtype) for name, (dtype, _) in form] + [None])[:2]
            looked = slice(None)
            if weight.table and tables is not None:
                rows, looked = tables.share(weight), slice(ROWS_AT_ONCE if tables.sampled else None)
                tensor, scale = tensor[rows], None if scale is None else scale[rows]
            self._check_numbers(weight, tensor[looked], None if scale is None else scale[looked])
            yield weight, tensor, scale
            del tensor, scale

    def read(self, name: str, dtype: str) -> Tensor:
        """One stored tensor, in the released dtype where another one was used for the same bytes."""
        file, stored, part = self.places[name]
        shard = self._shards[file]
        try:
            tensor = shard.get_tensor(stored) if part is None else shard.get_slice(stored)[part]
        except (SafetensorError, OSError) as error:
            self._fail(f"the tensor cannot be read ({error})", stored)
        if dtype == "I8":
            return tensor.view(torch.int8)
        if dtype == "I64":
            return tensor.long()
        if dtype == "F8_E8M0" and tensor.dtype == torch.float32:
            scale = scale_bytes(tensor)
            if not torch.equal(scale.float(), tensor):
                self._fail("the scales are not powers of two", stored)
            return scale
        return tensor.view(torch.float8_e8m0fnu) if dtype == "F8_E8M0" else tensor

    def _check_numbers(self, weight: Weight, tensor: Tensor, scale: Tensor | None) -> None:
        if (bad := first_bad(tensor)) is not None:
            self._fail("a weight is NaN or infinite", self.places[weight.name].stored, found=f"one at {bad}",
                       expected="finite numbers")
        if scale is not None and (bad := first_bad(scale)) is not None:
            self._fail("a scale is NaN", self.places[weight.scale_name].stored, found=f"byte 255 at {bad}",
                       expected="E8M0 bytes below 255")
        if weight.fmt == "int64":
            low, high, experts = int(tensor.min()), int(tensor.max()), self.config.n_routed_experts
            if low < 0 or high >= experts:
                self._fail("the table names experts that do not exist", self.places[weight.name].stored,
                           found=f"{low} to {high}", expected=f"0 to {experts - 1}")


def first_bad(tensor: Tensor) -> list[int] | None:
    """Index of the first NaN or infinite number (E8M0: byte 255), or None; looks at large tables in parts."""
    if tensor.dtype in (torch.int8, torch.int64):
        return None
    for start in range(0, tensor.shape[0], ROWS_AT_ONCE):
        part = tensor[start : start + ROWS_AT_ONCE]
        if part.dtype == torch.float8_e8m0fnu:
            bad = part.view(torch.uint8) == 255
        elif part.dtype == torch.float8_e4m3fn:
            bad = (part.view(torch.uint8) & 0x7F) == 0x7F
        else:
            bad = ~part.isfinite()
        if bad.any():
            first = bad.nonzero()[0].tolist()
            return [first[0] + start, *first[1:]]
    return None


def _header_says(file: Path) -> int | None:
    """Bytes that a safetensors header promises, None where the header itself is damaged."""
    with suppress(ValueError, struct.error, KeyError, TypeError, AttributeError), file.open("rb") as data:
        size = struct.unpack("<Q", data.read(8))[0]
        if size < 1 << 30:
            header = json.loads(data.read(size))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return 8 + size + max(ends, default=0)
    return None


def _hint(name: str, config: ModelConfig) -> str:
    """Why a tensor of the family does not belong into this checkpoint."""
    if ".wgate." in name:
        return f" (a gate belongs to KV sources with a ratio above 1, among {config.kv_source_layer_ids})"
    if ".indexer.wk." in name or ".indexer.k_norm." in name:
        return f" (an index key belongs to KV sources, {config.kv_source_layer_ids})"
    if name.startswith("mtp."):
        return f" (num_nextn_predict_layers is {config.num_nextn_predict_layers})"
    if name.endswith(".scale") and not config.quantized:
        return " (config.json has no quantization_config)"
    return ""
