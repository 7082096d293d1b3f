"""Profiles: the table adds up, folders follow the schema, traces open elsewhere, two runs compare."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import socket
import threading
from pathlib import Path

import jsonschema
import pytest
import torch

import dskit
from dskit import cli, ops, traces
from dskit.bench import environment
from dskit.layers.norm import RMSNorm
from dskit.profiling import NO_GPU, profile

SCHEMA = Path(__file__).parents[2] / "profiles" / "schema.json"


# ---- the command, once -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The JSON of one short profile of the tiny model, its folder, TensorBoard's, and the trace as text.

    Every op runs by its reference, so that a GPU calls the same ones; the prompt is longer than a draft.
    """
    out, home = io.StringIO(), tmp_path_factory.mktemp("profiles")
    argv = ["profile", "tiny", "--prompt-tokens", "16", "--decode", "1", "--warmup", "1", "--json"]
    with contextlib.redirect_stdout(out), ops.use("torch"):
        assert cli.main([*argv, "--out", str(home), "--tensorboard", str(home / "board")]) == 0
    report = json.loads(out.getvalue())
    with gzip.open(Path(report["folder"]) / "trace.rank0.json.gz", "rt") as file:
        return report, Path(report["folder"]), home / "board", file.read()


def proposals(report):
    """How often the draft guessed; each time counts as a step."""
    return next(row["calls"] for row in report["rows"] if row["op"] == "dspark.confidence")


def test_the_shares_of_a_phase_add_up_and_so_do_the_phases(run):
    report = run[0]
    for name, phase in report["phases"].items():
        rows = [row for row in report["rows"] if row["phase"] == name]
        assert sum(row["self_ms"] for row in rows) == pytest.approx(phase["wall_ms"], rel=1e-6)
        assert sum(row["share"] for row in rows) == pytest.approx(1.0)
        assert all(row["self_ms"] >= 0 for row in rows)
    assert report["phases"]["prefill"]["steps"] == 1
    assert report["phases"]["decode"]["steps"] == 1 + proposals(report)
    assert sum(phase["wall_ms"] for phase in report["phases"].values()) == pytest.approx(report["wall_ms"])
    assert set(report["unprofiled_step_ms"]) == {"prefill", "decode"}


def test_the_rows_count_what_one_step_of_the_model_calls(run, tiny):
    layers, drafts = tiny.config.num_hidden_layers, tiny.config.num_nextn_predict_layers
    rows = {(row["phase"], row["op"]): row for row in run[0]["rows"]}
    of_draft = "".join(f",mtp.{i}" for i in range(drafts))
    for phase, guesses, named in (("prefill", 0, ""), ("decode", proposals(run[0]), of_draft)):
        attend = rows[phase, "mla.attend"]
        assert attend["calls"] == layers + drafts * guesses and attend["layers"] == f"0-{layers - 1}{named}"
        assert attend["implementation"] == "torch"
    gates = [str(i) for i in tiny.config.engram_layer_ids]
    assert rows["decode", "engram.gate"]["layers"] == ",".join(gates)
    assert rows["decode", "(outside ops)"]["calls"] is None and ("outside steps", "(between steps)") in rows


def test_without_a_gpu_it_says_so(run):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    report, folder, *_ = run
    assert report["no_gpu"] == NO_GPU and report["gpu_busy_ms"] is report["gpu_idle_share"] is None
    assert not any(key.startswith("cuda") for row in report["rows"] for key in row)
    assert NO_GPU in (folder / "summary.md").read_text()


def test_the_folder_follows_the_schema_and_tells_nothing_of_this_machine(run):
    report, folder, _, trace = run
    header = json.loads((folder / "run.json").read_text())
    jsonschema.validate(header, json.loads(SCHEMA.read_text()))
    assert header["command"].startswith("dskit profile tiny --prompt-tokens 16") and header["date"]
    assert header["commit"] == environment.commit() and header["selection"]["mla.attend"]
    files = {path.name: path for path in folder.iterdir()}
    assert {"run.json", "table.csv", "summary.md", "trace.rank0.json.gz"} <= set(files)
    assert sum(path.stat().st_size for path in files.values()) < 2e6  # a GPU's trace is the larger
    summary = files["summary.md"].read_text()
    for text in (trace, summary):
        assert str(Path.home()) not in text and "host_name" not in text
        assert f'"{socket.gethostname()}"' not in text and os.sep + "dskit" not in text
    assert "ui.perfetto.dev" in summary and "without the profiler a decode step takes" in summary


