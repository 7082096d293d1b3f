"""transformers beside dskit: its DeepSeek-V4 model at the same widths, timed by the same clock.

Idea: V4 is the nearest model that transformers has. It gets the demo's widths, layers, heads, experts,
residual streams and window, V4-Flash's own pattern of compression (4 and 128 by turns), random weights,
our dtype, our threads, and its own cache. What it lacks is Engram and the quantised formats, which makes
its step the lighter one.

Units: seconds; tokens per second of one stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dskit.config import ModelConfig

Run = Callable[[list[list[int]], int], list[tuple[float, float]]]


def transformers_run(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Run:
    """Build the peer; the returned function generates and gives each stream's (ttft_s, decode_tok_s).

    Raises ModuleNotFoundError when transformers is not installed.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**peer_fields(config))).to(device, dtype).eval()

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[float, float]]:
        ids = torch.tensor(prompts, device=device)
        clock = Clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            stopping_criteria=[clock],
        )
        rate = (new_tokens - 1) / (clock.last - clock.first) if new_tokens > 1 else 0.0
        return [(clock.first - clock.start, rate)] * len(prompts)

    return run


def peer_fields(config: ModelConfig) -> dict[str, object]:
    """V4 configuration with the widths of ours."""
    layers = config.num_hidden_layers
    same = (
        *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
        *(
            "num_experts_per_tok",
            "n_routed_experts",
            "n_shared_experts",
            "routed_scaling_factor",
            "swiglu_limit",
        ),
        *("hc_mult", "hc_sinkhorn_iters", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
        *("max_position_embeddings", "rope_theta", "compress_rope_theta", "pad_token_id"),
    )
    return {name: getattr(config, name) for name in same} | {
        "compress_ratios": ([0, 0] + [4, 128] * layers)[:layers],
        "num_hash_layers": 0,
        "eos_token_id": None,
        "bos_token_id": None,
        "rope_parameters": dict(config.rope_scaling or {}),
    }


class Clock:
    """A stopping criterion that never stops: it notes when each token is there."""

    def __init__(self):
        self.start = time.perf_counter()
        self.first = self.last = 0.0

    def __call__(self, ids: torch.Tensor, _scores: object, **_unused: object) -> torch.Tensor:
        """Note the time; go on."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
