"""`dskit bench kernels` and `compare`: honest without a GPU, whole after a crash, read back as written."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import torch

from dskit import cli, ops
from dskit.bench import compare, floors, kernels, peers, pool, records, timing, tune, worker
from dskit.flags import KernelsArgs
from dskit.kernels import common
from dskit.testing import Maker, all_cases, relative_rms

SCHEMA = json.loads((Path(__file__).parents[2] / "profiles" / "schema.json").read_text())
SHAPE = {"rows": 128, "width": 5120}
ops.load_all()
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def follows(what: str, one: dict) -> None:
    jsonschema.validate(one, {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{what}"})


def measured(us: float = 10.0, spread: float = 0.1, **rest) -> dict:
    """A record as a GPU would give it."""
    peer = {"name": "lib: f", "version": "1", "note": "", "status": "ok", "reason": None, "us": 20.0}
    blank = worker.blank(all_cases()["norm.rms"], SHAPE, worker.Options())
    times = {"median": us, "p10": us - spread, "p90": us + spread}
    return blank | {"status": "ok", "us": times, "us_warm": us, "graph": True, "reps": 60, "peer": peer,
                    "peers": [peer], "of_floor": 0.5, "vs_peer": 2.0, "vs_compile": 1.5, "vs_eager": 9.0,
                    "eager_us": 90.0, "compile_us": 15.0, "clock_moved": False} | rest


# ---- without a GPU -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Exit code, printed lines and folder of a run over one op, its worker a process of its own."""
    folder = tmp_path_factory.mktemp("profiles")
    out, argv = io.StringIO(), ["bench", "kernels", "--op", "norm.rms", "--quick", "--result-dir"]
    with contextlib.redirect_stdout(out):
        code = cli.main([*argv, str(folder)])
    return code, out.getvalue(), next(folder.iterdir())


@no_gpu
def test_without_a_gpu_nothing_is_measured_and_all_is_said(run):
    code, out, folder = run
    assert code == kernels.NO_GPU and "nothing was measured" in out
    lines = [json.loads(text) for text in (folder / "kernels.jsonl").read_text().splitlines()]
    for record in lines[:-1]:
        follows("kernel", record)
        assert record["status"] == "not_measured" and record["reason"] == "no CUDA device"
        assert record["check"]["passed"] and record["cpu_check_s"] > 0 and record["env"]["gpu"] is None
    rows = [record["shape"]["rows"] for record in lines[:-1]]
    assert set(rows[:2]) == set(kernels.QUICK_ROWS) and len(rows) == len(all_cases()["norm.rms"].frozen)
    follows("kernel_summary", lines[-1])
    assert lines[-1]["counts"]["not_measured"] == len(rows) and lines[-1]["launch_us"] is None
    header = json.loads((folder / "run.json").read_text())
    jsonschema.validate(header, SCHEMA)
    assert header["floors"]["name"] == "H200" and not header["defaults"]  # --quick is no default


@no_gpu
def test_exit_code_is_zero_only_when_asked_for(monkeypatch, capsys):
    blank = worker.blank(all_cases()["norm.rms"], SHAPE, worker.Options()) | {"reason": "no CUDA device"}
    for extra, code in (([], 3), (["--allow-no-gpu"], 0)):
        monkeypatch.setattr(pool, "work", lambda jobs, *_: iter([(jobs[0], blank)]))
        assert cli.main(["bench", "kernels", "--op", "norm.rms", *extra]) == code
    wrong = blank | {"status": "wrong"}
    monkeypatch.setattr(pool, "work", lambda jobs, *_: iter([(jobs[0], wrong)]))
    assert cli.main(["bench", "kernels", "--op", "norm.rms", "--allow-no-gpu"]) == 1


def test_what_had_no_room_beside_others_is_compared_alone(monkeypatch):
    blank, asked = worker.blank(all_cases()["norm.rms"], SHAPE, worker.Options()), []

    def work(jobs, options, count, end):
        asked.append(count)
        full = {"class": "E", "rel_rms": None, "passed": None, "figure": "OutOfMemoryError: out of memory"}
        for job in jobs:
            yield job, blank | {"op": job["op"], "check": full if count > 1 and job["op"] == "b" else None}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pool, "work", work)
    monkeypatch.setattr(pool, "cores", lambda: 8)
    found = list(kernels.measure([{"op": op} for op in "abc"], KernelsArgs(time=False)))
    assert [record["op"] for record in found[:-1]] == ["a", "c", "b"] and asked == [8, 1]
    assert not any(record["check"] for record in found[:-1])


