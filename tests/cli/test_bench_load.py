"""`dskit bench throughput, prefill, decode, startup, serve`: their documents, on the tiny model."""

import json
from pathlib import Path

import jsonschema
import pytest

from dskit import cli
from dskit.bench import serving

SCHEMA = json.loads((Path(__file__).parents[2] / "profiles" / "schema.json").read_text())


def run(capsys, tmp_path, name, *argv) -> dict:
    words = ["bench", name, "tiny", "--device", "cpu", "--json", "--result-dir", str(tmp_path), *argv]
    assert cli.main(words) == 0
    header = json.loads((next(tmp_path.iterdir()) / "run.json").read_text())
    jsonschema.validate(header, SCHEMA)
    found = json.loads(capsys.readouterr().out)
    assert header["interval"] == found["env"]["interval"] and found["bench"] == name
    return found["rows"]


def test_throughput(capsys, tmp_path):
    argv = ("--num-prompts", "3", "--input-len", "9", "--output-len", "4", "--repeats", "1")
    (row,) = run(capsys, tmp_path, "throughput", *argv)
    assert row["output_tok_s"] == pytest.approx(12 / row["seconds"])
    assert row["total_tok_s"] == pytest.approx(39 / row["seconds"])


def test_prefill_computes_what_is_new(capsys, tmp_path):
    argv = ("--cached-len", "64", "--new-len", "5", "--requests", "1", "3", "--repeats", "1")
    rows = run(capsys, tmp_path, "prefill", *argv)
    assert [row["requests"] for row in rows] == [1, 3]
    for row in rows:
        assert row["cached_tokens"] == 64
        assert row["new_tok_s"] == pytest.approx(row["computed_tok_s"])


def test_decode_times_its_steps(capsys, tmp_path):
    rows = run(capsys, tmp_path, "decode", "--context-len", "20", "--requests", "2", "--steps", "5")
    assert rows[0]["step_p99_ms"] >= rows[0]["step_ms"] > 0 and rows[0]["accepted_per_step"] is not None
    assert rows[0]["output_tok_s"] > 0


@pytest.mark.slow
def test_layer(capsys, tmp_path):
    words = ("--layers", "0", "3", "--requests", "1", "3", "--context-len", "70", "--prompt-len", "9")
    rows = run(capsys, tmp_path, "layer", *words, "--no-compile")
    seen = [(r["phase"], r["layer"], r["requests"], r["rows"], r["context"]) for r in rows]
    steps = ("decode", 1, 1, 71), ("decode", 3, 1, 71), ("prefill", 1, 9, 9)
    assert seen == [(phase, layer, *rest) for phase, *rest in steps for layer in (0, 3)]
    assert all(r["us"] > 0 and r["torch_us"] > 0 and r["compile_us"] is None for r in rows)
    assert rows[0]["experts"] == 2 < rows[4]["experts"] and rows[0]["floor_us"] is None  # no GPU, no floor


def test_a_layer_that_is_not_there_is_refused(capsys):
    assert cli.main(["bench", "layer", "tiny", "--device", "cpu", "--layers", "99"]) == 1
    assert "--layers has 99; tiny has 0 to 7" in capsys.readouterr().err


def test_a_context_that_is_too_short_is_refused(capsys):
    assert cli.main(["bench", "decode", "tiny", "--context-len", "2000"]) == 1
    assert "tiny holds 1024 tokens" in capsys.readouterr().err


def test_serve_against_a_running_server(capsys, tmp_path, tiny):
    from dskit import serve

    with serve.start(tiny, port=0, ui=False) as server:
        argv = ("--url", f"{server.url}/v1", "--num-prompts", "3", "--prefix-len", "32", "--input-len", "4",
                "--output-len", "3", "--repeats", "1", "--max-concurrency", "2", "--request-rate", "50",
                "--goodput", "ttft:60000")  # fmt: skip
        (row,) = run(capsys, tmp_path, "serve", *argv)
    assert row["requests"] == 3 and 0 < row["hit_ratio"] < 1
    assert row["goodput"] == pytest.approx(row["requests_per_s"])
    assert row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["e2el_p99_ms"]


def test_percentiles_and_goodput():
    answers = [serving.Answer(0.0, [0.1 * i, 0.1 * i + 0.2], {"prompt_tokens": 4, "completion_tokens": 3})
               for i in range(1, 5)]  # fmt: skip
    args = type("Args", (), {"goodput": ("ttft:250", "tpot:101")})
    row = serving._row(args, answers, 2.0)
    assert row["goodput"] == 1.0 and row["ttft_mean_ms"] == pytest.approx(250)
    assert row["itl_p50_ms"] == pytest.approx(200) and row["output_tok_s"] == 6


@pytest.mark.parametrize(("limit", "says"), [("ttft500", "write it as ttft:500"), ("itl:5", "ttft, tpot")])
def test_a_limit_that_is_none_is_refused_before_anything_starts(capsys, limit, says):
    assert cli.main(["bench", "serve", "tiny", "--goodput", limit]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_startup_and_a_server_of_its_own(capsys, tmp_path):
    (row,) = run(capsys, tmp_path / "a", "startup", "--repeats", "1")
    assert row["import_s"] + row["load_s"] + row["first_token_s"] < row["total_s"]
    argv = ("--num-prompts", "2", "--prefix-len", "8", "--input-len", "4", "--output-len", "3",
            "--repeats", "1")  # fmt: skip
    (row,) = run(capsys, tmp_path / "b", "serve", *argv)
    assert row["requests"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argv"), [
    ("decode", ("--context-len", "20", "--requests", "1", "3", "--steps", "5")),
    ("prefill", ("--cached-len", "64", "--new-len", "5", "--requests", "1", "3", "--repeats", "1")),
    ("throughput", ("--num-prompts", "3", "--input-len", "9", "--output-len", "4", "--repeats", "1")),
])
def test_several_ranks_get_equally_many_requests_and_are_compared_with_one(capsys, tmp_path, name, argv):
    rows = run(capsys, tmp_path, name, *argv, "--dp", "1", "2", "--speculate", "off")
    each = next(column for column in rows[0] if column.endswith("tok_s_per_rank"))
    alone, pair = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert [row["ranks"] for row in (*alone, *pair)] == [1] * len(alone) + [2] * len(pair)
    for one, two in zip(alone, pair, strict=True):
        assert one["requests"] == two["requests"] and one["efficiency"] is None
        assert two["efficiency"] == pytest.approx(two[each] / one[each])
        assert two[each.removesuffix("_per_rank")] == pytest.approx(2 * two[each])
        if name == "prefill":
            assert two["cached_tokens"] == 64, "every rank has the beginning"
