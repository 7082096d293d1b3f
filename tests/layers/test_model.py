"""The model against the oracle, and V4 against transformers, on random checkpoints with awkward sizes."""

import pytest
import torch

from dskit.checkpoint import load
from dskit.engine import pools
from dskit.engine.llm import LLM
from tests import drive, models, oracle

NEAR_TIE = 5e-6


def clear_ids(checkpoint, count: int, seed: int) -> tuple[list[int], oracle.Run]:
    """Random ids for which no choice hangs on the last digits of float32, and the oracle's run of them."""
    for attempt in range(seed, seed + 2000, 100):
        ids = checkpoint.ids(count, attempt)
        run = oracle.forward(checkpoint.net(), ids)
        if min(run.gaps) >= NEAR_TIE:
            return ids, run
    raise AssertionError("no prompt without near ties among twenty")


def check_equal(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Relative RMS of the logits, and the same best token at every position."""
    assert models.relative_rms(found, wanted) < tolerance
    assert torch.equal(found.argmax(1), wanted.argmax(1))


def in_one_step(model, ids: list[int]) -> torch.Tensor:
    return drive.play(drive.runner(model), [ids], drive.at_once([ids]))[0]


# ---- exact numerics --------------------------------------------------------------------------------------


def check_against_oracle(made, name: str, count: int, seed: int = 1) -> None:
    checkpoint = made(name)
    ids, run = clear_ids(checkpoint, count, seed)
    check_equal(in_one_step(checkpoint.load(), ids), run.logits, 1e-5)


@pytest.mark.parametrize("name", ["tiny", "odd", "v41-0", "v41-1", "v41-3"])
def test_v41_equals_the_oracle(made, name):
    check_against_oracle(made, name, 61)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 60))
def test_v41_equals_the_oracle_often(made, seed):
    check_against_oracle(made, f"v41-{seed}", 30 + seed, seed)


def check_against_transformers(made, seed: int, count: int) -> None:
    checkpoint = made(f"v4-{seed}")
    ids, _ = clear_ids(checkpoint, count, seed)
    theirs = models.transformers_v4(checkpoint.raw, seed)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    check_equal(in_one_step(checkpoint.load(), ids), wanted, 1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_v4_equals_transformers(made, seed):
    check_against_transformers(made, seed, 47 + seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 60))
def test_v4_equals_transformers_often(made, seed):
    check_against_transformers(made, seed, 30 + 2 * seed)


def test_v4_folder_written_by_transformers(made, tmp_path):
    """The names and the config that transformers writes, read as they are."""
    raw = models.random_v4(3)
    theirs = models.transformers_v4(raw, 3)
    theirs.save_pretrained(tmp_path)
    ids = models.ids(raw, 40)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    check_equal(in_one_step(load(tmp_path, numerics="exact", device="cpu"), ids), wanted, 1e-4)


def test_llm_logits_equal_the_oracle(made):
    """The same through the front door: submitted, scheduled, cut into chunks of 16 rows."""
    checkpoint = made("tiny")
    ids, run = clear_ids(checkpoint, 61, 1)
    with LLM(checkpoint.folder, device="cpu", numerics="exact", max_num_batched_tokens=16) as llm:
        check_equal(llm.logits(ids), run.logits, 1e-5)


def test_a_candidate_pool_that_covers_everything_changes_nothing(made, tmp_path):
    """Every block kept = no filter; and a filter that binds does change the logits."""
    checkpoint = made("tiny")
    ids = checkpoint.ids(61)
    found = {}
    for blocks, source in ((64, 4), (4, -1), (4, 4)):
        raw = checkpoint.raw | {
            "text_config": checkpoint.raw["text_config"]
            | {"candidate_topk_blocks": blocks, "candidate_source_layer_id": source}
        }
        stored = models.draw(models.flat(raw), 0)
        model = load(models.save(tmp_path / f"{blocks}{source}", raw, stored), numerics="exact", device="cpu")
        found[blocks, source] = in_one_step(model, ids)
    assert torch.equal(found[64, 4], found[4, -1])
    assert models.relative_rms(found[4, 4], found[4, -1]) > 0.01


# ---- release numerics ------------------------------------------------------------------------------------


def check_bits(made, name: str) -> None:
    """Most rows of short prompts have the bits of the oracle; one rounding in another place changes them all.

    Not every row: a product summed in another order may fall on the other side of a rounding boundary.
    """
    checkpoint, equal = made(name), 0
    on, net = drive.runner(checkpoint.load("release")), checkpoint.net(release=True)
    for seed in range(4):
        ids = checkpoint.ids(10, seed)
        found = drive.play(on, [ids], drive.at_once([ids]))[0]
        equal += int((found == oracle.forward(net, ids).logits).all(1).sum())
    assert equal > 12, f"{equal} of 40 rows are equal"


@pytest.mark.parametrize("name", ["tiny", "odd", "v41-1", "v4-0", "v4-5"])
def test_release_numerics_have_the_bits_of_the_oracle(made, name):
    check_bits(made, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{kind}-{seed}" for kind in ("v41", "v4") for seed in range(20)])
def test_release_numerics_have_the_bits_of_the_oracle_often(made, name):
    check_bits(made, name)


def row_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """RMS of each row's difference over its standard deviation."""
    return (found - wanted).pow(2).mean(1).sqrt() / wanted.std(1)


def check_statistics(made, name: str) -> None:
    """What release numerics do to the logits where no choice depends on a rounding (model.md 9.1)."""
    checkpoint = made(name)
    ids = checkpoint.ids(61)
    exact, release = (in_one_step(checkpoint.load(numerics), ids) for numerics in ("exact", "release"))
    error = row_errors(release, exact)
    assert 0.05 < error.median() < 0.15
    assert error.max() < 0.3
    divergence = exact.softmax(1) * (exact.log_softmax(1) - release.log_softmax(1))
    assert divergence.sum(1).mean() < 0.02
    assert (release.argmax(1) == exact.argmax(1)).float().mean() > 0.6


def test_release_numerics_stay_near_exact_ones(made):
    check_statistics(made, "calm-1")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 16))
def test_release_numerics_stay_near_exact_ones_often(made, seed):
    check_statistics(made, f"calm-{seed}")


# ---- the draft head --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "odd", "v41-4"])
def test_draft_equals_the_oracle(made, name):
    checkpoint, P = made(name), 31
    net, model = checkpoint.net(), checkpoint.load()
    ids = checkpoint.ids(P)
    tokens, logits, confidence = oracle.draft(net, oracle.forward(net, ids).main, token=7)
    on = drive.runner(model)
    on.memory = pools.allocate(
        model.config,
        model.numerics,
        num_blocks=40,
        block_size=on.block_size,
        num_slots=1,
        device="cpu",
        drafts=True,
    )
    with torch.inference_mode():
        drive.play(on, [ids], drive.chunks([ids], 8))
        step = drive.draft_step(model, on.memory, 7, P)
        found = model.draft(step, on.memory, (1, model.config.dspark_block_size), lambda l: l.argmax(-1))
    assert found[0][0].tolist() == tokens
    assert models.relative_rms(found[1][0], logits) < 1e-5
    assert models.relative_rms(found[2][0], confidence) < 1e-5
