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
# # 06 · Kernel swap and profile
#
# **What changes when a kernel takes the place of a formula, and how does one know that it is right?**
#
# The layers of this model call **ops**: named steps such as `norm.rms`. The formula in the layer file is one
# implementation of an op, a **kernel** (a function written for a GPU) is another. This notebook swaps them
# while the model runs, watches where the time goes, and ends with a kernel that you write in an empty cell.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# One decode step of the demo (a step that adds a token), op by op: before and after a swap of `norm.rms`, the
# op that divides a vector by its root mean square and scales its channels. On a GPU the swap is to the Triton
# kernel. A CPU can only *interpret* Triton kernels, which checks them and says nothing about speed, so there
# we swap to the same formula in many small steps.

# %%
import torch

from dskit import ops
from dskit.layers import norm
from dskit.viz import figures


@ops.implement("norm.rms", "in_steps")
def in_steps(x, gain_D, eps, dtype):
    """The formula of norm.rms, one torch call per sign."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = (wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1]
    y = wide / (mean + eps).sqrt()
    return (y if gain_D is None else y * gain_D).to(dtype)


llm = dskit.LLM("demo", speculate="off")
other = "triton" if llm.device.type == "cuda" else "in_steps"


def decode_steps(implementation, count=4):
    """A profile of some decode steps with one implementation of norm.rms."""
    params = dskit.SamplingParams(max_tokens=count + 2, ignore_eos=True)
    with dskit.use({"norm.rms": implementation}):
        handle = llm.submit("What does", params, start=False)
        llm.step(), llm.step()  # the prompt, and a step that pays for what later ones find ready
        with dskit.profile(llm) as seen:
            while not handle.finished:
                llm.step()
    return seen


def lane(name, seen):
    """The op calls of the last step of a profile, for the picture."""
    step = [r for r in seen.ranges if r.op == "step"][-1]
    inside = [r for r in seen.ranges if r.is_op and step.start <= r.start < step.start + step.duration]
    times = [{"op": r.op, "start_ms": (r.start - step.start) / 1e3, "ms": r.own / 1e3} for r in inside]
    return [{"lane": name, "lit": row["op"] == "norm.rms"} | row for row in times]


before, after = decode_steps("torch"), decode_steps(other)
figures.op_timeline(lane("norm.rms = torch", before) + lane(f"norm.rms = {other}", after))

# %% [markdown]
# The boxes are the processor's time in each op, without the ops that it calls.
#
# ## The source
#
# The formula, and the kernel that does the same. The kernel reads a row once, keeps it in registers, and
# writes the result; `ROWS` rows are handled by one *program*, a run of the kernel's function.

# %%
dskit.show(norm.rms)

# %%
from pathlib import Path

from dskit.viz.notebook import Source

kernels = Path(dskit.__file__).parent / "kernels" / "norm.py"
Source("dskit/kernels/norm.py", kernels.read_text())

# %% [markdown]
# ## The panel
#
# One line per group of ops. A click calls `dskit.use`; the line under the picture is that call, to copy.
# *Error* is the relative difference to the formula in float64 (relative RMS: root mean square of the
# difference over that of the right values); where an op itself rounds, to the formula with the same
# roundings. *Time* is one call of each op in the group. *undo* takes back the last click, *reset* all of
# them.
#
# On a CPU try `triton` for `norm`: the error appears, and "interpreted" where the time would be.

# %%
from dskit.viz.swap import KernelSwap

panel = KernelSwap(["norm", "rope", "mhc", "moe", "mla"])
panel

# %% [markdown]
# The live profile samples one step in 51 of a running model. Its bars are the ops' own times, and what
# compilers take stands apart. Here the engine's thread writes while you click above: a choice made in the
# panel holds from the next step on.

# %%
from dskit.viz.live import LiveProfile

live = LiveProfile(llm, every=9)  # more often than the default, since this text is short
story = llm.submit("What does", dskit.SamplingParams(max_tokens=40, ignore_eos=True))
live

# %% [markdown]
# The same clicks as code. `story` goes on meanwhile; its text does not care who computes.

# %%
panel.toggles["norm"].value = "auto"
print(panel.code)
print(panel.data[0]["state"])
panel.reset()
text = story.result().text
llm.engine.stop()  # from here on steps are taken by these cells again
live.poll()
live.pause()

# %% [markdown]
# Panels end with the kernel; their pictures stay.

# %%
panel.figure()

# %%
live.figure()

# %% [markdown]
# ## All ops
#
# `dskit.compare` runs the implementations of an op on the same arguments. Here are ops of each kind; drop the
# `[:12]` for all. Two errors of one op that are equal to three digits usually mean that both round the same
# result to bfloat16, and that this rounding is the error.

# %%
from dskit.testing import all_cases
from dskit.viz.notebook import Table

sizes = dskit.shapes()
print(sizes)
slow = {"moe.experts", "moe.plan", "mla.attend_cached", "dspark.accept", "sampler.draw"}  # in the interpreter
names = [name for name in sorted(all_cases()) if sizes.device == "cuda" or name not in slow]
rows = []
for name in names if sizes.device == "cuda" else names[:12]:
    for found in dskit.compare(name, only=("torch", "triton"), repeat=sizes.repeat):
        rows.append({"op": name, **found})
Table(rows, "Error against float64, and time")

# %% [markdown]
# And where the time of the decode steps above went, op by op:

# %%
Table(before.table("decode")[:12], "norm.rms = torch")

# %%
changed = [
    {"norm.rms": name, "calls": row["calls"], "ms per step": row["ms_per_step"], "share": row["share"]}
    for name, seen in (("torch", before), (other, after))
    for row in seen.table("decode")
    if row["op"] == "norm.rms"
]
Table(changed, "The swapped op before and after")

# %% [markdown]
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** Which op took the most time of its own in the decode steps of `before`? Read it from the profile by
# code, not by eye: `before.table("decode")` is a list of dicts.

# %%
def check_06_1(op):
    rows = [row for row in before.table("decode") if not row["op"].startswith("(")]
    wanted = max(rows, key=lambda row: row["self_ms"])["op"]
    print("pass" if op == wanted else f"not yet: expected {wanted!r}, got {op!r}")


# %% tags=["exercise-1"]
slowest = "norm.rms"

check_06_1(slowest)

# %% [markdown]
# **2.** This kernel scales rows by a number per row, and it is right at width 64. Run the check: it fails at
# another width. Repair the kernel. (`tl.arange` needs a power of two, so a program has more lanes than the
# row has numbers.)

# %%
def check_06_2(scale_rows):
    for width in (64, 48, 33):
        x_TD, scale_T = torch.randn(3, width, device=llm.device), torch.rand(3, device=llm.device)
        got, wanted = scale_rows(x_TD, scale_T), x_TD * scale_T[:, None]
        if not torch.allclose(got, wanted, atol=1e-6):
            row, col = ((got - wanted).abs() > 1e-6).nonzero()[0].tolist()
            values = f"{wanted[row, col]:.3f}, got {got[row, col]:.3f}"
            print(f"not yet: width {width}, row {row}, column {col}: expected {values}")
            return
    print("pass")


# %% tags=["exercise-2"]
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, scale_ptr, y_ptr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, LANES)
    x = tl.load(x_ptr + row * LANES + col)
    tl.store(y_ptr + row * LANES + col, x * tl.load(scale_ptr + row))


def scale_rows(x_TD, scale_T):
    rows, width = x_TD.shape
    lanes = triton.next_power_of_2(width)
    room = torch.zeros(rows * lanes, device=x_TD.device)  # so that nothing is read beyond the rows
    room[: x_TD.numel()] = x_TD.flatten()
    y = torch.zeros_like(room)
    scale_kernel[(rows,)](room, scale_T, y, WIDTH=width, LANES=lanes)
    return y[: x_TD.numel()].view(rows, width)


check_06_2(scale_rows)

# %% [markdown]
# **3.** The empty cell. Write RMSNorm as a Triton kernel and register it as implementation `"mine"` of
# `norm.rms`. The signature is that of the formula: `x` of any number of rows (also none) and any strides, a
# gain or None, `eps`, and the dtype of the result. `from dskit.kernels.common import ld, narrow` gives
# loading with widening, and rounding as a GPU rounds. The check is **parity** at every edge shape of the op's
# case table, and then the model's last norm must give the same with your kernel as without it.

# %%
from dskit.testing import check


def check_06_3():
    try:
        for shape in all_cases()["norm.rms"].edges:
            check(all_cases()["norm.rms"], shape, "mine", device=llm.device)
    except Exception as error:
        print(f"not yet: expected parity at every edge shape, got {type(error).__name__}: {error}")
        return
    x_TD = torch.randn(4, llm.config.hidden_size).to(llm.device, llm.dtype)
    layer = llm.model.norm
    with dskit.use({"norm.rms": "mine"}):
        got = layer(x_TD)
    off = (got.float() - layer(x_TD).float()).abs().max().item()
    print("pass" if off < 0.05 else f"not yet: expected what the model's own norm gives, got {off:.3f} off")


# %% tags=["exercise-3"]


check_06_3()

# %% [markdown]
# ## What to read next
#
# - [07_assemble_the_engine](07_assemble_the_engine.ipynb): who calls these ops, and when.
# - `dskit/ops.py`: who decides what an op runs, and why a refusal says so.
# - `dskit profile demo` on the command line writes such a profile as a trace for Perfetto, and
# `dskit bench kernels` times every kernel on a GPU beside public libraries.
