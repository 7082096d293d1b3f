"""`dskit doctor --plan`: its numbers against formulas worked out by hand for the released models."""

from __future__ import annotations

import json
from functools import cache

import pytest

from dskit import cli
from dskit.config import preset
from dskit.engine.plan import GIB, H100, H200, Plan, PlanError, parse_gpus, parts

FLASH, V4 = preset("flash"), preset("v4-flash")
close = pytest.approx


@cache
def flash(gpus: int) -> Plan:
    """V4.1-Flash on so many H200."""
    return Plan(FLASH, gpus, H200)


# V4.1-Flash by hand: 40 layers of 384 experts, three matrices 5120 x 2304 each, half a byte and 1/32 a number
EXPERTS = 40 * 384 * 3 * 5120 * 2304
DRAFT_EXPERTS = 3 * 128 * 3 * 5120 * 2304
FP4, FP8 = 1 / 2 + 1 / 32, 1 + 1 / 1024
ATTENTION = 1280 * 5120 + 64 * 512 * 1280 + 512 * 5120 + 8 * 1024 * 4096 + 5120 * 8192
SHARED = 3 * 5120 * 2304
PROJECTIONS = 40 * (ATTENTION + SHARED) + 8 * 32 * 128 * 1280 + 2 * 25600 * 6144
VOCABULARY = 2 * 129280 * 5120
COMPRESSORS = 3 * 2 * 512 * 5120 + 512 * 5120
MIXES = 40 * 2 * 24 * 4 * 5120
TABLES = (384_006_168 + 384_016_682) * 264


def test_the_parts_of_flash():
    found = parts(FLASH)
    assert found["routed experts"] / GIB == close(268.9, rel=1e-3) == EXPERTS * FP4 / GIB
    assert found["projections"] == close(PROJECTIONS * FP8, rel=1e-4)
    assert found["Engram tables"] == TABLES and close(188.8, rel=1e-3) == TABLES / GIB
    assert found["draft's experts"] == DRAFT_EXPERTS * FP4
    assert found["head"] == found["embedding"] == VOCABULARY
    others = 2 * (40 * 384 * 5120 + COMPRESSORS) + 4 * MIXES
    assert found["routers, compressors, norms, mHC"] == close(others, rel=0.03)
    assert found["the rest of the draft"] / GIB == close(0.65, rel=0.03)


@pytest.mark.parametrize(("gpus", "fp4", "fp8", "table"), [
    (1, 285.5, 529, 188.8), (2, 147.7, 270, 94.4), (4, 78.7, 139.7, 47.2), (8, 44.3, 74.7, 23.6)])
def test_flash_on_so_many_h200(gpus, fp4, fp8, table):
    """GiB per GPU as worked out in the design, and its verdicts."""
    hand = (EXPERTS + DRAFT_EXPERTS) * FP4 / gpus + PROJECTIONS * FP8 + 2 * VOCABULARY
    for plan, gib in ((flash(gpus), fp4), (Plan(FLASH.replace(expert_dtype="fp8"), gpus, H200), fp8)):
        beside = plan.weight_bytes - plan.per_gpu["Engram tables"]
        assert beside / GIB == close(gib, rel=0.03)
        assert plan.tables / gpus / GIB == close(table, rel=0.03)
    plan = flash(gpus)
    assert plan.weight_bytes - plan.per_gpu["Engram tables"] == close(hand, rel=0.03)
    assert plan.fits == (gpus >= 4) and plan.placement == ("shard" if gpus == 8 else "host")
    assert plan.to_dict()["fits"] is plan.fits
    there = [name for name, place in plan.placements().items() if place["fits"]]
    assert there == (["shard"] if gpus >= 4 else []) + ["host", "mmap"]


def test_what_is_left_is_tokens_of_cache():
    plan = Plan(FLASH, 8, H200, max_num_seqs=100, exact_prefix=False, max_model_len=131072)
    ring = 128 + 6
    state = 43 * ring * 528 + 3 * 7 * 2 * 512 * 4
    assert plan.token_bytes == 890 and plan.state_bytes == close(101 * state, rel=1e-3)
    left = 0.94 * 140.4 * GIB - plan.weight_bytes - 101 * state
    assert plan.cache_tokens == close(left / 890, rel=1e-3)
    assert f"fits: {plan.cache_tokens:,} tokens of cache per GPU at 890 bytes" in str(plan)


def test_v4_flash_on_two():
    experts = 43 * 256 * 3 * 4096 * 2048 * FP4
    draft = 3 * 256 * 3 * 4096 * 2048 * FP4
    attention = 1024 * 4096 + 64 * 512 * 1024 + 512 * 4096 + 8 * 1024 * 4096 + 4096 * 8192
    dense = 43 * (attention + 3 * 4096 * 2048) + 21 * 64 * 128 * 1024
    bf16 = 2 * 129280 * 4096 * 2 + 2 * 43 * 256 * 4096 + 4 * 43 * 2 * 24 * 4 * 4096
    plan = Plan(V4, 2, H200)
    assert plan.per_gpu["routed experts"] == experts / 2
    hand = (experts + draft) / 2 + dense * (1 + 1 / 128**2) + bf16
    # the hand's count leaves out what compressors, draft attention and norms take
    assert 1.0 < plan.weight_bytes / hand < 1.03
    assert plan.fits and plan.placement is None and plan.placements() == {}
    step = plan.decode(32, 8192)
    assert step["bytes"]["experts"] == close(experts / 2 * (1 - (1 - 6 / 256) ** 64))
    assert "Engram" not in str(plan)


