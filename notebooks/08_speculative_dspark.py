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
# # 08 · Speculative decoding with DSpark
#
# **How can a step give several tokens when each token depends on the one before it?**
#
# A model writes one token per step. Most of a step's time goes into reading weights, and they are read
# whether the step computes one row or six. So a small second network, the **draft**, guesses the next five
# tokens, and the model checks all five in one step. What it would have said itself is kept. DSpark is the
# draft of DeepSeek-V4.1-Flash, and the demo has one too.

# %%
import dskit

dskit.notebook(seed=0)

# %% [markdown]
# ## The picture
#
# A **round** is one step of the model with guesses to check. Each strip below is a round. Guesses that the
# model agrees with are kept. Where it disagrees, its own token takes the place of the guess, and the guesses
# behind it are thrown away. If all are kept, the model's own token comes on top. So a round gives at least
# one token, and at most one more than there are guesses.
#
# The cell takes the steps of the engine by hand and looks at the guesses before each one. First the model
# goes on from "What does", drawing tokens at random, so nobody can know which word it will ask for. Then it
# answers a sum, where each token follows from what stands before. Numerics are `exact` (float32, no
# rounding), so that texts can be compared to the letter.

# %%
from dskit.engine.spec import survivals
from dskit.viz import figures

if "llm" in globals():  # when the notebook is run again
    globals()["llm"].close()
llm = dskit.LLM("demo", numerics="exact", speculate="static", overlap=False)
GUESSES = llm.config.dspark_block_size


def piece(token_id):
    """A token as text; those that show nothing by a word."""
    return llm.tokenizer.decode([token_id]) or "(end)"


def rounds_of(prompt, temperature=0.0, max_tokens=64):
    """Continue a prompt step by step; one row per round."""
    params = dskit.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    handle, rows = llm.submit(prompt, params, start=False), []
    while not handle.finished:
        running = llm.engine.scheduler.running
        guess = running[0].proposal if running else None
        events = llm.step()
        if guess:
            rows.append(
                {
                    "drafted": [piece(token) for token in guess.tokens],
                    "held": llm.engine.rounds()[-1].held,
                    "next": piece(events[-1].token_id),
                    "chance": survivals(guess.confidence),
                }
            )
    return rows


made_up = rounds_of("What does", temperature=1.0, max_tokens=5)
answered = rounds_of(llm.render("What is 47 + 85?")[0].ids)
rounds = made_up + answered
figures.acceptance(rounds)

# %% [markdown]
# The **accepted length** is the number of tokens per round, the model's own token included. The draft also
# says how sure it is of each guess: its **confidence**. The diamonds show what it expected, the bars what
# happened. This draft was trained on answers only: on the made-up question it errs, and does not know it.
# The last round of a text ends with it, whatever was guessed behind the end.
#
# ## The source
#
# The formulas of the draft are one file. Look for three things: `propose` goes from left to right and adds
# what the token just drafted says about the next one; `confidence` gives one number per guess; `accept`
# decides.

# %%
from dskit.layers import dspark

dskit.show(dspark)

# %% [markdown]
# ## Same text, fewer steps
#
# The draft must not change what the model says. Without a draft and with one, greedy (temperature 0) and
# drawn at random from one seed:

# %%
from dskit.viz.notebook import Table

QUESTION = "What is 12 * 12?"


def engine(**settings):
    """Another engine over the same model."""
    return dskit.LLM(llm.model, tokenizer=llm.tokenizer, overlap=False, **settings)


rows = []
with engine(speculate="off") as plain, engine(speculate="static") as drafting:
    for temperature in (0.0, 1.0):
        params = dskit.SamplingParams(temperature=temperature, seed=3, max_tokens=24)
        alone, drafted = (one.chat(QUESTION, params=params) for one in (plain, drafting))
        rows.append(
            {
                "temperature": temperature,
                "same tokens": alone.token_ids == drafted.token_ids,
                "tokens": len(drafted.token_ids),
                "rounds": drafted.usage.rounds,
            }
        )
Table(rows, "without a draft and with one")

# %% [markdown]
# ## Which texts are easy to guess?
#
# Choose a question and a temperature. A higher **temperature** makes unlikely tokens likelier, so the model
# surprises its draft more often.

# %%
from dskit.viz.widgets import Panel

asked = {
    "sum": "What is 347 + 85?",
    "definition": "What does lamp mean?",
    "about itself": "Who are you?",
    "JSON": "Give me a JSON object with the name Mira and the age 34.",
}


def guesses(question, temperature):
    """Rounds of one question."""
    prompt, _ = llm.render(asked[question])
    return rounds_of(prompt.ids, float(temperature), max_tokens=48)


panel = Panel(guesses, figures.acceptance, {"question": list(asked), "temperature": ["0", "0.7", "1.5"]})
panel

# %%
panel.figure()

# %% [markdown]
# A panel ends with the kernel; its picture stays.
#
# ## What is a longer block worth?
#
# More guesses give more tokens per round, but each one is a row that the model must compute. Below,
# `guesses` is the most that a round may check. The engine decides how many guesses are worth their row by a
# table of costs; here the cell hands it a table in which every further row costs far too much. Times differ
# from run to run and from machine to machine; on a busy one look at the tokens per round alone.

