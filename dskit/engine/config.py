"""Sizes and limits of an engine, and every reason to refuse them at the start.

Units: tokens, blocks and sequences, as the names say.
Errors: EngineConfigError (a ValueError), which names the setting, the numbers and what to change.
Source: engine.md sections 4.3, 6.2, 6.3, 8.1, 20.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from dskit.config import ModelConfig


class EngineConfigError(ValueError):
    """Settings that no engine can run with."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; None is filled in by `of` from the model's config."""

    max_model_len: int | None = None
    """Longest sequence, prompt and answer together; None: the model's max_position_embeddings."""
    max_num_seqs: int = 16
    """Sequences served at the same time; each owns a state slot."""
    max_num_batched_tokens: int = 1024
    """Most rows of a prefill step; longer prompts are cut into chunks."""
    block_size: int | None = None
    """Positions per cache block; None: twice the window, as a multiple of every compression ratio."""
    num_blocks: int | None = None
    """Cache blocks; None: for 1.25 longest sequences, or 4,096 tokens per sequence if that is more."""
    max_queued_requests: int = 512
    """Requests that may wait; the next one is refused."""
    prefill_interval: int = 1
    """Decode steps between two looks at the queue; 1 gives the first token soonest."""
    replay: str = "off"
    """Decoder rows of a prompt: "off" all; "mask", "compact" (approximate) the last `keep_tokens`."""
    keep_tokens: int | None = None
    """Rows kept by replay; None: the window and twice what a request may be rolled back."""
    exact_prefix: bool = True
    """How a reused prefix gets its windows; no prefix is reused yet, so both values are exact."""

    @classmethod
    def of(cls, model: ModelConfig, **settings) -> EngineConfig:
        """Fill in what depends on the model and check everything; None counts as not given."""
        unknown = sorted(set(settings) - {f.name for f in fields(cls)})
        if unknown:
            raise EngineConfigError(
                f"{unknown[0]} is no setting of the engine; it has {[f.name for f in fields(cls)]}"
            )
        cfg = cls(**{k: v for k, v in settings.items() if v is not None})
        for name in _COUNTS:
            value = getattr(cfg, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise EngineConfigError(f"{name} is {value!r}; it must be a positive integer")
        ratios = math.lcm(*(r for r in model.compress_ratios if r), 1)
        length = cfg.max_model_len or model.max_position_embeddings
        block = cfg.block_size or math.ceil(2 * model.sliding_window / ratios) * ratios
        tokens = max(math.ceil(length / 0.8), cfg.max_num_seqs * min(length, 4096))
        cfg = replace(
            cfg,
            max_model_len=length,
            block_size=block,
            num_blocks=cfg.num_blocks or math.ceil(tokens / block),
        )
        cfg._check(model, ratios)
        return cfg

    def _check(self, model: ModelConfig, ratios: int) -> None:
        """The rules between settings; raises EngineConfigError."""
        if not 2 <= self.max_model_len <= model.max_position_embeddings:
            raise EngineConfigError(
                f"max_model_len is {self.max_model_len}; this model's positions allow 2 to "
                f"{model.max_position_embeddings} (max_position_embeddings)"
            )
        if self.block_size % ratios:
            raise EngineConfigError(
                f"block_size is {self.block_size}; it must be a multiple of {ratios}, so that no "
                "compressed entry lies across two blocks"
            )
        if 0.8 * self.block_size * self.num_blocks < self.max_model_len:
            raise EngineConfigError(
                f"num_blocks {self.num_blocks} x block_size {self.block_size} is too small: a sequence of "
                f"max_model_len {self.max_model_len} may take 80 % of it at most; raise num_blocks to "
                f"{math.ceil(self.max_model_len / 0.8 / self.block_size)} or lower max_model_len"
            )


_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "max_queued_requests",
    "prefill_interval",
    "keep_tokens",
)