def test_the_trace_has_steps_layers_and_ops_in_one_another(run):
    trace = json.loads(run[3])
    assert trace["distributedInfo"]["rank"] == 0
    ranges = traces.ranges_of(trace["traceEvents"])
    assert {r.name for r in ranges} >= {"dskit::step[prefill]", "dskit::step[decode]", "dskit::layers.0"}
    fine = next(r for r in ranges if r.op == "mhc.sinkhorn" and r.phase == "decode")
    assert fine.layer and fine.outer.is_op, "a fine op lies in the coarse one that calls it"
    times = [event["ts"] for event in trace["traceEvents"]]
    assert min(times) == 0 and max(times) < 1e9
    assert any(event["name"].startswith("aten::") for event in trace["traceEvents"])


def test_tensorboard_reads_the_scalars_and_its_plugin_the_trace(run):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report, _, board, _ = run
    found = event_accumulator.EventAccumulator(str(board)).Reload()
    scalar = found.Scalars("decode ms per step/mla.attend[torch]")[0].value
    row = next(r for r in report["rows"] if (r["phase"], r["op"]) == ("decode", "mla.attend"))
    assert scalar == pytest.approx(row.get("cuda_ms_per_step", row["ms_per_step"]), rel=1e-4)
    assert found.Tags()["tensors"] == ["summary/text_summary"]
    (path,) = board.glob("dskit.*.pt.trace.json")  # the name that torch's handler gives
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert "dskit::mla.attend[torch]" in names