def test_an_unknown_op_is_refused_with_those_there_are(capsys):
    assert cli.main(["bench", "kernels", "--op", "norm.rsm"]) == 1
    assert "norm.rsm" in (said := capsys.readouterr().err) and "norm.rms" in said


def test_rows_and_groups_choose_calls():
    jobs = kernels.chosen(KernelsArgs(op="norm", rows="4096,1"))
    assert {job["op"].split(".")[0] for job in jobs} == {"norm"}
    assert {job["shape"]["rows"] for job in jobs} <= {4096, 1}
    assert len(kernels.chosen(KernelsArgs())) == sum(len(cases.frozen) for cases in all_cases().values())


def test_every_op_comes_before_its_further_shapes():
    shapes = [{"rows": rows, "width": width} for width in (64, 32) for rows in (1, 128, 4096)]
    assert kernels.urgency(shapes) == [1, 0, 0, 2, 1, 1]
    assert kernels.urgency([{"requests": n} for n in (1, 32, 128)]) == [1, 0, 0]
    first = {job["op"] for job in kernels.chosen(KernelsArgs())[: 2 * len(all_cases())]}
    assert first == {name for name, cases in all_cases().items() if cases.frozen}


# ---- a worker that dies ------------------------------------------------------------------------------------

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
SCRIPT = """
import json, os, sys, time
assert json.loads(sys.stdin.readline())["seed"] == 0
for job in map(json.loads, sys.stdin):
    if job["op"] == "crash": os._exit(9)
    if job["op"] == "hang": time.sleep(60)
    print(json.dumps(job), flush=True)
    if job["op"] == "lost": os._exit(75)
"""


def test_a_call_that_breaks_its_process_costs_its_own_record_alone(monkeypatch):
    monkeypatch.setattr(pool, "start", lambda: subprocess.Popen([sys.executable, "-c", SCRIPT], **PIPES))
    monkeypatch.setattr(pool, "LIMIT_S", 2)
    jobs = [{"op": op} for op in ("a", "lost", "b", "crash", "c", "hang", "d")]
    lost = {"crash": pool.Lost("the worker ended with exit code 9"),
            "hang": pool.Lost("no result within 2 s")}
    for count in (1, 3):
        found = list(pool.work(jobs, worker.Options(), count, time.monotonic() + 60))
        assert count > 1 or [job for job, _ in found] == jobs
        assert {job["op"]: answer for job, answer in found} == {
            job["op"]: lost.get(job["op"], job) for job in jobs}
    late = list(pool.work(jobs, worker.Options(), 1, time.monotonic() - 1))
    assert [answer for _, answer in late] == [pool.Lost(pool.OVER, guilty=False)] * len(jobs)
    shape = {"rows": 1, "width": 5120}
    for answer, status in ((pool.Lost("why"), "failed"), (pool.Lost("why", guilty=False), "not_measured")):
        record = kernels.unmeasured({"op": "norm.rms", "shape": shape}, worker.Options(), answer)
        assert record["status"] == status and record["reason"] == "why"


TIMED = """
import json, os, sys, time
json.loads(sys.stdin.readline())
while line := sys.stdin.readline():
    print("null", flush=True)
    assert json.loads(sys.stdin.readline()) == "go"
    if json.loads(line) == "crash": os._exit(9)
    if json.loads(line) == "lost": os._exit(75)
    began, ticks = time.monotonic(), [time.monotonic()]
    while time.monotonic() < began + 0.1:
        ticks.append(time.monotonic())
    print(json.dumps(ticks), flush=True)
"""


