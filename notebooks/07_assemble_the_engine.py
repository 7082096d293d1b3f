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
# # 07 · Assemble the engine
#
# **How does one model serve many requests at a time?**
#
# A model computes rows. Somebody has to decide *whose* rows come next, where their memory lies, and what to
# do when there is none left. That is the **engine**. It goes round in steps, and each step has three parts:
# `plan`, `launch`, `commit`. Here you call them by hand.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# Three requests over the engine's steps. A request first reads its prompt (**prefill**), then adds a token
# per step (**decode**). Its memory of earlier tokens lies in **blocks** of 16 positions, and the numbers
# count them. A step is either prefill or decode: while a newcomer reads its prompt, the others rest for that
# step.

# %%
from dskit.viz import figures
from dskit.viz.blocks import CacheMap

SIZES = dict(block_size=16, max_model_len=128, max_num_seqs=4, speculate="off")
llm = dskit.LLM("demo", num_blocks=32, **SIZES)


def ask(engine, name, ids, tokens):
    """Put a request into the queue; nothing is computed yet."""
    params = dskit.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return engine.submit(ids, params, start=False, request_id=name)


board = CacheMap(llm)
ask(llm, "first", llm.encode("What does lamp mean? And what does a harbour do?"), 12)
board.go(3)
ask(llm, "second", llm.encode("What is 47 + 85?"), 6)
board.go(2)
ask(llm, "third", llm.encode("Who are you?"), 4)
board.go()
figures.request_lives(board.lives)

# %% [markdown]
# ## The source
#
# `Scheduler.plan` decides. It reads like the sentence: a prompt if one is due and fits, else one row for
# every running request. `Engine._book` then sends out what a step gave.

# %%
from dskit.engine.loop import Engine
from dskit.engine.scheduler import Scheduler

dskit.show(Scheduler.plan)

# %%
dskit.show(Scheduler.commit)

# %%
dskit.show(Engine._step)

# %% [markdown]
# ## One step by hand
#
# **Plan.** The queue's request gets blocks and a *slot* (room for what does not grow with its length), and
# the plan says which of its rows to compute.

# %%
from dskit.viz.notebook import Table

by_hand = ask(llm, "by hand", llm.encode("What does lamp mean?"), 3)
plan = llm.engine.plan()
Table(
    (
        {"request": c.seq.request_id, "rows": f"{c.start} to {c.stop - 1}", "blocks": c.seq.blocks}
        for c in plan.chunks
    ),
    f"a {plan.kind} step of {plan.rows} rows",
)

# %% [markdown]
# **Launch.** The model runs over these rows, writes what it must remember into the blocks, and a token is
# chosen from the scores of the last row.

# %%
result = llm.engine.launch(plan)
(sampled,) = result.outputs
print("token", sampled.token_id, repr(llm.tokenizer.decode([sampled.token_id])))

# %% [markdown]
# **Commit.** The books are brought up to date: the token belongs to the request now, and goes out as an
# event.

# %%
events = llm.engine.commit(plan, result)
print(events[0])
request = plan.chunks[0].seq
print("in the caches:", request.num_computed, "rows; known:", len(request.tokens), "tokens")

# %% [markdown]
# The newest token is known, but its row has not been computed: that is the next step's work. `step` does all
# three parts.

# %%
while not by_hand.finished:
    llm.step()

print(by_hand.result().text)
print(llm.stats())

# %% [markdown]
# ## Blocks
#
# All blocks of the cache. A letter says whose it is. Hatched blocks are *shared*: two prompts that begin
# alike need that memory once. A `c` marks a block that no request holds and the *prefix tree* still knows, so
# that a later prompt can begin behind it. Press *plan*, *launch*, *commit*, and look at the counts: they are
# those of `llm.stats()`, which a server shows at `/metrics`.

# %%
shared_text = "What does lamp mean? And what does a harbour do? Tell me "
panel = CacheMap(llm)
ask(llm, "A lamp", llm.encode(shared_text + "more about lamps."), 8)
panel.go(2)
ask(llm, "A harbour", llm.encode(shared_text + "more about harbours."), 8)
panel.go(2)
panel

# %% [markdown]
# A panel ends with the kernel; its picture stays. The line at its side has the bytes of all caches by kind:
# *window* (the last tokens, in slots), *global* and *index* (in blocks).

# %%
panel.figure()

# %%
panel.go()
print(llm.stats())

# %% [markdown]
# ## What a larger batch costs
#
# *TTFT* is the time to first token, *TPOT* the time per output token after it, *throughput* the tokens per
# second of all requests together.

