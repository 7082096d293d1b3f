"""Ablations: each mechanism is really off, what is held fixed is, and a stopped study goes on."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import rms_norm

from dskit import chat, cli
from dskit.config import PRESETS_DIR
from dskit.layers.mla import Memory
from dskit.layers.moe import Gate
from dskit.model import Block
from dskit.train import ablate, data
from dskit.train.skills import SKILLS
from dskit.train.whole import whole_step

RECIPE = replace(ablate.SMALL, steps=2, warmup=1, sparse_from=0.0, probes=4)
T = 192  # tokens: more than four layers' windows reach


@pytest.fixture(scope="module")
def tokenizer():
    return chat.Tokenizer(PRESETS_DIR / "demo")


def short(run):
    """The run's batches, cut to a few windows: what a test of seconds can train on."""
    for index in itertools.count(run.step):
        whole = data.batch(run.tokenizer, run.recipe.seed, index, 512, 1)
        yield data.Batch(index, *(a[:, :T] for a in (whole.ids, whole.loss, whole.doc_start)))


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    """Every variant after a step of training: {name: its run}."""
    runs = {}
    for name in ablate.VARIANTS:
        out = tmp_path_factory.mktemp(name)
        runs[name] = ablate.Ablation(name, ablate.small(), tokenizer, RECIPE, out)
        assert torch.isfinite(runs[name].update(next(short(runs[name])))["loss"])
    return runs


@pytest.fixture(scope="module")
def batch(tokenizer):
    """One conversation that fills a row, so that far tokens could be read."""
    ids = torch.from_numpy(data.batch(tokenizer, 3, 0, 512, 1, {"recall": 1.0}).ids).long()[:, :T]
    return ids, torch.zeros_like(ids)


def hidden(run, batch, sparse=True, embed=None):
    """What the model says at each row; `embed` takes the place of the embedding's output."""
    step = whole_step(run.model, run.folding, *batch, sparse=sparse, probes=4)
    handle = run.model.embed.register_forward_hook(lambda *_: embed) if embed is not None else None
    try:
        return run.model.hidden(step, Memory())
    finally:
        if handle:
            handle.remove()


def far_gradient(run, batch):
    """How much the last row depends on tokens that no chain of windows reaches."""
    embed = run.model.embed(batch[0].flatten()).detach().requires_grad_()
    hidden(run, batch, embed=embed)[-1].sum().backward()
    reach = run.config.num_hidden_layers * (run.config.sliding_window - 1)
    return embed.grad[: T - 1 - reach].abs().sum()


def test_without_engram_no_module_reads_n_grams(made, batch):
    assert any("engram" in name for name, _ in made["full"].model.named_parameters())
    assert not any("engram" in name for name, _ in made["engram"].model.named_parameters())
    said = hidden(made["engram"], batch)
    made["engram"].folding.zero_()  # the folded ids that n-grams are made of
    assert torch.equal(hidden(made["engram"], batch), said)


def test_without_mhc_a_sublayer_is_added_to_one_stream(made, batch, monkeypatch):
    """X' = X + y: the write weight is one, the mixing matrix too, and reading only scales what is normed."""
    seen = []
    enter = Block.enter

    def spy(block, part, state):
        before, y = state.X, state.y
        x = enter(block, part, state)
        seen.append((getattr(block, f"{part}_norm").weight, before, y, x, state.X))
        return x

    monkeypatch.setattr(Block, "enter", spy)
    run = made["mhc"]
    hidden(run, batch)
    assert run.config.hc_mult == 1 and len(seen) == 8
    for gain, before, y, x, after in seen:
        torch.testing.assert_close(after, before if y is None else before + y[:, None], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x, rms_norm(after[:, 0], gain.shape, gain), rtol=1e-3, atol=1e-4)