def test_those_who_are_timed_have_the_machine_in_turns_while_all_others_stand_still(monkeypatch):
    monkeypatch.setattr(pool, "start", lambda: subprocess.Popen([sys.executable, "-c", TIMED], **PIPES))
    found = list(pool.work(["a", "crash", "b", "lost", "c"], worker.Options(), 3, time.monotonic() + 60))
    told = {job: answer for job, answer in found}
    assert told["crash"] == pool.Lost("the worker ended with exit code 9")
    assert told["lost"] == pool.Lost("the worker lost the GPU while it was timed")
    spans = sorted((told[name][0], told[name][-1]) for name in "abc")
    assert all(first[1] < second[0] for first, second in itertools.pairwise(spans))


def test_a_process_that_is_not_being_timed_is_stopped(monkeypatch):
    script = "import time\nwhile True: print(time.monotonic(), flush=True); time.sleep(0.005)"
    monkeypatch.setattr(pool, "start", lambda: subprocess.Popen([sys.executable, "-c", script], **PIPES))
    busy, timed = pool.Process(worker.Options()), pool.Process(worker.Options())
    busy.tell("begin")
    assert busy.lines.get(timeout=20)
    with pool.Turn([busy, timed]).of(timed):
        began = time.monotonic()
        time.sleep(0.2)
        ended = time.monotonic()
    while (tick := busy.lines.get(timeout=20)) < ended:
        assert tick < began
    busy.stop()


def test_peers_that_did_not_compile_in_time_are_not_waited_for_later(monkeypatch):
    monkeypatch.setattr(worker, "device", Stopwatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(peers.MODULES, "pytest", "pytest")
    bad = peers.Peer("norm.rms", ("pytest",), "bad", lambda *args: 1 / 0)
    good = peers.Peer("norm.rms", ("pytest",), "good", lambda *args: lambda: None)
    plain = peers.Peer("norm.rms", ("torch",), "plain", lambda *args: lambda: None)
    monkeypatch.setattr(peers, "PEERS", [bad, good, plain])
    job = {"op": "norm.rms", "shape": {"rows": 2, "width": 32}}
    ready = worker.warm(job, worker.Options())
    assert ready == {"norm.rms pytest: bad": "ZeroDivisionError: division by zero",
                     "norm.rms pytest: good": None}
    assert bad.header(ready)["reason"].startswith("Zero") and bad.header()["reason"] is None
    assert good.header(ready)["reason"] is None and plain.header({})["reason"] is None
    assert "while there was time" in good.header({})["reason"]
    asked = []
    monkeypatch.setattr(pool, "work", lambda jobs, *_: [asked.append(len(jobs)) or (jobs[0], ready)])
    assert kernels.warm_up([job] * 5, worker.Options(), 0) == ready and asked == [2]
    assert kernels.warm_up([job] * 5, worker.Options(peer="none"), 0) == {} and asked == [2]


def test_a_run_is_resumed_where_it_ended(monkeypatch, tmp_path, capsys):
    jobs = kernels.chosen(KernelsArgs(op="norm.rms", rows="1,128"))
    done, slow = measured(shape=jobs[0]["shape"]), measured(shape=jobs[1]["shape"], compile_us=None)
    (tmp_path / "old").write_text("".join(json.dumps(one) + "\n" for one in (done, slow)))
    asked = []

    def work(todo, *_):
        asked.extend(todo)
        return [(job, measured(shape=job["shape"])) for job in todo]

    monkeypatch.setattr(pool, "work", work)
    command = ["bench", "kernels", "--op", "norm.rms", "--rows", "1,128", "--allow-no-gpu", "--resume",
               str(tmp_path / "old"), "--out", str(tmp_path / "old")]
    assert cli.main(command) == 0
    assert jobs[0] not in asked and len(asked) == len(jobs) - 1
    now = records.read(tmp_path / "old")
    assert len(now) == len(jobs) and now[0] == done and all(records.timed(one, True) for one in now)
    assert len(capsys.readouterr().out.split(" us (")) == len(jobs)  # what was there is not told again
    late = [worker.blank(all_cases()["norm.rms"], job["shape"], worker.Options()) for job in jobs]
    monkeypatch.setattr(pool, "work", lambda todo, *_: list(zip(jobs, late, strict=True)))
    (tmp_path / "old").write_text(json.dumps(slow) + "\n")
    assert cli.main(command) == 0
    assert records.read(tmp_path / "old")[1] == slow  # what had no time keeps what was known of it


# ---- floors and timing -------------------------------------------------------------------------------------

def test_floors_are_the_larger_of_bytes_and_arithmetic(tmp_path):
    cases = all_cases()["norm.rms"]
    found = floors.floor(cases, {"rows": 4096, "width": 5120}, floors.H200)
    assert found["bound"] == "bytes" and found["floor_us"] == pytest.approx(19.5, abs=0.1)
    slow = floors.Machine("slow", 1e18, {"fp32": 1e9})
    assert floors.floor(cases, {"rows": 1, "width": 1000}, slow)["bound"] == "fp32"
    assert floors.machine("NVIDIA H200") is floors.H200 and floors.machine("NVIDIA A100") is None
    assert floors.floor(cases, SHAPE, None)["floor_us"] is None
    (tmp_path / "a.json").write_text('{"name": "mine", "bytes_per_s": 1e12}')
    with pytest.raises(ValueError, match="flop_per_s"):
        floors.machine(None, str(tmp_path / "a.json"))


def test_a_ring_exceeds_twice_the_cache_or_has_a_copy_for_each_call():
    mega = 1 << 20
    assert timing.ring_size(10 * mega, 200, 60 * mega) == 12
    assert timing.ring_size(200 * mega, 200, 60 * mega) == 1
    assert timing.ring_size(100, 200, 60 * mega) == 200


def scripted(*times: float) -> timing.Timed:
    turn = itertools.cycle(times)
    return timing.Timed([], lambda: next(turn), True, 1, 1.0)


def test_rounds_rotate_and_ratios_are_per_round():
    order = []
    contenders = {name: timing.Timed([], lambda name=name: order.append(name) or 1.0, True, 1, 1.0)
                  for name in "abc"}
    timing.interleave(contenders, 3)
    assert "".join(order[::3]) == "abcbcacab" and all(len(one.rounds) == 3 for one in contenders.values())
    slow, fast = scripted(), scripted()
    slow.rounds, fast.rounds = [[10, 10, 10], [40, 40, 90], [10, 12, 10]], [[5, 5, 5], [20, 20, 1], [5, 5, 5]]
    assert timing.ratio(slow, fast) == 2  # a clock that moved between rounds does not show
    found = timing.spread([1.0, 2.0, 3.0])
    assert found["p10"] < found["median"] == 2 < found["p90"]
    assert timing.moved({"clock_mhz": 1000}, {"clock_mhz": 1060})
    assert not timing.moved({"clock_mhz": None}, {"clock_mhz": 1060})


class Stopwatch(timing.Device):
    """The same steps without a GPU: wall time instead of events, and calls in a row instead of a graph."""

    kind = "cpu"

    def __init__(self):
        self.cache = 1 << 14

    def between(self, work, cold=True):
        began = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - began)

    def capture(self, calls, count):
        class Graph:
            def replay(self):
                for i in range(count):
                    calls[i % len(calls)]()
        return Graph()


