"""Steps that compile kernels leave nothing behind, whatever the model."""

import pytest

from dskit import LLM, SamplingParams, checkpoint
from dskit.config import ModelConfig, preset
from tests import models

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = [[3, 4, 5], list(range(5, 60)), [9]]


def small(name: str) -> ModelConfig:
    """A preset's configuration, or that of a random V4 model."""
    return ModelConfig.from_dict(models.random_v4(5) | {"vocab_size": 300}) if name == "v4" else preset(name)


@pytest.mark.parametrize(("name", "settings"), [
    ("v4", {}), *(pytest.param(name, more, marks=pytest.mark.slow) for name, more in (
        ("tiny", {}), ("tiny", {"replay": "compact", "speculate": "off"}), ("odd", {})))])
def test_all_kinds_and_sizes_are_taken_and_nobody_is_answered_otherwise(name, settings):
    model = checkpoint.random(small(name), device="cpu", batch_invariant=True)
    with LLM(model, max_num_seqs=5, max_num_batched_tokens=40, max_model_len=256, **settings) as llm:
        want = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
        llm.engine.forget()
        runner, seen = llm.engine.runner, []
        run = runner.run
        runner.run = lambda work, kind: (seen.append((kind, [w.stop - w.start for w in work], work[0].stop)),
                                         run(work, kind=kind))
        runner.warm_up(40, 5, 150)
        runner.run = run
        longest, far = runner.rows_per_round, {(kind, stop) for kind, _, stop in seen}
        assert {sum(rows) for kind, rows, _ in seen if kind == "prefill"} == {1, 4, 16, 40}
        assert {len(rows) for kind, rows, _ in seen if kind == "decode"} == {1, 4, 5}
        assert {rows[0] for kind, rows, _ in seen if kind == "decode"} == {1, longest}
        assert {("prefill", 150), ("decode", 150), ("decode", longest)} <= far
        assert [result.token_ids for result in llm.generate(PROMPTS, PARAMS)] == want