def test_a_dense_layer_sends_every_token_to_all_experts_with_one_weight(made):
    run = made["moe"]
    x = torch.randn(50, run.config.hidden_size)
    for gate in (m for m in run.model.modules() if isinstance(m, Gate)):
        topk, weight = gate(x, torch.zeros(50, dtype=torch.int64), None)
        assert topk.sort(dim=1).values.unique(dim=0).tolist() == [[0, 1]]
        assert (weight == weight[0, 0]).all()
    full, dense = (ablate.sizes(made[name].model)[1] for name in ("full", "moe"))
    assert abs(full - dense) <= 4 * run.config.hidden_size * made["full"].config.n_routed_experts


def test_window_only_does_not_see_beyond_its_windows(made, batch):
    assert far_gradient(made["full"], batch) > 0
    assert far_gradient(made["global"], batch) == 0


def test_without_sharing_a_layer_reads_what_it_wrote(made, batch):
    for name, others in (("full", True), ("sharing", False)):
        run, last = made[name], made[name].config.num_hidden_layers - 1
        assert (run.config.kv_source(last) == last) != others
        writers = [i for i, block in enumerate(run.model.layers) if hasattr(block.attn, "compressor")]
        assert writers == ([1, 2] if others else [1, 2, 3])
        assert all(hasattr(run.model.layers[i].attn, "indexer") for i in (1, 2, 3))


def test_without_an_indexer_every_visible_entry_is_read(made, batch):
    run = made["indexer"]
    assert not any("indexer" in name for name, _ in run.model.named_parameters())
    torch.testing.assert_close(hidden(run, batch, sparse=True), hidden(run, batch, sparse=False),
                               rtol=0, atol=0)
    full = made["full"]
    assert not torch.equal(hidden(full, batch, sparse=True), hidden(full, batch, sparse=False))


def test_without_the_shared_expert_routed_ones_answer_alone(made):
    run = made["shared"]
    assert not any("shared" in name for name, _ in run.model.named_parameters())
    ffn, x = run.model.layers[0].ffn, torch.randn(6, run.config.hidden_size)
    with torch.no_grad():
        ffn.experts.w2.weight.zero_()
    assert not ffn(x, torch.zeros(6, dtype=torch.int64)).any()


def test_what_is_held_fixed_is(made):
    """All parameters without Engram and without the shared expert; per token where experts become dense."""
    total = {name: ablate.sizes(run.model)[0] for name, run in made.items()}
    active = {name: ablate.sizes(run.model)[1] for name, run in made.items()}
    assert abs(total["engram"] / total["full"] - 1) < 0.02
    assert abs(total["shared"] / total["full"] - 1) < 0.001
    assert abs(active["shared"] / active["full"] - 1) < 0.001
    assert abs(active["moe"] / active["full"] - 1) < 0.005
    for name, run in made.items():
        learning = {n: p for n, p in run.masters.items() if p.requires_grad}
        assert total[name] == sum(p.numel() for p in learning.values())
        assert all(p.grad is not None for p in learning.values())


