"""The engine: turns requests into steps of the model, many requests at a time.

One step of the loop, in words. `Engine.plan` empties the inbox and asks the scheduler what to compute now:
either chunks of prompts (prefill) or one new row for every running sequence (decode), never both. A prompt
starts behind the part that the prefix tree knows already. The scheduler hands out cache blocks and state
slots while it plans, and takes them back from a victim when none is left. `Engine.launch` gives the plan to
the runner, which makes the copies it asks for, lays the rows out as one batch and runs the model over the
caches; the sampler picks a token for each sequence that has reached its end. `Engine.commit` appends the
tokens, turns them into text, looks for stop conditions, puts whole blocks into the tree, frees what finished
sequences held, and sends each token to its request's `Handle`. The three are plain calls, so a notebook can
take a step apart:

    engine = LLM("tiny").engine
    engine.submit([5, 6, 7])
    plan = engine.plan()
    result = engine.launch(plan)
    engine.commit(plan, result)

`Engine.step` does the three; with `overlap` it plans and launches a step before it commits the one before,
so that the device never waits for the books.

In reading order:

seq.py        the words of the engine: SamplingParams, Sequence, StepPlan, StepResult, TokenEvent, Result, ...
scheduler.py  queues; which rows now; blocks and slots; preemption; forks; what a new token means
tree.py       prompts that begin alike share blocks: what is known, who holds it, what to evict
runner.py     a plan becomes tensors, the model runs, logits come back
graphs.py     on a GPU, steps of a few sizes are captured and launched by one call, those of prompts by a few
loop.py       Engine (plan, launch, commit, step, overlap) and Handle (a request seen from any thread)
pools.py      the caches: blocks of global KV, slots of window rings and carries
draft.py      a draft guesses ahead: which guesses hold, and what is guessed next
spec.py       how many guesses are worth a row; how far a draft's confidence can be trusted
sampler.py    logits become one token: penalties, temperature, filters, a counter-based draw
grammar.py    structured output: which tokens may follow, from a schema, a pattern or a grammar
text.py       ids become text as they arrive: UTF-8 borders, stop strings
exchange.py   experts on several ranks: which slot is where, rows there and answers back
deepep.py     the same by DeepEP, where that is installed
window.py     memory that GPUs of one NVLink domain write to each other, for the exchange
dist.py       the ranks of a group: who is there, what they agree on before a step
ranks.py      one engine on several ranks: they step together, rank 0 hands requests out
eplb.py       which slot holds which expert: rows that were counted become a plan, a plan becomes transfers
rebalance.py  experts change their slots while requests are served
engram.py     where the n-gram tables lie, and how a step's rows come from there
host.py       copies between host and device that wait for nothing
config.py     EngineConfig: sizes and limits, and every reason to refuse them at the start
plan.py       what a model would take on some GPUs, and the floors of its steps, without loading it
canary.py     a shadow of the caches that notices wrong blocks, slots and windows (tests; `canary="raise"`)
llm.py        LLM: model, tokenizer and engine in one object; the only class a notebook needs
"""