def race(monkeypatch, function, **options) -> dict:
    """The record of one small call, timed by the stopwatch."""
    monkeypatch.setattr(worker, "device", Stopwatch)
    monkeypatch.setattr(timing, "alive", lambda: True)
    monkeypatch.setattr(timing, "state", lambda: dict.fromkeys(timing.FIELDS))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cases, shape = all_cases()["norm.rms"], {"rows": 8, "width": 64}
    given = worker.Options(compile=False, replays=3, **options)
    record = worker.blank(cases, shape, given)
    with torch.no_grad(), ops.use("torch"):
        entered = worker.on_gpu(cases, shape, ops.Implementation("triton", function), given, record)
        if entered:
            worker.fill(record, entered, given.replays)
    return record


def test_a_right_kernel_gets_time_and_ratios(monkeypatch):
    record = race(monkeypatch, ops.find("norm.rms").reference)
    follows("kernel", record)
    assert record["status"] == "ok" and record["us"]["p10"] <= record["us"]["median"] <= record["us"]["p90"]
    assert record["vs_eager"] > 0 and record["of_floor"] > 0 and record["us_warm"] > 0 and record["ring"] > 1
    assert record["check"]["passed"] and record["dtype"].startswith("bf16")
    assert {peer["reason"] for peer in record["peers"] if not peer["us"]} >= {"liger-kernel is not installed"}


