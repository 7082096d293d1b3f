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
# # 05 · MoE
#
# **How can a layer have many networks and use two of them?**
#
# After attention, each token goes through a small network. In a **mixture of experts** (MoE) a layer has many
# such networks, the *experts*, and a **router** picks a few for each token. The layer can then know much,
# while a token pays for little. This notebook shows who goes where, what happens when everybody wants the
# same expert, and how you put an implementation of your own in the place of a part of it.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# The trained demo has 16 experts in each layer and picks 2 for each token. Here is one question in layer 3:
# lines are as thick as the weights with which the two answers are added up. One more expert, the *shared*
# one, answers every token; it is not drawn.

# %%
from dskit.viz import figures

llm = dskit.LLM("demo", speculate="off")
QUESTION = "What does lamp mean?"
ids = llm.encode(QUESTION)
with dskit.tap(llm, "layers.3.ffn.gate") as chosen:
    llm.logits(ids)

topk_TJ, weight_TJ = chosen["layers.3.ffn.gate"][0]  # T tokens, J experts for each
pieces = [llm.tokenizer.decode([token]) for token in ids]
n_experts = llm.config.n_routed_experts
figures.expert_flow(
    [
        {"token": piece, "experts": experts, "weights": weights}
        for piece, experts, weights in zip(pieces, topk_TJ.tolist(), weight_TJ.tolist(), strict=True)
    ],
    n_experts,
)

# %% [markdown]
# ## The source
#
# Read it from the bottom. `MoE.forward` calls the router (`gate`), rounds its input, and calls `experts`.
# `experts` makes a **plan**: one row per token and chosen expert, sorted by expert, so that each expert reads
# its weights once for all of its rows. Each row goes through its expert (`each_expert`), and `combine` adds
# up what belongs to one token.

# %%
from dskit.layers import moe

dskit.show(moe)

# %% [markdown]
# ## Who is busy?
#
# Count the tokens of each expert in each layer. Three numbers say how even the counts are. The *even load* is
# the mean of a layer. *Max/mean* is the busiest expert over that mean; 1 is even. *Entropy* measures how
# spread the shares are: 1 is even, 0 is all on one expert. Choose a text and press *run*; *running* adds up
# all texts since the last *reset*.

# %%
from dskit.viz.experts import ExpertLoad, evenness

texts = [QUESTION, "What is 47 + 85?", "Give me an object with a name.", "lamp lamp lamp lamp lamp lamp"]
board = ExpertLoad(llm, texts)
board

# %% [markdown]
# A panel ends with the kernel; its picture stays.

# %%
board.figure()

# %% [markdown]
# So few tokens cannot be even: a layer has 16 experts, and a short text makes about as many choices.
# Here are all four texts together.

# %%
from dskit.viz.notebook import Table

for text in texts[1:]:
    board.text.value = text
    board.run()

