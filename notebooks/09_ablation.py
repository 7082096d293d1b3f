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
# # 09 · Ablation
#
# **What is a mechanism worth?**
#
# To find out, train two models that differ in one thing, and compare. That is an **ablation**: one part is
# taken out, everything else stays. It sounds simple and goes wrong easily. This notebook trains small models
# without Engram and without mHC, and asks of every difference whether it is one.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## What is compared
#
# A model without a part is also a smaller model. If it is worse, is that because the part is gone, or
# because there are fewer parameters (learned numbers)? So something is **held fixed**, and the table says
# what. Without Engram, for example, the model gets more experts, until it has as many parameters as before.

# %%
from dskit.train import ablate
from dskit.viz.notebook import Table

Table(
    ({"name": name, "model": one.what, "held fixed": one.held} for name, one in ablate.VARIANTS.items()),
    "the variants",
)

# %% [markdown]
# ## The source
#
# Most parts are switched off by a field of the config, under the checkpoint's own names. What no field can
# say is a small edit of the model, such as an expert that answers nothing.

# %%
from dskit.train import trainer

dskit.show(ablate.without_shared_expert)

# %%
dskit.show(trainer.ablated)

# %% [markdown]
# ## Train
#
# Nine small models: three variants, each from three **seeds**. A seed decides the first random weights and
# the order of the data. Variants of one seed read the same conversations, so they can be compared pair by
# pair. Here the conversations are sums, and there are few steps: enough to see how a study is read, not
# enough to judge a mechanism. On a GPU the same cell takes more and larger steps.
#
# The **loss** is how surprised the model is by each token of a right answer, in nats (the natural logarithm
# of one over the probability that it gave the token). Less is better.

# %%
from dataclasses import replace

sizes = dskit.shapes()
steps, rows = (400, 16) if sizes.device == "cuda" else (6, 1)
recipe = replace(
    ablate.SMALL, steps=steps, warmup=2, shapes=((512, rows, 1),), mix={"arithmetic": 1.0}
)
runs = ablate.study(
    ["engram", "mhc"], range(3), "dskit-out/ablation", recipe=recipe, device=sizes.device, say=print
)

# %% [markdown]
# ## The picture
#
# One line per variant: the mean over its seeds. The band around it is one **standard error**: the spread of
# the seeds divided by the square root of their number. It says how far the mean would move with other seeds.
# Choose which parts to show; Ctrl or Shift adds to the choice.

# %%
from dskit.viz import figures
from dskit.viz.widgets import Panel, Several


def curves(models):
    """The loss at every step of the chosen models."""
    return [
        {"what": ablate.VARIANTS[run["variant"]].what, "seed": run["seed"], "step": step, "loss": loss}
        for run in runs
        if run["variant"] in models
        for step, loss in run["curve"]
    ]


panel = Panel(curves, figures.loss_curves, {"models": Several(["full", "engram", "mhc"])})
panel

# %% [markdown]
# A panel ends with the kernel; its picture stays.

# %%
panel.figure()

# %% [markdown]
# ## The table
#
# `loss` is measured on sums that no training draws. `worse` is the difference to the full model, seed by
# seed, and then averaged: what all seeds share, such as an easy start, cancels out. `per token` counts the
# parameters in the products of one token, `cache` what 4,096 tokens leave in the caches.

# %%
summary = ablate.summary(runs)


def with_error(row, key, form):
    """A mean and its standard error."""
    if row.get(key) is None:
        return ""
    return f"{row[key]:{form}} ± {row[f'{key}_se']:{form.lstrip('+')}}"


Table(
    (
        {
            "model": row["what"],
            "loss": with_error(row, "loss", ".3f"),
            "worse": with_error(row, "worse", "+.3f"),
            "answer tokens right": with_error(row, "arithmetic", ".1%"),
            "tokens/s": with_error(row, "tokens_per_s", ",.0f"),
            "parameters": row["parameters"],
            "per token": row["active"],
            "cache, KB": round(row["cache_bytes"] / 1000),
        }
        for row in summary
    ),
    f"{runs[0]['tokens']:,.0f} tokens each, mean and standard error over {summary[0]['seeds']} seeds",
)

