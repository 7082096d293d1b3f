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
# # 10 · Serve in place
#
# **Can one chat with the model that a notebook holds, and change it while it answers?**
#
# A server is often a second program with a second copy of the model. Here it is a thread of the notebook.
# The chat page, the API and your cells use one model and one engine. So a kernel that you swap in a cell is
# at once the kernel of the running chat. This notebook opens the server, talks to it, swaps a kernel in the
# middle of a reply, and closes it again.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# A **request** is one question with its settings. It travels from left to right, and its tokens come back
# the same way, one by one. The **engine** takes steps: in each one every running request gets at least a
# token. An **op** is a named operation, such as a norm; a **kernel** is one way to compute it.

# %%
from dskit.viz import figures

figures.request_path(
    [
        {"what": "chat page", "where": "serve/ui.py", "thread": "the browser"},
        {"what": "API", "where": "serve/api.py", "thread": "the server's thread"},
        {"what": "scheduler", "where": "engine/scheduler.py", "thread": "the engine's thread"},
        {"what": "model", "where": "model.py", "thread": "the engine's thread"},
        {"what": "op", "where": "ops.py", "thread": "the engine's thread"},
        {"what": "kernel", "where": "kernels/ or a cell", "thread": "the engine's thread"},
    ]
)

# %% [markdown]
# ## The source
#
# `dskit.serve.start` is short: it makes the application and gives it a thread.

# %%
dskit.show(dskit.serve.start)

# %% [markdown]
# ## Open it
#
# Port 0 takes a free port. The last line of the cell shows the server, and a server shows itself as its chat
# page. Ask it "What does lamp mean?". The page comes from the machine on which the kernel runs; if that is
# not yours, forward the port that the link names. Numerics are `exact` (float32, no rounding), so that texts
# can be compared to the letter.

# %%
for earlier in ("server", "llm"):  # when the notebook is run again
    if earlier in globals():
        globals()[earlier].close()
llm = dskit.LLM("demo", numerics="exact")
server = dskit.serve.start(llm, port=0)
server

# %% [markdown]
# The API is OpenAI's, so OpenAI's own client works. `temperature=0` always takes the likeliest token; that
# is called **greedy**, and it gives the same text each time.

# %%
from openai import OpenAI

client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
QUESTION = "What does lamp mean?"


def ask(question, **fields):
    """The answer of the API, greedy and without a thought before it."""
    reply = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        extra_body={"thinking": {"type": "disabled"}},
        **fields,
    )
    return reply.choices[0].message.content


print("API     :", ask(QUESTION))
print("notebook:", llm.chat(QUESTION, thinking={"type": "disabled"}).text)

# %% [markdown]
# The engine counts tokens. What the API produced is in the notebook's own count:

# %%
before = llm.stats()["tokens"]
ask("What does harbour mean?")
print(f"the API's answer added {llm.stats()['tokens'] - before} tokens to llm.stats()")

# %% [markdown]
# ## Swap a kernel while a reply streams
#
# First a kernel to swap in: the norm of every layer, written by hand in a cell.

# %%
from dskit import ops

dskit.show(ops.find("norm.rms").reference)

# %%
calls = 0


@ops.implement("norm.rms", "by_hand")
def by_hand(x, gain_D, eps, dtype):
    """The same formula, which also counts how often it is asked."""
    global calls
    calls += 1
    wide = x.float()
    y = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
    return (y if gain_D is None else y * gain_D).to(dtype)


# %% [markdown]
# Now a reply as a **stream**: tokens are shown as they come. After four pieces the cell swaps. `llm.swap`
# waits for the running step, changes the choice, and the request goes on. It says what it did.

# %%
def streamed(question, swap_to=None):
    """The reply piece by piece, with a swap after the fourth piece."""
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": question}], temperature=0, stream=True
    )
    pieces = []
    for chunk in stream:
        delta = chunk.choices[0].delta if chunk.choices else None
        text = delta and (getattr(delta, "reasoning_content", None) or delta.content)
        if text:
            pieces.append(text)
        if len(pieces) == 4 and swap_to:
            print(llm.swap({"norm.rms": swap_to}))
            swap_to = None
    return pieces


llm.swap({"norm.rms": "torch"})  # which a CPU has anyway
plain = streamed("What is 47 + 85?")
swapped = streamed("What is 47 + 85?", swap_to="by_hand")
print(f"by_hand was called {calls} times")
print("same text:", "".join(plain) == "".join(swapped))
llm.swap({"norm.rms": "torch"})

# %% [markdown]
# Both kernels compute the same formula, and float32 leaves them so close that the likeliest token stays the
# likeliest. The cell shows it for this text; another kernel or a coarser number format may differ in a rare
# close call.
#
# ## Ask with either kernel
#
# Choose a kernel and a question, then press *Ask*: the question goes through the API, to the same server as
# the chat page. Equal rows say so.

# %%
from dskit.viz.widgets import Panel

asked = []


def reply(kernel, question):
    """Ask through the API with one kernel of norm.rms, and keep the answer beside earlier ones."""
    llm.swap({"norm.rms": kernel})
    tokens = [llm.tokenizer.decode([token]) for token in llm.tokenizer.encode(ask(question))]
    asked.append({"label": kernel, "tokens": tokens})
    return asked[-6:]