def test_a_wrong_kernel_gets_a_time_and_no_ratio(monkeypatch):
    record = race(monkeypatch, lambda x, gain, eps, dtype: x.clone())
    follows("kernel", record)
    assert record["status"] == "wrong" and record["us"] and record["vs_eager"] is record["of_floor"] is None


def test_a_kernel_can_be_compared_without_being_timed(monkeypatch):
    right = race(monkeypatch, ops.find("norm.rms").reference, time=False)
    wrong = race(monkeypatch, lambda x, gain, eps, dtype: x.clone(), time=False)
    for record in (right, wrong):
        follows("kernel", record)
        assert record["us"] is None and record["vs_eager"] is None
    assert right["status"] == "not_measured" and kernels.passed(right) and wrong["status"] == "wrong"


def test_a_kernel_that_raises_is_a_line_and_a_peer_that_raises_a_reason(monkeypatch):
    def broken(x, gain_D, eps, dtype):
        raise RuntimeError("no such instruction")

    bad = peers.Peer("norm.rms", ("torch",), "bad", broken)
    off = peers.Peer("norm.rms", ("torch",), "off", lambda x, *rest: lambda: 2 * x, compare=lambda y: (y,))
    monkeypatch.setattr(peers, "PEERS", [bad, off])
    record = race(monkeypatch, ops.find("norm.rms").reference)
    assert [peer["status"] for peer in record["peers"]] == ["failed", "wrong"]
    assert "no such instruction" in record["peers"][0]["reason"] and record["peers"][1]["us"] > 0
    assert record["status"] == "ok" and record["peer"] is None and record["vs_peer"] is None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(worker, "environment", lambda: {"gpu": None})
    monkeypatch.setattr(worker, "on_gpu", lambda *_: broken(*_[:4]))
    monkeypatch.setattr(ops.Op, "implementation", lambda self, name: None)
    failed = worker.run({"op": "norm.rms", "shape": SHAPE}, worker.Options())
    assert failed["status"] == "failed" and failed["reason"] == "RuntimeError: no such instruction"


# ---- tuning ------------------------------------------------------------------------------------------------

def test_the_fastest_right_configuration_is_taken_and_read_back(monkeypatch, tmp_path):
    slow, fast, wrong, large = {"ms": 3.0}, {"ms": 0.1}, {"ms": 0.0}, {"ms": -1}

    def function(x, gain_D, eps, dtype):
        config = common.tuned("norm.rms", (len(x), x.shape[1]), slow)
        if config == large:
            raise RuntimeError("out of shared memory")
        time.sleep(config["ms"] / 1e3)
        return x * 2 if config == wrong else x.clone()

    for one in (tune, worker):
        monkeypatch.setattr(one, "device", Stopwatch)
    monkeypatch.setattr(timing, "alive", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "candidates", lambda: {"norm.rms": (slow, fast, wrong, large)})
    monkeypatch.setattr(ops.Op, "implementation", lambda *_: ops.Implementation("triton", function))
    job = {"op": "norm.rms", "shape": {"rows": 8, "width": 64}}
    assert tune.run(job | {"part": 0}, worker.Options()) == {"sizes": [], "failed": []}
    found = tune.run(job, worker.Options())
    (size,) = found["sizes"]
    assert size["key"] == [8, 64] and size["config"] == fast and size["us"] < size["default_us"]
    assert "beside the default" in found["failed"][0] and "out of shared memory" in found["failed"][1]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(common, "TUNED", tmp_path / "tuned.json")
    monkeypatch.setattr(common, "INTERPRET", False)
    before = {"sizes": [{"key": [8, width], "config": slow} for width in (64, 96)]}
    empty = {"sizes": []}
    common.TUNED.write_text(json.dumps({"A": {"b": empty}, "NVIDIA H200": {"c": empty, "norm.rms": before}}))
    tune.write({size.pop("kernel"): [size]}, common.TUNED)
    table = json.loads(common.TUNED.read_text())
    assert set(table["NVIDIA H200"]) == {"c", "norm.rms"} and set(table) == {"A", "NVIDIA H200"}
    assert table["NVIDIA H200"]["norm.rms"].keys() == {"date", "driver", "torch", "triton", "commit", "sizes"}
    assert [size["key"] for size in table["NVIDIA H200"]["norm.rms"]["sizes"]] == [[8, 96], [8, 64]]
    for cached in (common._tables, common._measured):
        cached.cache_clear()
    keys = (1, 64), (5000, 64), (8, 65)
    assert [common.tuned("norm.rms", key, slow) for key in keys] == [fast, fast, slow]
    for cached in (common._tables, common._measured):
        cached.cache_clear()


