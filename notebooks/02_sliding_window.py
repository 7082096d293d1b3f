# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Sliding window
#
# **Which of all earlier tokens does a layer look at?**
#
# A layer that looks at everything pays for everything: at the end of a text of a million tokens it would
# read a million vectors to write one more token. Here it reads two small sets. The **window** holds the
# last `W` tokens. The **selection** holds `K` entries of a **global memory**, and a small network, the
# *indexer*, chooses them anew for every token. This notebook shows both sets at work, what they cost, and
# where it is easy to be wrong by one.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## A conversation
#
# A fact stands at its start, other questions follow, and at the end the fact is asked for. By then it is
# far outside the window, which is 64 tokens long in the demo.

# %%
llm = dskit.LLM("demo", numerics="exact")
config = llm.config
learned = {
    "calm": "not agitated",
    "lamp": "an artificial source of visible illumination",
    "garden": "a plot of ground where plants are cultivated",
    "winter": "the coldest season of the year",
}
unknown = ["bread", "river", "hammer", "engine"]
conversation = [
    {"role": "user", "content": "Remember: the code of Mira is 4821. The color of Tom is green."},
    {"role": "assistant", "content": "Noted."},
]
for word in [*learned, *unknown]:
    conversation += [
        {"role": "user", "content": f"What does {word} mean?"},
        {"role": "assistant", "content": learned.get(word, "I have not learned that word.")},
    ]
conversation += [{"role": "user", "content": "What is the code of Mira?"}]

prompt, _ = llm.render(conversation, thinking={"type": "disabled"})
answer = llm.generate(prompt.ids)
tokens = [*prompt.ids, *answer.token_ids]
pieces = [llm.tokenizer.decode([token]) for token in tokens]
print(f"{len(prompt.ids)} tokens, then: {answer.text}")

# %% [markdown]
# `dskit.tap` records what runs inside. A name after a colon is an **op**: a line of the layer with a name
# of its own. Its arguments and its result are kept. `dskit.use("torch")` makes every step run as its
# formula, so that each can be seen.

# %%
with dskit.use("torch"), dskit.tap(llm, "layers.*.attn:mla.attend", "layers.*.attn:indexer.*") as seen:
    llm.logits(tokens)


def call(layer, op):
    """What an op was given, and gave, in the attention of a layer."""
    return seen[f"layers.{layer}.attn:{op}"][0]


def chosen_by(layer):
    """The entries that each query of a layer reads: chosen by the newest index source at or before it."""
    if not config.ratio(layer):
        return [[] for _ in tokens]
    rows = call(config.index_source(layer), "indexer.topk")["result"][0].tolist()
    return [[entry for entry in row if entry >= 0] for row in rows]


# %% [markdown]
# ## The picture
#
# One query: the last token before the model writes the first digit of the code. Each layer has two strips.
# The upper one is the text, with the window. The lower one is the global memory that the layer reads. An
# entry of it stands for `ratio` tokens: 2 in layers 2 and 3, which the memory of layer 2 serves, and 1 in
# the layers from 4 on, which the memory of layer 4 serves. Layers 0 and 1 have none.

# %%
from dskit.viz import figures

asking = len(prompt.ids) + pieces[len(prompt.ids) :].index("4") - 1
roles = {
    0: "layer 0: window only",
    2: "layer 2: chooses, an entry for 2 tokens",
    4: "layer 4: chooses, an entry for each token",
    6: "layer 6: chooses anew from the memory of layer 4",
}
figures.query_reach(
    [
        {
            "what": role,
            "position": asking,
            "window": config.sliding_window,
            "ratio": config.ratio(layer),
            "chosen": chosen_by(layer)[asking],
            "block": llm.engine.cfg.block_size,
        }
        for layer, role in roles.items()
    ]
)

# %% [markdown]
# The left end of the strips is the sentence with the code. Layers 4 and 6 chose most of it, little of the
# middle, and more of what stands right before the query. Did they choose the four digits?

# %%
from dskit.viz.notebook import Table