questions = [QUESTION, "What does harbour mean?", "Who are you?"]
reply("by_hand", QUESTION)
controls = {"kernel": ["torch", "by_hand"], "question": questions}
panel = Panel(reply, figures.token_strips, controls, button="Ask")
panel

# %%
panel.figure()

# %% [markdown]
# A panel ends with the kernel; its picture stays.
#
# ## What a reply costs
#
# Every result has its counts. `per round` is how many tokens one step gave on average: the demo has a draft
# that guesses ahead. `cached` are tokens of the prompt that an earlier request had left in the cache. They
# are shared in whole blocks of tokens, so a prompt shorter than a block shares none.

# %%
from dskit.viz.notebook import Table


def statistics(question):
    """One row: what one reply of the engine took."""
    usage = llm.chat(question).usage
    return {
        "question": question,
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "answered": usage.completion_tokens,
        "first token, s": usage.ttft_s,
        "tokens/s": usage.decode_tok_s,
        "per round": 1 + usage.accepted / usage.rounds if usage.rounds else 1.0,
    }


rows = [statistics(question) for question in [*questions, "What is 12 * 12?"]]
Table(rows, f"per reply; a block holds {llm.engine.cfg.block_size} tokens")

# %% [markdown]
# A **profile** records which op took how long. It sees the engine's thread too, so a request that comes
# through the API shows up like any other. A profile slows the run down: compare the shares, not the times.

# %%
with dskit.profile(llm) as seen:
    ask("Who are you?", max_tokens=4)

rows = sorted(seen.table("decode"), key=lambda row: -(row["share"] or 0))
Table(rows[:8], "the eight ops that took longest in decode steps")

# %% [markdown]
# ## Close it
#
# `server.close()` ends open replies and frees the port; the model stays. The chat above is needed below, so
# this cell opens a second server, without a page, and closes that one. Two servers on one engine are no
# problem.

# %%
with dskit.serve.start(llm, port=0, ui=False) as second:
    print(second)
print(second)
print("the model still answers:", llm.chat("Who are you?", thinking={"type": "disabled"}).text)

# %% [markdown]
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** Write the body of a request that asks "What is 25 + 17?", thinks first, and allows 100 tokens. The
# fields are those of OpenAI's chat API: `model`, `messages`, `max_tokens`, `reasoning_effort` ("low",
# "high", ...).

# %%
import httpx


def check_10_1(body):
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    if "error" in answer:
        return print(f"not yet: expected an answer, got the error {answer['error']['message']!r}")
    message = answer["choices"][0]["message"]
    if message["content"] != "42":
        return print(f"not yet: expected '42', got {message['content']!r}")
    if not message.get("reasoning_content"):
        return print("not yet: expected a thought before the answer, got none")
    print("pass")


# %% tags=["exercise-1"]
body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 100}

check_10_1(body)

# %% [markdown]
# **2.** Prove that a swap leaves greedy text as it is, or that it does not. `same_text(kernel)` should ask
# each of `questions` with `norm.rms` of torch and with that kernel, compare, and leave torch selected.

# %%
@ops.implement("norm.rms", "forgetful")
def forgetful(x, gain_D, eps, dtype):
    """Leaves out the gain of each channel."""
    return ops.find("norm.rms").reference(x, None, eps, dtype)


def check_10_2(same_text):
    found = {kernel: same_text(kernel) for kernel in ("by_hand", "forgetful")}
    wanted = {"by_hand": True, "forgetful": False}
    selected = ops.selection()["norm.rms"]
    if found != wanted:
        print(f"not yet: expected {wanted}, got {found}")
    else:
        print("pass" if selected == "torch" else f"not yet: expected torch to be selected, got {selected}")


# %% tags=["exercise-2"]
def same_text(kernel):
    return all(ask(question, max_tokens=16) == ask(question, max_tokens=16) for question in questions)


check_10_2(same_text)

# %% [markdown]
# **3.** Stop means stop. Start a long stream, leave it after five chunks, and show that the engine frees the
# request: `llm.stats()["running"]` is 0 soon after. `leave_early()` should return how many chunks it read.
# The client lets go of a stream with `stream.close()`.

# %%
import time

LONG = "What is 4712 * 8539?"


def check_10_3(leave_early):
    read = leave_early()
    end = time.monotonic() + 10
    while llm.stats()["running"] and time.monotonic() < end:
        time.sleep(0.05)
    running = llm.stats()["running"]
    if read != 5:
        print(f"not yet: expected 5 chunks, got {read}")
    else:
        print("pass" if not running else f"not yet: expected nothing to run, got {running}")


# %% tags=["exercise-3"]
def leave_early():
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": LONG}], temperature=0, stream=True
    )
    return sum(1 for _ in stream)


check_10_3(leave_early)

# %% [markdown]
# ## What to read next
#
# - `dskit/serve/api.py`: the routes, and what they refuse.
# - `dskit/engine/loop.py`: how a swap waits for a step.
# - `dskit serve demo` on the command line: the same server without a notebook.
