"""The engine on an NVIDIA GPU says the same however it is driven, and the demo knows there what it knows."""

import pytest

from dskit import LLM, checkpoint, ops
from dskit.engine.seq import SamplingParams
from dskit.evaluate import evaluate

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


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_the_demo_knows_what_it_knows(kernels):
    """Packed caches, and weights as they are stored."""
    with ops.use(kernels), LLM("demo", device="cuda") as llm:
        report = evaluate(llm, ["define", "tools"], 6)
    assert all(skill["correct"] >= 5 for skill in report["skills"].values()), report
