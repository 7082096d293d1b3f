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
# # 04 · mHC
#
# **What do four residual streams do that one does not?**
#
# In most models a layer adds its output to one vector per token, the **residual**. Here there are `N` = 4
# copies of it, the **streams**. A sublayer (attention, or the experts) reads one weighted sum of them and
# writes back to all, and in between the streams are mixed by a 4 x 4 matrix. All these weights are computed
# from the token's own streams. The matrix is kept close to **doubly stochastic**: no negative numbers, and
# each row and each column adds up to one. This notebook shows how that is done, by **Sinkhorn's**
# iterations, and what happens without.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# The token "mp" of " lamp", at the attention of layer 3. `dskit.tap` records what ops are given and what
# they give, under the name of the module that calls them; a layer calls `mhc.boundary` twice, before its
# attention and before its experts. `dskit.use("torch")` makes every step run as its formula, so that each
# can be seen.

# %%
from dskit.viz import figures

llm = dskit.LLM("demo", numerics="exact")
question, focus = "What does lamp mean?", 4
tokens = llm.encode(question)
pieces = [llm.tokenizer.decode([token]) for token in tokens]
with dskit.use("torch"), dskit.tap(llm, "layers.*:mhc.sinkhorn", "layers.*:mhc.boundary") as seen:
    llm.logits(tokens)

SUBLAYERS = ("attention", "experts")


def call(layer, sublayer, op):
    """What an op was given, and gave, before a sublayer of a layer."""
    return seen[f"layers.{layer}:{op}"][SUBLAYERS.index(sublayer)]


def flow(layer, sublayer, token):
    """The weights of one token on its way past a sublayer, one row per stream."""
    boundary = call(layer, sublayer, "mhc.boundary")
    read, (_, _, _, write, mix) = boundary["p_TN"], boundary["result"]
    return [
        {"read": p, "write": q, "mix": C}
        for p, q, C in zip(read[token].tolist(), write[token].tolist(), mix[token].tolist(), strict=True)
    ]


figures.stream_flow(flow(3, "attention", focus), inside="attention of layer 3")

# %% [markdown]
# The attention reads three of the streams and writes mostly to the fourth, stream 2. The streams keep most
# of what they hold, and pass on a little. One thing is easily overlooked: the weights of *reading* were
# computed a sublayer earlier (`p_TN` is an argument of the op), those of *writing* and mixing here.
#
# ## Before and after
#
# The matrix starts as 16 numbers of any sign, the **logits**. Softmax makes each row positive with sum one;
# the columns then add up to anything. One iteration divides each row by its sum, then each column by its
# own. The last step is always that of the columns, so those are right; the rows come closer with every
# iteration. Sums stand in the margins.

# %%
from dskit.layers import mhc

eps, trained_with = llm.config.hc_eps, llm.config.hc_sinkhorn_iters


def logits_of(layer, sublayer):
    """The logits of all tokens, [T, N, N]."""
    return call(layer, sublayer, "mhc.sinkhorn")["B_TNN"]


def stages(layer, sublayer, iterations, token=focus):
    """One token's matrix on its way, one row per stage."""
    B_TNN = logits_of(layer, sublayer)[token][None]
    after = f"after {iterations} iteration{'s' * (iterations > 1)}"
    return [
        {"what": "logits", "matrix": B_TNN[0].tolist(), "sums": False},
        {"what": "softmax of each row", "matrix": B_TNN.softmax(dim=-1)[0].tolist(), "sums": True},
        {"what": "after 1 iteration", "matrix": mhc.sinkhorn(B_TNN, 1, eps)[0].tolist(), "sums": True},
        {"what": after, "matrix": mhc.sinkhorn(B_TNN, iterations, eps)[0].tolist(), "sums": True},
    ]


figures.mixing_matrices(stages(3, "attention", trained_with), "Layer 3, attention, token 'mp'")

# %% [markdown]
# ## The source

# %%
dskit.show(mhc.sinkhorn)

# %%
dskit.show(mhc.mixes)

# %%
dskit.show(mhc.write)

# %% [markdown]
# `write` is the whole update: the output `y`, spread over the streams by `q`, plus the streams under the
# *transposed* matrix. What leaves stream `j` for stream `k` is `C[j, k]`.
#
# ## Turn the iterations
#
# The demo was trained with 4 iterations, the released model uses 20. Watch the sums of the last matrix.