@pytest.fixture
def candidates():
    """Those of every kernel file, by the name that it asks for."""
    for op in ops.all_ops().values():
        with contextlib.suppress(ops.UnknownImplementation):
            op.implementation("triton")
    return tune.candidates()


def test_products_in_the_table_can_be_measured_again():
    shapes = [call["shape"] for call in tune.calls("gemm.fp8")]
    known = {(s["rows"], s["n"], s["k"], s.get("block_k", 32), s.get("coded", 0)) for s in shapes}
    table = json.loads(common.TUNED.read_text())["NVIDIA H200"]
    for name in ("gemm.fp8/few", "gemm.fp8/many", "gemm.fp8/spans"):
        assert {tuple(size["key"]) for size in table[name]["sizes"]} <= known


def test_the_table_holds_configurations_that_the_kernels_know(candidates):
    table = json.loads(common.TUNED.read_text())
    for name, kernel in ((name, kernel) for gpu in table.values() for name, kernel in gpu.items()):
        words = {tuple(config) for config in candidates[name]}
        assert {tuple(size["config"]) for size in kernel["sizes"]} <= words, f"measure {name} again"


def test_every_candidate_has_the_words_of_its_kernel(candidates):
    for name, configs in candidates.items():
        assert len({tuple(config) for config in configs}) == 1 and 4 <= len(configs) <= 24, name
        assert len({str(config) for config in configs}) == len(configs), f"{name} has one twice"


# ---- peers -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: f"{peer.op}-{peer.name}")
def test_every_peer_takes_the_arguments_of_its_op(peer):
    names = inspect.signature(ops.find(peer.op).reference).parameters
    inspect.signature(peer.prepare).bind(*names)
    header = peer.header()
    assert header["us"] is None and (header["version"] or header["reason"])


def test_peers_are_chosen_by_package():
    assert peers.of("norm.rms", "none") == []
    assert {one.packages for one in peers.of("norm.rms", "liger-kernel")} == {("liger-kernel",)}
    with pytest.raises(ValueError, match="flashinfer-python"):
        peers.of("norm.rms", "flashinfre")


def test_torch_as_a_peer_computes_the_op():
    m = Maker()
    base, embed, head = m.normal(3, 40, dtype=torch.float32), m.normal(3, 16), m.normal(40, 16)
    (peer,) = peers.of("dspark.markov")
    got = peer.prepare(base, embed, head)()
    assert relative_rms(got, ops.find("dspark.markov").reference(base, embed, head)) < peer.limit
    x, weight = m.normal(5, 24), m.normal(7, 24)
    (peer,) = peers.of("linear.matmul")
    want = ops.find("linear.matmul").reference(x, weight, torch.bfloat16)
    assert relative_rms(peer.prepare(x, weight, torch.bfloat16)(), want) < peer.limit


# ---- showing and comparing ---------------------------------------------------------------------------------

def test_no_number_is_shown_out_of_a_record_that_measured_none():
    """Whatever its fields hold: only op and shape may have digits."""
    for status in ("not_measured", "failed", "wrong"):
        row = records.markdown([measured(status=status, reason="none")]).splitlines()[2].split("|")
        assert row[1].strip() == "`norm.rms`" and row[2].strip() == "rows 128, width 5120"
        assert not any(letter.isdigit() for cell in row[3:] for letter in cell), row
        (bar,) = records.shares([measured(status=status)])
        assert bar["share"] is bar["us"] is bar["peer_share"] is None
        summed = records.summary([measured(status=status)], None)
        assert summed["groups"]["norm"]["vs_peer"] is None and summed["worst"]["of_floor"] is None
    assert "10.00 us" not in records.line(measured(status="wrong", reason="rms 0.3"))