# %%
figures.ablation_effects([row for row in summary if row["variant"] != "full"])

# %% [markdown]
# ## The finding
#
# A difference is called one here if its **95 % interval** leaves out zero: mean ± t times the standard
# error. For three seeds t is 4.30, which is much, because three numbers say little about their own spread.
# One line per variant, and no more than the numbers support:

# %%
for row in summary:
    if row["variant"] != "full":
        print(ablate.finding(row))

# %% [markdown]
# Whatever these lines say, they say it of models this small after this few tokens. `dskit train ablate`
# compares all variants, longer and on every skill; it can be stopped (`--minutes 9`) and goes on with the
# same words. What it found on an H200, three seeds of each at the demo's widths, lies under
# `profiles/2026-11-30-ablation-h200`, with a table and this picture.
#
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** What may one say? Given the differences to the full model, one per seed, return "worse", "better" or
# "cannot say". Use the 95 % interval; `ablate.T95[n - 2]` is t for n seeds. One seed says nothing.

# %%
def check_09_1(verdict):
    asked = {
        (0.10, 0.11, 0.12): "worse",
        (0.30, -0.10, 0.20): "cannot say",
        (-0.05, -0.06, -0.05, -0.06): "better",
        (0.5,): "cannot say",
    }
    found = {values: verdict(values) for values in asked}
    wrong = [values for values in asked if found[values] != asked[values]]
    if not wrong:
        return print("pass")
    print(f"not yet: expected {asked[wrong[0]]!r} for {wrong[0]}, got {found[wrong[0]]!r}")


# %% tags=["exercise-1"]
def verdict(differences):
    return "worse" if sum(differences) > 0 else "better"


check_09_1(verdict)

# %% [markdown]
# **2.** Without its shared expert a model is smaller, and each token meets one expert less. Which fields of
# the config give both back? Return the changed fields; the names are `n_routed_experts` (all of them) and
# `num_experts_per_tok` (those that a token meets).

# %%
def check_09_2(give_back):
    wanted = {"n_routed_experts": 9, "num_experts_per_tok": 3}
    found = give_back(ablate.small())
    print("pass" if found == wanted else f"not yet: expected {wanted}, got {found}")


# %% tags=["exercise-2"]
def give_back(config):
    return {"n_routed_experts": config.n_routed_experts}


check_09_2(give_back)

# %% [markdown]
# **3.** Add a variant of your own: mHC with one round of Sinkhorn instead of four. The field is
# `hc_sinkhorn_iters`. A variant has a name, what it is, what is held fixed, and `fair`, which returns the
# changed fields. Once it passes, train it: add its name to the list in `ablate.study` above, in a new
# folder.

# %%
from dskit import chat
from dskit.config import PRESETS_DIR


def check_09_3(name):
    if name not in ablate.VARIANTS:
        return print(f"not yet: expected a variant called {name!r}, got {', '.join(ablate.VARIANTS)}")
    tokenizer = chat.Tokenizer(PRESETS_DIR / "demo")
    full, mine = (ablate.Ablation(one, ablate.small(), tokenizer, recipe, None) for one in ("full", name))
    fields = {key for key, value in vars(full.config).items() if vars(mine.config).get(key, value) != value}
    if fields - {"raw"} != {"hc_sinkhorn_iters"} or mine.config.hc_sinkhorn_iters != 1:
        return print(f"not yet: expected hc_sinkhorn_iters alone to change, to 1; got {fields or 'nothing'}")
    same = ablate.sizes(full.model) == ablate.sizes(mine.model)
    print("pass" if same else "not yet: expected the same number of parameters, got another")


# %% tags=["exercise-3"]
ablate.VARIANTS["one_round"] = ablate.Variant(
    "one round of Sinkhorn", "all parameters", fair=lambda config: {}
)

check_09_3("one_round")

# %% [markdown]
# ## What to read next
#
# - `dskit/train/ablate.py`: the variants, and how a study is kept.
# - `tests/train/test_ablate.py`: how one proves that a mechanism is really off.
# - [03_engram](03_engram.ipynb) and [04_mhc](04_mhc.ipynb): the two parts that were taken out here.