@pytest.mark.parametrize(("gpus", "requests", "rows", "ms", "arithmetic_ms"), [
    (1, 8, 1, 10.0, 0.2), (1, 256, 1, 71.1, 6.6), (2, 32, 1, 23.7, 0.8), (4, 64, 1, 19.3, 1.7),
    (8, 8, 1, 7.4, 0.2), (8, 128, 1, 11.9, 3.3), (8, 256, 1, 13.5, 6.6), (8, 128, 4, 14.4, 13.2),
    (64, 8, 4, 3.3, 0.8), (64, 256, 4, 11.1, 26.4)])
def test_decode_floors_of_flash(gpus, requests, rows, ms, arithmetic_ms):
    """At 131,072 tokens of context: the design's table and formula of bytes; many rows are bound by FLOP."""
    tokens, C = requests * rows, 131072
    experts = 40 * 384 / gpus * (1 - (1 - 6 / 384) ** (gpus * tokens)) * 3 * 5120 * 2304 * FP4
    attention = tokens * 38 * 512 * 288 + requests * 40 * (128 + rows - 1) * 528
    index = requests * 68 * C * (3 / 2 + 1) + tokens * 4 * 16384 * 68
    activations = tokens * 40 * (30 * 2 * 5120 + 64 * 512 * 4.06)
    found = flash(gpus).decode(requests, C, rows)
    assert found["bytes"] == {"experts": close(experts), "dense": close(8.52e9, rel=0.01),
                              "attention": attention, "index": index, "activations": close(activations)}
    assert sum(found["bytes"].values()) / 4.3e9 == close(ms, rel=0.03)
    assert found["floor_ms"] == close(max(ms, arithmetic_ms), rel=0.03)
    assert found["tokens_per_s"] == close(1e3 * tokens / found["floor_ms"])


@pytest.mark.parametrize(("context", "replay", "us"), [
    (8192, True, 12.1), (131072, True, 13.0), (8192, False, 24.2), (131072, False, 25.8)])
def test_prefill_floors_of_flash(context, replay, us):
    found = flash(2).prefill(context, replay)
    assert found["us_per_token"] == close(us, rel=0.03)
    if replay:
        assert found["experts_ms"] == close(16.8, rel=0.03)


@pytest.mark.parametrize("requests", [1, 128])
def test_layers_and_head_take_what_a_step_takes(requests):
    plan = Plan(preset("slice"), 1, H200)
    met = 384 * (1 - (1 - 6 / 384) ** requests)
    layers = sum(plan.layer(layer, requests, 8192, 1, met) for layer in range(6))
    head = plan.parts["head"] / H200.bytes_per_s
    assert 1e3 * (layers + head) == close(plan.decode(requests, 8192)["floor_ms"], rel=0.01)


def test_the_floor_of_a_prompt_is_its_arithmetic():
    """4,096 rows of a layer that reads all earlier entries' best, met by all experts."""
    plan, rows = Plan(preset("slice"), 1, H200), 4096
    per_row = plan._token_seconds(rows, 5) - plan._token_seconds(rows, 4)
    assert 0.9 * rows * per_row < plan.layer(4, 1, rows, rows, 384) <= rows * per_row


@pytest.mark.parametrize(("gpus", "us_128", "ms_8k"), [(2, 5.3, 0.34), (4, 13.2, 0.85), (8, 20.7, 1.32)])
def test_exchange_of_a_layer(gpus, us_128, ms_8k):
    plan = flash(gpus)
    assert plan.decode(128, 8192)["exchange_ms"] / 40 == close(us_128 / 1e3, rel=0.03)
    assert plan.prefill(8192)["exchange_us_per_token"] * 8192 / 40 == close(1e3 * ms_8k, rel=0.03)
    assert flash(1).decode(1, 8192)["exchange_ms"] == 0


def test_gpus_are_named_or_described(tmp_path):
    assert parse_gpus("8xH200") == (8, H200) and parse_gpus("h100") == (1, H100)
    file = tmp_path / "gpu.json"
    described = {"name": "B1", "bytes_per_s": 8e12, "flop_per_s": {"bf16": 2e15, "fp8": 4e15},
                 "memory_bytes": 2e11}
    file.write_text(json.dumps(described))
    count, machine = parse_gpus("72xB1", str(file))
    assert (count, machine.memory_bytes, machine.link_bytes_per_s) == (72, 2e11, 370e9)
    for words in ("", "0xH200", "8x", "8 x H200"):
        with pytest.raises(PlanError, match="as in 8xH200"):
            parse_gpus(words)
    with pytest.raises(PlanError, match="'B300' here, only H100 and H200; .* --machine FILE, JSON with name"):
        parse_gpus("4xB300")
    for field in ("memory_bytes", "flop_per_s"):
        file.write_text(json.dumps(described | {field: None if field == "memory_bytes" else {"fp8": 1e15}}))
        with pytest.raises(PlanError, match="which a plan needs"):
            parse_gpus("B1", str(file))


def test_the_command(capsys, tmp_path):
    assert cli.main(["doctor", "--plan", "flash", "--gpus", "8xH200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "flash" and found["fits"] and len(found["decode"]) == 6
    folder = tmp_path / "released"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(V4.to_dict()))  # and no shards
    assert cli.main(["doctor", "--plan", str(folder), "--gpus", "1xH100"]) == 1
    assert "does not fit: weights and windows take" in capsys.readouterr().out
    assert cli.main(["doctor", "--plan", "flash", "--gpus", "8xTPU"]) == cli.USAGE
    assert "only H100 and H200" in capsys.readouterr().err


def test_small_models_have_plans_too():
    for name in ("tiny", "odd", "demo", "slice"):
        assert Plan(preset(name), 1, H100).fits, name
