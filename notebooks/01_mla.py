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
# # 01 · MLA
#
# **How do all heads share one key-value vector per token?**
#
# While a model writes, it must remember something of every earlier token. In ordinary attention that is a key
# and a value for each head. Here it is *one* vector, which is key and value at once, for all heads. This
# notebook shows what that saves, where it happens in the code, and the one rotation without which it would
# not work.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# The released model has 64 heads of width 512. What does one token leave in the memory of one layer? The bars
# are to scale: 128 vectors against one. The shared vector is stored narrower still, with its scales: in FP8
# (one byte each, a scale byte per 32 channels) in the window, in FP4 (half a byte each, a scale byte per 16
# channels) in the global memory.

# %%
from dskit.config import preset
from dskit.viz import figures

released = preset("flash")
SCALED = {"bf16": (2, None), "fp8": (1, 32), "fp4": (0.5, 16)}  # bytes per number, channels per scale byte


def vector_bytes(width, precision):
    """Bytes of one stored vector, its scales included."""
    each, group = SCALED[precision]
    return int(width * each + (width / group if group else 0))


def bar(what, vectors, precision, width=released.head_dim):
    """One bar of the picture."""
    return {"what": what, "vectors": vectors, "bytes": vectors * vector_bytes(width, precision)}


heads = released.num_attention_heads
figures.memory_bars(
    [
        bar(f"{heads} heads, a key and a value each, bf16", 2 * heads, "bf16"),
        bar("one vector, key and value of all heads, bf16", 1, "bf16"),
        bar("the same in FP8, as in the window", 1, "fp8"),
        bar("the same in FP4, as in the global memory", 1, "fp4"),
    ]
)

# %% [markdown]
# ## The source
#
# The whole mechanism is one file. Look for three things: `wkv` gives *one* vector of width H where `wq_b`
# gives A of them; `attend` uses `value` twice, once for the scores and once for the sum; `attend_cached`
# rotates queries in and the output back.

# %%
from dskit.layers import mla

dskit.show(mla)

# %% [markdown]
# The trained demo shows the same. Its numerics are `exact` here (float32, no rounding), so that the tests
# below can be strict.

# %%
from dskit.viz.notebook import Table

llm = dskit.LLM("demo", numerics="exact")
attention = llm.model.layers[0].attn
with dskit.tap(llm, "layers.0.attn.wq_b", "layers.0.attn.wkv") as seen:
    llm.logits(llm.encode("What does lamp mean?"))

Table(
    (
        {"module": name, "shape": str(list(values[0].shape)), "numbers per token": values[0].shape[1]}
        for name, values in seen.items()
    ),
    f"{llm.config.num_attention_heads} heads: a query for each, one key-value vector for all",
)

# %% [markdown]
# ## Heads and precision
#
# More heads cost nothing in memory once the vector is shared. Move the sliders.

# %%
from dskit.viz.widgets import Panel


def memory(heads, precision):
    """Bytes that one token leaves in one layer of released width."""
    return [
        bar(f"{heads} heads, a key and a value each, {precision}", 2 * heads, precision),
        bar(f"one shared vector, {precision}", 1, precision),
    ]


panel = Panel(memory, figures.memory_bars, {"heads": (1, 128, 64), "precision": list(SCALED)})
panel

# %% [markdown]
# A panel ends with the kernel; its picture stays.

# %%
panel.figure()

# %% [markdown]
# ## Prefill and decode
#
# **Prefill** reads a whole prompt at once; **decode** adds one token to each running request. Both are the
# same op, `mla.attend`, on different shapes: here 64 heads of 512 over a full window, 128 vectors.
# `dskit.compare` runs every implementation on the same arguments: error against float64, and time. There is
# no Triton kernel for it in this version, so its row says so instead of giving a number. A row for `compile`
# joins once `ops.find("mla.attend").implementation("compile")` has been called, where a C++ compiler is; its
# first run takes long.

# %%
import torch

sizes = dskit.shapes()
print(sizes)


def attend_arguments(tokens, requests):
    """Random queries and windows in the shapes of the released model; every request has its own window."""
    width, window = released.head_dim, released.sliding_window
    make = dict(device=sizes.device, dtype=torch.bfloat16)
    q_TAH = torch.randn(tokens, heads, width, **make)
    line_SH = torch.randn(requests * window + tokens, width, **make)
    row = torch.arange(tokens, device=sizes.device)
    start = row if requests == 1 else row * window  # prefill slides over one line, decode reads a line each
    read_TW = start[:, None] + torch.arange(window, device=sizes.device)
    sink_A = torch.zeros(heads, device=sizes.device)
    return q_TAH, line_SH, read_TW, None, None, sink_A, torch.bfloat16


rows = []
for step, tokens, requests in (
    ("prefill", sizes.prefill_tokens, 1),
    ("decode", sizes.decode_requests, sizes.decode_requests),
):
    arguments = attend_arguments(tokens, requests)
    for found in dskit.compare("mla.attend", *arguments, repeat=sizes.repeat):
        refused = found.get("refused", "")
        note = "no triton kernel yet" if "has no implementation" in refused else refused
        if not refused and found["time_ms"] is None:
            note = "interpreted"
        rows.append(
            {
                "step": step,
                "queries": str(list(arguments[0].shape)),
                "implementation": found["implementation"],
                "relative error": found.get("relative_rms"),
                "ms": found.get("time_ms"),
                "ms per token": found["time_ms"] / tokens if found.get("time_ms") else None,
                "note": note,
            }
        )