# %%
from dskit.engine.spec import StepCost


def at_most(count):
    """Settings of an engine that checks at most so many guesses per round."""
    if not count:
        return {"speculate": "off"}
    dear = StepCost((1 + count, 2 + GUESSES), (1.0, 1e6))
    return {"speculate": "scheduled", "step_cost": dear}


rows = []
for count in (0, 1, 3, GUESSES):
    with engine(**at_most(count)) as one:
        one.generate("Hello", dskit.SamplingParams(max_tokens=6))  # the first steps are slower
        usage = one.chat(QUESTION, params=dskit.SamplingParams(max_tokens=48)).usage
    per_round = 1 + usage.accepted / usage.rounds if usage.rounds else 1.0
    rows.append(
        {
            "guesses": count,
            "tokens per round": per_round,
            "ms per round": 1000 * per_round / usage.decode_tok_s,
            "tokens/s": usage.decode_tok_s,
        }
    )
for row in rows:
    row["times without"] = row["tokens/s"] / rows[0]["tokens/s"]
Table(rows, f"one request, {llm.device}")

# %% [markdown]
# ## Where the time goes
#
# A **profile** records which op took how long. Layers called `mtp` are the draft's, numbers are the model's
# own. A profile slows the run down: compare the shares, not the times.

# %%
with dskit.profile(llm) as seen:
    llm.chat("Who are you?", params=dskit.SamplingParams(max_tokens=4))

rows = sorted(seen.table("decode"), key=lambda row: -(row["share"] or 0))
Table(rows[:8], "the eight ops that took longest in rounds")

# %% [markdown]
# ## Exercises
#
# Each has a check that prints `pass`, or what it expected and what it got. Solutions are in
# `notebooks/solutions`.
#
# **1.** `rounds` holds the rounds of the first picture; each has `held`, how many guesses were kept. Compute
# the accepted length, and how often the second guess was kept *when the first one was*.

# %%
def check_08_1(length, second):
    held = [row["held"] for row in rounds]
    first = [n for n in held if n >= 1]
    wanted = (1 + sum(held) / len(held), sum(n >= 2 for n in first) / len(first))
    close = max(abs(a - b) for a, b in zip((length, second), wanted, strict=True)) < 1e-9
    print("pass" if close else f"not yet: expected {wanted}, got {(length, second)}")


# %% tags=["exercise-1"]
length = len(rounds)
second = 0.0

check_08_1(length, second)

# %% [markdown]
# **2.** When tokens are drawn at random, a guess must be kept by chance, so that the text still follows the
# model. The draft drew `guess` from its probabilities `q`; the model's are `p`. Keep the guess with
# probability min(1, p/q), and otherwise draw from what the model has *more* of than the draft: max(p - q,
# 0). `coin` and `draw` are random numbers between 0 and 1. The cell below makes a well-known mistake; the
# check plays every guess with many coins and draws, and compares how often each token comes out with `p`.

# %%
def pick(weights, draw):
    """The token on which a random number falls."""
    total = 0.0
    for token, weight in enumerate(weights):
        total += weight
        if total > draw * sum(weights):
            return token


def check_08_2(emit):
    p, q, n = (0.5, 0.3, 0.2, 0.0), (0.1, 0.2, 0.3, 0.4), 50
    grid = [(i + 0.5) / n for i in range(n)]
    share = [0.0] * len(p)
    for guess, chance in enumerate(q):
        for coin in grid:
            for draw in grid:
                share[emit(p, q, guess, coin, draw)] += chance / n**2
    worst = max(abs(a - b) for a, b in zip(share, p, strict=True))
    said = ", ".join(f"{one:.2f}" for one in share)
    print("pass" if worst < 0.02 else f"not yet: expected tokens in shares {p}, got {said}")


# %% tags=["exercise-2"]
def emit(p, q, guess, coin, draw):
    if coin * q[guess] < p[guess]:
        return guess
    return pick(p, draw)


check_08_2(emit)

# %% [markdown]
# **3.** Predict the best number of guesses. `alive[k]` is the chance that guess k + 1 is reached and kept,
# and `time_ms[n]` what a round with n guesses takes. A round gives one token and those that are kept; what
# counts is tokens per millisecond. Then compare with the table above.

# %%
def check_08_3(best_count):
    alive = (0.9, 0.75, 0.5, 0.2, 0.1)
    found = {
        "rows are free": best_count(alive, (10, 10, 10, 10, 10, 10)),
        "rows cost a little": best_count(alive, (10, 10.5, 11, 12, 14, 16)),
        "rows cost as much as a step": best_count(alive, (10, 20, 30, 40, 50, 60)),
    }
    wanted = {"rows are free": 5, "rows cost a little": 3, "rows cost as much as a step": 0}
    print("pass" if found == wanted else f"not yet: expected {wanted}, got {found}")


# %% tags=["exercise-3"]
def best_count(alive, time_ms):
    return len(alive)


check_08_3(best_count)

# %% [markdown]
# ## What to read next
#
# - `dskit/engine/draft.py`: one round, and how guesses are drawn.
# - `dskit/engine/spec.py`: how many guesses are worth a row, when many requests share a step.
# - `dskit bench spec demo`: the same figures over many prompts.
