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
# # 03 · Engram
#
# **What if a model could look things up instead of computing them?**
#
# Much of language is fixed: " la" followed by "mp" is a lamp, whatever the sentence says. A layer can
# compute that, and pays for it in every token. **Engram** looks it up. The last 2, 3 and 4 tokens, an
# **n-gram** each, name rows of a large table; what stands there is added to the residual streams, as far as
# a **gate** lets it in. This notebook shows the lookup, the gates, what is left without them, and two
# n-grams that meet in one row.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## Same word, same number
#
# Before anything is looked up, token ids are **folded**: tokens that differ only in case, accents or spaces
# get one number, so that they share their rows. These tokens of the demo fold to the number of "the":

# %%
llm = dskit.LLM("demo", numerics="exact")
config, folding = llm.config, llm.model.folding


def number(text):
    """The folded number of a text that is one token."""
    (token,) = llm.tokenizer.encode(text)
    return int(folding[token])


alike = [llm.tokenizer.decode([int(token)]) for token in (folding == number("the")).nonzero()[0]]
print(alike)
print(f"{config.vocab_size} ids fold to {config.engram_compressed_vocab_size} numbers")

# %% [markdown]
# ## The picture
#
# One token, "mp", and the n-grams that end at it. Every n-gram is hashed twice, and each hash names one
# row: two n-grams that meet in one row meet in the other only by chance. A row is 32 numbers wide in the
# demo, and its bytes are all that is read.
#
# The table cannot hold a row for every n-gram. To find others that read the same row, the definitions that
# the demo was trained on are looked up as one long text.

# %%
from functools import cache

import torch

from dskit.layers import engram
from dskit.train import words
from dskit.viz import figures

longest, filler = config.engram_max_ngram_size, int(folding[config.engram_pad_token_id])
hashes = config.engram_n_heads  # of each n-gram


def grams(tokens):
    """The folded n-gram that ends at each token, newest first, [T, Q]; a filler stands before the start."""
    numbers = [filler] * (longest - 1) + [int(folding[token]) for token in tokens]
    return torch.tensor([numbers[t : t + longest][::-1] for t in range(len(tokens))])


def table_rows(layer, gram_TQ):
    """The rows of a layer's table that n-grams read, [T, C]: those of the 2-gram first."""
    return llm.model.layers[layer].engram.rows(gram_TQ.to(llm.device)).cpu()


library = llm.tokenizer.encode("\n".join(word.definition for word in words.load()))
library_grams = grams(library)


@cache
def library_rows(layer):
    """Where the n-grams of the definitions are looked up."""
    return table_rows(layer, library_grams)


def twin(layer, column, row, gram):
    """Another n-gram of the definitions that reads this row; "" if there is none."""
    size = 2 + column // hashes
    for at in (library_rows(layer)[:, column] == row).nonzero()[:, 0].tolist():
        if at >= size and library_grams[at, :size].tolist() != gram[:size].tolist():
            return llm.tokenizer.decode(library[at - size + 1 : at + 1])
    return ""


@cache
def opened(text):
    """The gates of each engram layer at each token of a text, [T, N]: how much of the value they let in."""
    with dskit.use("torch"), dskit.tap(llm, "layers.*.engram:engram.gate") as seen:
        llm.logits(llm.encode(text))
    gates = {}
    for layer in config.engram_layer_ids:
        call = seen[f"layers.{layer}.engram:engram.gate"][0]
        added_TND, value_TND = call["result"] - call["X_TND"], call["value_TD"][:, None]
        gates[layer] = (added_TND * value_TND).sum(-1) / value_TND.pow(2).sum(-1)
    return gates


