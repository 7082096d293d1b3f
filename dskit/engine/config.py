"""Sizes and limits of an engine, and every reason to refuse them at the start.

Units: tokens, blocks and sequences, as the names say.
Errors: EngineConfigError (a ValueError), which names the setting, the numbers and what to change.
Source: engine.md sections 4.3, 6.2, 6.3, 8.1, 12, 20.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from dskit.config import ModelConfig
from dskit.engine.eplb import PLANNERS
from dskit.engine.pools import backtrack
from dskit.engine.spec import StepCost


class EngineConfigError(ValueError):
    """Settings that no engine can run with."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; None is filled in by `of` from the model's config."""

    max_model_len: int | None = None
    """Longest sequence, prompt and answer together; None: the model's max_position_embeddings."""
    max_num_seqs: int = 16
    """Sequences served at the same time; each owns a state slot."""
    max_num_batched_tokens: int | None = None
    """Most rows of a prefill step; longer prompts are cut into chunks.  None: 1,024, and on a GPU 8,192, as
    each step reads all experts."""
    block_size: int | None = None
    """Positions per cache block; None: twice the window, as a multiple of every compression ratio."""
    num_blocks: int | None = None
    """Cache blocks; None: for 1.25 longest sequences, or 4,096 tokens per sequence if that is more."""
    max_queued_requests: int = 512
    """Requests that may wait; the next one is refused."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait, likewise; None: eight times what the cache blocks hold."""
    queue_timeout: float = math.inf
    """Seconds after which a request that could not be started ends with an error; a batch waits its turn."""
    prefill_interval: int = 1
    """Decode steps between two looks at the queue; 1 gives the first token soonest."""
    overlap: bool | None = None
    """Plan a step while the one before it runs; None: on a GPU."""
    replay: str = "off"
    """Decoder rows of a prompt: "off" all; "mask", "compact" (approximate) the last `keep_tokens`."""
    keep_tokens: int | None = None
    """Rows kept by replay; None: the window and twice what a request may be rolled back."""
    enable_prefix_caching: bool = True
    """Keep the blocks of prompts and answers, and start a prompt behind what is known of it."""
    exact_prefix: bool = True
    """Windows of a reused prefix: from snapshots (exact), or rebuilt from its last tokens (approximate)."""
    replay_tokens: int | None = None
    """Rows before the new ones from which windows are rebuilt; None: the window."""
    num_snapshots: int | None = None
    """Snapshots kept for exact prefixes; None: four per sequence."""
    speculate: str | None = None
    """Let a draft guess ahead: "off", "static" (verify every guess), "scheduled" (those worth a row, by the
    draft's confidence and `step_cost`; without one every guess); None: scheduled where the model has a
    draft."""
    accept: str = "coupled"
    """Which guesses hold: "coupled" (those that would be drawn without a draft: the same tokens for the same
    seed), "rejection" (more of them; the text follows the model's law, but depends on how guesses fell),
    "block" (likewise, and more still: guesses are judged together)."""
    step_cost: StepCost | None = None
    """Milliseconds of a step by its rows, as `dskit bench spec` measures them."""
    draft_temperatures: tuple[float, ...] | None = None
    """What the draft's confidences are divided by, as `dskit bench spec` fits them."""
    enforce_eager: bool = False
    """Launch every kernel of a step by itself, where one GPU would replay CUDA graphs of them."""
    ep: int = 1
    """Ranks that share the routed experts."""
    num_redundant_experts: int = 0
    """Second copies of experts, for busy ones to be spread; at least so many, equally many on each rank."""
    enable_eplb: bool = False
    """Count what the experts of all ranks receive, and move them while serving so that ranks are even."""
    eplb_interval: int = 3000
    """Steps from one look for a better placement to the next; the first comes after a quarter of it."""
    eplb_min_balance: float = 0.9
    """Mean over busiest rank from which on nothing is moved."""
    eplb_algorithm: str = "step-aware"
    """How a placement is found: "step-aware" (peaks of single steps), "classic" (counts alone)."""
    canary: str = "off"
    """Check every step's reads and writes against a shadow of the caches: "off", "log", "raise"."""
    engram_placement: str | None = None
    """Where Engram tables lie: "device", "shard", "host", "mmap" (engine/engram.py); None: where they fit."""
    sliding_window: int | None = None
    """The model's window; no setting, `of` fills it in."""

    @property
    def drafts(self) -> bool:
        """Whether a draft guesses ahead."""
        return self.speculate in ("static", "scheduled")

    @classmethod
    def of(cls, model: ModelConfig, gpu: bool = False, **settings) -> EngineConfig:
        """Fill in what depends on the model and the device, check everything; None counts as not given."""
        known = [f.name for f in fields(cls) if f.name != "sliding_window"]
        if unknown := sorted(set(settings) - set(known)):
            raise EngineConfigError(f"{unknown[0]} is no setting of the engine; it has {known}")
        cfg = cls(**{k: v for k, v in settings.items() if v is not None})
        for name in _COUNTS:
            value = getattr(cfg, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise EngineConfigError(f"{name} is {value!r}; it must be a positive integer")
        ratios = math.lcm(*(r for r in model.compress_ratios if r), 1)
        length = cfg.max_model_len or model.max_position_embeddings
        block = cfg.block_size or math.ceil(2 * model.sliding_window / ratios) * ratios
        tokens = max(math.ceil(length / 0.8), cfg.max_num_seqs * min(length, 4096))
        window = model.sliding_window
        exact = cfg.exact_prefix and cfg.enable_prefix_caching
        num_blocks = cfg.num_blocks or math.ceil(tokens / block)
        cfg = replace(
            cfg,
            max_model_len=length,
            max_num_batched_tokens=cfg.max_num_batched_tokens or (8192 if gpu else 1024),
            block_size=block,
            num_blocks=num_blocks,
            max_queued_tokens=cfg.max_queued_tokens or 8 * num_blocks * block,
            keep_tokens=cfg.keep_tokens or window + 2 * backtrack(model),
            replay_tokens=cfg.replay_tokens or window,
            sliding_window=window,
            num_snapshots=(cfg.num_snapshots or 4 * cfg.max_num_seqs) if exact else 0,
            speculate=cfg.speculate or ("scheduled" if model.num_nextn_predict_layers else "off"),
        )
        cfg._check(model, ratios)
        return cfg

    def _check(self, model: ModelConfig, ratios: int) -> None:
        """The rules between settings; raises EngineConfigError."""
        if self.canary not in ("off", "log", "raise"):
            raise EngineConfigError(f"canary is {self.canary!r}; choose off, log or raise")
        if self.speculate not in ("off", "static", "scheduled"):
            raise EngineConfigError(f"speculate is {self.speculate!r}; choose off, static or scheduled")
        if self.speculate != "off" and not model.num_nextn_predict_layers:
            raise EngineConfigError(f"speculate is {self.speculate!r}, but this model has no draft (mtp.*); "
                                    "use 'off'")
        if self.accept not in ("rejection", "block", "coupled"):
            raise EngineConfigError(f"accept is {self.accept!r}; choose rejection, block or coupled")
        if not self.queue_timeout > 0:
            raise EngineConfigError(f"queue_timeout is {self.queue_timeout!r}; it must be seconds above 0")
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
        if self.enable_prefix_caching and not self.exact_prefix:
            self._check_replay(model)
        self._check_experts()

    def _check_experts(self) -> None:
        """What ranks that share experts can do; raises EngineConfigError."""
        extra = self.num_redundant_experts
        if not isinstance(extra, int) or isinstance(extra, bool) or extra < 0:
            raise EngineConfigError(f"num_redundant_experts is {extra!r}; it must be 0 or a positive integer")
        for name in ("num_redundant_experts", "enable_eplb"):
            if getattr(self, name) and self.ep == 1:
                raise EngineConfigError(f"{name} is {getattr(self, name)!r}, but one rank has all experts "
                                        "(ep is 1); share them among several, or leave it out")
        if not 0 < self.eplb_min_balance <= 1:
            raise EngineConfigError(f"eplb_min_balance is {self.eplb_min_balance!r}; it is a mean over a "
                                    "maximum, above 0 and at most 1")
        if self.eplb_algorithm not in PLANNERS:
            raise EngineConfigError(f"eplb_algorithm is {self.eplb_algorithm!r}; choose one of "
                                    f"{', '.join(PLANNERS)}")

    def _check_replay(self, model: ModelConfig) -> None:
        """What rebuilding windows after a prefix hit asks for; raises EngineConfigError."""
        if not model.is_v41:
            raise EngineConfigError(
                "exact_prefix is False, but a V4 model compresses overlapping groups in every layer, which "
                "its last tokens cannot rebuild; use exact_prefix=True or enable_prefix_caching=False"
            )
        if self.replay_tokens < model.sliding_window:
            raise EngineConfigError(
                f"replay_tokens is {self.replay_tokens}; the window needs {model.sliding_window}"
            )
        least = self.replay_tokens + self.block_size
        if self.max_num_batched_tokens < least:
            raise EngineConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; behind a reused prefix a step "
                f"holds replay_tokens and one block, {least}; raise it or set exact_prefix=True"
            )


_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "max_queued_requests",
    "max_queued_tokens",
    "prefill_interval",
    "keep_tokens",
    "replay_tokens",
    "num_snapshots",
    "ep",
    "eplb_interval",
)