def test_a_measured_record_is_shown_with_where_it_comes_from():
    table = records.markdown([measured()])
    assert "| 10.0 | 0.6 | 50% | 2.00 | 1.50 | 9.0 | lib: f |" in table
    assert "Measured on one " in table and torch.__version__ in table
    assert "2.00 x peer, 1.50 x compile" in records.line(measured())


def test_a_summary_has_geometric_means_and_the_worst():
    found = [measured(vs_peer=4.0), measured(vs_peer=1.0, shape={"rows": 1}),
             measured(peer=None, vs_peer=None)]
    summed = records.summary(found, 0.7)
    follows("kernel_summary", summed)
    group = summed["groups"]["norm"]
    assert group["vs_peer"] == pytest.approx(2.0) and group["without_peer"] == 1 and group["measured"] == 3
    assert summed["worst"]["vs_peer"]["shape"] == {"rows": 1}
    assert any("0.70 us" in text for text in records.closing(summed))


def test_a_file_is_read_back_and_a_foreign_one_refused(tmp_path, capsys):
    file, picture = tmp_path / "a.jsonl", tmp_path / "a.svg"
    lines = [measured(), records.summary([measured()], 0.7)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert records.read(file) == [measured()]
    assert cli.main(["bench", "kernels", "--read", str(file), "--picture", str(picture)]) == 0
    assert "| 10.0 |" in capsys.readouterr().out and "<svg" in picture.read_text()
    file.write_text('{"us": 3}')
    with pytest.raises(ValueError, match="line 1"):
        records.read(file)


def files(tmp_path, old: list[dict], new: list[dict]) -> list[str]:
    for name, found in (("old", old), ("new", new)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, found)))
    return [str(tmp_path / "old"), str(tmp_path / "new")]


@pytest.mark.parametrize(("new", "kind"), [
    (measured(10.4), "same"),  # 4 %
    (measured(10.6), "slower"),
    (measured(9.4), "faster"),
    (measured(10.6, spread=0.7), "same"),  # within its own spread
    (measured(status="wrong", reason="rms 1"), "broken"),
    (measured(status="not_measured", reason="no CUDA device"), "unmeasured"),
])
def test_a_change_counts_beyond_five_percent_and_both_spreads(new, kind, tmp_path, capsys):
    report = compare.compare([measured(10.0)], [new])
    assert bool(report[kind]) and sum(map(bool, (report[k] for k in ("same", "slower", "faster", "broken",
                                                                    "unmeasured")))) == 1
    code = cli.main(["bench", "compare", *files(tmp_path, [measured(10.0)], [new])])
    assert code == int(kind in ("slower", "broken"))
    assert kind == "same" or kind in capsys.readouterr().out


def test_what_comes_goes_and_where_it_ran_is_told(tmp_path, capsys):
    other = measured(shape={"rows": 1}, env=measured()["env"] | {"gpu": "NVIDIA H100"})
    assert cli.main(["bench", "compare", "--json", *files(tmp_path, [measured()], [other])]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gone"][0]["shape"] == SHAPE and report["added"][0]["shape"] == {"rows": 1}
    assert report["machines"]["gpu"][1] == ["NVIDIA H100"]


def test_proving_keeps_what_passed_at_every_shape_and_takes_back_what_did_not(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ops, "PROVEN", tmp_path / "proven.json")
    ops.PROVEN.write_text('{"sm_90": {"ops": ["mhc.read", "norm.rms", "rope.rotate"]}}')

    def record(name, passed, status="ok"):
        return {"schema": worker.SCHEMA, "op": name, "status": status, "check": {"passed": passed},
                "env": {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc"}}

    kernels.prove([record("norm.rms", True), record("norm.rms", False), record("moe.gate", True),
                   record("rope.rotate", True, "failed"), record("moe.plan", True, "not_measured"),
                   record("mhc.read", None, "not_measured"), record("mhc.read", True),
                   record("mhc.write", None, "not_measured"), {"schema": "summary"}])
    found = json.loads(ops.PROVEN.read_text())["sm_90"]
    assert found["ops"] == ["mhc.read", "moe.gate", "moe.plan"] and found["gpu"] == "NVIDIA H200"