def lookup(text, layer, token):
    """One row per hash of the n-grams that end at a token of a text."""
    tokens = llm.encode(text)
    token = min(token, len(tokens) - 1)
    pieces = [llm.tokenizer.decode([each]) for each in tokens]
    gram = grams(tokens)[token]
    return [
        {
            "gram": pieces[max(0, token - 1 - column // hashes) : token + 1],
            "row": row,
            "twin": twin(layer, column, row, gram),
            "bytes": config.engram_head_dim + config.engram_head_dim // 32,
            "gates": opened(text)[layer][token].tolist(),
        }
        for column, row in enumerate(table_rows(layer, gram[None])[0].tolist())
    ]


figures.ngram_lookup(lookup("What does lamp mean?", layer=1, token=4))

# %% [markdown]
# "What does lamp" has four tokens. Each of its rows is shared with an n-gram that has nothing to do with
# it, and the two are different ones. Training has to live with that, and the gates help.
#
# ## The source
#
# `hash_rows` multiplies each number by an odd constant of its place in the n-gram and joins them by **xor**
# (`^`, which compares two numbers bit by bit). The remainder by a prime is the row. `gate` asks how well
# the looked-up key fits each stream.

# %%
dskit.show(engram.hash_rows)

# %%
dskit.show(engram.gate)

# %%
dskit.show(engram.Engram)

# %% [markdown]
# The picture used the same function as the model. Here is what the model looked up while it read the
# question:

# %%
question = "What does lamp mean?"
with dskit.use("torch"), dskit.tap(llm, "layers.*.engram:engram.hash") as seen:
    llm.logits(llm.encode(question))

for layer in config.engram_layer_ids:
    looked_up = seen[f"layers.{layer}.engram:engram.hash"][0]["result"].cpu()
    same = torch.equal(looked_up, table_rows(layer, grams(llm.encode(question))))
    print(f"layer {layer}: the same rows as in the picture: {same}")

# %% [markdown]
# ## Look up your own words
#
# Type a text and press Enter. The slider chooses the token.

# %%
from dskit.viz.widgets import Panel

panel = Panel(
    lookup,
    figures.ngram_lookup,
    {"text": "What does lamp mean?", "layer": list(config.engram_layer_ids), "token": (0, 31, 4)},
)
panel

# %% [markdown]
# A panel ends with the kernel; its picture stays.

# %%
panel.figure()

# %% [markdown]
# ## The gates
#
# Between 0 (closed) and 1 (open), for each token and stream of layer 1. They are measured: what the layer
# added, as a share of the value that it could have added.

# %%
def gates_of(text, layer):
    """One row per token, for the picture of the gates."""
    pieces = [llm.tokenizer.decode([token]) for token in llm.encode(text)]
    return [
        {"token": piece, "gates": gates}
        for piece, gates in zip(pieces, opened(text)[layer].tolist(), strict=True)
    ]


figures.gate_map(gates_of(question, layer=1))

# %% [markdown]
# At " la" the gates are nearly closed. At "mp", which completes the word, those of two streams are wide
# open.
#
# ## Without the memory
#
# How much does the demo lean on it? `silent` is an implementation of `engram.gate` that adds nothing.

# %%
from dskit import ops
from dskit.viz.notebook import Table


@ops.implement("engram.gate", "silent")
def silent(X_TND, *looked_up, **settings):
    """The streams as they are."""
    return X_TND


def answer(question, gate):
    """What the demo says, with one implementation of the gate."""
    params = dskit.SamplingParams(max_tokens=20)
    with dskit.use({"engram.gate": gate}):
        return llm.chat(question, thinking={"type": "disabled"}, params=params).text


questions = ("What does lamp mean?", "What does winter mean?", "What is 47 + 85?")
Table(
    (
        {"question": each, "with the memory": answer(each, "torch"), "without": answer(each, "silent")}
        for each in questions
    ),
    "The demo with and without its n-gram memory",
)

# %% [markdown]
# Without it the sum is wrong and the words fall apart. The demo was trained *with* its memory, so this says
# how much it relies on it, not how good a model without one could become. For that both have to be trained:
# see [09_ablation](09_ablation.ipynb).
#
# ## Large, and yet cheap
#
# The table is most of what an engram layer stores, and next to nothing of what it reads.

# %%
from dskit.config import preset


def size_of(name):
    """A row of the table below, from a configuration."""
    model = preset(name)
    width = model.engram_head_dim + model.engram_head_dim // 32  # a byte per number, and a scale byte for 32
    columns = (model.engram_max_ngram_size - 1) * model.engram_n_heads
    rows = sum(model.engram_num_embeddings)
    return {
        "model": name,
        "layers with a table": len(model.engram_layer_ids),
        "rows in all": rows,
        "bytes of a row": width,
        "tables, GB": rows * width / 1e9,
        "rows read for a token": columns * len(model.engram_layer_ids),
        "bytes read for a token": columns * width * len(model.engram_layer_ids),
    }


Table([size_of("demo"), size_of("flash")], "What is stored, and what one token reads")

# %% [markdown]
# The tables of the released model do not fit beside everything else on one GPU. But which rows are needed
# follows from the tokens alone, so they can lie in the memory of the **host** (the machine around the GPU)
# and be fetched ahead. What does that cost? Here rows of released width are looked up in tables of growing
# size, 24 rows for each token, other rows in each call. "Host" includes the way to the device.

# %%
from itertools import cycle

from torch.utils.benchmark import Timer

sizes = dskit.shapes()
print(sizes)


def lookup_ms(place, rows, tokens, draws=16):
    """Milliseconds to look up 24 rows for each token in a table at a place, until they are on the device."""
    weight = torch.randint(0, 120, (rows, 256), dtype=torch.uint8).view(torch.float8_e4m3fn).to(place)
    scale = torch.full((rows, 8), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu).to(place)
    wanted = cycle([torch.randint(rows, (tokens, 24), device=place) for _ in range(draws)])

    def look_up():
        return engram.gather(weight, scale, next(wanted), torch.bfloat16).to(sizes.device)

    look_up()
    return 1e3 * Timer("look_up()", globals={"look_up": look_up}).timeit(draws).mean


rows = []
for power in (10, 14, 18, *((22,) if sizes.device == "cuda" else ())):
    for step, tokens in (("decode", sizes.decode_requests), ("prefill", sizes.prefill_tokens)):
        rows.append(
            {
                "rows of the table": 2**power,
                "MB": 2**power * 264 / 1e6,
                "step": step,
                "tokens": tokens,
                "host, ms": lookup_ms("cpu", 2**power, tokens),
                "device, ms": lookup_ms("cuda", 2**power, tokens) if sizes.device == "cuda" else None,
                "note": "" if sizes.device == "cuda" else "no GPU here",
            }
        )
Table(rows, "engram.gather by size and place of the table")

# %% [markdown]
# A table 256 times as large holds 256 times as much, and a lookup reads the same bytes.
#
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** Find a **collision**: another 2-gram that reads the same row as "What does" under the first hash of
# layer 1. `row_of` gives the row of a 2-gram of two tokens; `single` lists texts that are one token.

# %%
first_layer = llm.model.layers[1].engram
multiplier, prime = first_layer.multiplier.tolist(), int(first_layer.prime[0, 0])
decoded = (llm.tokenizer.decode([token]) for token in range(config.vocab_size))
single = [text for text in decoded if text.strip() and len(llm.tokenizer.encode(text)) == 1]


def row_of(older, newer, multiplier=multiplier):
    """The row that the first hash of layer 1 gives to a 2-gram."""
    return (number(newer) * multiplier[0] ^ number(older) * multiplier[1]) % prime


def check_03_1(older, newer):
    wanted, got = row_of("What", " does"), row_of(older, newer)
    if (number(older), number(newer)) == (number("What"), number(" does")):
        print("not yet: expected another 2-gram, got one that folds to 'What does'")
    else:
        print("pass" if got == wanted else f"not yet: expected row {wanted}, got row {got}")


# %% tags=["exercise-1"]
older, newer = "What", " does"

check_03_1(older, newer)

# %% [markdown]
# **2.** " la" + "mp" shares a row with another 2-gram, `other`. Move the collision away by changing a
# multiplier. All multipliers must stay odd, and small enough for products below 2^63.

# %%
(at,) = [
    at
    for at in (library_rows(1)[:, 0] == row_of(" la", "mp")).nonzero()[:, 0].tolist()
    if library_grams[at, :2].tolist() != [number("mp"), number(" la")]
][:1]
other = tuple(llm.tokenizer.decode([token]) for token in library[at - 1 : at + 1])
print("other =", other)


def check_03_2(changed):
    limit = 2**63 // config.engram_compressed_vocab_size
    if not all(each % 2 and 0 < each < limit for each in changed):
        print(f"not yet: expected odd multipliers below {limit}, got {changed}")
        return
    rows = row_of(" la", "mp", changed), row_of(*other, changed)
    print("pass" if rows[0] != rows[1] else f"not yet: expected two rows, got row {rows[0]} twice")


# %% tags=["exercise-2"]
changed = list(multiplier)

check_03_2(changed)

# %% [markdown]
# **3.** Write the hash of one n-gram in plain integers: `gram` holds folded numbers, newest first; the
# result lists its rows, of the 2-gram first. The version below adds where it should not.

# %%
def check_03_3(rows_by_hand):
    gram_TQ = grams(llm.encode(question))
    offset = first_layer.offset.tolist()
    for gram, wanted in zip(gram_TQ.tolist(), table_rows(1, gram_TQ).tolist(), strict=True):
        got = rows_by_hand(gram, multiplier, first_layer.prime.tolist(), offset)
        if got != wanted:
            print(f"not yet: expected rows {wanted} for {gram}, got {got}")
            return
    print("pass")


# %% tags=["exercise-3"]
def rows_by_hand(gram, multiplier, prime, offset):
    rows, h = [], gram[0] * multiplier[0]
    for size in range(2, len(gram) + 1):
        h = h + gram[size - 1] * multiplier[size - 1]
        rows += [start + h % p for start, p in zip(offset[size - 2], prime[size - 2], strict=True)]
    return rows


check_03_3(rows_by_hand)

# %% [markdown]
# ## What to read next
#
# - [04_mhc](04_mhc.ipynb): the residual streams that the memory is added to.
# - `dskit/layers/engram.py`: the whole layer; `fold_vocabulary` is where spellings meet.
# - `dskit/kernels/engram.py`: hash, lookup and gate as kernels.
