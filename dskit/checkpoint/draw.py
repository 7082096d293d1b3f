"""Seeded random weights: any preset becomes a model without a download.

Idea: each weight has its own generator, seeded by the model's seed and the weight's name. So one weight can
be drawn alone, in any order, with the same bits; a folder of `write_random` loads to what `random` makes.

Nothing is trivial, since a trivial start hides mistakes: mixes far from the identity, norm gains away from 1,
router biases apart. Index heads come in exactly opposite pairs, so that no two entries tie at a score of 0.

Shapes: as spec.py lists them.
Errors: none of its own.
Numerics: products keep the size of their input; the bits differ between a CPU and a GPU.
Source: model.md appendix B, 9.1 (`calm`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dskit.checkpoint.files import ROWS_AT_ONCE
from dskit.checkpoint.place import Tables, pack_rows, packed
from dskit.checkpoint.spec import Held, Weight, layout
from dskit.config import ModelConfig


def weights(config: ModelConfig, seed: int = 0, *, device: torch.device | str = "cpu", calm: bool = False,
            held: Held | None = None, tables: Tables | None = None
            ) -> Iterator[tuple[Weight, Tensor, Tensor | None]]:
    """The stream of a random checkpoint; `calm`: router biases so far apart that no rounding moves one.

    held: which experts are drawn, as in spec.layout; tables: where Engram tables are drawn to.
    """
    tables = tables or Tables()
    for weight in layout(config, held):
        generator = torch.Generator(device).manual_seed(_seed(seed, weight.name))
        if weight.fmt == "int64":
            yield weight, _choices(config, weight.shape, generator), None
        elif weight.fmt == "row":
            yield weight, *_rows(weight, generator, tables)
        else:
            yield weight, *packed(weight, _numbers(config, weight, generator, calm), config)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")


def _numbers(config: ModelConfig, weight: Weight, generator: torch.Generator, calm: bool) -> Tensor:
    """Float32 values: normal, of a size that keeps activations of order one."""
    name, _, shape = weight
    noise = torch.randn(shape, generator=generator, device=generator.device)
    leaf = name.rpartition(".")[2]
    if leaf.startswith("hc_"):
        kind = leaf.rpartition("_")[2]
        return 0.5 + 0.1 * noise if kind == "scale" else noise if kind == "base" else noise * shape[1] ** -0.5
    if leaf.startswith("bias"):
        order = torch.randperm(shape[0], generator=generator, device=generator.device)
        return order * 4.0 if calm else 0.2 * noise
    if "norm" in name or leaf in ("q_weight", "k_weight"):
        return 1 + 0.2 * noise
    if leaf in ("attn_sink", "ape") or ".embed." in f".{name}" or "markov_w1" in name:
        return noise
    if name.endswith("indexer.wq_b.weight"):
        pairs = noise.view(config.index_n_heads, -1)
        pairs[1::2] = -pairs[0 : pairs.shape[0] // 2 * 2 : 2]
    return noise * shape[-1] ** -0.5


def _rows(weight: Weight, generator: torch.Generator, tables: Tables) -> tuple[Tensor, Tensor]:
    """This process' rows of an Engram table, a part at a time: the released ones are 92 GiB."""
    rows, width = weight.shape
    device = generator.device
    counts = (min(ROWS_AT_ONCE, rows - start) for start in range(0, rows, ROWS_AT_ONCE))
    parts = (0.5 * torch.randn(count, width, generator=generator, device=device) for count in counts)
    return pack_rows(parts, tables.share(weight), tables.room(weight, device))


def _choices(config: ModelConfig, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """V4's table of experts by token id: different ones for each token."""
    score = torch.rand(shape[0], config.n_routed_experts, generator=generator, device=generator.device)
    return score.argsort(dim=1)[:, : shape[1]].contiguous()
