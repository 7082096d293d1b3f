"""The trainer: it learns, resumes to the bit, leaves out what it is told to, and writes what it trained."""

from dataclasses import replace

import pytest
import torch

from dskit import chat, checkpoint
from dskit.config import PRESETS_DIR, preset
from dskit.train import data
from dskit.train.muon import Muon, orthogonalise
from dskit.train.trainer import ABLATIONS, Recipe, Trainer, ablated
from dskit.train.whole import index_loss, whole_step

RECIPE = Recipe(steps=4, warmup=2, shapes=((512, 1, 1),), probes=8, sparse_from=0.5, round_from=0.75)


@pytest.fixture(scope="module")
def tokenizer():
    return chat.Tokenizer(PRESETS_DIR / "demo")


@pytest.fixture(scope="module")
def config():
    """The demo's roles and vocabulary, narrow enough for a CPU."""
    return preset("demo").without_draft().replace(
        hidden_size=64, num_attention_heads=4, head_dim=64, q_lora_rank=32, o_lora_rank=32,
        moe_intermediate_size=32, n_routed_experts=4, index_n_heads=2, index_topk=16)


def trainer(config, tokenizer, out, recipe=RECIPE):
    return Trainer(config, tokenizer, recipe, out, "cpu")


def to(step, run):
    """Train up to a step."""
    for batch in run.batches():
        if run.step == step:
            return run
        run.update(batch)


def weights(run):
    return {name: p.detach().clone() for name, p in run.masters.items()}


@pytest.fixture(scope="module")
def learned(config, tokenizer, tmp_path_factory):
    """A short run through all stages, at its end."""
    run = trainer(config, tokenizer, tmp_path_factory.mktemp("learned"))
    assert run.run()
    return run


def test_it_learns_through_all_stages_and_the_checkpoint_holds_what_it_learned(learned):
    rows = (learned.out / "log.csv").read_text().splitlines()
    assert rows[0].startswith("step,loss,accuracy,index_kl") and (learned.out / "loss.png").stat().st_size > 0
    model = checkpoint.load(learned.out / "model", device="cpu")
    stored = learned.weights(rounded=True)
    for name, p in model.named_parameters():
        if p.is_floating_point() and ".engram.embed." not in name:
            torch.testing.assert_close(p.float(), stored[name].float(), rtol=0, atol=0, msg=name)


@pytest.mark.slow
def test_a_batch_seen_again_and_again_is_learned(config, tokenizer, tmp_path):
    run = trainer(config, tokenizer, tmp_path, replace(RECIPE, steps=40))
    batch = data.batch(tokenizer, 0, 0, 512, 1)
    losses = [run.update(batch)["loss"].item() for _ in range(5)]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(config, tokenizer, tmp_path):
    whole = to(3, trainer(config, tokenizer, tmp_path))  # into the stage of sparse attention
    to(1, trainer(config, tokenizer, tmp_path)).save_state()
    second = trainer(config, tokenizer, tmp_path)
    second.resume()
    a, b = weights(whole), weights(to(3, second))
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(ValueError, match="another recipe"):
        trainer(config, tokenizer, tmp_path, replace(RECIPE, seed=1)).resume()


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_each_mechanism_can_be_left_out(config, tokenizer, tmp_path, name):
    recipe = replace(RECIPE, disable=(name,), sparse_from=0.0, round_from=0.0)
    run = trainer(config, tokenizer, tmp_path, recipe)
    logs = run.update(next(run.batches()))
    assert torch.isfinite(logs["loss"]) and torch.isfinite(logs["grad_norm"])


def test_an_unknown_mechanism_is_named(config):
    with pytest.raises(ValueError, match="'engrams'.*engram"):
        ablated(config, ("engrams",))


def test_every_weight_of_the_release_gets_a_gradient(config, tokenizer, tmp_path):
    run = trainer(config, tokenizer, tmp_path)
    run._set_numerics(True)
    with torch.no_grad():  # some first values are zeros, which keep others from being felt
        for p in run.masters.values():
            p.add_(0.01 * torch.randn_like(p) if p.is_floating_point() else 0)
    batch = data.batch(tokenizer, 0, 0, 512, 1)
    arrays = batch.ids.astype("int64"), batch.doc_start.astype("int64"), batch.loss
    loss, _ = run.loss(*map(torch.from_numpy, arrays), True, True)
    loss.backward()
    missing = [n for n, p in run.masters.items()
               if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)]
    assert not missing


def test_orthogonalised_updates_have_singular_values_near_one():
    x = orthogonalise(torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(x)
    assert values.min() > 0.5 and values.max() < 1.5
    with pytest.raises(ValueError, match="AdamW"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_the_index_loss_is_zero_exactly_where_scores_are_the_logarithm_of_what_is_given():
    given = torch.tensor([[[0.1, 0.3, 0.6, 0.0]]])
    reads = torch.tensor([[[True, True, True, False]]])
    assert index_loss(given.clamp(min=1e-9).log(), given, reads).abs() < 1e-6
    assert index_loss(torch.zeros(1, 1, 4), given, reads) > 0.1


def test_rows_of_a_wrong_length_are_refused(config, tokenizer, tmp_path):
    run = trainer(config, tokenizer, tmp_path)
    ids = torch.zeros(1, 100, dtype=torch.int64)
    with pytest.raises(ValueError, match="seq_len is 100"):
        whole_step(run.model, run.folding, ids, ids, sparse=False, probes=4)


def test_a_run_goes_on_from_a_checkpoint_and_leaves_alone_what_is_frozen(learned, config, tokenizer,
                                                                         tmp_path):
    recipe = replace(RECIPE, steps=2, freeze=("ffn.experts", "ffn.gate"), mix={"json": 1.0})
    second = trainer(config, tokenizer, tmp_path, recipe)
    second.start_from(learned.out / "model")
    begun, stored = weights(second), learned.weights(rounded=True)
    for name, value in begun.items():
        torch.testing.assert_close(value, stored[name].to(value.dtype), rtol=0, atol=0, msg=name)
    assert second.run()
    for name, value in weights(second).items():
        if "ffn.experts" in name or name.endswith("ffn.gate.weight"):
            assert torch.equal(value, begun[name]), name
    assert not torch.equal(second.masters["embed.weight"], begun["embed.weight"])
    with pytest.raises(ValueError, match="hc_attn_fn"):
        trainer(config.replace(hc_mult=2), tokenizer, tmp_path).start_from(learned.out / "model")
