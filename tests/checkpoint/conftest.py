"""Small checkpoints of every kind, written once, and a way to damage a copy of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dskit import checkpoint
from dskit.checkpoint.files import INDEX
from dskit.config import ModelConfig, preset

V4 = {
    "model_type": "deepseek_v4", "torch_dtype": "bfloat16", "vocab_size": 300, "hidden_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 160, "o_groups": 2, "o_lora_rank": 72, "sliding_window": 9,
    "compress_ratios": [0, 4, 8, 4, 0, 0],
    "index_n_heads": 2, "index_head_dim": 32, "index_topk": 5, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 64},
    "hc_mult": 3, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
    "num_hash_layers": 1, "num_nextn_predict_layers": 1, "dspark_block_size": 3, "dspark_noise_token_id": 299,
    "dspark_target_layer_ids": [2, 3], "dspark_markov_rank": 8, "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}


def configs() -> dict[str, ModelConfig]:
    """One small config of every storage: MXFP4 and FP8 experts, 32 and 128 blocks, and nothing quantised."""
    v4 = ModelConfig.from_dict(V4)
    return {"tiny": preset("tiny"), "odd": preset("odd"), "v4": v4, "plain": v4.replace(quantized=False),
            "fp8-experts": v4.replace(expert_dtype="fp8", num_hidden_layers=2, compress_ratios=(0, 4, 0),
                                      kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
                                      num_nextn_predict_layers=1, dspark_target_layer_ids=(1,))}


CONFIGS = configs()


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """written(kind) -> the folder of a random checkpoint in several shards; do not change it."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            made[kind] = checkpoint.write_random(CONFIGS[kind], path, seed=3, shard_size=1_200_000)
        return made[kind]

    return folder


@pytest.fixture
def copy(written, tmp_path):
    """copy(kind) -> a folder of one's own with the same checkpoint."""
    def folder(kind: str = "tiny") -> Path:
        return Path(shutil.copytree(written(kind), tmp_path / kind))

    return folder


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_index(folder: Path, where: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def change(folder: Path, name: str, become) -> str:
    """Replace a stored tensor by `become(tensor)`, or remove it when that is None; returns its shard."""
    where = index_of(folder)
    shard = where[name]
    tensors = load_file(folder / shard)
    new = become(tensors.pop(name))
    if new is None:
        del where[name]
        write_index(folder, where)
    else:
        tensors[name] = new.contiguous()
    save_file(tensors, folder / shard)
    return shard


def add(folder: Path, name: str, tensor, indexed: bool = True) -> str:
    """Put one more tensor into the first shard."""
    where = index_of(folder)
    shard = min(where.values())
    save_file(load_file(folder / shard) | {name: tensor}, folder / shard)
    write_index(folder, where | ({name: shard} if indexed else {}))
    return shard


def change_config(folder: Path, **fields) -> None:
    """Change fields of config.json, inside text_config where there is one."""
    raw = json.loads((folder / "config.json").read_text())
    raw.get("text_config", raw).update(fields)
    (folder / "config.json").write_text(json.dumps(raw))
