"""`dskit bench engine`: the document that other tools read, with few requests; how idle time is counted."""

import json

import pytest
import torch

from dskit import cli
from dskit.bench import engine
from dskit.config import preset
from dskit.engine import engram


def test_the_document_has_the_keys_that_others_read(capsys):
    flags = ["--json", "--running", "8", "--steps", "30", "--device", "cpu"]
    assert cli.main(["bench", "engine", "tiny", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    scheduler = found["scheduler"]
    assert scheduler["running"] == 8 and scheduler["steps"] == 30
    assert 0 < scheduler["plan_median_us"] < scheduler["median_us"] <= scheduler["p99_us"]
    assert found["blocks_ops_s"] > 1000 and found["tree_ops_s"] > 1000
    assert found["idle_fraction"] is None and found["idle"] == found["prompts"] == []
    tables = {row["placement"]: row for row in found["engram"]}
    assert list(tables) == ["device", "host", "mmap"] and "in no file" in tables.pop("mmap")["reason"]
    assert all(row["rows_per_s"] > 1000 and row["step_ms"] > 0 for row in tables.values())
    assert len({(row["table_bytes"], row["resident_bytes"]) for row in tables.values()}) == 1
    assert set(tables["host"]["wait_us"]) == {"1", "3"} and tables["device"]["wait_us"] == {}
    here = "left out by --device cpu" if torch.cuda.is_available() else "no NVIDIA GPU here"
    assert found["idle_reason"] == here and "no model runs" in found["env"]["interval"]


def test_the_table_says_what_was_not_measured(capsys):
    flags = ["--running", "2", "--steps", "10", "--device", "cpu"]
    assert cli.main(["bench", "engine", "v4-flash", *flags]) == 0  # which has no n-gram tables
    printed = capsys.readouterr().out
    assert "scheduler, 2 running, median" in printed and "GPU idle time: not measured" in printed


def test_tables_grow_to_the_size_asked_for():
    config = preset("slice")
    grown = engine.grown(config, 8)
    assert engram.table_bytes(grown) == pytest.approx(8e9, rel=0.01)
    assert grown.engram_layer_ids == config.engram_layer_ids


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tables_of_any_size_lie_anywhere_and_change_no_token(capsys):
    flags = ["--running", "2", "--steps", "9", "--device", "cpu", "--ep", "2", "--engram-gb", ".01", "--json"]
    assert cli.main(["bench", "engine", "tiny", *flags]) == 0
    rows = {row["placement"]: row for row in json.loads(capsys.readouterr().out)["engram"]}
    assert list(rows) == ["device", "host", "mmap", "shard"] and all(row["equal"] for row in rows.values())
    assert all(row["table_bytes"] == pytest.approx(1e7, rel=0.01) for row in rows.values())
    assert rows["shard"]["ranks"] == 2 and rows["shard"]["direct"] is False
    for row in (rows["host"], rows["mmap"]):
        assert row["fetch_us"] > 0 and 0 <= row["hidden"] <= 1 and row["rows_per_s"] > 1000


@pytest.mark.slow
def test_a_rebalance_on_two_ranks_is_told(capsys):
    flags = ["--running", "2", "--steps", "10", "--device", "cpu", "--ep", "2", "--json"]
    assert cli.main(["bench", "engine", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in found["eplb"]] == ["model", "draft"]
    for row in found["eplb"]:
        assert row["ranks"] == 2 and 0 < row["before"] < 1 and 0 < row["after"] <= 1
        assert row["layers"] > 0 and row["moved_bytes"] > 0 and row["stall_ms"] > 0
    for plan in found["eplb_plans"]:
        assert plan["ranks"] == 2 and plan["first"] < min(plan["step-aware"], plan["classic"]) <= 1
    assert [plan["redundant"] > 0 for plan in found["eplb_plans"]] == [False, True]


def test_so_many_requests_run_at_any_time():
    traffic = engine.Traffic(5, 0)
    kinds = [traffic.step()[0] for _ in range(1200)]
    assert len(traffic.scheduler.running) + len(traffic.scheduler.waiting) == 5
    assert traffic.count > 5 and kinds.count("decode") > 1000


def test_idle_time_lies_between_what_runs_on_the_gpu():
    def event(start, length, kind="kernel", name="gemm"):
        return {"cat": kind, "ts": start, "dur": length, "name": name}

    def mark(start):
        return event(start, 1, name=f"at::{engine.MARK}(long)")

    events = [mark(0), event(11, 9, "gpu_memcpy"), event(25, 10), event(20, 8), mark(40), event(50, 10),
              mark(70), event(71, 28), mark(99), event(10, 5000, "cpu_op")]
    found = engine.idle_shares(events)  # of 100: 1-11, 41-50 and 60-70 between passes, 35-40 inside one
    assert found == pytest.approx({"idle_fraction": 0.29, "gap_fraction": 0.05, "busy_ms": 0.066})