digits = [pieces.index(digit) for digit in "4821"]
Table(
    (
        {
            "layer": layer,
            "window starts at token": asking - config.sliding_window + 1,
            "entries chosen": len(chosen_by(layer)[asking]),
            "of": (asking + 1) // config.ratio(layer),
            "digits among them": sum(at // config.ratio(layer) in chosen_by(layer)[asking] for at in digits),
        }
        for layer in (2, 4, 6)
    ),
    f"The digits stand at tokens {digits[0]} to {digits[-1]}, the query at token {asking}",
)

# %% [markdown]
# ## The source
#
# The window first. Each request keeps its newest vectors in a **ring**: the vector of position `p` lies in
# slot `p mod ring`, so that a new one takes the place of one that no query can see any more. `read` lists,
# for each query, the rows that it sees, oldest first; -1 stands for "none".

# %%
from dskit.layers import compress, indexer, swa

dskit.show(swa)

# %% [markdown]
# An entry of the global memory is a weighted mean of its tokens (`compress.pool`). The indexer scores all
# entries that are complete with small vectors, 64 numbers wide in the demo, and `topk` keeps the best. In a
# tie the earlier entry wins, so that the choice does not depend on the machine.

# %%
dskit.show(compress.pool)

# %%
dskit.show(indexer.scores)

# %%
dskit.show(indexer.topk)

# %% [markdown]
# ## Move the limits
#
# The map has a row for every query and a column for every token. The scores are those of the demo: of layer
# 4 where an entry is one token, of layer 2 where it is two. The sliders change how much of them is used.

# %%
from dskit.viz.widgets import Panel

scores = {config.ratio(layer): call(layer, "indexer.scores_cached")["result"] for layer in (2, 4)}


def reach(window, top_k, ratio):
    """What every query would read: the first token of its window, and its best entries."""
    chosen = indexer.topk(scores[ratio], top_k)[0].tolist()
    return [
        {
            "window": max(0, position - window + 1),
            "chosen": [entry for entry in row if entry >= 0],
            "ratio": ratio,
        }
        for position, row in enumerate(chosen)
    ]


panel = Panel(reach, figures.selection_mask, {"window": (1, 128, 64), "top_k": (1, 128, 64), "ratio": [1, 2]})
panel

# %% [markdown]
# A panel ends with the kernel; its picture stays. The bright columns on the left are the first sentences:
# queries keep choosing them. Up to token 63 all entries fit, and nothing has to be chosen.

# %%
panel.figure()

# %% [markdown]
# ## Where the heads look
#
# What a query *may* read is one thing, what it weighs is another. `mla.attend` puts window, entries and a
# **sink** under one softmax. The sink is a learned number that takes a share and gives nothing: a head that
# finds nothing can rest there. The cell computes the weights from what the op was given, and checks them:
# with these weights the vectors must add up to what the op gave.

# %%
from functools import cache

import torch


@cache
def weights(layer):
    """Shares [T, A, W + K + 1] of the window, the chosen entries and the sink, for each query and head."""
    attend = call(layer, "mla.attend")
    index = attend["read_TW"]
    vectors = attend["window_SH"][index.clamp(min=0)]
    if config.ratio(layer):
        chosen = attend["chosen_TK"]
        vectors = torch.cat((vectors, attend["entries_SH"][chosen.clamp(min=0)]), dim=1)
        index = torch.cat((index, chosen), dim=1)
    z = attend["q_TAH"] @ vectors.mT * config.head_dim**-0.5
    z = z.masked_fill(index[:, None] < 0, -torch.inf)
    sink = attend["sink_A"][:, None].expand(len(z), -1, 1)
    shares = torch.cat((z, sink), dim=-1).softmax(dim=-1)
    assert torch.allclose(shares[..., :-1] @ vectors, attend["result"], atol=1e-4)
    return shares


def looks(layer, head):
    """The weights of one head, query by query."""
    window, rows = config.sliding_window, []
    for position, (share, chosen) in enumerate(
        zip(weights(layer)[:, head].tolist(), chosen_by(layer), strict=True)
    ):
        first = max(0, position - window + 1)
        rows.append(
            {
                "window": first,
                "weights": share[window - (position - first + 1) : window],
                "chosen": chosen,
                "entries": share[window : window + len(chosen)],
                "ratio": max(1, config.ratio(layer)),
                "sink": share[-1],
            }
        )
    return rows


heads = Panel(
    looks,
    figures.attention_map,
    {"layer": (0, config.num_hidden_layers - 1, 7), "head": (0, config.num_attention_heads - 1, 1)},
)
heads

# %%
heads.figure()

# %% [markdown]
# Look at the lower left corner of the global memory: there the answer is written, and a short bright line
# runs along the code. The table has, for four layers, the head that gives one entry the largest share at
# our query.

# %%
def best_head(layer):
    """The head that gives a single entry most, at the query that writes the first digit."""
    found = []
    for head in range(config.num_attention_heads):
        row = looks(layer, head)[asking]
        share, entry = max(zip(row["entries"], row["chosen"], strict=True))
        found.append(
            {"layer": layer, "head": head, "token": pieces[entry], "position": entry, "share": share}
        )
    return max(found, key=lambda row: row["share"])


Table([best_head(layer) for layer in (4, 5, 6, 7)], f"Strongest entry of the query at token {asking}")

# %% [markdown]
# In layers 4, 6 and 7 one head gives nearly all its weight to the first digit, where it was written, far
# outside the window. The heads of layer 5 look elsewhere. Of these four layers only two chose: layer 5
# **reuses** the selection of layer 4, and layer 7 that of layer 6.
#
# ## What is read for one token
#
# The released model, at the end of a text of a million tokens. A layer that chooses for itself first reads
# an index key of each entry; from layer 24 on only the keys in blocks that layer 20 found promising, its
# *candidates*; a layer that reuses a selection reads none. Bytes are those of the packed caches: an index
# key and an entry in FP4, a window vector in FP8, each with its scales.

# %%
from dskit.config import preset
from dskit.layers.cache import Packing
from dskit.layers.linear import Numerics

released = preset("flash")
CONTEXT = 1_000_000
packed = {
    what: Packing.of(released, Numerics.of(released), what).nbytes for what in ("window", "entry", "key")
}
print("bytes of one vector:", packed)


def reads(layer):
    """What one layer reads to decode one token: its role, and how many vectors of each kind."""
    ratio = released.ratio(layer)
    if not ratio:
        return "window only", 0, 0
    if layer not in released.index_source_layer_ids:
        return "selection reused", 0, released.index_topk
    if layer <= released.candidate_source_layer_id:
        return "full selection", CONTEXT // ratio, released.index_topk
    kept = released.candidate_topk_blocks * released.candidate_block_size
    return "reindexed", min(kept, CONTEXT), released.index_topk


layers_of = {}
for layer in range(released.num_hidden_layers):
    layers_of.setdefault((*reads(layer), released.ratio(layer)), []).append(layer)

rows = []
for (role, keys, entries, ratio), layers in layers_of.items():
    nbytes = keys * packed["key"] + entries * packed["entry"] + released.sliding_window * packed["window"]
    rows.append(
        {
            "role": role,
            "layers": len(layers),
            "for example": layers[0],
            "tokens per entry": ratio or None,
            "index keys": keys,
            "entries": entries,
            "kB per layer": nbytes / 1e3,
            "MB in all": len(layers) * nbytes / 1e6,
            "everything, MB": len(layers) * (CONTEXT // ratio) * packed["entry"] / 1e6 if ratio else None,
        }
    )
Table(rows, "Read to decode one token after a million")

# %%
chosen_mb, all_mb = (sum(row[key] or 0 for row in rows) for key in ("MB in all", "everything, MB"))
print(f"{chosen_mb:,.0f} MB with a selection, {all_mb:,.0f} MB if every layer read its whole memory")

# %% [markdown]
# ## Full, reindexed, reused: the time
#
# The same three roles on this machine, one decode step at released widths: 32 index heads of 128, the best
# 512 of the entries kept. `dskit.compare` runs each implementation on the same arguments and gives its
# error against float64. For `indexer.topk`, an error of 0 means the same entries.

# %%
sizes = dskit.shapes()
on_gpu = sizes.device == "cuda"
requests, entries, blocks = (32, 65536, 2048) if on_gpu else (2, 1024, 64)
print(f"{requests} requests, {entries} entries, {blocks} candidate blocks of 8 entries. {sizes}")

scoring = {"rows": requests, "each": 1, "heads": 32, "entries": entries, "seen": entries, "spread": 2}
scoring |= {"tile": 0, "wide": 0}
picking = {"rows": requests, "k": released.index_topk, "masked": 0, "grain": 0, "flat": 0, "wide": 0}
rows = []
for role, op, shape in (
    ("full", "indexer.scores_cached", scoring | {"among": 0}),
    ("full", "indexer.topk", picking | {"entries": entries}),
    ("reindexed", "indexer.scores_cached", scoring | {"among": blocks}),
    ("reindexed", "indexer.topk", picking | {"entries": 8 * blocks}),
):
    for found in dskit.compare(op, shape=shape, repeat=sizes.repeat):
        rows.append(
            {
                "selection": role,
                "op": op,
                "implementation": found["implementation"],
                "relative error": found.get("relative_rms"),
                "ms": found.get("time_ms"),
                "note": found.get("refused") or found.get("note"),
            }
        )
rows.append({"selection": "reused", "op": "none", "note": "nothing to score, nothing to choose"})
Table(rows, "Choosing, by the role of a layer")

# %% [markdown]
# The formula scores all entries and then throws away those outside the candidates, so it gains nothing from
# them. The Triton kernel reads the keys of the candidates alone.
#
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** `window_start` gives the first token in the window of a query. It is off by one: which token too
# many does it let in? Repair it. A window of 64 holds 64 tokens, the query's own among them.

# %%
def check_02_1(window_start):
    read_TW = call(0, "mla.attend")["read_TW"].tolist()  # rows of the line, in which token p is row p + 1
    for position, row in enumerate(read_TW):
        wanted = min(line - 1 for line in row if line >= 0)
        got = window_start(position, config.sliding_window)
        if got != wanted:
            print(f"not yet: expected token {wanted} for the query at {position}, got {got}")
            return
    print("pass")


# %% tags=["exercise-1"]
def window_start(position, window):
    return max(0, position - window)


check_02_1(window_start)

# %% [markdown]
# **2.** An entry exists once all its tokens do. `complete` says how many entries of `ratio` tokens a query
# may see, and it shows the query an entry that is not complete: a look into the future. Repair it. A query
# at the *last* token of a group must see that group.

# %%
def check_02_2(complete):
    for layer in (2, 4):
        visible = call(layer, "indexer.scores_cached")["visible_BQ"][0].tolist()
        ratio = config.ratio(layer)
        for position, wanted in enumerate(visible):
            got = complete(position, ratio)
            if got != wanted:
                place = f"position {position}, ratio {ratio}"
                print(f"not yet: expected {wanted} entries at {place}, got {got}")
                return
    print("pass")


# %% tags=["exercise-2"]
def complete(position, ratio):
    return position // ratio + 1


check_02_2(complete)

# %% [markdown]
# **3.** Write the selection for one query: the `k` best of the first `visible` entries, as a list in
# ascending order; where two scores are equal the earlier entry wins.

# %%
def check_02_3(choose):
    draw = torch.Generator().manual_seed(0)
    for visible, k in ((0, 4), (3, 4), (40, 4), (40, 16)):
        score_S = torch.randint(0, 9, (40,), generator=draw).float()  # whole numbers, so that some are equal
        hidden = torch.arange(40) >= visible
        best = indexer.topk(score_S.masked_fill(hidden, -torch.inf)[None, None], k)[0, 0].tolist()
        wanted, got = [entry for entry in best if entry >= 0], choose(score_S.tolist(), visible, k)
        if got != wanted:
            print(f"not yet: expected {wanted} with {visible} visible entries and k = {k}, got {got}")
            return
    print("pass")


# %% tags=["exercise-3"]
def choose(score_S, visible, k):
    return sorted(range(len(score_S)), key=lambda entry: score_S[entry])[-k:]


check_02_3(choose)

# %% [markdown]
# ## What to read next
#
# - [03_engram](03_engram.ipynb): a memory that is looked up by what was said, not by where.
# - `dskit/layers/compress.py` and `dskit/layers/indexer.py`: how entries and index keys are written.
# - `dskit/engine/pools.py`: where rings and global memories lie, block by block.
# - `tests/layers/test_state.py`: however a text is cut into steps, what is computed stays the same.
