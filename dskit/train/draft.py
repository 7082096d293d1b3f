"""The draft's trainer: DSpark's stages learn to guess what a trained model says next.

Idea: the model reads packed conversations as when it is trained, but learns nothing. At anchors, tokens that
it said itself, a block [token, noise, noise, ...] runs through the draft stages, which see the window before
the anchor (keys made from tapped streams) and the whole block. Row k guesses the k-th next token, and is
taught by the model's own distribution there:

    w_k = exp(-(k - 1) / delta)          what comes first matters most
    L = 0.1 CE(q_k, t_k) + 0.9 |q_k - p_k|_1 + BCE(confidence_k, 1 - |q_k - p_k|_1 / 2)

What the model would itself have said is where its best guess was the conversation's token since the answer
began, so no text has to be generated: supervision stops at the first token that it would not have said.

Shapes: B rows of T tokens, N anchors in each, blocks of G = dspark_block_size rows, V vocabulary.
Units: tau is tokens per round, the model's own included, at temperature 1.
Errors: ValueError for a model that is not V4.1, or one that has a draft of another shape.
Source: dspark.md 6; dspark paper, sections 2 and 3.
Try: dskit train demo-draft --steps 20 --batch-size 4 --seq-len 512
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dskit import chat, checkpoint
from dskit.config import ModelConfig
from dskit.layers import dspark
from dskit.layers.mla import Attention, Global, Memory, attend_whole
from dskit.layers.rope import turns
from dskit.layers.swa import RingPlan
from dskit.model import Model, Step
from dskit.train.trainer import Recipe, Trainer
from dskit.train.whole import SINK_KEYS, additive_mask, whole_step

DRAFT = dict(num_nextn_predict_layers=2, dspark_block_size=5)  # what the demo's config gains with its draft


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """A recipe for a draft; anchors: blocks per 512 tokens of a row; the model is read as it is served."""

    steps: int = 2000
    sparse_from: float = 0.0
    round_from: float = 0.0
    anchors: int = 32
    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0


def with_draft(config: ModelConfig) -> ModelConfig:
    """The config of a model once it has a draft; one that has a draft already stays as it is."""
    if not config.is_v41:
        raise ValueError("the draft trainer taps the streams that enter a layer, as V4.1 does; this is V4")
    if config.num_nextn_predict_layers:
        return config
    return config.replace(compress_ratios=(*config.compress_ratios, 0, 0), **DRAFT)


@dataclass
class Blocks:
    """Where drafted blocks stand: the counterpart of `whole.Whole` for their attention.

    rows [B, N, W]: the window before each anchor; bias [B*N, G, W + G + sink]; contexts[layer] [B, T, H].
    """

    rows: Tensor
    bias: Tensor
    contexts: dict[int, Tensor]

    def attend(self, layer: Attention, x: Tensor, latent: Tensor, q_TAH: Tensor, own_TH: Tensor,
               shared: Global) -> Tensor:
        """Every row of a block sees the window before its anchor and the whole block, both ways."""
        B, N, W = self.rows.shape
        context, G = self.contexts[layer.layer], self.bias.shape[1]
        batch = torch.arange(B, device=context.device)[:, None, None]
        keys = torch.cat((context[batch, self.rows].flatten(0, 1), own_TH.unflatten(0, (B * N, G))), dim=1)
        keys = F.pad(keys, (0, 0, 0, SINK_KEYS))
        return attend_whole(q_TAH.unflatten(0, (B * N, G)), keys, self.bias, layer.attn_sink).flatten(0, 1)


class Pair(nn.Module):
    """The model and its draft as one callable, so that both can be run on weights from outside."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, part: str, *args) -> tuple[Tensor, ...]:
        """Run "read" or "guess"."""
        return getattr(self, part)(*args)

    def read(self, step: Step) -> tuple[Tensor, Tensor]:
        """The model's part: taps [B*T, m*D] and normed last hidden [B*T, D]."""
        model, state, shared = self.model, self.model.streams(step.ids), Global()
        state.taps = []
        for block in model.layers:
            state, step = block(state, step, Memory(), shared)
        return torch.cat(state.taps, dim=-1), model.norm(model.collapse(state, model))

    def guess(self, taps: Tensor, turn: Tensor, step: Step, before: Tensor) -> tuple[Tensor, Tensor]:
        """The draft's part: logits [R, V] and confidence logits [R] of all block rows.

        `turn` belongs to the context's rows; `before` [R] is the token before each guess.
        """
        model, stages, blocks = self.model, self.model.mtp, step.whole
        main = model.numerics.activation(dspark.main_projection([taps], stages, model.numerics))
        shape = (blocks.rows.shape[0], -1)
        blocks.contexts = {s.layer: s.attn.key(main, turn).unflatten(0, shape) for s in stages}
        state, last = model.streams(step.ids), stages[-1]
        for stage in stages:
            state, _ = stage(state, step, Memory(), Global())
        x = model.collapse(state, last)
        embedding = last.markov_head.embed.dense()[before]
        logits = dspark.markov(model.logits(last.norm(x)), embedding, last.markov_head.head.dense())
        conf = dspark.confidence(x[:, None], embedding[:, None], last.confidence_head.proj.dense())
        return logits, conf.flatten()


