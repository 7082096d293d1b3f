"""Decode steps through a stand-in for CUDA graphs, which repeats a call on the tensors that it was given."""

import logging
import math
from contextlib import contextmanager

import pytest

from dskit import checkpoint, ops
from dskit.engine import graphs
from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams

IDS = [3 + (11 * i * i + 5 * i + i // 7) % 59 for i in range(80)]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=8, ignore_eos=True) for i in range(5)]
PROMPTS = [IDS[i : 4 * i + 9] for i in range(5)]


class Backend:
    """Captures by remembering the call; a replay writes where the first result is, as a graph does."""

    def __init__(self, fails=()):
        self.captured, self.fails = 0, fails

    def capture(self, work):
        self.captured += 1
        assert ops._state.phase == "decode"  # else the kernels of another phase would be captured
        if self.captured in self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = work()
        out.fill_(math.nan)  # a capture computes nothing
        return lambda: out.copy_(work()), out


@pytest.fixture(scope="module")
def model():
    return checkpoint.load("tiny", device="cpu", batch_invariant=True)


@contextmanager
def graphed(model, backend=None, **settings):
    with LLM(model, max_model_len=256, canary="raise", **settings) as llm:
        llm.engine.runner.graphs = graphs.Graphs(llm.engine.runner, backend or Backend())
        yield llm
        llm.engine.check()


@pytest.fixture(scope="module")
def eager(model):
    with LLM(model, max_model_len=256, speculate="off") as llm:
        return [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("settings", [{"speculate": "off"}, {"speculate": "off", "overlap": True},
                                      {"speculate": "static", "replay": "off"}], ids=str)  # fmt: skip
def test_tokens_are_those_without_graphs(model, eager, settings):
    """Rows come and go, so that steps of several sizes are padded; drafts make rows of one request many."""
    with graphed(model, **settings) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        stats, sizes = llm.stats(), llm.engine.runner.graphs.graphs
    assert [r.token_ids for r in found] == eager and stats["graph_failures"] == 0
    assert stats["graph_steps"] > 3 and all(graph.checked for graph in sizes.values())


def test_a_failed_capture_runs_eagerly_with_a_warning(model, eager, caplog):
    with caplog.at_level(logging.WARNING), graphed(model, Backend(fails=[1]), speculate="off") as llm:
        found = llm.generate(PROMPTS, PARAMS)
        stats = llm.stats()
    assert [r.token_ids for r in found] == eager
    assert stats["graph_failures"] == 1 and stats["eager_steps"] > 0
    assert "which run eagerly: RuntimeError: operation not permitted" in caplog.text


def test_a_graph_that_computes_something_else_is_not_used(model, eager, caplog):
    class Wrong(Backend):
        def capture(self, work):
            replay, out = super().capture(work)
            return lambda: (replay(), out.neg_()), out

    with caplog.at_level(logging.WARNING), graphed(model, Wrong(), speculate="off") as llm:
        assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == eager
    assert "differ by 2 from those of the same step without it" in caplog.text


def test_a_swap_captures_again(model):
    backend = Backend()
    with graphed(model, backend, speculate="off") as llm:
        want = llm.generate(PROMPTS[0], PARAMS[0]).token_ids
        before = backend.captured
        done = llm.swap()
        assert done.graphs == before == backend.captured - before > 0
        assert "CUDA graphs captured again" in repr(done)
        assert llm.generate(PROMPTS[0], PARAMS[0]).token_ids == want


def test_sizes():
    assert [graphs._rows(n) for n in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]
