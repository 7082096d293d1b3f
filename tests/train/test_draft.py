"""The draft's trainer: what a block may see, what counts as the model's own words, and training = serving."""

from dataclasses import replace

import pytest
import torch

from dskit import chat, checkpoint
from dskit.config import PRESETS_DIR, preset
from dskit.engine import pools
from dskit.train import data
from dskit.train.draft import DraftRecipe, DraftTrainer, with_draft
from dskit.train.trainer import Recipe, Trainer
from dskit.train.whole import whole_step
from tests import drive

RECIPE = DraftRecipe(steps=3, warmup=1, shapes=((512, 1, 1),), anchors=8)


@pytest.fixture(scope="module")
def tokenizer():
    return chat.Tokenizer(PRESETS_DIR / "demo")


@pytest.fixture(scope="module")
def source(tokenizer, tmp_path_factory):
    """A narrow model without a draft, hardly trained: what the draft is for does not matter here."""
    out = tmp_path_factory.mktemp("source")
    config = preset("demo").without_draft().replace(
        hidden_size=64, num_attention_heads=4, head_dim=64, q_lora_rank=32, o_lora_rank=32,
        moe_intermediate_size=32, n_routed_experts=4, index_n_heads=2, index_topk=16)
    run = Trainer(config, tokenizer, Recipe(steps=1, warmup=1, shapes=((512, 1, 1),), probes=8), out, "cpu")
    assert run.run()
    return out / "model"


def trainer(source, tokenizer, out, recipe=RECIPE):
    """A run that takes every answer for the model's own: this one has hardly learned to speak."""
    run = DraftTrainer(source, tokenizer, recipe, out, "cpu")
    run._own = lambda last, head, ids, said: said
    return run


@pytest.fixture
def run(source, tokenizer, tmp_path):
    return trainer(source, tokenizer, tmp_path)


def test_only_the_draft_learns_and_the_models_shards_stay_as_they_are(source, run, tmp_path):
    before = {name: p.detach().clone() for name, p in run.masters.items()}
    assert run.run()
    for name, p in run.masters.items():
        if not name.startswith("mtp."):
            assert torch.equal(p, before[name]), name
    moved = [name for name, p in run.masters.items() if not torch.equal(p, before[name])]
    assert any("markov_head" in name for name in moved) and any("main_proj" in name for name in moved)
    for shard in source.glob("model-*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "model" / shard.name).read_bytes()
    model = checkpoint.load(tmp_path / "model", device="cpu")
    assert model.config == with_draft(preset("demo").without_draft().replace(**{
        name: getattr(model.config, name) for name in ("hidden_size", "num_attention_heads", "head_dim",
        "q_lora_rank", "o_lora_rank", "moe_intermediate_size", "n_routed_experts", "index_n_heads",
        "index_topk")}))
    assert (tmp_path / "log.csv").read_text().splitlines()[0].endswith("tau,accept_1,accept_2,accept_3,"
                                                                       "accept_4,accept_5")


def test_its_own_words_end_where_the_model_would_have_said_something_else(run):
    vocabulary = run.config.vocab_size
    ids = torch.tensor([[5, 6, 7, 8, 9, 6, 7, 8, 2]])
    said = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 0]], dtype=torch.bool)  # two answers of three tokens
    guess = torch.tensor([0, 7, 1, 9, 0, 7, 8, 2, 0])  # the first goes wrong at its second token
    last = torch.nn.functional.one_hot(guess, vocabulary).float()
    own = DraftTrainer._own(run, last, torch.eye(vocabulary), ids, said)
    assert own[0].tolist() == [False, True, False, False, False, True, True, True, False]
    run.recipe = replace(RECIPE, anchors=512)  # a place for each of the nine tokens
    anchor, live = run._anchors(own)
    assert sorted(anchor[live].tolist()) == [6, 7]


def _guess(run, taps, ids, start, anchor):
    """Logits of all block rows at these anchors, [N, G, V]."""
    G = run.config.dspark_block_size
    rows = anchor[..., None] + torch.arange(G)
    step = run._blocks(ids, start, anchor, rows)
    weights = {f"model.{name}": w for name, w in run.weights(True).items()}
    whole = whole_step(run.model, run.folding, ids, start, sparse=True, probes=0)
    if taps is None:
        taps, _ = torch.func.functional_call(run.pair, weights, ("read", whole))
    before = ids.gather(1, rows.flatten(1)).flatten()
    given = ("guess", taps, whole.rope[False], step, before)
    logits, _ = torch.func.functional_call(run.pair, weights, given)
    return logits.view(anchor.shape[1], G, -1), taps


@torch.no_grad()
def test_a_block_sees_its_window_and_itself_and_nothing_else(run, tokenizer):
    batch = data.batch(tokenizer, 0, 0, 512, 1, {"json": 1.0})
    ids, start = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.doc_start).long()
    run._set_numerics(True)
    W = run.config.sliding_window
    first = next(s for s in range(W + 2, 500) if start[0, s] <= s - W - 1)
    anchor = torch.tensor([[first]])
    plain, taps = _guess(run, None, ids, start, anchor)
    for position, seen in ((first - W - 1, False), (first - W, True), (first - 1, True), (first, False)):
        other = taps.clone()
        other[position] = torch.randn_like(other[position])
        changed = not torch.equal(_guess(run, other, ids, start, anchor)[0], plain)
        assert changed == seen, position


def test_a_block_in_training_is_the_block_of_serving(run, tokenizer, tmp_path):
    run.run()
    model = checkpoint.load(tmp_path / "model", device="cpu")
    ids = torch.randint(3, 4000, (1, 512))
    start = torch.zeros_like(ids)
    anchor = torch.tensor([[130]])
    run._set_numerics(True)
    with torch.no_grad():
        taught, _ = _guess(run, None, ids, start, anchor)
    on = drive.runner(model)
    on.memory = pools.allocate(model.config, model.numerics, num_blocks=40, block_size=on.block_size,
                               num_slots=1, device="cpu", drafts=True)
    drive.play(on, [ids[0, :130].tolist()], [{0: 130}])
    forced = iter(ids[0, 131:].tolist())
    step = drive.draft_step(model, on.memory, ids[0, 130].item(), 130)
    _, served, _ = model.draft(step, on.memory, (1, 5), lambda logits: torch.tensor([next(forced)]))
    torch.testing.assert_close(served[0], taught[0], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_stopped(source, tokenizer, tmp_path):
    def to(step, one):
        for batch in one.batches():
            if one.step == step:
                return one
            one.update(batch)

    whole = to(2, trainer(source, tokenizer, tmp_path))
    to(1, trainer(source, tokenizer, tmp_path)).save_state()
    second = trainer(source, tokenizer, tmp_path)
    second.resume()
    to(2, second)
    assert all(torch.equal(p, second.masters[name]) for name, p in whole.masters.items())
    with pytest.raises(ValueError, match="another recipe"):
        trainer(source, tokenizer, tmp_path, replace(RECIPE, seed=1)).resume()


def test_a_v4_model_is_refused():
    with pytest.raises(ValueError, match=r"V4\.1"):
        with_draft(preset("v4-flash"))