class DraftTrainer(Trainer):
    """A run that trains the draft of a finished model and leaves the model as it is."""

    recipe: DraftRecipe

    def __init__(self, source: str | Path, tokenizer: chat.Tokenizer, recipe: DraftRecipe, out: Path,
                 device: str, workers: int = 0):
        self.source = checkpoint.locate(source)
        config = checkpoint.load(self.source, device="cpu").config
        super().__init__(with_draft(config), tokenizer, recipe, out, device, workers)
        self.start_from(self.source)
        self.pair = Pair(self.model)
        self.figures = ("tau", *(f"accept_{k}" for k in range(1, self.config.dspark_block_size + 1)))
        self.fixed: dict[str, Tensor] = {}

    def learns(self, name: str) -> bool:
        """Only the draft learns."""
        return name.startswith("mtp.") and super().learns(name)

    def weights(self, rounded: bool) -> dict[str, Tensor]:
        """The draft's weights of this step; the model's are rounded once, since they never move."""
        if not self.fixed:
            with torch.no_grad():
                self.fixed = super().weights(rounded=True)
        return self.fixed | super().weights(rounded, prefix="mtp.")

    def loss(self, ids: Tensor, start: Tensor, said: Tensor, rounded: bool, sparse: bool
             ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and how often each guess would be accepted."""
        weights = {f"model.{name}": w for name, w in self.weights(rounded).items()}
        whole = whole_step(self.model, self.folding, ids, start, sparse=sparse, probes=0)
        with torch.no_grad():
            taps, last = torch.func.functional_call(self.pair, weights, ("read", whole))
            own = self._own(last, weights["model.head.weight"], ids, said)
            anchor, live = self._anchors(own)
            rows = anchor[..., None] + torch.arange(self.config.dspark_block_size + 1, device=ids.device)
            rows = rows.clamp(max=ids.shape[1] - 1)  # [B, N, G + 1]: the block's tokens and the last guess
            token = ids.gather(1, rows.flatten(1)).view(rows.shape)
            good = (own.gather(1, rows[..., :-1].flatten(1)).view(live.shape[0], -1, rows.shape[2] - 1)
                    & live[..., None]).cumprod(dim=-1)
            p = self._given(last, weights["model.head.weight"], rows[..., :-1], ids.shape)
        step = self._blocks(ids, start, anchor, rows[..., :-1])
        logits, conf = torch.func.functional_call(
            self.pair, weights, ("guess", taps, whole.rope[False], step, token[..., :-1].flatten()))
        return self._judge(logits.view(*good.shape, -1), conf.view(good.shape), p, token[..., 1:], good)

    def _own(self, last: Tensor, head: Tensor, ids: Tensor, said: Tensor) -> Tensor:
        """True at t where token t + 1 is an answer's and the model itself would have said it, [B, T]."""
        best = torch.cat([(rows @ head.T.to(rows.dtype)).argmax(-1) for rows in last.split(8192)])
        miss = (said & (best.view(ids.shape) != ids.roll(-1, dims=1))).int().cumsum(dim=1)
        before = torch.where(said, -1, miss).cummax(dim=1).values.clamp(min=0)  # misses before this answer
        return said & (miss == before)

    def _anchors(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Random positions where the model said this token and the next: (positions [B, N], are they any)."""
        valid = own & own.roll(1, dims=1)
        valid[:, 0] = False
        count = max(1, self.recipe.anchors * own.shape[1] // 512)
        chance = torch.rand(own.shape, device=own.device).masked_fill(~valid, -1.0)
        best = chance.topk(min(count, own.shape[1]), dim=1)
        return best.indices, best.values >= 0

    def _given(self, last: Tensor, head: Tensor, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        """The model's distribution of the tokens that the block's rows guess, [B, N, G, V]."""
        hidden = last.view(*shape, -1).gather(1, rows.flatten(1)[..., None].expand(-1, -1, last.shape[-1]))
        logits = hidden.float() @ head.float().T
        return logits.softmax(dim=-1).view(*rows.shape, -1)

    def _blocks(self, ids: Tensor, start: Tensor, anchor: Tensor, rows: Tensor) -> Step:
        """The Step of all block rows: [anchor's token, noise ...] at the positions from the anchor on."""
        W, G = self.config.sliding_window, rows.shape[-1]
        noise = torch.full(rows.shape, self.config.dspark_noise_token_id, device=ids.device)
        noise[..., 0] = ids.gather(1, anchor)
        first = start.gather(1, anchor)  # where the anchor's conversation begins
        pos = (anchor - first)[..., None] + torch.arange(G, device=ids.device)
        window = anchor[..., None] + torch.arange(-W, 0, device=ids.device)
        seen = torch.cat((window >= first[..., None], torch.ones_like(rows, dtype=torch.bool)), dim=-1)
        bias = additive_mask(seen.flatten(0, 1)[:, None].expand(-1, G, -1), self.model.numerics.compute)
        nothing = RingPlan(ids.new_empty(0), None, None, ids.new_empty(0))
        rope = {False: turns(pos.flatten(), self.model.frequency_0)}
        return Step(noise.flatten(), pos.flatten(), rope, (nothing, nothing),
                    whole=Blocks(window.clamp(min=0), bias, {}))

    def _judge(self, logits: Tensor, conf: Tensor, p: Tensor, label: Tensor, good: Tensor
               ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and figures of logits [B, N, G, V] beside p; good [B, N, G] says which rows count."""
        G, recipe = good.shape[-1], self.recipe
        delta = max(2.0, 4 * G / 7)
        weight = good * torch.exp(-torch.arange(G, device=good.device) / delta)
        accept = 1 - 0.5 * (logits.softmax(dim=-1) - p).abs().sum(dim=-1)
        ce = F.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none").view(good.shape)
        bce = F.binary_cross_entropy_with_logits(conf, accept.detach(), reduction="none")
        each = recipe.cross_entropy * ce + 2 * recipe.total_variation * (1 - accept) + recipe.confidence * bce
        loss = (each * weight).sum() / weight.sum().clamp(min=1)
        with torch.no_grad():
            hit = (logits.argmax(dim=-1) == label).float()
            logs = {"loss": loss, "accuracy": (hit * good).sum() / good.sum().clamp(min=1),
                    "tau": 1 + (accept * good).cumprod(dim=-1).sum() / good[..., 0].sum().clamp(min=1)}
            for k in range(G):
                logs[f"accept_{k + 1}"] = ((accept * good)[..., k].sum() / good[..., k].sum().clamp(min=1))
        return loss, logs

    def save_model(self) -> Path:
        """Write OUT/model: the model's own shards as they were, and the draft's beside them."""
        folder = super().save_model()
        for shard in self.source.glob("model-*.safetensors"):
            shutil.copyfile(shard, folder / shard.name)
        checkpoint.load(folder, device="cpu")  # the index still fits the shards
        return folder
