"""Packed caches read back what expanded ones hold, bit for bit, in the bytes that the release states."""

import dataclasses
from collections import Counter

import pytest
import torch

from dskit.config import preset
from dskit.engine import pools
from dskit.layers import cache, mla
from dskit.layers.cache import Packing
from dskit.layers.linear import Numerics
from tests import drive

FORMATS = [("fp8_32", 512, 0), ("fp4_16", 512, 0), ("fp4_32", 128, 0), ("fp8_64", 512, 64),
           ("fp8_32", 40, 0), ("fp4_16", 42, 0), ("fp4_32", 6, 0), ("fp8_64", 96, 20), ("fp8_64", 32, 6)]


# one sequence is prefilled in chunks, with steps of several rows and of one; then all decode together
SHORT = [{0: 25, 1: 6}, {0: 5, 2: 1}, {0: 1, 1: 2, 2: 4}, *[{0: 1, 1: 1, 2: 1}] * 3]
LONG = [{0: 100, 1: 2}, {0: 49}, {0: 1, 1: 1}]


def check_storages(model, ids, schedule, **settings) -> None:
    """The same steps over packed and over expanded caches give the same bits."""
    lengths = Counter()
    for step in schedule:
        lengths.update(step)
    prompts = [ids(lengths[s], s) for s in sorted(lengths)]
    packed, expanded = (drive.play(drive.runner(model, cache_storage=storage, **settings), prompts, schedule)
                        for storage in ("packed", "expanded"))
    for which, (one, other) in enumerate(zip(packed, expanded, strict=True)):
        assert torch.equal(one, other), f"prompt {which}"


@pytest.mark.parametrize("name", ["tiny", "odd", "v41-0", "v4-0", "v4-5"])
def test_packed_caches_give_the_logits_of_expanded_ones(made, name):
    checkpoint = made(name)
    check_storages(checkpoint.load("release"), checkpoint.ids, SHORT)


@pytest.mark.parametrize(("name", "share"), [("tiny", 64), ("v4-0", 0), ("v4-0", 64)])
def test_rows_that_are_laid_out_have_the_same_bits(made, monkeypatch, name, share):
    checkpoint = made(name)
    monkeypatch.setattr(mla, "MANY_ROWS", 3)
    monkeypatch.setattr(mla, "MOST_LAID_OUT", share)
    laid, lay_out = [], mla.Attention.lay_out
    monkeypatch.setattr(mla.Attention, "lay_out", lambda self, step, shared: (
        lay_out(self, step, shared), laid.append(shared.line))[0])
    check_storages(checkpoint.load("release"), checkpoint.ids, SHORT)
    assert any(line is not None for line in laid) == (share > 0)


def test_packed_caches_give_the_logits_of_the_demo(demo):
    check_storages(demo.model, lambda count, seed: torch.randint(10, 4000, (count,)).tolist(), LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{kind}-{seed}" for kind in ("v41", "v4") for seed in range(1, 12)])
def test_packed_caches_give_the_logits_of_expanded_ones_often(made, name):
    checkpoint = made(name)
    model = checkpoint.load("release")
    for seed in range(2):
        lengths = [[0] * n for n in (5, 61, 1, 90)]
        check_storages(model, checkpoint.ids, list(drive.ragged(lengths, seed)), blocks_of=1 + seed)


# ---- rows --------------------------------------------------------------------------------------------------


def values(width: int) -> torch.Tensor:
    """Bfloat16 values over sixty binades, with zeros of both signs and an empty row."""
    v = torch.randn(50, width) * torch.pow(2.0, torch.randint(-40, 20, (50, width)))
    v[3], v[4, ::2], v[5, 1::3] = 0, -0.0, 0
    return v.bfloat16()


@pytest.mark.parametrize(("fmt", "width", "tail"), FORMATS)
def test_unpacking_gives_the_bits_of_rounding(fmt, width, tail):
    packing, v = Packing(width, fmt, tail, torch.float32), values(width)
    rows = packing.pack(v)
    assert rows.shape == (50, packing.nbytes) and rows.dtype == torch.uint8 and packing.nbytes % 4 == 0
    for dtype in (torch.float32, torch.bfloat16):
        wanted = dataclasses.replace(packing, dtype=dtype).round(v)
        assert torch.equal(packing.unpack(rows, dtype).view(torch.uint8), wanted.view(torch.uint8))


def test_rows_take_the_bytes_of_the_release():
    """model.md 5.1: 528, 288 and 68 bytes a row, 890 a token; V4 584 and 68, 3,514 a token."""
    for name, window, entry, per_token in (("flash", 528, 288, 890), ("v4-flash", 584, 584, 3514)):
        config = preset(name)
        numerics = Numerics.of(config)
        size = {what: Packing.of(config, numerics, what).nbytes for what in ("window", "entry", "key")}
        assert size == {"window": window, "entry": entry, "key": 68}
        total = sum((size["entry"] + size["key"] * (s in config.index_source_layer_ids)) / config.ratio(s)
                    for s in config.kv_source_layer_ids)
        assert int(total) == per_token


def test_memory_bytes_counts_packed_rows():
    config = preset("tiny")
    numerics = Numerics.of(config)
    size = {what: Packing.of(config, numerics, what).nbytes for what in ("window", "entry", "key")}
    memory = pools.allocate(config, numerics, num_blocks=5, block_size=8, num_slots=2, device="cpu",
                            cache_storage="packed")
    wanted = config.num_hidden_layers * 3 * pools.window_ring(config) * size["window"]
    for source in config.kv_source_layer_ids:
        ratio = config.ratio(source)
        wanted += 6 * 8 // ratio * (size["entry"] + size["key"])
        if ratio > 1:
            wanted += 3 * pools.carry_ring(config, ratio) * 2 * config.head_dim * 4
    assert pools.memory_bytes(memory) == wanted


def test_a_slot_of_minus_one_is_skipped_and_a_row_of_minus_one_is_zero():
    packing = Packing(32, "fp8_32", 0, torch.float32)
    held, v = torch.zeros(6, packing.nbytes, dtype=torch.uint8), torch.randn(3, 32).bfloat16()
    cache.write_(held, v, None, 0.0, None, torch.tensor([4, -1, 2]), packing)
    found = cache.read(held, torch.tensor([[2, -1], [4, 5]]), packing, torch.float32)
    assert torch.equal(found[0, 0], packing.round(v[2])) and torch.equal(found[1, 0], packing.round(v[0]))
    assert not found[0, 1].any() and not found[1, 1].any()
    assert held[[0, 1, 3, 5]].sum() == 0


@pytest.mark.parametrize(("numerics", "storage", "says"),
                         [("exact", "packed", "exact numerics"), ("release", "zip", "packed or expanded")])
def test_what_no_cache_can_hold_is_refused(numerics, storage, says):
    config = preset("tiny")
    with pytest.raises(ValueError, match=says):
        pools.allocate(config, Numerics.of(config, numerics), num_blocks=1, block_size=8, num_slots=1,
                       device="cpu", cache_storage=storage)