Table(rows, "mla.attend")

# %% [markdown]
# The reference copies the window of every row before it multiplies. Neighbouring rows of a prompt see nearly
# the same window, so a kernel can read it once for many of them; in decode every request has a window of its
# own.
#
# ## Why the output is rotated back
#
# Positions enter by **rotation**: pairs of channels are turned by an angle that grows with the position, so
# that the score of a query and a key depends on their *distance*. Here the value is the key, so the values
# carry a rotation too, and a weighted sum of them is turned by where the tokens stand in the text. Turning
# the output back by the query's own position leaves distances only. Three tests say what that means for a
# layer:

# %%
from dskit import ops
from dskit.layers import rope
from dskit.layers.rope import turns


def layer_output(x_TD, pos_T):
    """The attention of layer 0 over rows that see all earlier rows, at any positions."""
    turn_T = turns(pos_T, llm.model.frequency_0)
    q_TAH = rope.rotate(attention.query(attention.q_norm(attention.wq_a(x_TD))), turn_T)
    key_TH = attention.key(x_TD, turn_T)
    row = torch.arange(len(x_TD), device=llm.device)
    read_TT = torch.where(row <= row[:, None], row, -1)
    o_TAH = mla.attend(q_TAH, key_TH, read_TT, None, None, attention.attn_sink, torch.float32)
    return attention.output(rope.rotate(o_TAH, turn_T, inverse=True))


def moved(found, wanted):
    """Relative RMS of a difference."""
    return ((found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()).item()


x_TD = torch.randn(12, llm.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(llm.device)
pos_T = torch.arange(12, device=llm.device)


def keeps_lengths():
    """Rotating a vector does not change its length."""
    v_TH = x_TD[:, : llm.config.head_dim]
    turned_TH = ops.find("rope.rotate")(v_TH, turns(pos_T, llm.model.frequency_0))
    return moved(turned_TH.norm(dim=1), v_TH.norm(dim=1))


def shift_changes_nothing():
    """The same rows 1,000 positions later give the same output."""
    return moved(layer_output(x_TD, pos_T + 1000), layer_output(x_TD, pos_T))


def answer_is_right():
    """The demo can still add: 0 if it answers 132, else 1."""
    text = llm.chat("What is 47 + 85?", params=dskit.SamplingParams(max_tokens=60)).text
    return float(text != "132")


def run_tests(implementation, tolerance=1e-4):
    """Run the three tests with one implementation of rope.rotate."""
    found = []
    with dskit.use({"rope.rotate": implementation}):
        for test in (keeps_lengths, shift_changes_nothing, answer_is_right):
            change = test()
            result = "pass" if change < tolerance else "FAIL"
            found.append({"test": test.__name__, "result": result, "change": change})
    return Table(found, f"rope.rotate = {implementation}")


run_tests("torch")

# %% [markdown]
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** How many bytes does a token leave in the *window* of one layer of the demo, in the released precision
# (FP8)? And how many would a key and a value for each of its heads take in bf16? `vector_bytes` above helps;
# `llm.config` has the sizes.

# %%
def check_01_1(shared, separate):
    wanted = (99, 3072)
    print("pass" if (shared, separate) == wanted else f"not yet: expected {wanted}, got {(shared, separate)}")


# %% tags=["exercise-1"]
shared, separate = 0, 0

check_01_1(shared, separate)

# %% [markdown]
# **2.** Write attention for one row and one head with plain sums: scores, softmax with the sink in the
# denominator only, weighted sum of the *same* vectors.

# %%
def check_01_2(attend_one):
    q_H, entries_SH, sink = torch.randn(96), torch.randn(5, 96), torch.tensor(0.3)
    wanted = mla.attend(
        q_H[None, None], entries_SH, torch.arange(5)[None], None, None, sink[None], torch.float32
    )[0, 0]
    change = moved(attend_one(q_H, entries_SH, sink), wanted)
    print("pass" if change < 1e-5 else f"not yet: expected mla.attend's output, got one {change:.1%} away")


# %% tags=["exercise-2"]
def attend_one(q_H, entries_SH, sink):
    z_S = entries_SH @ q_H / len(q_H) ** 0.5
    return z_S.softmax(dim=0) @ entries_SH


check_01_2(attend_one)

# %% [markdown]
# **3.** `one_way` leaves out the inverse rotation. Run it: which tests fail, and why does the other one pass?
# Then repair it.

# %%
rotate = ops.find("rope.rotate").reference  # a pair of channels (a, b) is a + ib; turn_T holds exp(i angle)


def check_01_3():
    table = run_tests("one_way")
    failed = [row["test"] for row in table if row["result"] != "pass"]
    print("pass" if not failed else f"not yet: expected all three tests to pass, got failures in {failed}")
    return table


# %% tags=["exercise-3"]
@ops.implement("rope.rotate", "one_way")
def one_way(x, turn_T, inverse=False):
    """Turns queries and keys, and leaves the output as it is."""
    return x if inverse else rotate(x, turn_T)


check_01_3()

# %% [markdown]
# ## What to read next
#
# - `dskit/layers/rope.py`: the rotation, and how YaRN stretches it to long texts.
# - `dskit/layers/swa.py`: the window that these vectors live in; `dskit/layers/compress.py`: how the global
#   memory is written.
# - `tests/layers/test_oracle.py`: the mistake of exercise 3 is one of the typical ones that the tests must
#   notice.
