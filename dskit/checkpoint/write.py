"""Writing a checkpoint folder, one shard after another, and converting one folder into another.

Idea: a stream of weights fills a shard until it is full; only that shard is in memory. The draft stages get a
shard of their own, `mtp.safetensors`, so that a new draft leaves the backbone's bytes alone. Files get their
final names when all of them are complete: a broken write leaves the old checkpoint as it was.

Shapes: as spec.py lists them.
Units: shard_size in bytes, headers included.
Errors: CheckpointError when a source does not fit (files.py), OSError when the folder cannot be written.
Source: model.md 4.1, 7.2.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dskit.checkpoint.files import INDEX, Folder
from dskit.checkpoint.place import Stream, packed
from dskit.checkpoint.spec import layout
from dskit.config import ModelConfig

SHARD_SIZE = 4 << 30
DRAFT_SHARD = "mtp.safetensors"
_HEADER = 160  # bytes of a tensor's entry in a shard's header, at most


def write(config: ModelConfig, stream: Stream, folder: str | Path, shard_size: int = SHARD_SIZE) -> Path:
    """Write config.json, shards and index from a stream in the order of the layout; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    used = total = 0
    for weight, tensor, scale in stream:
        new = {weight.name: tensor} | ({} if scale is None else {weight.scale_name: scale})
        size = sum(t.numel() * t.element_size() + _HEADER for t in new.values())
        draft = weight.name.startswith("mtp.")
        if held and (used + size > shard_size or draft != next(iter(held)).startswith("mtp.")):
            parts.append(_part(folder, held, len(parts)))
            held, used = {}, 0
        held |= {name: t.cpu().contiguous() for name, t in new.items()}
        used += size
        total += size - len(new) * _HEADER
    parts.append(_part(folder, held, len(parts)))
    _publish(folder, parts, total, config)
    return folder


def _part(folder: Path, tensors: dict[str, Tensor], number: int) -> tuple[Path, list[str]]:
    path = folder / f"part-{number}.safetensors.tmp"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner reads
    return path, list(tensors)


def _publish(folder: Path, parts: list[tuple[Path, list[str]]], total: int, config: ModelConfig) -> None:
    """Give the parts their names, write config and index, remove shards that only the old index named."""
    backbone = [part for part in parts if not part[1][0].startswith("mtp.")]
    drafts = parts[len(backbone) :]
    names = [f"model-{i:05}-of-{len(backbone):05}.safetensors" for i in range(1, len(backbone) + 1)]
    names += [DRAFT_SHARD] if len(drafts) == 1 else [f"mtp-{i:05}.safetensors" for i in range(len(drafts))]
    old = _named_by_index(folder)
    where = {}
    for name, (path, held) in zip(names, parts, strict=True):
        path.replace(folder / name)
        where |= dict.fromkeys(held, name)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    for stale in old - set(names):
        (folder / stale).unlink(missing_ok=True)


def _named_by_index(folder: Path) -> set[str]:
    try:
        shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()
    return {shard for shard in shards if Path(str(shard)).name == shard}


# ---- converting --------------------------------------------------------------------------------------------

@dataclass
class Report:
    """What a conversion does with the source's tensors; nothing fills the `missing` tensors of the target."""

    mapped: int
    unmapped: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers alone, for `dskit convert --json`."""
        return {"mapped": self.mapped} | {n: len(getattr(self, n)) for n in ("unmapped", "unused", "missing")}

    @property
    def complete(self) -> bool:
        """True when every tensor has its place: what the command's exit status says."""
        return not self.unmapped and not self.missing

    def __str__(self) -> str:
        lines = []
        for name, count in self.counts.items():
            names = [] if name == "mapped" else getattr(self, name)[:5] + ["..."] * (count > 5)
            lines.append(f"{name:<10} {count}" + (f"  ({', '.join(names)})" if names else ""))
        return "\n".join(lines)


def convert(source: str | Path, target: str | Path | None = None, *, dry_run: bool = False,
            quantize: bool = False, shard_size: int = SHARD_SIZE) -> Report:
    """Rewrite a checkpoint folder under the released names; `quantize` packs plain weights as the release.

    A dry run reads headers only and writes nothing. Otherwise everything must have its place, or it raises
    CheckpointError.
    """
    files = Folder(source)
    report = Report(len({place.stored for place in files.places.values()}) - len(set(files.unmapped)),
                    sorted(set(files.unmapped)), files.unused, files.missing)
    if dry_run:
        return report
    if target is None:
        raise ValueError("target is None; name the folder to write, or ask for dry_run=True")
    if Path(target).resolve() == files.path.resolve():
        raise ValueError(f"target is the source, {source}; name another folder")
    files.check()
    config, stream = files.config, files.weights()
    if quantize and not config.quantized:
        config = config.replace(quantized=True)
        stream = _packing(config, stream)
    write(config, stream, target, shard_size)
    for extra in files.path.glob("*.json"):
        if extra.name not in ("config.json", INDEX):
            shutil.copyfile(extra, Path(target) / extra.name)
    return report


def _packing(config: ModelConfig, stream: Stream) -> Stream:
    for weight, (_, tensor, _) in zip(layout(config), stream, strict=True):
        yield weight, *packed(weight, tensor, config)
