"""Other spellings of one checkpoint: third-party V4.1 files, transformers' V4, and `convert` between them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from dskit import checkpoint
from dskit.checkpoint import CheckpointError, Folder
from dskit.config import ConfigError, ModelConfig
from tests.checkpoint.conftest import V4, add, change, change_config
from tests.checkpoint.test_round_trip import same, stored


def parameters(folder) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load(folder, device="cpu", numerics="exact").named_parameters())


def assert_equal_models(a, b) -> None:
    one, two = parameters(a), parameters(b)
    assert one.keys() == two.keys()
    assert all(same(one[name], two[name]) for name in one)


def respell(folder, target, rename, recast=lambda name, tensor: tensor):
    """The same checkpoint in one shard without an index, under other names."""
    target.mkdir()
    tensors = {rename(name): recast(name, tensor) for name, tensor in stored(folder).items()}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def third_party(name: str) -> str:
    for pattern, new in ((r"^(layers|norm|mtp)\.", r"model.\1."), (r"^embed\.", "model.embed_tokens."),
                         (r"^head\.", "lm_head."), (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp."),
                         (r"\.scale$", ".weight_scale_inv"),
                         (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
                         (r"(experts\.\d+|shared_experts)\.w1\.", r"\1.gate_proj."),
                         (r"(experts\.\d+|shared_experts)\.w3\.", r"\1.up_proj.")):
        name = re.sub(pattern, new, name)
    return name


@pytest.mark.parametrize("kind", ["tiny", "v4"])
def test_third_party_names_and_scales(kind, written, tmp_path):
    def recast(name, tensor):  # scales as numbers, packed codes as unsigned bytes
        if name.endswith(".scale"):
            return tensor.float()
        return tensor.view(torch.uint8) if tensor.dtype == torch.int8 else tensor

    other = respell(written(kind), tmp_path / "other", third_party, recast)
    assert "model.layers.1.self_attn.wq_a.weight_scale_inv" in Folder(other).files
    assert_equal_models(written(kind), other)


def test_a_prefix_alone(written, tmp_path):
    assert_equal_models(written("tiny"), respell(written("tiny"), tmp_path / "other", "model.{}".format))


# ---- convert -----------------------------------------------------------------------------------------------

def test_convert_writes_the_released_names(written, tmp_path):
    other = respell(written("tiny"), tmp_path / "other", third_party)
    (other / "tokenizer_config.json").write_text("{}")
    report = checkpoint.convert(other, tmp_path / "new", shard_size=1_200_000)
    assert report.complete and report.counts == {"mapped": 772, "unmapped": 0, "unused": 0, "missing": 0}
    for file in written("tiny").iterdir():
        if file.name != "config.json":
            assert (tmp_path / "new" / file.name).read_bytes() == file.read_bytes(), file.name
    assert (tmp_path / "new" / "tokenizer_config.json").is_file()
    assert_equal_models(written("tiny"), tmp_path / "new")


def test_dry_run_counts_and_writes_nothing(copy, tmp_path):
    folder = copy()
    add(folder, "vision.norm.weight", torch.ones(2))
    add(folder, "layers.0.attn.stray.weight", torch.ones(2))
    change(folder, "norm.weight", lambda tensor: None)
    before = sorted(tmp_path.rglob("*"))
    report = checkpoint.convert(folder, tmp_path / "new", dry_run=True)
    assert report.counts == {"mapped": 771, "unmapped": 1, "unused": 1, "missing": 1} and not report.complete
    assert report.unmapped == ["layers.0.attn.stray.weight"] and report.missing == ["norm.weight"]
    assert "stray" in str(report) and sorted(tmp_path.rglob("*")) == before
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        checkpoint.convert(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_convert_refuses_its_own_source(copy):
    folder = copy()
    with pytest.raises(ValueError, match="target is the source"):
        checkpoint.convert(folder, folder)
    with pytest.raises(ValueError, match="target is None"):
        checkpoint.convert(folder)


def test_convert_can_quantise(written, tmp_path):
    report = checkpoint.convert(written("plain"), tmp_path / "new", quantize=True)
    assert report.complete and Folder(tmp_path / "new").config == ModelConfig.from_dict(V4)
    plain, packed = parameters(written("plain")), parameters(tmp_path / "new")
    for name, tensor in packed.items():
        step = 0.2 if "experts.w" in name else 2**-4  # at worst 5 becomes 4 in e2m1, 17/16 becomes 1 in e4m3
        error = (tensor.float() - plain[name].float()).abs().max()
        assert error <= step * plain[name].abs().max(), name
    assert_equal_models(tmp_path / "new", written("v4"))


# ---- V4 ----------------------------------------------------------------------------------------------------

def test_v4_draft_stages_are_counted_by_the_tensors(copy):
    folder = copy("v4")
    change_config(folder, compress_ratios=[0, 4, 8, 4])  # as released: the file says 1 stage, here are 2
    assert len(checkpoint.load(folder, device="cpu").mtp) == 2


def test_v4_draft_of_another_kind_is_left_out(copy):
    folder = copy("v4")
    for name in ("weight", "scale"):
        change(folder, f"mtp.0.main_proj.{name}", lambda tensor: None)
    model = checkpoint.load(folder, device="cpu")
    assert len(model.mtp) == 0 and model.config.compress_ratios == (0, 4, 8, 4)
    assert any(name.startswith("mtp.") for name in Folder(folder).unused)


def test_v4_bigram_head_has_its_released_names(written):
    assert {"mtp.1.markov_head.markov_w1.weight", "mtp.1.hc_head_fn"} <= stored(written("v4")).keys()
    model = checkpoint.load(written("v4"), device="cpu")
    assert torch.equal(model.mtp[1].markov_head.embed.weight,
                       stored(written("v4"))["mtp.1.markov_head.markov_w1.weight"].float())


@pytest.fixture(scope="module")
def transformers_model():
    """A random V4 of transformers' own; every tensor differs from every other."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 32}
    config = transformers.DeepseekV4Config(
        vocab_size=90, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        head_dim=32, q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=4, max_position_embeddings=512,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                     "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], o_groups=2, o_lora_rank=8, index_n_heads=2,
        index_head_dim=16, index_topk=4, sliding_window=8, partial_rotary_factor=0.25, rope_parameters=rope)
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    return model


