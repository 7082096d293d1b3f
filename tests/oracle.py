"""The model once more, from the specification alone: one sequence, no cache, no batching, nothing fast.

Every public function of the layers is judged by this file, so it imports nothing of dskit. It is slow and
plain on purpose: the sets a token may attend to are lists, hashes are Python integers, sorting is `sorted`.

    run = forward(Net(tensors, config), ids)               # exact numerics, in the dtype of the tensors
    run = forward(Net(tensors, config, release=True), ids)  # with the release's roundings, on float32 tensors

Shapes: T tokens, D width, n streams, X [T, n, D]; `tensors` maps names of the checkpoint to plain numbers.
Units: `run.gaps[t]` is the smallest relative distance at which any discrete choice of token t would flip.
Errors: KeyError for a missing tensor; IndexError for an id outside the vocabulary.
Source: model.md sections 3, 5 and 6.2; names of section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

INFINITY = float("inf")


@dataclass
class Net:
    """Weights and sizes; with `release` every point of the numeric contract rounds."""

    tensors: dict[str, Tensor]
    config: Any
    release: bool = False

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def v41(self) -> bool:
        return self.config.model_type == "deepseek_v41"

    def ratio(self, l: int) -> int:
        return self.config.compress_ratios[l] if l < self.config.num_hidden_layers else 0

    def kv_source(self, l: int) -> int:
        return max(s for s in self.config.kv_source_layer_ids if s <= l)

    def split(self) -> int:
        """The first decoder layer."""
        return list(self.config.compress_ratios).index(1) if self.v41 else self.config.num_hidden_layers


@dataclass
class Run:
    """What one forward pass computed."""

    logits: Tensor
    main: Tensor | None = None  # [T, D], what the draft stages cache keys of
    selections: dict[int, list[list[int]]] = field(default_factory=dict)
    candidates: dict[int, list[list[int]]] = field(default_factory=dict)
    store: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)  # global entries, index keys
    gaps: list[float] = field(default_factory=list)


# ---- rounding (3.1, 3.4) ---------------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bf16(net: Net, v: Tensor) -> Tensor:
    return v.to(torch.bfloat16).to(v.dtype) if net.release else v


def pow2ceil(v: Tensor) -> Tensor:
    """The smallest power of two that is not below v > 0."""
    mantissa, exponent = torch.frexp(v)  # v = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(v), exponent - (mantissa == 0.5).int())


def e4m3(v: Tensor) -> Tensor:
    return v.clamp(-448, 448).to(torch.float8_e4m3fn).to(v.dtype)


def e2m1(v: Tensor) -> Tensor:
    """The nearest of the eight magnitudes; of two equally near ones the one with the even code."""
    size, code = v.abs(), torch.zeros_like(v, dtype=torch.long)
    for i in range(7):
        middle = (E2M1[i] + E2M1[i + 1]) / 2
        code += (size > middle) | ((size == middle) & (i % 2 == 1))
    return torch.copysign(torch.tensor(E2M1, dtype=v.dtype)[code], v)


def by_group(v: Tensor, size: int, restore) -> Tensor:
    """Apply restore(group, amax) to each `size` consecutive channels; the last group may be shorter."""
    return torch.cat([restore(g, g.abs().amax(-1, keepdim=True)) for g in v.split(size, -1)], -1)


def fq8(v: Tensor, size: int = 32) -> Tensor:
    def restore(g, amax):
        s = pow2ceil(amax.clamp(min=1e-4) * (1 / 448))
        return e4m3(g / s) * s

    return by_group(v, size, restore)


def fq4_32(v: Tensor) -> Tensor:
    def restore(g, amax):
        s = pow2ceil(amax.clamp(min=6 * 2.0**-126) * (1 / 6))
        return e2m1((g / s).clamp(-6, 6)) * s

    return by_group(v, 32, restore)


def fq4_16(v: Tensor) -> Tensor:
    def restore(g, amax):
        s = e4m3(amax.clamp(min=6 * 2.0**-9) / 6)
        return e2m1((g / s).clamp(-6, 6)) * s

    return by_group(v, 16, restore)


def window_cache(net: Net, v: Tensor) -> Tensor:
    if not net.release:
        return v
    return bf16(net, fq8(v)) if net.v41 else v4_cache(net, v)


def global_cache(net: Net, v: Tensor) -> Tensor:
    if not net.release:
        return v
    return bf16(net, fq4_16(v)) if net.v41 else v4_cache(net, v)


def v4_cache(net: Net, v: Tensor) -> Tensor:
    """V4 keeps the rotary channels in bf16 and the others as FP8 per 64."""
    plain = v.shape[-1] - net.config.qk_rope_head_dim
    return torch.cat([bf16(net, fq8(v[..., :plain], 64)), v[..., plain:]], -1)


def index_cache(net: Net, v: Tensor) -> Tensor:
    return bf16(net, fq4_32(v)) if net.release else v


# ---- norm and linear (3.3, 3.4) --------------------------------------------------------------------------


def rms(net: Net, v: Tensor, gain: Tensor) -> Tensor:
    return bf16(net, gain * (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + net.config.rms_norm_eps)))


def quantised(net: Net, x: Tensor, name: str) -> Tensor:
    """A product with an FP8 or FP4 weight, whose input is rounded to e4m3 per group."""
    if net.release:
        x = fq8(x, net.config.weight_block_size[1])
    return bf16(net, x @ net[f"{name}.weight"].T)


def plain(net: Net, x: Tensor, name: str) -> Tensor:
    """A product with a BF16 weight."""
    return bf16(net, x @ net[f"{name}.weight"].T)


# ---- rotary (3.5) ----------------------------------------------------------------------------------------


def frequencies(net: Net, l: int) -> Tensor:
    """Radians per position of each channel pair in layer l, float32."""
    c = net.config
    dr, scaling = c.qk_rope_head_dim, c.rope_scaling
    base = c.compress_rope_theta if net.ratio(l) else c.rope_theta
    theta = torch.tensor([base ** (-2 * i / dr) for i in range(dr // 2)], dtype=torch.float32)
    if not net.ratio(l) or not scaling:
        return theta

    def correction(turns):
        start = scaling["original_max_position_embeddings"]
        return dr * math.log(start / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(scaling["beta_fast"])), 0)
    high = min(math.ceil(correction(scaling["beta_slow"])), dr - 1)
    ramp = ((torch.arange(dr // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return theta / scaling["factor"] * ramp + theta * (1 - ramp)


def rotate(net: Net, l: int, v: Tensor, positions: list[int], sign: int = 1) -> Tensor:
    """v [T, ..., d]: turn the pairs of the last dr channels of row i to positions[i]."""
    dr = net.config.qk_rope_head_dim
    angle = torch.tensor(positions, dtype=torch.float32)[:, None] * frequencies(net, l)
    angle = angle.to(v.dtype).view(len(positions), *[1] * (v.dim() - 2), dr // 2)
    cos, sin = angle.cos(), sign * angle.sin()
    a, b = v[..., -dr::2], v[..., -dr + 1 :: 2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return bf16(net, torch.cat([v[..., :-dr], turned], -1))


def unrotate(net: Net, l: int, v: Tensor, positions: list[int]) -> Tensor:
    return rotate(net, l, v, positions, sign=-1)


# ---- mHC (3.6) -------------------------------------------------------------------------------------------


def mixes(net: Net, prefix: str, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Read weights p [T, n], write weights q [T, n] and mix C [T, n, n] of one sublayer."""
    n, eps = net.config.hc_mult, net.config.hc_eps
    scale, base = net[f"{prefix}_scale"], net[f"{prefix}_base"]
    f = X.flatten(1)
    m = (f @ net[f"{prefix}_fn"].T) * torch.rsqrt((f * f).mean(-1, keepdim=True) + net.config.rms_norm_eps)
    p = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    q = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    B = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    return p, q, sinkhorn(B, net.config.hc_sinkhorn_iters, eps)


