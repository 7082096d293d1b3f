"""The op registry: choices are strict, scoped and visible; only `auto` may fall back, and it says why."""

import pickle
import threading
from contextlib import contextmanager, suppress

import pytest
import torch

import dskit
from dskit import ops
from dskit.layers.norm import RMSNorm, rms
from dskit.testing import all_cases, compare

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def _refuse(x, *_, **__):
    asked.append(tuple(x.shape))
    return f"{len(x)} rows are more than 3" if len(x) > 3 else None


asked: list[tuple[int, ...]] = []  # shapes that the check of `doubled` was asked about


@pytest.fixture
def fake(monkeypatch):
    """Two ops of a group that no layer has: `outer` calls `inner`, which has a faulty implementation.

    Their process has no GPU and interprets kernels, wherever the test runs.
    """
    @ops.op("fake.inner")
    def inner(x):
        return x + 1

    @ops.op("fake.outer")
    def outer(x):
        return 3 * inner(x)

    @ops.implement("fake.inner", "doubled", when=_refuse)
    def doubled(x):
        return 2 * (x + 1)

    asked.clear()
    monkeypatch.setattr(ops, "_rules", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ops, "interpreting", lambda: True)
    monkeypatch.delenv("DSKIT_USE", raising=False)
    ops._apply(ops._ops.values())
    yield outer
    for name in ("fake.inner", "fake.outer"):
        del ops._ops[name]
    monkeypatch.undo()
    ops._apply(ops._ops.values())


