"""Settings: what is filled in, and what is refused at the start."""

import pytest

from dskit.config import preset
from dskit.engine.config import EngineConfig, EngineConfigError

TINY = preset("tiny")


def test_sizes_follow_the_model():
    cfg = EngineConfig.of(TINY, max_num_seqs=None)
    assert (cfg.max_model_len, cfg.block_size) == (1024, 16)
    assert 0.8 * cfg.block_size * cfg.num_blocks >= cfg.max_model_len
    assert (
        EngineConfig.of(preset("demo")).block_size == 128
        and EngineConfig.of(preset("flash")).block_size == 256
    )


def test_a_gpu_takes_longer_chunks_unless_told_otherwise():
    assert EngineConfig.of(TINY).max_num_batched_tokens == 1024
    assert EngineConfig.of(TINY, gpu=True).max_num_batched_tokens == 8192
    assert EngineConfig.of(TINY, gpu=True, max_num_batched_tokens=96).max_num_batched_tokens == 96


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 1025}, "max_model_len is 1025; this model's positions allow 2 to 1024"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens is 1.5"),
        ({"block_size": 15}, "block_size is 15; it must be a multiple of 2"),
        ({"num_blocks": 79}, "raise num_blocks to 80 or lower max_model_len"),
        ({"keep_tokens": -7}, "keep_tokens is -7"),
        ({"tensor_parallel": 2}, "tensor_parallel is no setting of the engine"),
        ({"prefill_interval": True}, "prefill_interval is True"),
        ({"enable_eplb": True}, "enable_eplb is True, but one rank has all experts"),
        ({"num_redundant_experts": 2}, "num_redundant_experts is 2, but one rank"),
        ({"num_redundant_experts": -1, "ep": 2}, "num_redundant_experts is -1"),
        ({"eplb_interval": 0}, "eplb_interval is 0"),
        ({"eplb_min_balance": 1.5}, "eplb_min_balance is 1.5"),
        ({"eplb_algorithm": "greedy"}, "'greedy'; choose one of step-aware, classic"),
    ],
    ids=str,
)
def test_refused_at_the_start(settings, words):
    with pytest.raises(EngineConfigError, match=words):
        EngineConfig.of(TINY, **settings)
