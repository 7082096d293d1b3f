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
# # 00 · Start
#
# **What is in the model, and how does one talk to it?**
#
# The `demo` model lies in the package: 8 layers, trained, with every mechanism of DeepSeek-V4.1-Flash in it.
# This notebook draws it, asks it something, gets the same text twice from one seed, and changes how one
# operation is computed while the text stays the same. It runs from top to bottom on a laptop without a GPU.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# Read it from left to right. Token ids become **residual streams** (four parallel copies of the hidden
# vector). Each layer reads one vector from the streams, lets attention and then the experts work on it, and
# writes back. Below the layers are their memories: every layer sees its own **window** of recent tokens, and
# most layers also read a **global memory** that few layers write. `T` is the number of tokens.

# %%
from dskit.config import preset
from dskit.viz import figures

demo_config = preset("demo")
figures.model_map(demo_config, "demo")

# %% [markdown]
# The released model has the same parts, only more of them:

# %%
figures.model_map(preset("flash"), "flash")

# %% [markdown]
# ## The source
#
# `dskit.show` prints what runs. There is no second, faster copy elsewhere: this is the loop over the layers.

# %%
from dskit.model import Model

dskit.show(Model.hidden)

# %% [markdown]
# ## The machine
#
# `dskit doctor` on the command line gives the same report. `warn` and `fail` come with a remedy.

# %%
from dataclasses import asdict

from dskit import doctor
from dskit.viz.notebook import Table

Table((asdict(finding) for finding in doctor.examine()), "What this machine can do")

# %% [markdown]
# ## Chat
#
# `dskit.LLM` is the one class that a notebook needs. The model thinks before it answers; the thought is
# `reasoning`, the answer is `text`.

# %%
llm = dskit.LLM("demo")
total = llm.chat("What is 47 + 85?")
print(total.reasoning)
print("->", total.text)

# %%
def ask(question, **fields):
    """One row of a table: a question, the thought, the answer, and what it cost."""
    result = llm.chat(question, **fields)
    return {
        "question": question,
        "thought": result.reasoning,
        "answer": result.text,
        "tokens": result.usage.completion_tokens,
        "tokens/s": result.usage.decode_tok_s,
    }


questions = ["What does lamp mean?", "Who are you?", "Who won the match yesterday?"]
Table([ask(question) for question in questions], "Its skills, and one question beyond them")

# %% [markdown]
# The last question lies outside what the demo was trained on, and it says so.
#
# ## Same seed, same text
#
# At temperature 0 (the demo's default) the most probable token is always taken. Above 0 tokens are drawn at
# random, and the **seed** decides what is drawn: the same seed, prompt and settings give the same text. The
# model continues "What does": it makes up a question of its own, and answers it. Press *Draw* with the same
# seed twice; equal rows say so.

# %%
from functools import cache

import torch

from dskit.viz.widgets import Panel


@cache
def model_on(device):
    """The demo on a device, loaded once."""
    return llm if device == llm.device.type else dskit.LLM("demo", device=device)


drawn = []


def draw(device, seed):
    """Continue "What does", and keep the tokens beside those drawn earlier."""
    params = dskit.SamplingParams(temperature=1.0, seed=seed, max_tokens=14)
    result = model_on(device).generate("What does", params)
    pieces = [llm.tokenizer.decode([token]) for token in result.token_ids]
    drawn.append({"label": f"{device}, seed {seed}", "tokens": pieces})
    return drawn[-6:]


devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
draw(devices[0], 1), draw(devices[0], 2)
panel = Panel(draw, figures.token_strips, {"device": devices, "seed": (0, 99, 1)}, button="Draw")
panel

# %% [markdown]
# A panel ends with the kernel; its picture stays. `panel.data` holds the rows, `panel.save("strips.png")` (or
# `.svg`, `.csv`) writes a file.

# %%
panel.figure()