# %%
import time

sizes = dskit.shapes()
print(sizes)


def serve(requests, tokens=6):
    """One row of the table: so many equal requests at once."""
    params = dskit.SamplingParams(max_tokens=tokens, ignore_eos=True)
    room = SIZES | {"max_num_seqs": requests, "enable_prefix_caching": False}
    with dskit.LLM(llm.model, tokenizer=llm.tokenizer, **room) as engine:
        start = time.perf_counter()
        results = engine.generate([llm.encode(f"What is {n} + 85?") for n in range(requests)], params)
        seconds = time.perf_counter() - start
    return {
        "requests": requests,
        "TTFT, ms": 1e3 * sum(r.usage.ttft_s for r in results) / requests,
        "TPOT, ms": 1e3 * sum(1 / r.usage.decode_tok_s for r in results) / requests,
        "throughput, tokens/s": requests * tokens / seconds,
    }


serve(1)  # the first run pays for what later ones find ready
Table([serve(requests) for requests in (1, 2, sizes.decode_requests, 2 * sizes.decode_requests)])

# %% [markdown]
# Read the table downwards: how does the time per token grow from the first row to the last, and how does the
# throughput? A step reads the model's weights once, for however many requests.
#
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** When decode finds no free block, the scheduler takes everything back from one request and computes it
# again later: a **preemption**. Two requests of 40 prompt tokens and 20 new ones each are served below.
# Choose the number of blocks (16 positions each) so that both are started and then one is preempted. The
# check also wants the same tokens as with room enough, and all blocks back at the end. (A newcomer is started
# only if the blocks of its prompt are free, and as many more as those who run will probably ask for.)

# %%
def served_with(num_blocks):
    """Tokens of two requests, the panel that stepped through them, and the engine's counts."""
    sizes = SIZES | {"max_model_len": 64}
    with dskit.LLM(llm.model, tokenizer=llm.tokenizer, num_blocks=num_blocks, **sizes) as engine:
        lives = CacheMap(engine)
        handles = [ask(engine, f"request {n}", [n + 5] * 40, 20) for n in (1, 2)]
        lives.go()
        return [handle.result().token_ids for handle in handles], lives, engine.stats()


def check_07_1(num_blocks):
    tokens, lives, stats = served_with(num_blocks)
    if not stats["preemptions"]:
        print(f"not yet: expected a preemption, got none with {num_blocks} blocks")
    elif tokens != served_with(32)[0] or stats["blocks_free"] != num_blocks:
        print("not yet: expected the same tokens and all blocks back")
    else:
        print("pass")
    return figures.request_lives(lives.lives)


# %% tags=["exercise-1"]
num_blocks = 12

check_07_1(num_blocks)

# %% [markdown]
# **2.** How many blocks does a request hold that has `tokens` tokens in its caches? The check asks around the
# borders of blocks.

# %%
def check_07_2(blocks_of):
    for tokens in (1, 15, 16, 17, 32, 33):
        wanted = len(range(0, tokens, SIZES["block_size"]))
        if blocks_of(tokens, SIZES["block_size"]) != wanted:
            got = blocks_of(tokens, SIZES["block_size"])
            print(f"not yet: expected {wanted} for {tokens} tokens, got {got}")
            return
    print("pass")


# %% tags=["exercise-2"]
def blocks_of(tokens, block_size):
    return tokens // block_size


check_07_2(blocks_of)

# %% [markdown]
# **3.** A prompt that begins like an earlier one starts behind what is known of it. `known` has been served.
# Make a prompt that holds all of `known` and one token more, so that the engine reuses 32 of its positions.

# %%
known = [11 + n % 50 for n in range(40)]


def check_07_3(prompt):
    llm.engine.forget()
    params = dskit.SamplingParams(max_tokens=1)
    llm.generate(known, params)
    reused = llm.generate(prompt, params).usage.cached_tokens
    if len(prompt) != len(known) + 1 or not set(known) <= set(prompt):
        print(f"not yet: expected all of `known` and one token more, got {len(prompt)} tokens")
    else:
        print("pass" if reused == 32 else f"not yet: expected 32 positions reused, got {reused}")


# %% tags=["exercise-3"]
prompt = [9, *known]

check_07_3(prompt)

# %% [markdown]
# ## What to read next
#
# - `dskit/engine/__init__.py`: the engine's files in the order of reading.
# - `dskit/engine/tree.py`: who may begin behind whom.
# - [06_kernel_swap_and_profile](06_kernel_swap_and_profile.ipynb): what a step is made of.