def test_caches_are_counted_as_the_release_stores_them(made):
    config = ablate.small()
    window, entry, key = 64 + 2, 32 + 4, 32 + 2
    wanted = 4 * 32 * (window + -window % 4) + (100 // 2 + 100) * (entry + key + -key % 4)
    assert config.index_head_dim == 64 and ablate.cache_bytes(made["full"].model, 100) == wanted
    assert ablate.cache_bytes(made["global"].model, 100) == 4 * 32 * (window + -window % 4)


RUN = {"skills": {skill: {"loss": 1.0, "right": 0.5} for skill in SKILLS}, "exact": None, "parameters": 9,
       "active": 5, "cache_bytes": 7, "peak_mb": None, "tokens": 1024, "tokens_per_s": 100.0, "curve": []}


def runs_of(**losses):
    return [RUN | {"variant": name, "seed": seed, "loss": loss}
            for name, values in losses.items() for seed, loss in enumerate(values)]


def test_differences_are_taken_seed_by_seed():
    full, mhc = ablate.summary(runs_of(full=[1.0, 2.0, 3.0], mhc=[1.1, 2.2, 3.3]))
    assert "worse" not in full and mhc["worse"] == pytest.approx(0.2)
    assert mhc["worse_se"] == pytest.approx(0.1 / 3**0.5) and full["loss_se"] == pytest.approx(1 / 3**0.5)
    assert mhc["tokens_per_s_se"] == 0 and mhc["peak_mb"] is None and mhc["define_exact"] is None


@pytest.mark.parametrize(("losses", "said"), [
    ([1.1, 2.2, 3.3], "no difference"), ([1.2, 2.2, 3.21], "is higher"), ([0.8, 1.8, 2.79], "is lower"),
])  # fmt: skip
def test_a_finding_claims_what_its_interval_supports(losses, said):
    row = ablate.summary(runs_of(full=[1.0, 2.0, 3.0], engram=losses))[1]
    assert said in ablate.finding(row) and "3 seeds" in ablate.finding(row)


def test_one_seed_is_no_finding():
    row = ablate.summary(runs_of(full=[1.0], engram=[2.0]))[1]
    assert ablate.differs(row) is None and "nothing can be said" in ablate.finding(row)


def test_a_stopped_study_goes_on_and_keeps_what_is_finished(tokenizer, tmp_path, monkeypatch):
    def held_out(run):
        size = sum(p.abs().sum().item() for p in run.masters.values())  # any other weight, another size
        return {skill: {"loss": size, "right": 0.0} for skill in SKILLS}

    monkeypatch.setattr(ablate.Ablation, "held_out", held_out)
    monkeypatch.setattr(ablate.Ablation, "batches", short)
    whole = ablate.study([], [0], tmp_path / "whole", recipe=RECIPE)
    out, seen = tmp_path / "stopped", []
    assert ablate.study([], [0], out, recipe=RECIPE, minutes=0) == []
    run = ablate.Ablation("full", ablate.small(), tokenizer, RECIPE, out / "full-0")
    run.out.mkdir()
    run.update(next(short(run)))
    run.save_state()
    runs = ablate.study([], [0], out, recipe=RECIPE, say=seen.append)
    assert seen == ["full, seed 0"] and not list(out.glob("*/state.pt"))
    assert [run["loss"] for run in runs] == [run["loss"] for run in whole]
    assert ablate.study(["mhc"], [0], out, recipe=RECIPE, minutes=0) == runs  # nothing is run again
    with pytest.raises(ValueError, match="another study"):
        ablate.study([], [0], out, recipe=replace(RECIPE, steps=3))


def test_a_study_is_written_as_json_csv_and_a_picture(tmp_path):
    runs = runs_of(full=[1.0, 2.0], mhc=[1.1, 2.2])
    rows = ablate.write(runs, tmp_path)
    assert json.loads((tmp_path / "ablation.json").read_text()) == {"summary": rows, "runs": runs}
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "ablation.csv").read_text().startswith("variant,what,held,seeds")


def test_an_unknown_variant_is_named(tmp_path):
    with pytest.raises(ValueError, match="'engrams'.*mhc"):
        ablate.study(["engrams"], [0], tmp_path)


@pytest.mark.slow
def test_a_trained_model_answers_as_the_evaluation_asks(tokenizer, tmp_path):
    """Without an indexer and without the shared expert too: the engine runs what the edit left."""
    for name in ("full", "indexer", "shared"):
        run = ablate.Ablation(name, ablate.small(), tokenizer, replace(RECIPE, mix={"define": 1.0}), tmp_path)
        assert run.exact(1) == {"define": 0.0}


@pytest.mark.slow
def test_the_command_compares_and_goes_on(tmp_path, capsys):
    words = ["train", "ablate", "--disable", "moe", "--seeds", "1", "--out", str(tmp_path)]
    words += ["--device", "cpu", "--steps"]
    assert cli.main([*words, "2", "--minutes", "0.0001"]) == 1
    assert cli.main([*words, "2"]) == 0
    assert "nothing can be said" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "ablation.json").read_text())["runs"]) == 2
    assert cli.main([*words, "3"]) == 1  # three steps are another study
    assert "another study" in capsys.readouterr().err