def test_compare_shows_what_changed(run, tmp_path, capsys):
    """A run beside itself, then beside one whose attention takes twice as long by another kernel."""
    folder, other = run[1], tmp_path / "other"
    other.mkdir()
    lines = (folder / "table.csv").read_text().splitlines()
    columns = lines[0].split(",")
    at, times = columns.index("implementation"), [i for i, c in enumerate(columns) if "ms_per_step" in c]
    for i, line in enumerate(lines):
        cells = line.split(",")
        if cells[:2] == ["decode", "mla.attend"]:
            cells[at] = "better"
            for column in times:
                cells[column] = str(2 * float(cells[column]))
            lines[i] = ",".join(cells)
    (other / "table.csv").write_text("\n".join(lines) + "\n")
    assert all(row["difference_ms"] == 0 for row in traces.compare(folder, folder))
    assert cli.main(["profile", "--compare", str(folder), str(other), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["phase"], first["op"], first["b"]) == ("decode", "mla.attend", "better")
    assert first["ratio"] == pytest.approx(2) and first["difference_ms"] > 0
    assert cli.main(["profile", "--compare", str(folder), str(other)]) == 0
    assert "mla.attend" in capsys.readouterr().out
    assert cli.main(["profile", "--compare", str(folder), str(tmp_path)]) == 1
    assert "no table.csv" in capsys.readouterr().err


# ---- in a cell ---------------------------------------------------------------------------------------------


def test_a_block_of_plain_calls_has_a_table_that_displays_itself():
    norm = RMSNorm(8, 1e-6, torch.float32)
    with dskit.profile() as seen:
        norm(torch.ones(2, 8)), norm(torch.ones(2, 8))
    (row,) = [row for row in seen.table("outside steps") if row["op"] == "norm.rms"]
    assert row["calls"] == 2 and row["ms_per_step"] is None
    assert sum(row["share"] for row in seen.table()) == pytest.approx(1.0)
    assert "norm.rms" in repr(seen) and "<td" in seen._repr_html_() and "wall" in repr(seen)
    assert seen.prof.key_averages(), "torch's own profiler stays in reach"
    assert not ops._state.ranges and not ops._state.ranging


def test_memory_has_its_figures_and_its_column():
    norm = RMSNorm(1000, 1e-6, torch.float32)
    with profile(memory=True) as seen:
        norm(torch.ones(50, 1000))
    (row,) = [row for row in seen.table() if row["op"] == "norm.rms"]
    assert row["alloc_mb"] >= 0.2, "at least its result"
    assert seen.memory[0]["device"] == "cpu" and seen.memory[0]["peak_over_start_mb"] >= 0.4
    assert any(line.startswith("memory of cpu: peak over start") for line in seen.lines())


def test_another_thread_is_seen_and_an_error_closes_the_profile():
    norm = RMSNorm(8, 1e-6, torch.float32)
    with profile() as seen:
        thread = threading.Thread(target=lambda: norm(torch.ones(2, 8)))
        thread.start()
        thread.join()
    assert [row["calls"] for row in seen.table() if row["op"] == "norm.rms"] == [1]
    with pytest.raises(KeyError), profile() as failed:
        raise KeyError("mine")
    assert not ops._state.ranges and not ops._state.ranging and not failed.table()


@pytest.mark.gpu
def test_a_gpu_s_time_belongs_to_the_op_that_launched_it():
    norm = RMSNorm(5120, 1e-6, torch.bfloat16).cuda()
    x = torch.ones(4096, 5120, device="cuda", dtype=torch.bfloat16)
    norm(x)
    with profile(memory=True) as seen:
        norm(x)
        x + 1
    rows = {row["op"]: row for row in seen.table()}
    assert 0 < rows["norm.rms"]["cuda_ms"] < seen.summary()["wall_ms"]
    assert rows["(between steps)"]["cuda_ms"] > 0, "the addition belongs to no op"
    assert sum(row["cuda_share"] for row in rows.values()) == pytest.approx(1.0)
    assert 0 <= seen.summary()["gpu_idle_share"] < 1 and seen.snapshot["segments"]
    assert seen.memory[1]["peak_mb"] >= seen.memory[1]["held_mb"] > 0


# ---- arithmetic, on a trace that was written by hand -------------------------------------------------------


def event(name, ts, dur, cat="user_annotation", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


BY_HAND = [  # a prefill step of 100 us: layer 3 calls a coarse op that calls a fine one; a GPU works for both
    event("dskit::profile", 0, 200), event("dskit::step[prefill]", 50, 100), event("dskit::layers.3", 60, 80),
    event("dskit::moe.experts[triton]", 70, 50), event("dskit::moe.swiglu[torch]", 80, 20),
    event("cudaLaunchKernel", 75, 2, "cuda_runtime", correlation=7),
    event("cuLaunchKernelEx", 85, 2, "cuda_driver", correlation=8),
    event("cudaMemcpyAsync", 145, 2, "cuda_runtime", correlation=9),
    event("gemm", 90, 30, "kernel", tid=7, correlation=7), event("act", 110, 30, "kernel", 8, correlation=8),
    event("copy", 160, 10, "gpu_memcpy", 7, correlation=9),
    event("dskit::moe.experts[triton]", 90, 30, "gpu_user_annotation", 7),
    event("dskit::norm.rms[torch]", 160, 10),
]


def test_a_range_owns_its_time_and_the_kernels_launched_in_it():
    found = traces.rows_of(traces.ranges_of(BY_HAND), gpu=True, memory=False)
    rows = {row["op"]: row for row in found}
    assert [row["phase"] for row in found] == ["prefill"] * 3 + ["outside steps"] * 2
    assert {op: round(1e3 * row["self_ms"]) for op, row in rows.items()} == {
        "moe.experts": 30, "moe.swiglu": 20, "(outside ops)": 50, "norm.rms": 10, "(between steps)": 90}
    assert {op: round(1e3 * row["cuda_ms"]) for op, row in rows.items()} == {
        "moe.experts": 30, "moe.swiglu": 30, "(outside ops)": 10, "norm.rms": 0, "(between steps)": 0}
    assert rows["moe.experts"]["cuda_share"] == pytest.approx(30 / 70)
    assert rows["moe.swiglu"]["layers"] == "3" and rows["moe.swiglu"]["calls"] == 1
    assert traces.busy_ms(BY_HAND) == pytest.approx(0.060), "overlapping kernels count once"


def test_layers_are_written_as_spans():
    assert traces._spans({"layers.0", "layers.1", "layers.2", "layers.5", "layers.10", "mtp.0", None}) == (
        "0-2,5,10,mtp.0")


def test_a_slim_trace_keeps_what_viewers_read():
    raw = {"host_name": "mine", "traceName": "x.json", "deviceProperties": [], "schemaVersion": 1,
           "traceEvents": [event("dskit::profile", 1000.12345, 9, **{"Ev Idx": 3}),
                           event("gemm", 1001, 2, "kernel", correlation=7, **{"External id": 4}),
                           event("aten::to", 1002, 3, "cpu_op"), event("aten::copy_", 1003, 1, "cpu_op"),
                           event("aten::copy_", 1003, 1, "cpu_op", tid=2)]}
    slim = traces.slim(raw)
    assert [(e["name"], e["tid"]) for e in slim["traceEvents"][2:]] == [("aten::to", 1), ("aten::copy_", 2)]
    assert set(slim) == {"distributedInfo", "deviceProperties", "schemaVersion", "traceEvents"}
    assert slim["traceEvents"][0]["ts"] == 0 and "args" not in slim["traceEvents"][0]
    assert slim["traceEvents"][1]["args"] == {"correlation": 7, "External id": 4}
