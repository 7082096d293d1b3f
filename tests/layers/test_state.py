"""How a sequence is cut into steps, and with which others it is batched, changes nothing that it computes."""

import pytest
import torch

from dskit.layers import linear
from tests import drive, models, oracle

LENGTHS = (1, 2, 13, 31, 22)


def schedules(prompts, seed):
    return {
        "batch": drive.at_once(prompts),
        "tokens": drive.token_by_token(prompts),
        "chunks": drive.chunks(prompts, 7),
        "ragged": drive.ragged(prompts, seed),
    }


def prompts_of(checkpoint, lengths=LENGTHS, seed=0):
    return [checkpoint.ids(n, seed + i) for i, n in enumerate(lengths)]


def check_exact(made, name: str, prompts_seed: int = 0, lengths=LENGTHS, blocks_of: int = 3) -> None:
    checkpoint = made(name)
    prompts = prompts_of(checkpoint, lengths, prompts_seed)
    on = drive.runner(checkpoint.load(), blocks_of=blocks_of)
    alone = drive.play(on, prompts, drive.one_by_one(prompts))
    for seed, (how, schedule) in enumerate(schedules(prompts, prompts_seed).items(), 1):
        found = drive.play(on, prompts, schedule, seed=seed)
        for which, (one, other) in enumerate(zip(found, alone, strict=True)):
            assert models.relative_rms(one, other) < 1e-5, f"{how}, prompt {which}"


def check_bits(made, name: str, prompts_seed: int = 0, lengths=LENGTHS, **settings) -> None:
    checkpoint = made(name)
    prompts = prompts_of(checkpoint, lengths, prompts_seed)
    on = drive.runner(checkpoint.load("release", batch_invariant=True), **settings)
    alone = drive.play(on, prompts, drive.one_by_one(prompts))
    for seed, (how, schedule) in enumerate(schedules(prompts, prompts_seed).items(), 1):
        found = drive.play(on, prompts, schedule, seed=seed)
        for which, (one, other) in enumerate(zip(found, alone, strict=True)):
            rows = (one != other).any(1).nonzero().flatten().tolist()
            assert not rows, f"{how}, prompt {which}: rows {rows} have other bits"


@pytest.mark.parametrize("name", ["tiny", "odd", "v4-5"])
def test_exact_numerics_do_not_depend_on_the_schedule(made, name):
    check_exact(made, name)


@pytest.mark.parametrize("name", ["odd", "v41-0", "v4-5"])
def test_release_bits_do_not_depend_on_the_schedule(made, name):
    check_bits(made, name)


@pytest.mark.parametrize("name", ["odd", "v4-5"])
def test_bits_do_not_depend_on_where_tables_of_windows_are_made(made, name, monkeypatch):
    monkeypatch.setattr("dskit.engine.runner.MANY_ROWS", 3)  # prompts' on the device, others on the host
    check_bits(made, name)


@pytest.mark.parametrize("name", ["odd", "v4-5"])
def test_bits_do_not_depend_on_how_many_rows_are_scored_at_a_time(made, name, monkeypatch):
    monkeypatch.setattr("dskit.layers.indexer.SCORES_HELD", 50)  # one to a few rows, of a ragged batch
    check_bits(made, name)


def test_smallest_blocks(made):
    """One group per block: every entry is at a block's edge."""
    check_exact(made, "tiny", blocks_of=1, lengths=(30, 9))


MANY = ["tiny", "odd", *[f"v41-{s}" for s in (1, 3, 4, 6, 8, 9, 10, 12)], *[f"v4-{s}" for s in range(8)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_exact_numerics_do_not_depend_on_the_schedule_often(made, name):
    for seed in (100, 200):
        check_exact(made, name, seed, (5, 61, 1, 90, 33, 17), blocks_of=1 + seed // 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_release_bits_do_not_depend_on_the_schedule_often(made, name):
    for seed in (100, 200):
        check_bits(made, name, seed, (5, 61, 1, 90, 33, 17), blocks_of=1 + seed // 100)


# ---- elementwise functions -------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["sigmoid", "softplus"])
def test_steady_functions_give_an_element_the_same_bits_anywhere(function):
    """torch's own take another path for the last elements of a tensor, which would tie a row to its batch."""
    x = torch.cat((4 * torch.randn(4000), torch.tensor([-200.0, -90, -20, 0, 20, 20.5, 90, 200])))
    steady = getattr(linear, function)
    whole = steady(x, True)
    parts = torch.cat([steady(part, True) for part in x.split(7)])
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole, steady(x.double(), False).float(), rtol=1e-6, atol=1e-37)


# ---- bounded replay --------------------------------------------------------------------------------------


def least_keep(config) -> int:
    return config.sliding_window + max(6, config.dspark_block_size + 1)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_replay_equals_the_full_pass_when_nothing_is_dropped(made, mode):
    checkpoint = made("tiny")
    prompts = prompts_of(checkpoint)
    model = checkpoint.load()
    full = drive.play(drive.runner(model), prompts, drive.one_by_one(prompts))
    on = drive.runner(model, replay=mode, keep=max(LENGTHS))
    for one, other in zip(drive.play(on, prompts, drive.ragged(prompts, 4)), full, strict=True):
        assert models.relative_rms(one, other) < 1e-5


@pytest.mark.parametrize(("name", "mode"), [("tiny", "mask"), ("tiny", "compact"), ("odd", "compact")])
def test_replay_equals_its_oracle_and_goes_on_decoding(made, name, mode):
    """Rows decoded after the prompt see no window entry before its tail either."""
    checkpoint = made(name)
    model = checkpoint.load()
    keep, prompt, T = least_keep(model.config), 40, 52
    ids = checkpoint.ids(T)
    wanted = oracle.forward(checkpoint.net(), ids, keep=keep, prompt=prompt).logits[prompt - keep :]
    on = drive.runner(model, replay=mode, keep=keep)
    for step in (prompt, 9):  # the prompt at once; in chunks that lie before, across and in the tail
        schedule = [{0: min(step, prompt - t)} for t in range(0, prompt, step)] + [{0: 1}] * (T - prompt)
        found = drive.play(on, [ids], schedule, prompt_lens=[prompt])[0][-len(wanted) :]
        assert models.relative_rms(found, wanted) < 1e-5
    off = oracle.forward(checkpoint.net(), ids).logits[prompt - keep :]
    assert (
        models.relative_rms(wanted, off) > 0.01
    )  # bounded replay is an approximation, and this case shows it


def test_mask_and_compact_agree_bit_for_bit(made):
    checkpoint = made("odd")
    model = checkpoint.load("release", batch_invariant=True)
    prompts, keep = prompts_of(checkpoint), least_keep(model.config)
    masked, compact = (
        drive.play(drive.runner(model, replay=mode, keep=keep), prompts, drive.chunks(prompts, 11))
        for mode in ("mask", "compact")
    )
    for one, other in zip(masked, compact, strict=True):
        assert torch.equal(one[-len(other) :], other)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("v4-5", {"replay": "compact"}, "no decoder layers"),
        ("tiny", {"replay": "compact", "keep": 10}, "keep_tokens is 10"),
        ("tiny", {"replay": "some"}, "choose off, mask or compact"),
    ],
)
def test_replay_that_no_model_can_serve_is_refused(made, name, settings, says):
    with pytest.raises(ValueError, match=says):
        drive.runner(made(name).load(), **settings)
