"""Drafts in folders of their own: read whole, every fault named, and the missing target too."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dskit import checkpoint
from dskit.checkpoint.standalone import DraftConfig, Standalone, shapes

CONFIG = {
    "architectures": ["Qwen3DSparkModel"], "hidden_size": 24, "vocab_size": 50, "intermediate_size": 40,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
    "num_target_layers": 9, "target_layer_ids": [-1, 3, 7], "block_size": 7, "mask_token_id": 49,
    "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.fixture
def made(tmp_path):
    """made(changed fields, changed tensors, nested=..., at=...) -> a draft's folder; None leaves one out."""
    def make(fields=None, tensors=None, nested=None, at="."):
        folder = tmp_path / at
        folder.mkdir(exist_ok=True)
        raw = {name: value for name, value in (CONFIG | (fields or {})).items() if value is not None}
        if nested:
            inner = {name: raw.pop(name) for name in ("block_size", "target_layer_ids", "mask_token_id")}
            raw[nested] = inner
        (folder / "config.json").write_text(json.dumps(raw))
        try:
            stored = {name: torch.randn(shape).bfloat16()
                      for name, shape in shapes(DraftConfig.from_folder(folder)).items()}
        except checkpoint.CheckpointError:  # the fault under test is the config's
            stored = {"norm.weight": torch.ones(1)}
        stored = {name: tensor for name, tensor in (stored | (tensors or {})).items() if tensor is not None}
        save_file(stored, folder / "model.safetensors")
        return tmp_path, stored
    return make


KINDS = [{}, {"fields": {"markov_head_type": "gated"}}, {"fields": {"markov_head_type": "rnn"}},
         {"fields": {"markov_rank": 0, "enable_confidence_head": False}},
         {"fields": {"confidence_head_with_markov": False}}, {"nested": "dspark_config"},
         {"nested": "dflash_config"}, {"at": "dspark"}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_tensor_of_a_draft_is_read(made, kind):
    folder, stored = made(**kind)
    draft = Standalone(folder)
    assert draft.config.family == "Qwen3" and draft.config.target_layer_ids == (-1, 3, 7)
    found = dict(draft.weights())
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def test_the_layers_of_a_gemma_draft_are_taken_as_they_are(made):
    own = {"layers.0.pre_feedforward_layernorm.weight": torch.ones(3)}
    folder, _ = made({"architectures": ["Gemma4DSparkModel"]}, own)
    draft = Standalone(folder)
    assert draft.config.family == "Gemma4" and own.keys() <= dict(draft.weights()).keys()


@pytest.mark.parametrize("fields, words", [
    ({"block_size": None}, "block_size is missing"), ({"target_layer_ids": [3, 3]}, "must rise"),
    ({"target_layer_ids": [3, 8]}, "below 8"), ({"target_layer_ids": []}, "must rise"),
    ({"target_layer_ids": [-2]}, "must rise"), ({"markov_head_type": "tree"}, "found tree"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "no standalone draft"),
    ({"sample_from_anchor": False}, "anchor"),
])
def test_a_config_that_cannot_be_meant_is_refused(made, fields, words):
    folder, _ = made(fields)
    with pytest.raises(checkpoint.CheckpointError, match=words):
        Standalone(folder)


@pytest.mark.parametrize("tensors, words", [
    ({"fc.weight": None}, "fc.weight: the tensor is missing"),
    ({"confidence_head.proj.bias": torch.ones(2)}, r"another shape: found \[2\], expected \[1\]"),
    ({"layers.1.mlp.up_proj.weight": torch.ones(24, 40)}, "another shape"),
    ({"layers.2.mlp.up_proj.weight": torch.ones(40, 24)}, "no place in this format"),
])
def test_a_tensor_that_does_not_fit_is_named(made, tensors, words):
    folder, _ = made(tensors=tensors)
    with pytest.raises(checkpoint.CheckpointError, match=words):
        Standalone(folder)


def test_loading_it_as_a_model_says_which_target_is_missing(made):
    folder, _ = made()
    for read in (checkpoint.load, checkpoint.configuration):
        with pytest.raises(checkpoint.CheckpointError, match="target is missing.*Qwen3 model of 9 layers"):
            read(folder)
    made(tensors={"fc.weight": None})
    with pytest.raises(checkpoint.CheckpointError, match="fc.weight"):
        checkpoint.load(folder)
