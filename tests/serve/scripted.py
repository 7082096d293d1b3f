"""A scripted LLM: the real engine, tokenizer and chat format, over a runner that reads from a script.

It stands in for a trained model where a test needs a certain output: thinking, a tool call, a long reply. The
script maps a word of the last question to an assistant message; other questions get a reply without an end.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from dskit import chat
from dskit.config import preset
from dskit.engine.config import EngineConfig
from dskit.engine.grammar import Grammars
from dskit.engine.llm import LLM
from dskit.engine.loop import Engine
from dskit.engine.pools import Blocks, Slots

ENDLESS = "All work and no play makes a long story. "


class ScriptedLLM(LLM):
    """An LLM with the replies of `script` (word in the question -> message); `pause` in seconds a step."""

    def __init__(self, script: dict[str, dict], pause: float = 0.0, **settings):
        self.name, self.device, self.numerics, self.model = "scripted", "cpu", "exact", None
        self.config = preset("tiny").replace(max_position_embeddings=4096)  # room for a prompt with tools
        self.tokenizer = chat.Tokenizer.of_bytes(self.config)
        cfg = EngineConfig.of(self.config, max_num_batched_tokens=1024, speculate="off", **settings)
        self.runner = ScriptRunner(script, self.tokenizer, self.config.vocab_size, pause)
        self.engine = Engine(
            self.runner,
            cfg,
            Blocks(cfg.num_blocks, cfg.block_size),
            Slots(cfg.max_num_seqs),
            vocab_size=self.config.vocab_size,
            eos_ids=[self.tokenizer.eos_id],
            decode=self.tokenizer.decode,
            grammars=Grammars(self.tokenizer, self.config.vocab_size, [self.tokenizer.eos_id]),
        )


class ScriptRunner:
    """Scores that make the script's next token certain. `fail_on`: raise when a prompt holds these ids."""

    device = torch.device("cpu")

    def __init__(self, script: dict[str, dict], tokenizer: chat.Tokenizer, vocab_size: int, pause: float):
        self.pause, self.vocab_size, self.tokenizer = pause, vocab_size, tokenizer
        self.script = script
        self.fail_on: list[int] | None = None
        self._ids: dict[tuple[str, bool], list[int]] = {}
        self._endless = tokenizer.encode(ENDLESS)

    def run(self, work: list[SimpleNamespace], copies: object) -> torch.Tensor:
        """One row per sequence that wants a token."""
        time.sleep(self.pause)
        wanted = [w for w in work if w.want == "last"]
        if self.fail_on is not None and any(self._holds(w.tokens, self.fail_on) for w in wanted):
            raise RuntimeError("the script says that this step fails")
        logits = torch.full((len(wanted), self.vocab_size), -100.0)
        for row, w in enumerate(wanted):
            logits[row, self._next(w)] = 100.0
        return logits

    def _next(self, w: SimpleNamespace) -> int:
        answer, at = self._answer(w.tokens[: w.prompt_len]), w.stop - w.prompt_len
        return answer[at] if at < len(answer) else self._endless[(at - len(answer)) % len(self._endless)]

    def _answer(self, prompt: list[int]) -> list[int]:
        text = self.tokenizer.decode(prompt)
        question = text.rsplit(chat.USER, 1)[-1]
        word = next((word for word in self.script if word in question), None)
        if word is None:
            return []
        key = word, text.endswith(chat.THINK)
        if key not in self._ids:
            self._ids[key] = chat.answer_ids(self.script[word], self.tokenizer, key[1])
        return self._ids[key]

    @staticmethod
    def _holds(tokens: list[int], part: list[int]) -> bool:
        return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))
