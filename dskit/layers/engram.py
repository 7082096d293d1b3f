"""Engram: a memory of n-grams that is looked up, not computed.

Idea: the last 2, 3 and 4 token ids are hashed to rows of a huge table; the rows are projected to one key per
residual stream and one shared value, and a gate (how well the key fits the stream) decides how much of the
value is added. Ids are first folded (case, accents and spaces merged), so that spelling variants share rows.

    h_s = h_{s-1} xor (id[t-s] * multiplier[s]),  row = offset + h_s mod prime
    X_j += sigmoid(copysign(sqrt(max(|d_j|, 1e-6)), d_j)) * value,
    d_j = <rms(X_j) q_weight_j, rms(key_j) k_weight_j> / sqrt(D)

Shapes: gram [T, Q] folded ids, newest first -> rows [T, C] -> numbers [T, C*Y] -> X_TND in place of X.
State: the engine remembers the last Q-1 ids of a request; nothing else. A table may lie elsewhere than the
layer (on other ranks, in host memory, in a file): the engine then hands over a `Found` with the numbers.
Errors: ValueError when a tokenizer folds to another size than the config says.
Numerics: int64 hash without wrap; the gate in float32, one rounding.
Kernel: kernels/engram.py (engram.hash, engram.gather, engram.gather_runs, engram.gate)
Source: model.md 3.10; config fields engram_*.
Try: notebooks/03_engram.ipynb
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.linear import Linear, Numerics, scale_values, sigmoid
from dskit.layers.norm import up


def fold_vocabulary(tokenizer) -> np.ndarray:
    """Folded numbers of a `tokenizers.Tokenizer`'s ids, int64 [V]: equal text up to case, accents, spaces."""
    from tokenizers import Regex, normalizers

    fold = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), "\ue000"),
        normalizers.Strip(), normalizers.Replace("\ue000", " ")])
    numbers: dict[str, int] = {}
    folded = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token in range(len(folded)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else fold.normalize_str(text) or text
        folded[token] = numbers.setdefault(key, len(numbers))
    return folded


def folding(config: ModelConfig, tokenizer=None) -> np.ndarray:
    """A checkpoint's folding, int64 [vocab_size]; without a tokenizer `id % engram_compressed_vocab_size`.

    Raises ValueError when the tokenizer folds to another size than `engram_compressed_vocab_size`.
    """
    size = config.engram_compressed_vocab_size
    if tokenizer is None:
        return np.arange(config.vocab_size, dtype=np.int64) % size
    folded = fold_vocabulary(tokenizer)
    if folded.max() + 1 != size:
        raise ValueError(f"engram_compressed_vocab_size is {size}, but the tokenizer folds to "
                         f"{folded.max() + 1}; use the tokenizer.json that belongs to the checkpoint")
    rest = np.full(max(0, config.vocab_size - len(folded)), folded[config.engram_pad_token_id])
    return np.concatenate((folded, rest))


def multipliers(config: ModelConfig, layer: int) -> np.ndarray:
    """Odd hash multipliers of an engram layer, int64 [Q]; products with folded ids stay below 2^63."""
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    random = np.random.default_rng(10007 * layer)
    draw = random.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
    return 2 * draw + 1


@ops.op("engram.hash", grad=False)
def hash_rows(gram_TQ: Tensor, multiplier_Q: Tensor, prime_SC: Tensor, offset_SC: Tensor) -> Tensor:
    """Table rows [T, (Q-1)*C] of folded n-grams, newest id first, all int64; prime, offset [Q-1, C]."""
    product = gram_TQ * multiplier_Q
    rows, h = [], product[:, 0]
    for s in range(1, gram_TQ.shape[1]):
        h = h ^ product[:, s]
        rows.append(offset_SC[s - 1] + h[:, None] % prime_SC[s - 1])
    return torch.cat(rows, dim=1)


@ops.op("engram.gather")
def gather(weight: Tensor, scale: Tensor | None, row_TC: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table, side by side and as numbers: [T, C] -> [T, C*Y] of `dtype`.

    weight [rows, Y] holds e4m3 codes and scale [rows, Y/32] their E8M0 scales; or, without scales, numbers.
    """
    row = weight[row_TC]
    if scale is not None:
        row = row.float() * scale_values(scale[row_TC]).repeat_interleave(32, dim=-1)
    return row.to(dtype).flatten(1)


@ops.op("engram.gather_runs", grad=False)
def gather_runs(weight: tuple[Tensor, ...], scale: tuple[Tensor, ...], row_TC: Tensor, dtype: torch.dtype
                ) -> Tensor:
    """`gather` from a table in runs of as many rows, tensors that may lie in the memory of other GPUs."""
    per, found = weight[0].shape[0], None
    for k, (codes, scales) in enumerate(zip(weight, scale, strict=True)):
        first = k * per
        mine = gather(codes, scales, (row_TC - first).clamp(0, per - 1), dtype)
        mine = mine.unflatten(1, (row_TC.shape[1], codes.shape[1]))
        found = mine if found is None else torch.where((row_TC >= first)[..., None], mine, found)
    return found.flatten(1)


@ops.op("engram.gate")
def gate(X_TND: Tensor, key_TND: Tensor, value_TD: Tensor, q_weight_ND: Tensor, k_weight_ND: Tensor,
         eps: float, image_T: Tensor | None = None, steady: bool = False) -> Tensor:
    """Add the value to every stream, as far as its key fits it: X_TND of the same dtype; image rows stay."""
    X, key = up(X_TND), up(key_TND)
    norm = torch.rsqrt(X.pow(2).mean(-1) + eps) * torch.rsqrt(key.pow(2).mean(-1) + eps)
    fit = (X * key * (up(q_weight_ND) * up(k_weight_ND))).sum(-1) * norm * X.shape[-1] ** -0.5
    opening = sigmoid(torch.copysign(fit.abs().clamp(min=1e-6).sqrt(), fit), steady)
    mixed = (X + opening[..., None] * up(value_TD)[:, None]).to(X_TND.dtype)
    return mixed if image_T is None else torch.where(image_T[:, None, None], X_TND, mixed)


class Found(Protocol):
    """What was looked up for the rows of a step, in tables that lie elsewhere."""

    def rows(self, layer: int) -> Tensor:
        """The numbers [T, C*Y] of a layer; waits until they are there."""


class Table(nn.Module):
    """Rows: e4m3 codes [rows, Y] and E8M0 scales [rows, Y/32], restored when read; or numbers in training."""

    def __init__(self, rows: int, width: int, numerics: Numerics):
        super().__init__()
        self.numerics, self.shape = numerics, (rows, width)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.scale: nn.Parameter | None = None

    def forward(self, row_TC: Tensor) -> Tensor:
        """Rows [T, C] -> [T, C*Y], restored in the dtype of values."""
        return gather(self.weight, self.scale, row_TC, self.numerics.dtype)


class Engram(nn.Module):
    """The n-gram memory of one layer."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics):
        super().__init__()
        self.numerics, self.eps, self.streams = numerics, config.rms_norm_eps, config.hc_mult
        self.layer = layer
        at = config.engram_layer_ids.index(layer)
        primes = np.array(config.engram_primes[at], dtype=np.int64)  # [Q-1, C]
        offsets = np.concatenate(([0], primes.reshape(-1).cumsum()[:-1])).reshape(primes.shape)
        for name, value in (("multiplier", multipliers(config, layer)), ("prime", primes),
                            ("offset", offsets)):
            self.register_buffer(name, torch.tensor(value, device="cpu"), persistent=False)
        self.embed = Table(config.engram_num_embeddings[at], config.engram_head_dim, numerics)
        columns, D = primes.size, config.hidden_size
        self.wkv = Linear(columns * config.engram_head_dim, (self.streams + 1) * D, numerics,
                          block=config.weight_block_size)
        self.q_weight = nn.Parameter(torch.ones(self.streams, D), requires_grad=False)
        self.k_weight = nn.Parameter(torch.ones(self.streams, D), requires_grad=False)

    def rows(self, gram_TQ: Tensor) -> Tensor:
        """Which rows of the table [T, C] the n-grams ending at each token have."""
        return hash_rows(gram_TQ, self.multiplier, self.prime, self.offset)

    def forward(self, X_TND: Tensor, gram_TQ: Tensor, image_T: Tensor | None, found: Found | None = None
                ) -> Tensor:
        """Inject the memory of the n-grams ending at each token; image tokens pass through unchanged.

        Without `found` it is looked up in the layer's own table.
        """
        memory = self.embed(self.rows(gram_TQ)) if found is None else found.rows(self.layer)
        kv = self.wkv(self.numerics.activation(memory)).unflatten(-1, (self.streams + 1, -1))
        return gate(X_TND, kv[:, :-1], kv[:, -1], self.q_weight, self.k_weight, self.eps, image_T,
                    self.numerics.steady)
