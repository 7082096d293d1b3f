"""Presets: sizes as in the release and the specification, roles as their names promise."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

import pytest

from dskit.checkpoint import layout, spec
from dskit.config import PRESETS, ConfigError, ModelConfig, preset

BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
VISION = 263 + 3  # tensors of the release that are not of the text model


@lru_cache
def tensors(name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return spec(preset(name))


def size(stored: dict[str, tuple[str, tuple[int, ...]]], only: str | None = None) -> int:
    return sum(math.prod(shape) * BYTES[dtype] for dtype, shape in stored.values() if only in (None, dtype))


@pytest.mark.parametrize(("name", "count", "total"), [
    ("tiny", 772, 3.4e6), ("flash", 96_085 - VISION, (475.24 - 0.90) * 2**30), ("slice", None, 48.0 * 2**30)])
def test_tensors_and_bytes(name, count, total):
    assert count is None or len(tensors(name)) == count
    assert size(tensors(name)) == pytest.approx(total, rel=3e-3)


def test_bytes_of_the_release_by_format():
    gib = {dtype: size(tensors("flash"), dtype) / 2**30 for dtype in BYTES}
    assert gib["F8_E4M3"] == pytest.approx(190.00, abs=0.01) and gib["I8"] == pytest.approx(259.45, abs=0.01)
    assert gib["F8_E8M0"] == pytest.approx(21.94, abs=0.01) and gib["F32"] == pytest.approx(0.16, abs=0.01)
    assert gib["BF16"] == pytest.approx(2.78, abs=0.01) and gib["I64"] == 0


def test_names_and_shapes_of_the_release():
    flash = tensors("flash")
    assert flash["layers.0.attn.wq_a.scale"] == ("F8_E8M0", (40, 160))
    assert flash["layers.39.ffn.experts.383.w2.weight"] == ("I8", (5120, 1152))
    assert flash["layers.20.attn.compressor.wkv.weight"] == ("BF16", (512, 5120))
    assert "layers.20.attn.compressor.wgate.weight" not in flash
    assert flash["layers.14.engram.embed.scale"] == ("F8_E8M0", (384016682, 8))
    assert flash["mtp.0.main_proj.scale"] == ("F8_E8M0", (160, 480))
    assert flash["mtp.2.confidence_head.proj.weight"] == ("BF16", (1, 5376))
    per_layer = Counter(name.split(".")[1] for name in flash if name.startswith("layers."))
    assert per_layer["0"] == 2334 and per_layer["2"] == 2334 + 8 and per_layer["20"] == 2334 + 7
    assert len([name for name in flash if name.startswith("mtp.1.")]) == 798


def test_v4_flash():
    config, held = preset("v4-flash"), tensors("v4-flash")
    assert config.num_nextn_predict_layers == 3 and config.index_source_layer_ids == tuple(range(2, 43, 2))
    assert held["layers.2.attn.compressor.ape"] == ("F32", (4, 1024))
    assert held["layers.3.attn.compressor.wkv.weight"] == ("BF16", (512, 4096))
    assert held["layers.2.attn.indexer.compressor.wkv.weight"] == ("BF16", (256, 4096))
    assert held["layers.0.attn.wq_a.scale"] == ("F8_E8M0", (8, 32))
    assert held["layers.2.ffn.gate.tid2eid"] == ("I64", (129280, 6)) and "layers.2.ffn.gate.bias" not in held
    assert not any("bias_vl" in name or "engram" in name for name in held)


def test_demo_with_its_draft():
    both = preset("demo")
    assert len(spec(both)) == 1156 and size(spec(both)) == pytest.approx(22.2e6, rel=3e-3)
    assert sum(math.prod(weight.shape) for weight in layout(both)) == pytest.approx(26.0e6, rel=3e-3)


@pytest.mark.parametrize("layers", [4, 5, 6, 7, 12, 17])
def test_slice_keeps_the_roles(layers):
    config = preset(f"slice:{layers}")
    ratios = config.compress_ratios[:layers]
    paired = (layers - 1) // 2
    assert ratios == (0,) + (2,) * paired + (1,) * (layers - 1 - paired)
    assert config.candidate_source_layer_id == config.split == 1 + paired
    assert {config.ratio(source) for source in config.kv_source_layer_ids} == {1, 2}
    assert config.hidden_size == 5120 and config.n_routed_experts == 384


def test_slice_of_six_is_the_table():
    config = preset("slice")
    assert config.compress_ratios == (0, 2, 2, 1, 1, 1, 0) and config.kv_source_layer_ids == (1, 3)
    assert config.index_source_layer_ids == (1, 3, 5) and config.dspark_target_layer_ids == (3, 4, 5)
    assert preset("slice:6") == config


def test_odd_repeats_no_axis():
    config = preset("odd")
    axes = [config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank,
            config.o_groups, config.moe_intermediate_size, config.n_routed_experts, config.hc_mult,
            config.sliding_window,
            config.vocab_size, config.index_n_heads, config.index_topk, config.engram_head_dim]
    assert len(set(axes)) == len(axes)
    assert config.compress_ratios[:8] == preset("tiny").compress_ratios[:8]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "slice:N"])
def test_configs_survive_writing(name):
    config = preset(name)
    assert ModelConfig.from_dict(config.to_dict()) == config
    again = config.replace(bos_token_id=1)
    assert ModelConfig.from_dict(again.to_dict()) == again


@pytest.mark.parametrize("name", ["tinny", "slice:N", "slice:", "slice:x", "slice:3", "../tiny", ""])
def test_unknown_presets(name):
    with pytest.raises(ConfigError, match=r"slice:3 is too short|no preset is called"):
        preset(name)
