"""Standalone drafts: a DSpark draft in a folder of its own, made for a target of another family (DeepSpec).

Idea: such a folder looks like a checkpoint, but its few layers guess for a target that lies elsewhere: they
read the outputs of `target_layer_ids` of it, joined and projected (`fc`), and copies of its embedding and
head. `Standalone` reads the folder and compares every tensor with the config; `refuse` says which target is
missing: dskit serves DeepSeek-V4 and V4.1, whose drafts are part of their checkpoints (mtp.*).

Shapes: `shapes(config)` lists them; d hidden size, V vocabulary, r Markov rank, m tapped layers. The layers
of a Gemma4 draft are its family's own and are not compared.
Errors: CheckpointError, naming the file, the field or tensor, what was found and what was expected.
Source: dspark.md 2.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from dskit.checkpoint.files import CheckpointError, Shards

FAMILIES = {"Qwen3DSparkModel": "Qwen3", "Gemma4DSparkModel": "Gemma4"}
HEADS = {"vanilla": (), "gated": ("gate_proj",), "rnn": ("joint_proj",)}  # what a Markov head has besides
NESTED = ("dflash_config", "dspark_config")  # fields may stand in one of these instead
SUBFOLDER = "dspark"  # of the target's folder, where the draft may lie


@dataclass(frozen=True)
class DraftConfig:
    """Fields of a standalone draft's config.json, under their own names."""

    family: str
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    @classmethod
    def from_folder(cls, folder: Path) -> DraftConfig:
        """Read config.json; raises CheckpointError for what is missing or cannot be meant."""
        file = folder / "config.json"
        try:
            raw: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the config cannot be read ({error})", file=file) from None
        names = raw.get("architectures") or []
        if not (family := next((FAMILIES[name] for name in names if name in FAMILIES), None)):
            raise CheckpointError("the folder holds no standalone draft", file=file,
                                  found=f"architectures {names}", expected=" or ".join(FAMILIES))
        for part in NESTED:
            raw |= raw.get(part) or {}
        if raw.get("sample_from_anchor") is False:
            raise CheckpointError("the draft does not sample from its anchor row, which is not supported",
                                  file=file, found="sample_from_anchor false", expected="true")
        raw["family"] = family
        for field in fields(cls):
            if field.default is MISSING and raw.get(field.name) is None:
                raise CheckpointError(f"{field.name} is missing", file=file, found="no such field",
                                      expected=f"{field.name}, as DeepSpec writes it")
        values = {field.name: raw[field.name] for field in fields(cls) if raw.get(field.name) is not None}
        config = cls(**values | {"target_layer_ids": tuple(values["target_layer_ids"])})
        config._check(file)
        return config

    def _check(self, file: Path) -> None:
        taps = self.target_layer_ids
        rising = all(a < b for a, b in zip(taps, taps[1:], strict=False))
        if not (taps and rising and taps[0] >= -1 and taps[-1] < self.num_target_layers - 1):
            raise CheckpointError("target_layer_ids must rise from -1 (the embedding) and leave out the "
                                  "last layer", file=file, found=list(taps),
                                  expected=f"ids below {self.num_target_layers - 1}")
        if self.markov_head_type not in HEADS:
            raise CheckpointError("the Markov head is of no known type", file=file,
                                  found=self.markov_head_type, expected=", ".join(HEADS))


def shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft's folder and its shape; of a Gemma4 draft all but the layers'."""
    c, d, r = config, config.hidden_size, config.markov_rank
    found = {"embed_tokens.weight": (c.vocab_size, d), "lm_head.weight": (c.vocab_size, d),
             "fc.weight": (d, len(c.target_layer_ids) * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    if c.family == "Qwen3":
        for i in range(c.num_hidden_layers):
            found |= {f"layers.{i}.{name}.weight": shape for name, shape in _layer(c).items()}
    if r:
        found |= {f"markov_head.markov_w{n}.weight": (c.vocab_size, r) for n in (1, 2)}
        extra = {"gate_proj": (r, d + r), "joint_proj": (3 * r, 2 * r + d)}
        found |= {f"markov_head.{name}.weight": extra[name] for name in HEADS[c.markov_head_type]}
    if c.enable_confidence_head:
        found |= {"confidence_head.proj.weight": (1, d + r * c.confidence_head_with_markov),
                  "confidence_head.proj.bias": (1,)}
    return found


def _layer(c: DraftConfig) -> dict[str, tuple[int, ...]]:
    d, wide, narrow = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {"input_layernorm": (d,), "post_attention_layernorm": (d,),
            "self_attn.q_proj": (wide, d), "self_attn.k_proj": (narrow, d), "self_attn.v_proj": (narrow, d),
            "self_attn.o_proj": (d, wide),
            "self_attn.q_norm": (c.head_dim,), "self_attn.k_norm": (c.head_dim,),
            "mlp.gate_proj": (c.intermediate_size, d), "mlp.up_proj": (c.intermediate_size, d),
            "mlp.down_proj": (d, c.intermediate_size)}


def is_standalone(folder: Path) -> bool:
    """Whether a folder's config.json is that of a standalone draft."""
    try:
        names = json.loads((folder / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False  # whoever reads it as a model says what is wrong
    return any(name in FAMILIES for name in names)


class Standalone(Shards):
    """An opened draft folder (or the target's, which has it in `dspark/`), every tensor compared."""

    def __init__(self, path: str | Path):
        inner = Path(path) / SUBFOLDER
        path = inner if (inner / "config.json").is_file() else Path(path)
        self.config = DraftConfig.from_folder(path)
        super().__init__(path)
        self._compare()

    def _compare(self) -> None:
        expected = shapes(self.config)
        for name, shape in expected.items():
            if name not in self.files:
                raise CheckpointError("the tensor is missing", file=self.path, tensor=name, found="none",
                                      expected=list(shape))
            shard = self._shards[self.files[name]]
            if (found := shard.get_slice(name).get_shape()) != list(shape):
                raise CheckpointError("the tensor has another shape", file=self.path / self.files[name],
                                      tensor=name, found=found, expected=list(shape))
        layers = self.config.family == "Gemma4"
        for name in self.files.keys() - expected.keys():
            if not (layers and name.startswith("layers.")):
                raise CheckpointError("the tensor has no place in this format", file=self.path, tensor=name)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), one at a time, in the order of the names."""
        for name in sorted(self.files):
            yield name, self._shards[self.files[name]].get_tensor(name)

    def refuse(self) -> NoReturn:
        """Raise CheckpointError: what is missing before this draft can guess."""
        c = self.config
        raise CheckpointError(
            "the folder holds a draft alone, and its target is missing: the models that dskit serves have "
            "their drafts in their own checkpoints (mtp.*)", file=self.path,
            found="deepseek_v41, deepseek_v4",
            expected=f"a {c.family} model of {c.num_target_layers} layers of width {c.hidden_size} with a "
                     f"vocabulary of {c.vocab_size}")