def test_transformers_models_load_from_both_of_their_spellings(transformers_model, tmp_path):
    transformers_model.save_pretrained(tmp_path / "saved")
    state = {name: tensor.contiguous() for name, tensor in transformers_model.state_dict().items()}
    (tmp_path / "state").mkdir()
    save_file(state, tmp_path / "state" / "model.safetensors")
    (tmp_path / "state" / "config.json").write_text(json.dumps(transformers_model.config.to_dict()))
    assert_equal_models(tmp_path / "saved", tmp_path / "state")
    found = parameters(tmp_path / "state")
    at = "model.layers.1.self_attn."
    for ours, theirs in {
            "layers.1.attn.indexer.compressor.ape": at + "compressor.indexer.position_bias",
            "layers.1.attn.indexer.weights_proj.weight": at + "compressor.indexer.scorer.weights_proj.weight",
            "layers.1.attn.indexer.wq_b.weight": at + "compressor.indexer.q_b_proj.weight",
            "layers.1.attn.compressor.norm.weight": at + "compressor.kv_norm.weight",
            "layers.1.attn.kv_norm.weight": at + "kv_norm.weight", "layers.1.attn.attn_sink": at + "sinks",
            "layers.0.ffn.experts.w13.weight": "model.layers.0.mlp.experts.gate_up_proj",
            "layers.0.ffn.experts.w2.weight": "model.layers.0.mlp.experts.down_proj",
            "layers.0.ffn.gate.tid2eid": "model.layers.0.mlp.gate.tid2eid",
            "layers.3.hc_ffn_base": "model.layers.3.ffn_hc.base",
            "hc_head_scale": "model.hc_head.hc_scale"}.items():
        assert torch.equal(found[ours], state[theirs]), ours
    assert len(found) == len(state)


def test_transformers_config(transformers_model):
    config = ModelConfig.from_dict(transformers_model.config.to_dict())
    assert config.compress_ratios == (0, 4, 8, 4) and config.index_source_layer_ids == (1, 3)
    assert config.num_hash_layers == 1 and config.qk_rope_head_dim == 8 and not config.quantized
    assert config.rope_scaling["factor"] == 16 and config.compress_rope_theta == 160000
    raw = transformers_model.config.to_dict()
    raw["rope_parameters"]["compress"]["attention_factor"] = 1.2
    with pytest.raises(ConfigError, match=r"attention_factor is 1\.2"):
        ModelConfig.from_dict(raw)
    with pytest.raises(ConfigError, match="layer_types holds 'full_attention'"):
        ModelConfig.from_dict(raw | {"layer_types": ["full_attention"] * 4})
