"""Damaged checkpoints: each kind is refused; the message names file, tensor, what was found and expected."""

from __future__ import annotations

import json

import pytest
import torch

from dskit import checkpoint
from dskit.checkpoint import CheckpointError
from dskit.checkpoint.files import INDEX
from dskit.config import ConfigError
from tests.checkpoint.conftest import add, change, change_config, index_of, write_index

WQ_A = "layers.0.attn.wq_a"


def refused(folder, *words, error=CheckpointError) -> str:
    """The message with which loading fails; it must contain every word."""
    with pytest.raises(error) as caught:
        checkpoint.load(folder, device="cpu")
    message = str(caught.value)
    for word in words:
        assert str(word) in message, f"{word!r} is not in: {message}"
    return message


def poke(value, at=0, dtype=None):
    """A change that sets one element, through the bytes where the dtype has no arithmetic."""
    def become(tensor):
        tensor = tensor.clone()
        flat = (tensor.view(dtype) if dtype else tensor).flatten()
        flat[at] = value
        return flat.view(tensor.dtype).view(tensor.shape)

    return become


# ---- files -------------------------------------------------------------------------------------------------

def test_no_config(copy):
    folder = copy()
    (folder / "config.json").unlink()
    refused(folder, "config.json", "does not exist", error=ConfigError)


def test_config_is_not_json(copy):
    folder = copy()
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "not JSON", error=ConfigError)


def test_no_index(copy):
    folder = copy()
    (folder / INDEX).unlink()
    refused(folder, INDEX, "index is missing", "shards")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', "[]"])
def test_damaged_index(copy, text):
    folder = copy()
    (folder / INDEX).write_text(text)
    refused(folder, INDEX, "cannot be read", "weight_map")


def test_index_points_outside(copy):
    folder = copy()
    write_index(folder, index_of(folder) | {"norm.weight": "../model.safetensors"})
    refused(folder, INDEX, "outside the folder", "../model.safetensors")


def test_missing_shard(copy):
    folder = copy()
    shard = index_of(folder)["head.weight"]
    (folder / shard).unlink()
    refused(folder, shard, "missing", "index names")


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_shard(copy, keep):
    folder = copy()
    shard = index_of(folder)["head.weight"]
    whole = (folder / shard).read_bytes()
    (folder / shard).write_bytes(whole[:keep])
    sizes = [f"found {len(whole[:keep])} bytes"] + ([f"expected {len(whole)} bytes"] if keep == -1 else [])
    refused(folder, shard, "cut short", *sizes)


def test_a_shard_of_noise(copy):
    folder = copy()
    shard = index_of(folder)["head.weight"]
    (folder / shard).write_bytes(b"\x10" + bytes(7) + b"not a header at all, but long enough")
    refused(folder, shard, "damaged", "a safetensors file")


def test_swapped_shards(copy):
    folder = copy()
    first, second = sorted(set(index_of(folder).values()))[:2]
    (folder / first).rename(folder / "aside")
    (folder / second).rename(folder / first)
    (folder / "aside").rename(folder / second)
    refused(folder, "swapped shards", first, second, "found in", "expected in")


# ---- names -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "form"), [
    ("norm.weight", "BF16 [128]"), ("layers.3.ffn.experts.5.w3.weight", "I8 [64, 64]"),
    ("layers.1.engram.q_weight", "BF16 [4, 128]"), ("mtp.1.confidence_head.proj.weight", "BF16 [1, 144]"),
    ("layers.2.attn.compressor.wgate.weight", "BF16 [64, 128]"),
    ("layers.4.attn.indexer.wk.weight", "BF16 [32, 64]")])
def test_missing_tensor(copy, name, form):
    folder = copy()
    change(folder, name, lambda tensor: None)
    refused(folder, INDEX, name, "missing", "found nothing", f"expected {form}")


def test_missing_scale(copy):
    folder = copy()
    change(folder, f"{WQ_A}.scale", lambda tensor: None)
    refused(folder, f"{WQ_A}.scale", "scale of a packed weight is missing", "F8_E8M0 [2, 4]")


