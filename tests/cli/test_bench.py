"""`dskit bench latency`: the document that other tools read, on the tiny model; and its parts."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from dskit import chat, cli
from dskit.bench import environment, latency, peer
from dskit.config import PRESETS_DIR, preset
from dskit.flags import LatencyArgs

SCHEMA = Path(__file__).parents[2] / "profiles" / "schema.json"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a short run on the tiny model, and the folder that it was written to."""
    out, folder = io.StringIO(), tmp_path_factory.mktemp("profiles")
    argv = ["bench", "latency", "tiny", "--json", "--output-len", "3", "--repeats", "1", "--no-compile"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(latency, "ROWS", ((1, 20), (1, 2000), (2, 20)))
        assert cli.main([*argv, "--result-dir", str(folder)]) == 0
    return json.loads(out.getvalue()), next(folder.iterdir())


def test_the_document_has_the_keys_that_others_read(report):
    found = report[0]
    assert {"env", "runs", "peer", "ratio"} <= set(found)
    for row in found["runs"]:
        assert row["ttft_s"] > 0 and row["decode_tok_s"] > 0 and row["torch_calls_per_step"] != 0
    assert [(row["streams"], row["prompt_tokens"]) for row in found["runs"]] == [(1, 20), (2, 20)]
    assert found["ratio"] == pytest.approx(found["runs"][0]["decode_tok_s"] / found["peer"]["decode_tok_s"])


def test_rows_beyond_the_context_are_named(report):
    assert report[0]["left_out"] == [
        {"streams": 1, "prompt_tokens": 2000, "reason": "tiny holds 1024 tokens"}
    ]


def test_the_header_answers_the_four_questions(report):
    env = report[0]["env"]
    assert env["commit"] and env["interval"] and env["config"]["hidden_size"] == preset("tiny").hidden_size
    assert env["threads"] == torch.get_num_threads()


def test_the_written_header_follows_the_schema(report):
    header = json.loads((report[1] / "run.json").read_text())
    jsonschema.validate(header, json.loads(SCHEMA.read_text()))
    assert header["command"].startswith("dskit bench latency tiny --json")
    assert "runs" in json.loads((report[1] / "bench.json").read_text())


def test_a_second_run_of_a_day_gets_a_folder_of_its_own(tmp_path):
    report = {"env": {}, "runs": []}
    folders = {environment.write(report, str(tmp_path), "tiny", "dskit bench") for _ in range(3)}
    assert len(folders) == 3


def test_a_failed_request_is_no_measurement(tiny, monkeypatch):
    def fail(*_):
        raise RuntimeError("the step broke")

    monkeypatch.setattr(tiny.engine.runner, "run", fail)
    with pytest.raises(RuntimeError, match="ended with error"):
        latency.ours(tiny)([[5, 6, 7]], 4)


def test_without_transformers_the_peer_is_null_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = latency.peer_rows(None, None, [], LatencyArgs())
    assert found["decode_tok_s"] is None and "not installed" in found["reason"]


def test_the_peer_has_the_widths_of_the_demo():
    from transformers import DeepseekV4Config

    ours, theirs = preset("demo"), DeepseekV4Config(**peer.peer_fields(preset("demo")))
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "n_routed_experts",
        "hc_mult",
    ):
        assert getattr(ours, name) == getattr(theirs, name)
    assert theirs.num_local_experts == ours.n_routed_experts and set(theirs.mlp_layer_types) == {"moe"}


def test_calls_are_counted():
    with latency.Calls() as calls:
        torch.ones(2) + 1
    assert calls.count == 2


@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_prompts_are_seeded_and_never_repeat(name):
    config = preset(name)
    model = SimpleNamespace(name=name, config=config, tokenizer=chat.Tokenizer(PRESETS_DIR / "demo"))
    a, b = latency.Prompts(model, 0), latency.Prompts(model, 0)
    first = a.draw(2, 300)
    assert first == b.draw(2, 300) and a.draw(2, 300) != first
    assert all(200 < len(prompt) < 400 for prompt in first)