def sinkhorn(B: Tensor, rounds: int, eps: float) -> Tensor:
    C = torch.softmax(B, dim=2) + eps
    C = C / (C.sum(1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        C = C / (C.sum(2, keepdim=True) + eps)
        C = C / (C.sum(1, keepdim=True) + eps)
    return C


def read(net: Net, p: Tensor, X: Tensor) -> Tensor:
    return bf16(net, sum(p[:, j, None] * X[:, j] for j in range(X.shape[1])))


def write(net: Net, y: Tensor, X: Tensor, q: Tensor, C: Tensor) -> Tensor:
    n = X.shape[1]
    streams = [q[:, k, None] * y + sum(C[:, j, k, None] * X[:, j] for j in range(n)) for k in range(n)]
    return bf16(net, torch.stack(streams, 1))


def read_weights(net: Net, carried: Tensor, own: Tensor) -> Tensor:
    """V4.1 reads with the weights of the sublayer before, V4 with the sublayer's own."""
    return carried if net.v41 else own


# ---- attention (3.7) -------------------------------------------------------------------------------------


def queries(net: Net, l: int, at: str, a: Tensor, positions: list[int]) -> Tensor:
    """Query heads [T, A, d] from the query latent."""
    c = net.config
    Q = quantised(net, a, f"{at}.wq_b").view(-1, c.num_attention_heads, c.head_dim)
    if not net.v41:
        Q = bf16(net, Q * torch.rsqrt((Q * Q).mean(-1, keepdim=True) + 1e-6))
    return rotate(net, l, Q, positions)


def window_keys(net: Net, l: int, at: str, x: Tensor, positions: list[int]) -> Tensor:
    kv = rms(net, quantised(net, x, f"{at}.wkv"), net[f"{at}.kv_norm.weight"])
    return window_cache(net, rotate(net, l, kv, positions))


def window(t: int, size: int, floor: int = 0) -> list[int]:
    """Positions token t sees locally, itself included; nothing below `floor`."""
    return list(range(max(0, t - size + 1, floor), t + 1))


def attend(net: Net, Q: Tensor, entries: Tensor, sink: Tensor) -> Tensor:
    """Heads Q [A, d] of one token over entries [E, d], each both key and value -> [A, d]."""
    if not len(entries):
        return torch.zeros_like(Q)
    z = (Q @ entries.T) * Q.shape[1] ** -0.5
    largest = z.max(1, keepdim=True).values
    weight = torch.exp(z - largest)
    total = weight.sum(1, keepdim=True) + torch.exp(sink[:, None] - largest)
    return bf16(net, (bf16(net, weight) @ entries) / total)


def output(net: Net, l: int, at: str, O: Tensor, positions: list[int]) -> Tensor:
    """Heads O [T, A, d] -> [T, D]: turn back, project each group of heads alone, then all together."""
    c = net.config
    O = unrotate(net, l, O, positions).flatten(1)
    groups = zip(O.chunk(c.o_groups, 1), net[f"{at}.wo_a.weight"].chunk(c.o_groups, 0), strict=True)
    return quantised(net, torch.cat([bf16(net, u @ w.T) for u, w in groups], 1), f"{at}.wo_b")


# ---- compressor (3.8, 6.2) -------------------------------------------------------------------------------


def latents(net: Net, name: str, x: Tensor, ratio: int) -> Tensor:
    """Un-rotated entries of all complete groups of `ratio` tokens."""
    gain = net[f"{name}.norm.weight"]
    if ratio == 1:
        return rms(net, plain(net, x, f"{name}.wkv"), gain)
    v, g = x @ net[f"{name}.wkv.weight"].T, x @ net[f"{name}.wgate.weight"].T
    pool = overlapping if ratio == 4 and not net.v41 else disjoint
    groups = [pool(net, name, v, g, j, ratio) for j in range(len(x) // ratio)]
    return rms(net, bf16(net, torch.stack(groups)), gain) if groups else v.new_zeros(0, len(gain))


def disjoint(net: Net, name: str, v: Tensor, g: Tensor, j: int, ratio: int) -> Tensor:
    v, g = v[j * ratio : (j + 1) * ratio], g[j * ratio : (j + 1) * ratio]
    if not net.v41:
        g = g + net[f"{name}.ape"]
    return (torch.softmax(g, 0) * v).sum(0)


def overlapping(net: Net, name: str, v: Tensor, g: Tensor, j: int, ratio: int) -> Tensor:
    """Entry j: first halves of the group before, second halves of its own."""
    half, slots = v.shape[1] // 2, []
    for u in range(max(0, (j - 1) * ratio), (j + 1) * ratio):
        part = slice(0, half) if u < j * ratio else slice(half, 2 * half)
        slots.append((v[u, part], g[u, part] + net[f"{name}.ape"][u % ratio, part]))
    weight = torch.softmax(torch.stack([s for _, s in slots]), 0)
    return (weight * torch.stack([s for s, _ in slots])).sum(0)


def starts(count: int, ratio: int) -> list[int]:
    """The position of an entry: the first token of its group."""
    return [j * ratio for j in range(count)]


def visible(t: int, ratio: int) -> int:
    """How many entries are complete for token t."""
    return (t + 1) // ratio


def compress(net: Net, l: int, at: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Global entries [E, d] and, where the layer has an indexer of its own, index keys [E, di]."""
    ratio = net.ratio(l)
    lat = latents(net, f"{at}.compressor", x, ratio)
    positions = starts(len(lat), ratio)
    keys = None
    if f"{at}.indexer.wk.weight" in net.tensors:
        keys = rms(
            net, plain(net, index_source(net, l, lat), f"{at}.indexer.wk"), net[f"{at}.indexer.k_norm.weight"]
        )
        keys = index_cache(net, rotate(net, l, keys, positions))
    elif f"{at}.indexer.compressor.wkv.weight" in net.tensors:
        keys = latents(net, f"{at}.indexer.compressor", x, ratio)
        keys = index_cache(net, hadamard(net, rotate(net, l, keys, positions)))
    return global_cache(net, rotate(net, l, lat, positions)), keys


def index_source(net: Net, l: int, lat: Tensor) -> Tensor:
    """What index keys are made from: the latent before any rotation."""
    return lat


def hadamard(net: Net, v: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the channels; it only matters in front of a rounding."""
    if not net.release:
        return v
    H = torch.ones(1, 1, dtype=v.dtype)
    while len(H) < v.shape[-1]:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    return bf16(net, v @ H * len(H) ** -0.5)


# ---- indexer (3.9) ---------------------------------------------------------------------------------------


def index_scores(
    net: Net, l: int, at: str, x: Tensor, a: Tensor, keys: Tensor, positions: list[int]
) -> Tensor:
    """Scores [T, E] of every entry, visible or not."""
    c = net.config
    q = quantised(net, a, f"{at}.indexer.wq_b").view(len(x), c.index_n_heads, c.index_head_dim)
    q = rotate(net, l, q, positions)
    q = index_cache(net, q if net.v41 else hadamard(net, q))
    weight = bf16(
        net, plain(net, x, f"{at}.indexer.weights_proj") * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
    )
    scores = torch.zeros(len(x), len(keys), dtype=x.dtype)
    for h in range(c.index_n_heads):
        dot = bf16(net, q[:, h] @ keys.T)
        scores += bf16(net, weight[:, h, None] * dot.clamp(min=0))
    return bf16(net, scores)


def largest(scores: list[float], pool: list[int], k: int, gaps: list[float] | None = None) -> list[int]:
    """The min(k, len(pool)) members of `pool` with the largest scores, ties to the lower index, ascending."""
    order = sorted(pool, key=lambda j: (-scores[j], j))
    if gaps is not None and 0 < k < len(order):
        top = max(abs(scores[j]) for j in pool if abs(scores[j]) < INFINITY)
        gaps.append((scores[order[k - 1]] - scores[order[k]]) / max(top, 1e-30))
    return sorted(order[:k])


def candidate_blocks(net: Net, scores: list[float], seen: int, gaps: list[float]) -> list[int]:
    """Blocks that later index sources may choose from; the newest visible one always."""
    size, count = net.config.candidate_block_size, net.config.candidate_topk_blocks
    if not seen:
        return []
    last = (seen - 1) // size
    best = [max(scores[b * size : min((b + 1) * size, seen)]) for b in range(last + 1)]
    best[last] = INFINITY
    return largest(best, list(range(last + 1)), count, gaps)


def restrict(net: Net, seen: int, blocks: list[int]) -> list[int]:
    """Visible entries inside the kept blocks."""
    size = net.config.candidate_block_size
    return [j for j in range(seen) if j // size in blocks]


# ---- Engram (3.10) ---------------------------------------------------------------------------------------


def is_prime(value: int) -> bool:
    return value > 1 and all(value % d for d in range(2, math.isqrt(value) + 1))


def engram_primes(config: Any) -> list[list[list[int]]]:
    """[engram layer][n-gram size - 2][head]."""
    used: list[int] = []
    table = []
    for _ in config.engram_layer_ids:
        sizes = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            candidate, heads = config.engram_vocab_size - 1, []
            while len(heads) < config.engram_n_heads:
                candidate += 1
                if candidate not in used and is_prime(candidate):
                    used.append(candidate)
                    heads.append(candidate)
            sizes.append(heads)
        table.append(sizes)
    return table


def engram_multipliers(layer: int, ngram: int, folded_size: int) -> list[int]:
    bound = max(1, ((2**63 - 1) // folded_size) // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=ngram, dtype=np.int64)
    return [2 * int(d) + 1 for d in draws]


def engram_rows(config: Any, layer: int, folded: list[int], dead: list[bool], filler: int) -> list[list[int]]:
    """Rows of the table per token, one for each n-gram size and head."""
    primes = engram_primes(config)[list(config.engram_layer_ids).index(layer)]
    multipliers = engram_multipliers(layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size)
    rows = []
    for t in range(len(folded)):
        history, cut = [], False
        for s in range(config.engram_max_ngram_size):
            cut = cut or t - s < 0 or dead[t - s]
            history.append(filler if cut else folded[t - s])
        mixed, offset, row = history[0] * multipliers[0], 0, []
        for s in range(1, config.engram_max_ngram_size):
            mixed ^= history[s] * multipliers[s]
            for prime in primes[s - 1]:
                row.append(offset + mixed % prime)
                offset += prime
        rows.append(row)
    return rows


def engram(net: Net, l: int, X: Tensor, ids: list[int], dead: list[bool]) -> Tensor:
    c, D, name = net.config, net.config.hidden_size, f"layers.{l}.engram"
    size = c.engram_compressed_vocab_size
    rows = engram_rows(c, l, [i % size for i in ids], dead, c.engram_pad_token_id % size)
    E = bf16(net, net[f"{name}.embed.weight"][torch.tensor(rows)]).flatten(1)
    kv = quantised(net, E, f"{name}.wkv")
    value = kv[:, c.hc_mult * D :]
    out = X.clone()
    for j in range(c.hc_mult):
        gate = engram_gate(
            net, X[:, j], kv[:, j * D : (j + 1) * D], net[f"{name}.q_weight"][j], net[f"{name}.k_weight"][j]
        )
        out[:, j] = bf16(net, X[:, j] + gate * value)
    out[torch.tensor(dead)] = X[torch.tensor(dead)]
    return out


def engram_gate(net: Net, x: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """Gate [T, 1] of one stream."""
    eps = net.config.rms_norm_eps
    dot = (x * q_weight * k_weight * key).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
    dot = dot * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    dot = dot * torch.rsqrt((key * key).mean(-1, keepdim=True) + eps)
    return torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))


# ---- mixture of experts (3.11) ---------------------------------------------------------------------------


def moe(
    net: Net, at: str, x: Tensor, ids: list[int], dead: list[bool], k: int, gaps: list[list[float]]
) -> Tensor:
    c, rows = net.config, []
    scores = F.softplus(x @ net[f"{at}.gate.weight"].T / c.gate_temp).sqrt()
    for t in range(len(x)):
        chosen = choose(net, at, scores[t], ids[t], dead[t], k, gaps[t])
        weights = routing_weights(net, scores[t, chosen])
        routed = [
            expert(net, f"{at}.experts.{e}", x[t : t + 1], w) for e, w in zip(chosen, weights, strict=True)
        ]
        rows.append(bf16(net, sum(routed) + expert(net, f"{at}.shared_experts", x[t : t + 1], 1.0)))
    return torch.cat(rows)


def choose(
    net: Net, at: str, scores: Tensor, token: int, image: bool, k: int, gaps: list[float]
) -> list[int]:
    """The experts of one token: by table in V4's first layers, else by biased score."""
    if f"{at}.gate.tid2eid" in net.tensors:
        return net[f"{at}.gate.tid2eid"][token].tolist()
    biased = scores + net[f"{at}.gate.bias_vl" if image else f"{at}.gate.bias"]
    return largest(biased.tolist(), list(range(len(biased))), k, gaps)


def routing_weights(net: Net, scores: Tensor) -> Tensor:
    if net.config.norm_topk_prob and len(scores) > 1:
        scores = scores / (scores.sum() + 1e-20)
    return scores * net.config.routed_scaling_factor


def expert(net: Net, name: str, x: Tensor, weight: Tensor | float) -> Tensor:
    gate, up = quantised(net, x, f"{name}.w1"), quantised(net, x, f"{name}.w3")
    return quantised(net, bf16(net, weight * swiglu(gate, up, net.config.swiglu_limit)), f"{name}.w2")


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


# ---- the loop (3.14) -------------------------------------------------------------------------------------


def forward(
    net: Net,
    ids: list[int],
    *,
    keep: int | None = None,
    prompt: int | None = None,
    behind: tuple[int, int] | None = None,
) -> Run:
    """Logits [T, V] of all tokens.

    With `keep`, decoder layers see no window entry before position prompt - keep (bounded replay, 3.15); rows
    before that position are then meaningless. `prompt` defaults to all ids. With `behind` = (first, hit) the
    first `hit` tokens are a reused prefix: their global entries are those of a run over them alone, and no
    layer sees a window entry before position `first`.
    """
    c, T = net.config, len(ids)
    dead = [i == c.image_token_id for i in ids]
    first, hit = behind or (0, 0)
    floor = max(0, (prompt or T) - keep, first) if keep is not None else first
    prefix = forward(net, ids[:hit]).store if hit else {}
    run = Run(torch.empty(0), gaps=[INFINITY] * T)
    gaps: list[list[float]] = [[] for _ in ids]
    X = bf16(net, net["embed.weight"][torch.tensor(ids)])[:, None].repeat(1, c.hc_mult, 1)
    p = torch.zeros(T, c.hc_mult, dtype=X.dtype)
    p[:, 0] = 1
    store = run.store
    state: dict[str, Any] = {"selected": [[]] * T, "blocks": None, "prefix": prefix}
    taps = []
    for l in range(c.num_hidden_layers):
        if l in c.engram_layer_ids:
            X = engram(net, l, X, ids, dead)
        if net.v41 and l in c.dspark_target_layer_ids:
            taps.append(bf16(net, X.mean(1)))
        X, p = sublayer(
            net,
            f"layers.{l}",
            "attn",
            X,
            p,
            lambda x, l=l: attention(net, l, x, store, state, run, gaps, (first, floor)[l >= net.split()]),
        )
        X, p = sublayer(
            net,
            f"layers.{l}",
            "ffn",
            X,
            p,
            lambda x, l=l: moe(net, f"layers.{l}.ffn", x, ids, dead, c.num_experts_per_tok, gaps),
        )
    x = read(net, p if net.v41 else head_weights(net, X), X)
    run.logits = rms(net, x, net["norm.weight"]) @ net["head.weight"].T
    run.gaps = [min(row, default=INFINITY) for row in gaps]
    if taps and "mtp.0.main_proj.weight" in net.tensors:
        run.main = rms(
            net, quantised(net, torch.cat(taps, 1), "mtp.0.main_proj"), net["mtp.0.main_norm.weight"]
        )
    return run


def sublayer(net: Net, prefix: str, kind: str, X: Tensor, carried: Tensor, f) -> tuple[Tensor, Tensor]:
    """Read, norm, f, write; returns the new streams and the sublayer's own read weights."""
    p, q, C = mixes(net, f"{prefix}.hc_{kind}", X)
    x = rms(net, read(net, read_weights(net, carried, p), X), net[f"{prefix}.{kind}_norm.weight"])
    return write(net, f(x), X, q, C), p


def head_weights(net: Net, X: Tensor) -> Tensor:
    """V4's own read weights of the final collapse."""
    f = X.flatten(1)
    m = (f @ net["hc_head_fn"].T) * torch.rsqrt((f * f).mean(-1, keepdim=True) + net.config.rms_norm_eps)
    return torch.sigmoid(m * net["hc_head_scale"] + net["hc_head_base"]) + net.config.hc_eps


def attention(net: Net, l: int, x: Tensor, store, state, run: Run, gaps, floor: int) -> Tensor:
    """Attention of backbone layer l over x [T, D]; `store` and `state` carry what later layers share."""
    c, at, T, ratio = net.config, f"layers.{l}.attn", len(x), net.ratio(l)
    positions = list(range(T))
    a = rms(net, quantised(net, x, f"{at}.wq_a"), net[f"{at}.q_norm.weight"])
    Q, local = queries(net, l, at, a, positions), window_keys(net, l, at, x, positions)
    if ratio and l in c.kv_source_layer_ids:
        store[l] = compress(net, l, at, x)
        if old := state["prefix"].get(l):
            store[l] = tuple(
                new if new is None else torch.cat((held, new[len(held) :]))
                for held, new in zip(old, store[l], strict=True)
            )
    if ratio and l in c.index_source_layer_ids:
        scores = index_scores(net, l, at, x, a, store[net.kv_source(l)][1], positions)
        state["selected"] = run.selections[l] = select(net, l, scores.tolist(), state, run, gaps)
    rows = []
    for t in positions:
        entries = local[window(t, c.sliding_window, floor)]
        if ratio:
            shared = store[net.kv_source(l)][0]
            dense = not net.v41 and l not in c.index_source_layer_ids
            entries = torch.cat(
                [entries, shared[list(range(visible(t, ratio))) if dense else state["selected"][t]]]
            )
        rows.append(attend(net, Q[t], entries, net[f"{at}.attn_sink"]))
    return output(net, l, at, torch.stack(rows), positions)


def select(net: Net, l: int, scores: list[list[float]], state, run: Run, gaps) -> list[list[int]]:
    """The entries each token reads, as chosen at index source l (3.9.2, 3.9.3)."""
    c, seen = net.config, [visible(t, net.ratio(l)) for t in range(len(scores))]
    pools = [list(range(s)) for s in seen]
    if net.v41 and l == c.candidate_source_layer_id:
        blocks = [candidate_blocks(net, scores[t], seen[t], gaps[t]) for t in range(len(scores))]
        state["blocks"] = run.candidates[l] = blocks
    elif state["blocks"] is not None:
        pools = [restrict(net, seen[t], state["blocks"][t]) for t in range(len(scores))]
    return [largest(scores[t], pools[t], c.index_topk, gaps[t]) for t in range(len(scores))]


# ---- DSpark (3.13) ---------------------------------------------------------------------------------------


def draft_ring(net: Net, s: int, main: Tensor) -> Tensor:
    """Keys [T, d] that stage s caches of the committed positions."""
    l, at = net.config.num_hidden_layers + s, f"mtp.{s}.attn"
    return window_keys(net, l, at, main, list(range(len(main))))


def draft(net: Net, main: Tensor, token: int) -> tuple[list[int], Tensor, Tensor]:
    """Greedy drafts after `token` at position len(main): (ids [B], logits [B, V], confidence logits [B])."""
    c, B = net.config, net.config.dspark_block_size
    ids = [token] + [c.dspark_noise_token_id] * (B - 1)
    positions = [len(main) + i for i in range(B)]
    X = bf16(net, net["embed.weight"][torch.tensor(ids)])[:, None].repeat(1, c.hc_mult, 1)
    p = torch.zeros(B, c.hc_mult, dtype=X.dtype)
    p[:, 0] = 1
    k = c.dspark_num_experts_per_tok or c.num_experts_per_tok
    stages = c.num_nextn_predict_layers
    for s in range(stages):
        X, p = sublayer(
            net, f"mtp.{s}", "attn", X, p, lambda x, s=s: draft_attention(net, s, x, main, positions)
        )
        X, p = sublayer(
            net,
            f"mtp.{s}",
            "ffn",
            X,
            p,
            lambda x, s=s: moe(net, f"mtp.{s}.ffn", x, ids, [False] * B, k, [[] for _ in ids]),
        )
    x = read(net, p, X)
    last = f"mtp.{stages - 1}"
    base = rms(net, x, net[f"{last}.norm.weight"]) @ net["head.weight"].T
    drafts, logits, confidence = [], [], []
    for i in range(B):
        m = net[f"{last}.markov_head.embed.weight"][token]
        logits.append(base[i] + net[f"{last}.markov_head.head.weight"] @ m)
        confidence.append(net[f"{last}.confidence_head.proj.weight"][0] @ torch.cat([x[i], m]))
        token = int(logits[-1].argmax())
        drafts.append(token)
    return drafts, torch.stack(logits), torch.stack(confidence)


def draft_attention(net: Net, s: int, x: Tensor, main: Tensor, positions: list[int]) -> Tensor:
    """Every row of the block sees the ring before the block and all of the block."""
    l, at, P = net.config.num_hidden_layers + s, f"mtp.{s}.attn", len(main)
    a = rms(net, quantised(net, x, f"{at}.wq_a"), net[f"{at}.q_norm.weight"])
    Q, block = queries(net, l, at, a, positions), window_keys(net, l, at, x, positions)
    ring = draft_ring(net, s, main)[window(P - 1, net.config.sliding_window)]
    rows = [attend(net, Q[i], torch.cat([ring, block]), net[f"{at}.attn_sink"]) for i in range(len(x))]
    return output(net, l, at, torch.stack(rows), positions)