@pytest.mark.parametrize(("name", "why"), [
    ("layers.0.attn.wq_c.weight", "unexpected"),
    ("layers.4.attn.compressor.wgate.weight", "KV sources with a ratio above 1"),
    ("layers.3.attn.indexer.wk.weight", "KV sources"), ("layers.6.attn.indexer.k_norm.weight", "KV sources"),
    ("mtp.2.attn.wq_a.weight", "num_nextn_predict_layers is 2"),
    ("layers.0.ffn.experts.8.w1.weight", "unexpected")])
def test_unexpected_tensor(copy, name, why):
    folder = copy()
    shard = add(folder, name, torch.zeros(2, 2))
    refused(folder, shard, name, "unexpected", why)


def test_tensor_that_the_index_does_not_name(copy):
    folder = copy()
    shard = add(folder, "left.over", torch.zeros(2), indexed=False)
    refused(folder, shard, "left.over", "index does not name")


def test_two_spellings_of_one_tensor(copy):
    folder = copy()
    add(folder, "model.layers.0.self_attn.q_a_layernorm.weight", torch.ones(64))
    refused(folder, "same meaning", "layers.0.attn.q_norm.weight", "q_a_layernorm")


def test_draft_tensors_without_draft_stages(copy):
    folder = copy()
    change_config(folder, num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1])
    refused(folder, "mtp.", "unexpected", "num_nextn_predict_layers is 0")


def test_what_text_does_not_need_is_ignored(copy):
    folder = copy()
    for name in ("vision.norm.weight", "aligner.w1.bias", "image_start", "mtp.1.embed.weight"):
        add(folder, name, torch.zeros(2))
    checkpoint.load(folder, device="cpu")


# ---- headers -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "become", "words"), [
    ("norm.weight", lambda t: t[:-1], ("wrong shape", "found [127]", "expected [128]")),
    (f"{WQ_A}.scale", lambda t: t.view(torch.uint8)[:1].view(t.dtype), ("wrong shape", "[1, 4]", "[2, 4]")),
    (f"{WQ_A}.weight", lambda t: t.view(128, 64), ("wrong shape", "found [128, 64]", "expected [64, 128]")),
    ("layers.0.ffn.experts.0.w1.weight", lambda t: t[:, :16], ("wrong shape", "[64, 16]", "[64, 64]")),
    ("norm.weight", lambda t: t.half(), ("wrong dtype", "found F16", "expected BF16 or F32")),
    (f"{WQ_A}.weight", lambda t: t.to(torch.bfloat16), ("wrong dtype", "found BF16", "expected F8_E4M3")),
    (f"{WQ_A}.weight", lambda t: t.view(torch.float8_e5m2), ("wrong dtype", "found F8_E5M2")),
    ("layers.0.hc_attn_fn", lambda t: t.to(torch.bfloat16), ("wrong dtype", "found BF16", "expected F32")),
    ("layers.0.ffn.experts.0.w2.weight", lambda t: t.view(torch.float8_e4m3fn), ("wrong dtype", "I8 or U8"))])
def test_wrong_header(copy, name, become, words):
    folder = copy()
    shard = change(folder, name, become)
    refused(folder, shard, name, *words)


# ---- numbers -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "become", "words"), [
    (f"{WQ_A}.scale", poke(255, 5, torch.uint8), ("scale is NaN", "byte 255 at [1, 1]")),
    ("layers.7.ffn.experts.3.w2.scale", poke(255, 0, torch.uint8), ("scale is NaN", "[0, 0]")),
    ("layers.3.engram.embed.scale", poke(255, 9, torch.uint8), ("scale is NaN", "[9, 0]")),
    (f"{WQ_A}.weight", poke(0xFF, 130, torch.uint8), ("NaN or infinite", "[1, 2]", "finite numbers")),
    ("layers.1.engram.embed.weight", poke(0x7F, 33, torch.uint8), ("NaN or infinite", "[1, 1]")),
    ("head.weight", poke(float("nan"), 128), ("NaN or infinite", "[1, 0]")),
    ("layers.5.ffn.gate.bias", poke(float("inf"), 7), ("NaN or infinite", "[7]")),
    ("mtp.0.hc_ffn_base", poke(float("-inf"), 2), ("NaN or infinite", "[2]"))])
