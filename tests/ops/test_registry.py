"""The op registry: choices are strict, scoped and visible; only `auto` may fall back, and it says why."""

import pytest
import torch

import dskit.model  # noqa: F401, registers the ops
from dskit import ops
from dskit.layers.norm import RMSNorm, rms

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def doubled():
    """An implementation of norm.rms that doubles, and refuses more than three rows."""
    def when(x, *_):
        return f"{len(x)} rows are more than 3" if len(x) > 3 else None

    @ops.implement("norm.rms", "doubled", when=when)
    def twice(*args):
        return 2 * rms.reference(*args)

    yield
    del rms.implementations["doubled"]


def run(x=X):
    return rms(x, None, 1e-6, torch.float32)


def test_a_choice_holds_within_its_block_and_blocks_nest(doubled):
    plain = run()
    with ops.use(norm="doubled"):
        assert torch.equal(run(), 2 * plain)
        with ops.use({"norm.rms": "torch"}):
            assert torch.equal(run(), plain)
        assert torch.equal(run(), 2 * plain)
    assert torch.equal(run(), plain)


def test_a_phase_has_its_own_choice(doubled):
    plain = run()
    with ops.use(norm="doubled", phase="decode"):
        ops.set_phase("prefill")
        assert torch.equal(run(), plain)
        ops.set_phase("decode")
        assert torch.equal(run(), 2 * plain)
        ops.set_phase("prefill")
    with pytest.raises(ValueError, match="prefill, decode"):
        ops.use(norm="torch", phase="decoding")


def test_an_explicit_choice_that_cannot_be_met_raises_with_op_reason_and_remedy(doubled):
    words = "norm.rms.*4 rows.*use\\(norm='torch'\\)"
    with ops.use(norm="doubled"), pytest.raises(ops.Unsupported, match=words):
        run(torch.ones(4, 8))


@pytest.mark.parametrize(("groups", "error", "words"), [
    ({"nrom": "torch"}, ops.UnknownOp, "did you mean norm"),
    ({"norm": "trito"}, ops.UnknownImplementation, "did you mean triton"),
    ({"norm": "triton"}, ops.UnknownImplementation, "norm.rms has no implementation 'triton'")])
def test_a_typo_is_named_with_what_is_near_and_changes_nothing(groups, error, words):
    plain = run()
    with pytest.raises(error, match=words):
        ops.use(groups)
    assert torch.equal(run(), plain)


def test_auto_falls_back_and_says_why():
    with ops.use("auto"):
        run()
        row = next(r for r in ops.explain() if r["op"] == "norm.rms")
    assert row["selected"] == "auto" and row["decided_by"] == "use" and "triton" in row["refused"]


def test_a_pin_holds_for_the_modules_that_match_and_no_module_is_pinned_twice(doubled):
    model = torch.nn.ModuleDict({"a": RMSNorm(8, 1e-6, torch.float32), "b": RMSNorm(8, 1e-6, torch.float32)})
    plain = model["b"](X)
    unpin = ops.pin(model, "a", norm="doubled")
    assert torch.equal(model["a"](X), 2 * plain) and torch.equal(model["b"](X), plain)
    with pytest.raises(ValueError, match="already pinned"):
        ops.pin(model, "*", norm="torch")
    unpin()
    assert torch.equal(model["a"](X), plain)
    with pytest.raises(ValueError, match="no module matches"):
        ops.pin(model, "c", norm="torch")


def test_words_of_the_command_line():
    assert ops.read_words("moe=triton, mla=torch") == {"moe": "triton", "mla": "torch"}
    assert ops.read_words("auto") == {"*": "auto"}
    with pytest.raises(ValueError, match="group=implementation"):
        ops.read_words("moe")


def test_a_typo_in_the_environment_is_found_when_a_model_is_built(monkeypatch):
    monkeypatch.setenv("DSKIT_USE", "meo=torch")
    with pytest.raises(ops.UnknownOp, match="DSKIT_USE.*did you mean moe"):
        ops.check_environment()


def test_compare_measures_each_implementation_against_float64(doubled):
    rows = {r["implementation"]: r for r in ops.compare("norm.rms", X, None, 1e-6, torch.float32)}
    assert rows["torch"]["relative_rms"] < 1e-6 < rows["doubled"]["relative_rms"]
    assert "refused" in rows["triton"]