Table(
    (
        {"layer": layer, "tokens": sum(loads) // topk_TJ.shape[1]} | evenness(loads)
        for layer, loads in board.total.items()
    ),
    "All four texts",
)

# %% [markdown]
# ## Where the time goes
#
# Layer 3 on random rows, in the steps that the source names: route, sort (`plan`, `permute`), experts,
# combine. `self_ms` is the time of an op without the ops that it calls: `linear.matmul` are the products, of
# the chosen experts, the shared expert and the router.

# %%
import torch

sizes = dskit.shapes()
print(sizes)
layer = llm.model.layers[3].ffn
x_TD = torch.randn(8 * sizes.prefill_tokens, llm.config.hidden_size).to(llm.device, llm.dtype)
ids_T = torch.zeros(len(x_TD), dtype=torch.int64, device=llm.device)
with torch.inference_mode():
    layer(x_TD, ids_T)  # the first call pays for what later ones find ready
    with dskit.profile() as costs:
        for _ in range(sizes.repeat):
            layer(x_TD, ids_T)

Table(
    (
        {key: row[key] for key in ("op", "implementation", "calls", "self_ms", "share")}
        for row in costs.table()
        if row["op"].startswith(("moe.", "linear."))
    ),
    f"{sizes.repeat} passes of {len(x_TD)} rows through one layer's experts",
)

# %% [markdown]
# The same ops again, each implementation beside float64. Where kernels are interpreted, the triton row shows
# that the kernel computes the same; its time would say nothing and is not shown.

# %%
rows = []
for op in ("moe.route", "moe.permute", "moe.swiglu", "moe.combine"):
    for found in dskit.compare(op, repeat=sizes.repeat):
        rows.append({"op": op, **found})
Table(rows, "Each at the last shape of its case table that suits this machine")

# %% [markdown]
# ## When everybody wants the same expert
#
# In a large model the experts are spread over several GPUs, and all wait for the one with the most rows. Let
# four *ranks* (processes with a GPU each) hold four experts each. We run the experts of each rank by
# themselves on this machine and look at the slowest. The router adds a **bias** to its scores before it
# chooses; the weights of the answers come from the scores without it. A large bias on two experts *skews* the
# choice.

# %%
import time

RANKS = 4


def busiest_rank(bias_E):
    """One row of a table: loads under a bias, and the measured time of the slowest of four ranks."""
    config, gate = llm.config, layer.gate
    topk_TJ, weight_TJ = moe.gate(
        x_TD, gate.weight, bias_E, gate.k, config.norm_topk_prob, config.routed_scaling_factor
    )
    loads = topk_TJ.flatten().bincount(minlength=n_experts)
    rows = loads.view(RANKS, -1).sum(dim=1).tolist()
    rank_ms = [milliseconds_of_rank(rank, topk_TJ, weight_TJ) for rank in range(RANKS)]
    return {
        "max/mean of experts": evenness(loads.tolist())["max_over_mean"],
        "rows of each rank": rows,
        "slowest rank, ms": max(rank_ms),
        "all ranks, ms": sum(rank_ms),
    }


@torch.inference_mode()
def milliseconds_of_rank(rank, topk_TJ, weight_TJ):
    """The best of a few passes of one rank's rows through its experts; 0 when it has none."""
    token_R, slot_R = (topk_TJ // (n_experts // RANKS) == rank).nonzero(as_tuple=True)
    if not len(token_R):
        return 0.0
    times = []
    for _ in range(sizes.repeat):
        start = time.perf_counter()
        moe.experts(
            x_TD[token_R], topk_TJ[token_R, slot_R][:, None], weight_TJ[token_R, slot_R][:, None], None,
            layer.experts.w13, layer.experts.w2, layer.limit, llm.model.numerics,
        )  # fmt: skip
        if llm.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


skewed_E = layer.gate.bias.clone()
skewed_E[:2] += 100.0
Table(
    [{"bias": "as trained"} | busiest_rank(layer.gate.bias), {"bias": "skewed"} | busiest_rank(skewed_E)],
    "Four ranks, measured one after the other",
)

# %% [markdown]
# Compare *rows of each rank*: under the skewed bias one rank has all of them and three have nothing to do. A
# group would wait for its *slowest rank*. *All ranks* is what one device would take for all of them in turn:
# it also reads fewer experts when the choice is skewed, so this number does not show the damage.
#
# ## Put your own in its place
#
# An **op** is a named step with one signature and several implementations. The path from here to an
# implementation of your own has four calls. First: what does the op do, and who computes it now?

# %%
dskit.show(moe.permute)

# %%
Table([row for row in dskit.explain() if row["op"] == "moe.permute"])

# %% [markdown]
# Second: `ops.implement` registers a function of the same signature under a name. The op then has one
# implementation more, and nothing else changes.

# %%
from dskit import ops


@ops.implement("moe.permute", "by_gather")
def by_gather(x_TD, weight_TJ, order_R, place_TJ):
    """The same rows, by gather instead of an index."""
    token_R = torch.div(order_R, place_TJ.shape[1], rounding_mode="floor")
    x_RD = x_TD.gather(0, token_R[:, None].expand(-1, x_TD.shape[1]))
    return x_RD, weight_TJ.flatten().gather(0, order_R)


# %% [markdown]
# Third: **parity**. `check` runs it at every edge shape of the op's case table (no rows, one row, odd
# widths), twice, between guard bands, and compares with the reference. It raises an error that names the
# shape, the worst element and both values.

# %%
from dskit.testing import all_cases, check


def parity(op, implementation):
    """None when every edge shape passes, else the first complaint."""
    cases = all_cases()[op]
    for shape in cases.edges:
        try:
            check(cases, shape, implementation, device=llm.device)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


print(parity("moe.permute", "by_gather") or f"parity at {len(all_cases()['moe.permute'].edges)} shapes")

# %% [markdown]
# Fourth: use it. The model's logits (the scores of the next token) stay the same.

# %%
before_TV = llm.logits(ids)
llm.engine.forget()  # what is cached was computed before
with dskit.use({"moe.permute": "by_gather"}):
    after_TV = llm.logits(ids)
print("largest change of a logit:", (after_TV - before_TV).abs().max().item())

# %% [markdown]
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** Route one token by hand: scores `g`, a bias for the choice, weights from the scores *without* the
# bias that add up to `factor`. The reference is `moe.route` above.

# %%
def check_05_1(route_one):
    logit_E, bias_E = torch.randn(16), torch.rand(16)
    topk_TJ, weight_TJ = moe.route(logit_E[None], bias_E, 2, True, 1.5)
    experts, weights = route_one(logit_E, bias_E, 2, 1.5)
    wanted = topk_TJ[0].tolist(), [round(w, 4) for w in weight_TJ[0].tolist()]
    got = experts.tolist(), [round(w, 4) for w in weights.tolist()]
    print("pass" if got == wanted else f"not yet: expected {wanted}, got {got}")


# %% tags=["exercise-1"]
def route_one(logit_E, bias_E, k, factor):
    g_E = torch.nn.functional.softplus(logit_E).sqrt() + bias_E
    weights, experts = g_E.topk(k)
    return experts, factor * weights / weights.sum()


check_05_1(route_one)

# %% [markdown]
# **2.** Repair the skewed router with its bias. After each batch, change the bias of each expert by `step`:
# down where the load is above the mean, up where it is below. `balance` gets the loads and returns the new
# bias. The check runs it 400 times.

# %%
def check_05_2(balance):
    bias_E, gate = torch.zeros(n_experts), layer.gate
    bias_E[:2] = 2.0
    x = x_TD[:256].cpu()
    for _ in range(400):
        topk_TJ, _ = moe.route(x.float() @ gate.weight.cpu().float().T, bias_E, gate.k, True, 1.0)
        loads_E = topk_TJ.flatten().bincount(minlength=n_experts)
        bias_E = balance(bias_E, loads_E, 0.02)
    worst = (loads_E.max() / loads_E.float().mean()).item()
    print("pass" if worst < 2 else f"not yet: expected max/mean below 2, got {worst:.1f}")


# %% tags=["exercise-2"]
def balance(bias_E, loads_E, step):
    return bias_E


check_05_2(balance)

# %% [markdown]
# **3.** Write a kernel. `moe.swiglu` is what an expert does between its two products, element by element:
# `weight * silu(min(gate, limit)) * clamp(linear, -limit, limit)`, where `silu(z) = z / (1 + exp(-z))`. A
# limit of 0 means no limit, and `weight` may be None. The kernel below loads, computes and stores; the
# formula is not there yet. A *program* is one run of the kernel's function; here each handles `BLOCK`
# numbers, and `there` is false beyond the last one. `ld` loads and widens to float32, `narrow` rounds:
# without them the interpreter gets bfloat16 wrong. (Triton runs on Linux only.)

# %%
def check_05_3():
    complaint = parity("moe.swiglu", "mine")
    print("pass" if complaint is None else f"not yet: expected parity at every edge shape, got {complaint}")


# %% tags=["exercise-3"]
import triton
import triton.language as tl

from dskit.kernels.common import ld, narrow


@triton.jit
def swiglu_kernel(gate_ptr, linear_ptr, weight_ptr, y_ptr, count, limit, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    gate, linear, weight = ld(gate_ptr + i, there), ld(linear_ptr + i, there), ld(weight_ptr + i, there)
    y = gate + 0 * linear + 0 * weight  # the formula belongs here
    tl.store(y_ptr + i, narrow(y, y_ptr.dtype.element_ty), mask=there)


@ops.implement("moe.swiglu", "mine")
def mine(gate, linear, weight, limit, dtype, steady=False):
    """One program per 256 numbers."""
    gate, linear = gate.contiguous(), linear.contiguous()
    weight = gate.new_ones(1) if weight is None else weight
    weight = weight.float().expand(gate.shape).contiguous()
    y = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if y.numel():
        grid = (triton.cdiv(y.numel(), 256),)
        swiglu_kernel[grid](gate, linear, weight, y, y.numel(), limit, BLOCK=256)
    return y


check_05_3()

# %% [markdown]
# ## What to read next
#
# - [06_kernel_swap_and_profile](06_kernel_swap_and_profile.ipynb): a kernel from an empty cell, and what a
# swap does to a step.
# - `dskit/kernels/moe.py` and `dskit/kernels/experts.py`: the kernels of these ops.
# - `dskit/testing/moe.py`: the case tables that `check` reads.