def test_numbers_that_are_none(copy, name, become, words):
    folder = copy()
    shard = change(folder, name, become)
    refused(folder, shard, name, *words)


def test_scales_that_are_no_powers_of_two(copy):
    folder = copy()
    change(folder, f"{WQ_A}.scale", lambda scale: scale.float() * 1.5)
    refused(folder, f"{WQ_A}.scale", "powers of two")


@pytest.mark.parametrize(("expert", "words"), [(5, "0 to 5"), (-1, "-1 to 4")])
def test_table_of_experts_out_of_range(copy, expert, words):
    folder = copy("v4")
    change(folder, "layers.0.ffn.gate.tid2eid", poke(expert, 3))
    refused(folder, "layers.0.ffn.gate.tid2eid", f"found {words}", "expected 0 to 4")


# ---- config and tokenizer ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("field", "value", "word"), [
    ("engram_num_embeddings", [462, 631], "rehashes"), ("kv_source_layer_ids", [2], "KV source"),
    ("compress_ratios", [0] * 9, "num_nextn_predict_layers"), ("candidate_source_layer_id", 3, "candidate"),
    ("index_source_layer_ids", [4, 6], "index_source_layer_ids"), ("hidden_size", 100, "multiple of 32")])
def test_config_that_no_loader_could_run(copy, field, value, word):
    folder = copy()
    change_config(folder, **{field: value})
    refused(folder, field, word, error=ConfigError)


def test_config_that_does_not_fit_the_tensors(copy):
    folder = copy()
    change_config(folder, hidden_size=160)
    refused(folder, "embed.weight", "wrong shape", "found [512, 128]", "expected [512, 160]")


def tokenizer_json(words: list[str]) -> str:
    return json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                       "post_processor": None, "decoder": None, "truncation": None, "padding": None,
                       "model": {"type": "WordLevel", "unk_token": "w0",
                                 "vocab": {word: i for i, word in enumerate(words)}}})


def test_tokenizer_of_another_model(copy):
    folder = copy()
    (folder / "tokenizer.json").write_text(tokenizer_json([f"w{i}" for i in range(300)]))
    refused(folder, "tokenizer.json", "engram_compressed_vocab_size is 256", "folds to 300")


def test_tokenizer_that_fits(copy):
    folder = copy()
    words = [f"w{i}" for i in range(256)] + [f"W{i}" for i in range(40)]  # capitals fold
    (folder / "tokenizer.json").write_text(tokenizer_json(words))
    model = checkpoint.load(folder, device="cpu")
    assert model.folding[256 + 7] == 7 and model.folding.shape == (512,)


def test_tokenizer_with_too_many_words(copy):
    folder = copy()
    (folder / "tokenizer.json").write_text(tokenizer_json([f"w{i}" for i in range(513)]))
    refused(folder, "tokenizer.json", "513 tokens", "vocab_size = 512")


def test_tokenizer_that_cannot_be_read(copy):
    folder = copy()
    (folder / "tokenizer.json").write_text("{")
    refused(folder, "tokenizer.json", "cannot be read")


# ---- sources -----------------------------------------------------------------------------------------------

def test_unknown_source():
    refused("tinny", "tinny", "no such model", "tiny, odd, demo", "Hugging Face id")


def test_demo_without_weights(monkeypatch, tmp_path):
    (tmp_path / "demo").mkdir()
    monkeypatch.setattr(checkpoint, "PRESETS_DIR", tmp_path)
    refused("demo", "dskit train demo")


def test_download_that_fails(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    refused("somebody/something", "somebody/something", "download", "no route", "folder")


def test_download_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    refused("somebody/something", "pip install huggingface_hub")


def test_weights_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(checkpoint, "_memory", lambda device: 24 << 30)
    refused("flash", "do not fit on cpu", "24.0 GiB", "GiB (expanded weights)")
