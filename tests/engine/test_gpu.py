"""The engine on an NVIDIA GPU says the same however it is driven, and the demo knows there what it knows."""

import pytest

from dskit import LLM, checkpoint, ops
from dskit.config import preset
from dskit.engine.seq import SamplingParams
from dskit.evaluate import evaluate
from tests.engine.test_llm import bits_in_company

pytestmark = pytest.mark.gpu
PROMPTS = [[9 + (7 * i * j) % 240 for j in range(3 + 11 * i)] for i in range(4)]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module")
def model():
    return checkpoint.load("tiny", numerics="exact", device="cuda", batch_invariant=True)


@pytest.fixture(scope="module")
def said(model):
    with LLM(model, speculate="off", overlap=False) as llm:
        return [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("settings", [{"overlap": True, "speculate": "off"}, {"overlap": True}, {}], ids=str)
def test_overlap_and_drafts_change_nothing(model, said, settings):
    with LLM(model, canary="raise", **settings) as llm:
        for _ in range(2):  # the second time from the cache
            assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == said


@pytest.fixture(scope="module")
def rounded():
    """In release numerics, which the experts' kernel needs; experts by torch ask the host."""
    return checkpoint.load("tiny", device="cuda", batch_invariant=True)


GRAPHS = [{"speculate": "off"}, {"speculate": "off", "overlap": False}, {"speculate": "static"}]


@pytest.mark.parametrize("settings", GRAPHS, ids=str)
def test_graphs_change_no_token(rounded, settings):
    with LLM(rounded, enforce_eager=True, **settings) as llm:
        want = [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]
    with LLM(rounded, canary="raise", **settings) as llm:
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == want
        before = llm.stats()
        assert before["graph_steps"] > 10 and not before["graph_failures"] + before["eager_steps"]
        assert before["graph_prefills"] and not before["eager_prefills"]
        assert llm.swap({"moe.plan": "torch"}).graphs
        assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == want
        llm.swap({"moe.plan": "auto"})
        assert not llm.stats()["graph_failures"]


@pytest.mark.parametrize("placement", ["device", "host", "mmap"])
def test_graphs_have_breaks_where_tables_lie_elsewhere(placement, tmp_path):
    path = checkpoint.write_random(preset("tiny"), tmp_path)
    settings = dict(device="cuda", batch_invariant=True, speculate="off", engram_placement=placement)
    with LLM(path, enforce_eager=True, **settings) as llm:
        want = [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]
    with LLM(path, **settings) as llm:
        assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == want
        stats = llm.stats()
        assert stats["graph_steps"] > 10 and stats["graph_prefills"] and not stats["graph_failures"]


LENGTHS = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 80, 81, 255, 256, 257, 300]
PREFILLS = [{}, {"replay": "compact"}, {"replay": "compact", "exact_prefix": False},
            {"replay": "mask", "max_num_batched_tokens": 160}]


@pytest.mark.parametrize("settings", PREFILLS, ids=str)
def test_graphs_change_no_token_of_prompts(rounded, settings):
    """Of lengths around those that are captured; alone, together with others that decode, and again."""
    prompts = [[9 + (7 * i * j + i // 3) % 480 for i in range(n)] for j, n in enumerate(LENGTHS)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=3, ignore_eos=True) for i in range(99)]
    said = []
    for eager in (True, False):
        with LLM(rounded, enforce_eager=eager, canary="raise", **settings) as llm:
            found = [llm.generate(prompt, params[0]).token_ids for prompt in prompts]
            words = [[i % 480 for i in ids] for ids in found]  # a step with an image's token takes no graph
            longer = [prompt + ids + prompt[:70] for prompt, ids in zip(prompts, words, strict=True)]
            found += [r.token_ids for r in llm.generate(longer, params[: len(longer)])]
            said.append(found)
            stats = llm.stats()
    assert said[0] == said[1]
    assert stats["graph_prefills"] > len(prompts) and not stats["graph_failures"]


def test_what_cannot_be_captured_runs_eagerly(rounded, caplog):
    with ops.use({"moe.experts": "torch"}), LLM(rounded, speculate="off") as llm:
        found = [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]
        stats = llm.stats()
    assert stats["graph_failures"] == 2 and not stats["graph_steps"] + stats["graph_prefills"]
    assert "no CUDA graph for prefill" in caplog.text and "CannotRepeat" in caplog.text
    with ops.use({"moe.experts": "torch"}), LLM(rounded, enforce_eager=True, speculate="off") as llm:
        assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == found


def test_bits_do_not_depend_on_the_batch():
    """With the kernels; the formulas of exact numerics sum on a GPU as its library chooses for a batch."""
    bits_in_company(checkpoint.load("tiny", device="cuda", batch_invariant=True), 50)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_the_demo_knows_what_it_knows(kernels):
    """Packed caches, and weights as they are stored."""
    with ops.use(kernels), LLM("demo", device="cuda") as llm:
        report = evaluate(llm, ["define", "tools"], 6)
    assert all(skill["correct"] >= 5 for skill in report["skills"].values()), report