@pytest.fixture
def gpu(monkeypatch):
    """A process that believes in a GPU, so that `auto` and `triton` are possible."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ops, "interpreting", lambda: False)
    ops._apply(ops._ops.values())
    yield
    monkeypatch.undo()
    ops._apply(ops._ops.values())


def row(name, where="everywhere"):
    return next(r for r in ops.explain() if (r["op"], r["where"]) == (name, where))


# ---- scopes and authority ----------------------------------------------------------------------------------


def test_a_choice_holds_within_its_block_and_blocks_nest(fake):
    plain = fake(X)
    with ops.use({"fake.inner": "doubled"}):
        assert torch.equal(fake(X), 2 * plain)
        with ops.use(fake="torch"):
            assert torch.equal(fake(X), plain)
        assert torch.equal(fake(X), 2 * plain)
    assert torch.equal(fake(X), plain)


def test_leaving_a_block_keeps_what_was_chosen_for_good_inside(fake):
    plain = fake(X)
    with ops.use(fake="torch"):
        ops.use({"fake.inner": "doubled"})
    assert torch.equal(fake(X), 2 * plain)
    ops.use({"fake.inner": "torch"})
    before = len(ops._rules)
    for _ in range(20):  # swaps for good leave no trail
        ops.use({"fake.inner": "doubled"})
        ops.use({"fake.inner": "torch"})
    assert len(ops._rules) <= before + 1 and torch.equal(fake(X), plain)


def test_choosing_the_reference_of_a_coarse_op_leaves_its_fine_ops_free(fake):
    plain = fake(X)
    with ops.use({"fake.outer": "torch", "fake.inner": "doubled"}):
        assert torch.equal(fake(X), 2 * plain)
    with ops.use({"fake.inner": "doubled"}, fake="torch"):  # an op is narrower than its group
        assert torch.equal(fake(X), 2 * plain)


def test_authority_pin_over_use_over_flag_over_environment_over_command_over_default(fake, monkeypatch):
    """Each source, added under the one before, loses to it, and explain names who decided."""
    plain = fake(X)
    module = Calls(fake)

    def decided():
        return row("fake.inner")["selected"], row("fake.inner")["decided_by"]

    assert decided() == ("torch", "default")
    ops.prefer({"fake.inner": "doubled"}, "dskit train")
    assert decided() == ("doubled", "dskit train")
    monkeypatch.setenv("DSKIT_USE", "fake=torch")
    ops.check_environment()
    assert decided() == ("torch", "DSKIT_USE")
    ops.choose_by_flag("fake.inner=doubled")
    assert decided() == ("doubled", "--kernels")
    with ops.use(fake="torch"):
        ops.choose_by_flag("fake.inner=doubled")  # later, and still below use
        assert decided() == ("torch", "use")
        with ops.pin(module, "", {"fake.inner": "doubled"}):
            assert torch.equal(module(X), 2 * plain) and torch.equal(fake(X), plain)
            assert row("fake.inner", "")["decided_by"] == "pin" and row("fake.inner", "")["calls"] == 1


def test_another_process_adopts_what_was_chosen_here(fake):
    ops.prefer({"fake.outer": "torch"}, "dskit train")
    ops.choose_by_flag("fake=torch")
    with ops.use({"fake.inner": "doubled"}, phase="decode"):
        told, want = pickle.dumps(ops.choices()), {name: o.selected.copy() for name, o in ops._ops.items()}
    assert {name: o.selected for name, o in ops._ops.items()} != want
    ops.adopt(pickle.loads(told))
    assert {name: o.selected for name, o in ops._ops.items()} == want


def test_a_phase_has_its_own_choice(fake):
    plain = fake(X)
    with ops.use({"fake.inner": "doubled"}, phase="decode"):
        with ops.step("prefill"):
            assert torch.equal(fake(X), plain)
        with ops.step("decode"):
            assert torch.equal(fake(X), 2 * plain)
        assert torch.equal(fake(X), plain)
        assert row("fake.inner", "prefill")["selected"] == "torch"
        assert row("fake.inner", "decode")["selected"] == "doubled"
        assert ops.selection()["fake.inner"] == "torch/doubled"
    with pytest.raises(ValueError, match="prefill, decode"):
        ops.use(fake="torch", phase="decoding")


# ---- strictness --------------------------------------------------------------------------------------------


def test_an_explicit_choice_that_cannot_be_met_raises_with_op_reason_and_remedy(fake):
    words = "fake.inner.*'doubled'.*4 rows.*use\\(fake='torch'\\)"
    with ops.use({"fake.inner": "doubled"}):
        for _ in range(2):
            with pytest.raises(ops.Unsupported, match=words):
                fake(torch.ones(4, 8))


@pytest.mark.parametrize(("words", "error", "says"), [
    ({"fkae": "torch"}, ops.UnknownOp, "did you mean fake"),
    ({"fake": "trito"}, ops.UnknownImplementation, "did you mean triton"),
    ({"fake": "triton"}, ops.UnknownImplementation, "has no implementation 'triton'; it has: torch"),
    ({"fake.outer": "doubled"}, ops.UnknownImplementation, "fake.outer has no implementation 'doubled'")])
def test_a_typo_is_named_with_what_is_near_and_changes_nothing(fake, words, error, says):
    plain, revision = fake(X), ops.revision()
    with pytest.raises(error, match=says):
        ops.use(words)
    assert torch.equal(fake(X), plain) and ops.revision() == revision


def test_a_group_reaches_the_ops_that_have_it_and_names_the_others(fake, caplog):
    plain = fake(X)
    ops._told.clear()
    with ops.use(fake="doubled"):
        assert torch.equal(fake(X), 2 * plain)
        assert row("fake.outer")["selected"] == "torch"
    assert "fake.outer keep their choice, having no doubled" in caplog.text


def test_without_backward_a_gradient_is_refused(fake):
    x = X.clone().requires_grad_()
    with ops.use({"fake.inner": "doubled"}):
        with pytest.raises(ops.Unsupported, match="no backward"):
            fake(x)
        with torch.no_grad():
            fake(x)


def test_triton_on_a_cpu_says_exactly_what_is_missing(monkeypatch):
    """The three states of TRITON_INTERPRET: unset, set too late, set in time."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    common = pytest.importorskip("dskit.kernels.common")
    monkeypatch.setattr(common, "INTERPRET", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ops.Unsupported, match="no GPU.*only when TRITON_INTERPRET=1 is set before"):
        ops.use("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ops.Unsupported, match="was set after dskit.kernels was imported"):
        ops.use("triton")
    monkeypatch.setattr(common, "INTERPRET", True)
    assert ops.not_here("triton") is None


def test_every_kernel_says_when_it_cannot_run():
    for name, op in ops.all_ops().items():
        try:
            kernel = op.implementation("triton")
        except ops.UnknownImplementation:
            continue
        assert kernel.when is not None, f"{name} would fail in Triton's own words"


def test_a_kernel_file_that_cannot_be_imported_is_unsupported(monkeypatch):
    found = ops.find("norm.rms")
    monkeypatch.delitem(found.implementations, "triton", raising=False)

    def fail(name):
        raise ImportError("the triton kernels need the package triton")

    monkeypatch.setattr(ops.importlib, "import_module", fail)
    with pytest.raises(ops.Unsupported, match="norm.rms.*need the package triton"):
        found.implementation("triton")


# ---- auto --------------------------------------------------------------------------------------------------


def test_auto_takes_the_kernel_that_can_and_records_each_refusal_once(fake, gpu):
    inner, plain = ops.find("fake.inner"), fake(X)
    ops.implement("fake.inner", "triton", when=_refuse, grad=True)(lambda x: 2 * (x + 1))
    asked.clear()
    with ops.use("auto"):
        assert torch.equal(fake(X), 2 * plain) and torch.equal(fake(X), 2 * plain)
        assert torch.equal(fake(torch.ones(4, 8)), torch.full((4, 8), 6.0))
        fake(torch.ones(5, 8)), fake(torch.ones(4, 8))
        found = row("fake.inner")
    assert asked == [(3, 8), (4, 8), (5, 8)], "a check is asked once per shape class"
    assert found["selected"] == "auto" and found["refused"] == {"triton": "4 rows are more than 3"}
    assert found["ran"] == {"torch": 4, "triton": 2} and found["calls"] == 6
    assert found["last_shape"] == (4, 8) and inner.calls == 6


def test_a_check_is_asked_again_for_another_dtype_argument_or_gradient(fake, gpu):
    asked.clear()
    ops.implement("fake.inner", "triton", when=_refuse, grad=True)(lambda x, k=1: x)
    inner = ops.find("fake.inner")
    with ops.use({"fake.inner": "triton"}):
        for call in ((X,), (X.double(),), (X, 2), (X, 3), (X,), (X.clone().requires_grad_(),)):
            inner(*call)
        inner(X, k=[1, 2]), inner(X, k=[1, 2])  # a list can be no key: asked each time
    assert len(asked) == 7


def test_auto_leaves_the_interpreter_alone_and_says_so(fake, monkeypatch):
    ops.implement("fake.inner", "triton", when=lambda x: None, grad=True)(lambda x: 2 * (x + 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ops, "interpreting", lambda: True)
    plain = fake(X)
    with ops.use("auto"):
        assert torch.equal(fake(X), plain) and "interpreter" in row("fake.inner")["refused"]["triton"]
    with ops.use({"fake.inner": "triton"}):
        assert torch.equal(fake(X), 2 * plain)


def test_the_default_on_a_gpu_is_auto(fake, gpu):
    assert row("fake.inner")["selected"] == "auto" and row("fake.inner")["decided_by"] == "default"


def test_an_implementation_registered_again_replaces_the_first_with_a_notice(fake, caplog):
    with ops.use({"fake.inner": "doubled"}):
        fake(X)
        ops.implement("fake.inner", "doubled", grad=True)(lambda x: x * 0)
        assert not fake(X).any() and "'doubled' is replaced" in caplog.text


# ---- modules, threads, compilers ---------------------------------------------------------------------------


class Calls(torch.nn.Module):
    """A module whose forward is one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_a_pin_holds_where_it_matches_and_ends_with_its_module(fake):
    def broken(x):
        fake(x)
        raise ZeroDivisionError

    model = torch.nn.ModuleDict({"a": Calls(fake), "b": Calls(fake), "c": Calls(broken)})
    plain = model["b"](X)
    unpin = ops.pin(model, "[ac]", {"fake.inner": "doubled"})
    assert torch.equal(model["a"](X), 2 * plain) and torch.equal(model["b"](X), plain)
    with pytest.raises(ZeroDivisionError):
        model["c"](X)
    assert torch.equal(fake(X), plain), "a pin ends where its module does, failed or not"
    unpin(), unpin()
    assert torch.equal(model["a"](X), plain)
    with pytest.raises(ValueError, match="no module matches"):
        ops.pin(model, "d", fake="torch")


def test_pins_overlap_only_where_they_decide_the_same_op(fake):
    model = torch.nn.Sequential(torch.nn.Sequential(Calls(fake), RMSNorm(8, 1e-6, torch.float32)))
    with ops.pin(model, "0.*", {"fake.inner": "doubled"}) as first:
        assert list(first.modules) == ["0.0", "0.1"]
        for pattern in ("0", "0.0", ""):  # above, the same, the whole
            with pytest.raises(ValueError, match=r"0\.0 is already pinned by '0\.\*', .*fake.inner"):
                ops.pin(model, pattern, fake="torch")
        with ops.pin(model, "0", norm="torch"):
            pass
    with ops.pin(model, "0", fake="torch"):
        pass


def test_a_choice_waits_for_the_running_step_and_every_thread_sees_it(fake):
    plain, order = fake(X), []
    entered, go = threading.Event(), threading.Event()

    def step():
        with ops.step("decode"):
            entered.set()
            go.wait(5)
            order.append(("step", torch.equal(fake(X), plain)))
        order.append(("after", None))

    def choose():
        scope.append(ops.use({"fake.inner": "doubled"}))
        order.append(("chosen", torch.equal(fake(X), 2 * plain)))

    scope: list[ops.use] = []
    threads = [threading.Thread(target=step), threading.Thread(target=choose)]
    threads[0].start()
    entered.wait(5)
    threads[1].start()
    threads[1].join(0.05)
    assert not order, "the choice was made in the middle of a step"
    go.set()
    for thread in threads:
        thread.join(5)
    with scope[0]:
        pass
    assert ("step", True) in order and ("chosen", True) in order


def test_compiled_code_sees_a_swap_and_the_way_back(fake):
    """fullgraph with a backend that needs no compiler: the guard on the choice retraces."""
    torch._dynamo.reset()
    run = torch.compile(lambda x: fake(x), fullgraph=True, backend="eager")
    plain = fake(X)
    before = ops.find("fake.inner").calls
    for _ in range(2):
        assert torch.equal(run(X), plain)
        with ops.use({"fake.inner": "doubled"}):
            assert torch.equal(run(X), 2 * plain)
    with ops.use("auto"):
        assert torch.equal(run(X), plain)
    assert ops.find("fake.inner").calls == before, "what a compiler traced is not counted"


def test_an_op_that_is_not_traced_runs_as_it_is_inside_compiled_code(fake, monkeypatch):
    """Its loop would be another program for every list of values."""
    torch._dynamo.reset()
    monkeypatch.setattr(ops.find("fake.inner"), "traced", False)
    monkeypatch.setattr(ops._state, "compiles", False)  # whatever another test has asked for
    seen, graphs = [], []
    ops.find("fake.inner").implementations["torch"].function = lambda x: seen.append(x.tolist()) or x + 1
    run = ops.compiled(fake, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for i in range(3):
        assert torch.equal(run(X + i), 3 * (X + i + 1))
    assert seen == [(X + i).tolist() for i in range(3)] and len(graphs) == 1
    with ops.use({"fake.inner": "doubled"}):  # another implementation is traced
        assert torch.equal(run(X), 6 * (X + 1))
    assert len(seen) == 3


# ---- words -------------------------------------------------------------------------------------------------


def test_words_of_the_command_line():
    assert ops.read_words("moe=triton, mla=torch") == {"moe": "triton", "mla": "torch"}
    assert ops.read_words("auto") == {"*": "auto"}
    with pytest.raises(ValueError, match="group=implementation"):
        ops.read_words("moe")


@pytest.mark.parametrize(("words", "error", "says"), [
    ("meo=torch", ops.UnknownOp, "DSKIT_USE.*did you mean moe"),
    ("fake.outer=doubled", ops.UnknownImplementation, "DSKIT_USE.*fake.outer has no implementation")])
def test_a_mistake_in_the_environment_is_found_when_a_model_is_built(fake, monkeypatch, words, error, says):
    monkeypatch.setenv("DSKIT_USE", words)
    with pytest.raises(error, match=says):
        ops.check_environment()


def test_the_environment_chooses_and_is_read_before_the_kernels_can_be(fake, monkeypatch):
    """The op is defined, and called, while its kernel file is not imported yet."""
    monkeypatch.setenv("DSKIT_USE", "fake=triton")
    monkeypatch.setattr(ops, "not_here", lambda name: None)
    monkeypatch.setattr(ops._state, "checked", False)
    inner, plain = ops.find("fake.inner"), fake(X)

    def import_kernels():
        ops.implement("fake.inner", "triton", grad=True)(lambda x: 2 * (x + 1))

    monkeypatch.setattr(inner, "_import_kernels", import_kernels)
    ops._apply(ops._ops.values())
    assert torch.equal(fake(X), 2 * plain)
    assert row("fake.inner")["decided_by"] == "DSKIT_USE" and row("fake.outer")["decided_by"] == "default"


# ---- looking -----------------------------------------------------------------------------------------------


def test_explain_lists_every_op_and_displays_itself():
    table = dskit.explain()
    assert {r["op"] for r in table} >= set(all_cases()) | {"mla.attend", "sampler.draw"}
    for found in table:
        assert {"torch", "compile"} <= set(found["available"])
        assert ("triton" in found["available"]) != ("triton" in found["refused"]) or found["refused"]
    text, page = repr(table), table._repr_html_()
    assert "mhc.sinkhorn" in text and "<td" in page and "decided_by" in page
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    assert "mhc.sinkhorn" in console.export_text()


def test_compare_measures_each_implementation_against_float64(fake):
    rows = {r["implementation"]: r for r in compare("fake.inner", X)}
    assert rows["torch"]["relative_rms"] < 1e-6 < rows["doubled"]["relative_rms"]
    assert rows["torch"]["time_ms"] > 0 and "refused" in rows["triton"]
    rows = {r["implementation"]: r for r in compare("fake.inner", torch.ones(4, 8), only=["doubled"])}
    assert rows["doubled"]["refused"] == "4 rows are more than 3"
    with pytest.raises(ValueError, match="no case table"):
        compare("fake.inner")


def test_compare_takes_arguments_and_bytes_from_the_case_table():
    shape = {"rows": 5, "width": 64}
    rows = {r["implementation"]: r for r in compare("norm.rms", shape=shape)}
    torch_row, nbytes = rows["torch"], all_cases()["norm.rms"].nbytes(shape)
    assert torch_row["bandwidth_gbs"] == pytest.approx(nbytes / torch_row["time_ms"] / 1e6)
    triton_row = rows["triton"]
    if "refused" not in triton_row and ops.interpreting():
        assert triton_row["time_ms"] is None and "interpreted" in triton_row["note"]
        assert triton_row["relative_rms"] < 1e-2


def test_the_oracle_of_a_coarse_op_does_not_run_fine_kernels(fake):
    with ops.use({"fake.inner": "doubled"}):
        assert compare("fake.outer", X, only=["torch"])[0]["relative_rms"] == pytest.approx(1.0)


def test_auto_trusts_a_kernel_once_a_run_has_proven_it_on_this_gpu(monkeypatch, tmp_path):
    kernel = ops.Implementation("triton", lambda: None)
    kernel.function.__module__ = "dskit.kernels.norm"
    assert ops.unproven("norm.rms", kernel) is None or torch.cuda.is_available()  # a CPU has nothing to prove
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ops, "PROVEN", tmp_path / "proven.json")
    ops.PROVEN.write_text('{"sm_90": {"ops": ["norm.rms"]}, "sm_80": {"ops": ["mhc.read"]}}')
    assert ops.unproven("norm.rms", kernel) is None
    assert "sm_90" in ops.unproven("mhc.read", kernel)
    kernel.function.__module__ = "__main__"  # a reader's own, registered in a notebook
    assert ops.unproven("mhc.read", kernel) is None


# ---- ranges ------------------------------------------------------------------------------------------------


def labels_of(every: int, steps: int, failing: bool = False) -> list[str]:
    """The labels that one step in `every` shows while steps and a call outside of them run."""
    told = []

    @contextmanager
    def around(label):
        told.append(label)
        try:
            yield
        finally:
            told.append(f"/{label}")

    with ops.use("torch"), ops.named_ranges(around, every):
        rms(X, None, 0.0, X.dtype)
        for _ in range(steps):
            with suppress(KeyError), ops.step("decode"):
                rms(X, None, 0.0, X.dtype)
                if failing:
                    raise KeyError
    assert not ops._state.ranges and not ops._state.ranging
    return told


def test_ranges_are_steps_and_calls_also_outside_them():
    inside = ["dskit::step[decode]", "dskit::norm.rms[torch]", "/dskit::norm.rms[torch]"]
    assert labels_of(1, 1) == [*inside[1:], *inside, "/dskit::step[decode]"]


@pytest.mark.parametrize(("every", "steps", "watched"), [(2, 5, 3), (50, 50, 1), (50, 51, 2)])
def test_a_sample_is_the_first_of_so_many_steps_and_whole(every, steps, watched):
    told = labels_of(every, steps)
    assert told.count("dskit::step[decode]") == told.count("dskit::norm.rms[torch]") == watched
    assert told[0] == "dskit::step[decode]", "a call outside steps belongs to no sample"


def test_a_step_that_fails_closes_its_ranges():
    told = labels_of(3, 3, failing=True)
    assert [label for label in told if "norm" not in label] == ["dskit::step[decode]", "/dskit::step[decode]"]