# %%
from dskit.viz.widgets import Panel

panel = Panel(
    stages,
    figures.mixing_matrices,
    {
        "layer": (0, llm.config.num_hidden_layers - 1, 3),
        "sublayer": list(SUBLAYERS),
        "iterations": (1, 40, 20),
        "token": (0, len(tokens) - 1, focus),
    },
)
panel

# %% [markdown]
# A panel ends with the kernel; its picture stays.

# %%
panel.figure()

# %% [markdown]
# ## Why one, and not more
#
# A model mixes its streams again and again, 16 times in the demo. All those matrices in a row are one
# matrix, their product. If it can make a vector longer, the state can grow from layer to layer. How much
# longer at most? That is the largest **singular value** of the product, here for every token of the
# question, and the worst token counts. A doubly stochastic matrix has 1.

# %%
import torch

from dskit.viz.notebook import Table

places = [(layer, sublayer) for layer in range(llm.config.num_hidden_layers) for sublayer in SUBLAYERS]
every = [logits_of(*place) for place in places]


def worst_sum(C_TNN):
    """How far the worst row or column of all these matrices is from adding up to one."""
    return max((C_TNN.sum(dim) - 1).abs().max().item() for dim in (-1, -2))


def growth(name, mix):
    """One row: how far sums are from one, and how much longer a vector can get on its way."""
    product, worst = torch.eye(llm.config.hc_mult, dtype=torch.float64, device=llm.device), 0.0
    for B_TNN in every:
        C_TNN = mix(B_TNN.double())
        worst, product = max(worst, worst_sum(C_TNN)), C_TNN.mT @ product
    longer = torch.linalg.matrix_norm(product, ord=2).max().item()
    return {"mixing": name, "sums off by at most": worst, "longer by a factor of at most": longer}


ways = {"exp of the logits": torch.exp, "softmax of each row": lambda B_TNN: B_TNN.softmax(dim=-1)}
ways |= {f"{n} iterations": lambda B_TNN, n=n: mhc.sinkhorn(B_TNN, n, eps) for n in (1, 4, 20, 100)}
title = f"All {len(every)} mixing matrices of the demo in a row"
Table([growth(name, mix) for name, mix in ways.items()], title)

# %% [markdown]
# Without any normalising the state would grow beyond what a float32 can hold, about 3e38. Softmax alone
# keeps it small already; the iterations bring the factor down to 1.
#
# How do the streams really grow in the demo? With its 4 iterations the matrices explain a factor of 1.55 at
# most, from the first to the last; the rest comes from what the sublayers write.

# %%
def state_before(layer, sublayer):
    """One row: how long the streams are, and what the matrices do to them."""
    streams_TND = call(layer, sublayer, "mhc.boundary")["result"][0]
    mix_TNN = call(layer, sublayer, "mhc.sinkhorn")["result"]
    return {
        "before": f"{sublayer} of layer {layer}",
        "mean length of the streams": streams_TND[focus].norm(dim=-1).mean().item(),
        "a stream keeps": mix_TNN.diagonal(dim1=-2, dim2=-1).mean().item(),
        "sums off by at most": worst_sum(mix_TNN),
    }


Table(
    [state_before(*place) for place in places],
    f"Layer by layer, {trained_with} iterations: lengths at token 'mp', matrices of all tokens",
)

# %% [markdown]
# ## Other matrices, same weights
#
# An op takes other implementations by name. What does the demo say if its streams are never mixed, or mixed
# by softmax alone?

# %%
from dskit import ops


@ops.implement("mhc.sinkhorn", "never")
def never(B_TNN, iters, eps):
    """Every stream keeps what it has."""
    return torch.eye(B_TNN.shape[-1], device=B_TNN.device).expand_as(B_TNN)


@ops.implement("mhc.sinkhorn", "softmax_only")
def softmax_only(B_TNN, iters, eps):
    """Rows add up to one, columns to anything."""
    return B_TNN.softmax(dim=-1)


def answer(question, mixing):
    """What the demo says, with one implementation of mhc.sinkhorn."""
    params = dskit.SamplingParams(max_tokens=20)
    with dskit.use("torch"), dskit.use({"mhc.sinkhorn": mixing}):
        return llm.chat(question, thinking={"type": "disabled"}, params=params).text