# %% [markdown]
# ## Swap an operation
#
# Every heavy line of a layer calls an **op**. An op has one name and several implementations: `torch` is the
# formula in the layer file, `compile` the same under `torch.compile`, `triton` a kernel where one exists
# (none does yet in this version). `dskit.use` chooses, for good or inside a `with` block. You can add an
# implementation in a cell:

# %%
from dskit import ops
from dskit.layers import norm

dskit.show(norm.rms)

# %%
@ops.implement("norm.rms", "by_hand")
def by_hand(x, gain_D, eps, dtype):
    """The same formula, written out."""
    wide = norm.up(x)
    y = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
    return (y if gain_D is None else y * gain_D).to(dtype)


def answer_with(implementation):
    """One row: who computes norm.rms, who decided that, and what the model says."""
    with dskit.use({"norm.rms": implementation}):
        chosen = next(row for row in dskit.explain() if row["op"] == "norm.rms")
        text = llm.chat("What does lamp mean?", thinking={"type": "disabled"}).text
    return {"norm.rms": chosen["selected"], "decided by": chosen["decided_by"], "answer": text}


Table([answer_with("torch"), answer_with("by_hand")], "The same answer after a swap")

# %% [markdown]
# `dskit.explain()` lists every op with what is selected and who decided it, and the same words work on the
# command line: `dskit serve demo --kernels mhc=compile`.
#
# ## Look inside
#
# `dskit.tap` records what a module returns, under the module's own name. Here: to which experts layer 3 sends
# each token.

# %%
with dskit.tap(llm, "layers.3.ffn.gate") as seen:
    llm.logits(llm.encode("What does lamp mean?"))

experts_TJ, weights_TJ = seen["layers.3.ffn.gate"][0]
pieces = [llm.tokenizer.decode([token]) for token in llm.encode("What does lamp mean?")]
Table(
    {"token": piece, "experts": str(experts), "weights": ", ".join(f"{weight:.2f}" for weight in weights)}
    for piece, experts, weights in zip(pieces, experts_TJ.tolist(), weights_TJ.tolist(), strict=True)
)

# %% [markdown]
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** Ask the demo for 347 + 85 and keep its answer in `sum_text`.

# %%
def check_00_1(text):
    print("pass" if text == "432" else f"not yet: expected '432', got {text!r}")


# %% tags=["exercise-1"]
sum_text = llm.chat("Hello!").text

check_00_1(sum_text)

# %% [markdown]
# **2.** Draw a text at temperature 1 twice with a seed that you choose, and once with another seed, so that
# the first two are equal and the third is not.

# %%
def check_00_2(first, second, other):
    if first != second:
        print(f"not yet: expected equal texts, got {first!r} and {second!r}")
    elif first == other:
        print(f"not yet: expected another text from another seed, got {other!r} again")
    else:
        print("pass")


# %% tags=["exercise-2"]
def draw_text(seed):
    return llm.generate("What does", dskit.SamplingParams(temperature=0.0, seed=seed, max_tokens=8)).text


check_00_2(draw_text(5), draw_text(5), draw_text(6))

# %% [markdown]
# **3.** `forgetful` is an RMSNorm that leaves something out, so the demo mumbles. Read `norm.rms` above and
# repair it.

# %%
def answer():
    """A definition, without thinking first."""
    params = dskit.SamplingParams(max_tokens=16)
    return llm.chat("What does lamp mean?", thinking={"type": "disabled"}, params=params).text


def check_00_3():
    with dskit.use({"norm.rms": "forgetful"}):
        said = answer()
    print("pass" if said == answer() else f"not yet: expected {answer()!r}, got {said!r}")


# %% tags=["exercise-3"]
@ops.implement("norm.rms", "forgetful")
def forgetful(x, gain_D, eps, dtype):
    wide = norm.up(x)
    return (wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()).to(dtype)


check_00_3()

# %% [markdown]
# ## What to read next
#
# - [01_mla](01_mla.ipynb): how all heads share one key-value vector per token.
# - `dskit/model.py`: the file that you saw a part of; it is as long as its idea.
# - `dskit serve demo` opens the chat page, with the same model behind OpenAI's API.