Table(
    (
        {"question": each} | {mixing: answer(each, mixing) for mixing in ("torch", "never", "softmax_only")}
        for each in (question, "What does winter mean?", "What is 47 + 85?")
    ),
    "The same weights with other mixing matrices",
)

# %% [markdown]
# For these questions the demo does without any mixing: its matrices are close to "keep what you have"
# anyway, as the table above shows. With softmax alone it fails at the words: the columns, which say what
# arrives in a stream, no longer add up to one, and it was not trained so.
#
# ## Fused or in a loop
#
# As a formula, Sinkhorn is a loop of small steps over a 4 x 4 matrix for each token: four passes for every
# iteration after the first. A kernel keeps the matrix where it computes, from the first to the last.
# `dskit.compare` runs every implementation on the same arguments: error against float64, and time.

# %%
sizes = dskit.shapes()
print(sizes)

rows = []
for iterations in (1, 4, 20):
    shape = {"rows": sizes.prefill_tokens, "streams": 4, "iters": iterations}
    for found in dskit.compare("mhc.sinkhorn", shape=shape, only=["torch", "triton"], repeat=sizes.repeat):
        rows.append(
            {
                "iterations": iterations,
                "tokens": sizes.prefill_tokens,
                "implementation": found["implementation"],
                "relative error": found.get("relative_rms"),
                "ms": found.get("time_ms"),
                "note": found.get("refused") or found.get("note"),
            }
        )
Table(rows, "mhc.sinkhorn by iterations")

# %% [markdown]
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** How many iterations bring the sums of *all* mixing matrices of the question (`every`) within 0.1 of
# one? Give the smallest number; one is not enough. `worst_sum` helps.

# %%
def check_04_1(enough):
    near, before = (
        max(worst_sum(mhc.sinkhorn(B_TNN, n, eps)) for B_TNN in every) for n in (enough, max(1, enough - 1))
    )
    if near >= 0.1:
        print(f"not yet: expected sums within 0.1 of one, got {near:.2f} with {enough}")
    elif enough > 1 and before < 0.1:
        print(f"not yet: expected the smallest number, got {enough}, and {enough - 1} would do")
    else:
        print("pass")


# %% tags=["exercise-1"]
enough = 1

check_04_1(enough)

# %% [markdown]
# **2.** Write the update of the streams with plain sums: `y` is the output of the sublayer, `X[j]` the
# streams. The version below mixes them the wrong way round.

# %%
def check_04_2(update):
    draw = torch.Generator().manual_seed(0)
    y_D, X_ND, q_N, C_NN = (torch.rand(*size, generator=draw) for size in ((6,), (4, 6), (4,), (4, 4)))
    wanted = mhc.write(y_D[None], X_ND[None], q_N[None], C_NN[None], torch.float32)[0]
    got = torch.stack(update(y_D, X_ND, q_N, C_NN))
    off = (got - wanted).abs().max().item()
    print("pass" if off < 1e-5 else f"not yet: expected the streams of mhc.write, got some {off:.2f} away")


# %% tags=["exercise-2"]
def update(y, X, q, C):
    return [q[k] * y + sum(C[k, j] * X[j] for j in range(4)) for k in range(4)]


check_04_2(update)

# %% [markdown]
# **3.** Write Sinkhorn as an implementation of your own. The one below only ever touches the rows.
# `dskit.compare` says how far it is away.

# %%
def check_04_3():
    shape = {"rows": 8, "streams": 4, "iters": 20}
    (found,) = dskit.compare("mhc.sinkhorn", shape=shape, only=["by_hand"])
    off = found["relative_rms"]
    print("pass" if off < 1e-5 else f"not yet: expected a relative error below 1e-5, got {off:.2g}")


# %% tags=["exercise-3"]
@ops.implement("mhc.sinkhorn", "by_hand")
def by_hand(B_TNN, iters, eps):
    C = B_TNN.softmax(dim=-1) + eps
    for _ in range(iters):
        C = C / (C.sum(dim=-1, keepdim=True) + eps)
    return C


check_04_3()

# %% [markdown]
# ## What to read next
#
# - [05_moe](05_moe.ipynb): the other sublayer, many experts of which few work.
# - `dskit/layers/mhc.py`: `boundary` does everything that stands between two sublayers in one call.
# - `dskit/kernels/mhc.py`: the same as one pass over the streams.
