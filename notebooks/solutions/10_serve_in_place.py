# %% [markdown]
# Solutions of 10_serve_in_place: each cell takes the place of the exercise's cell.

# %% tags=["exercise-1"]
body = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 25 + 17?"}],
    "max_tokens": 100,
    "reasoning_effort": "high",
}

check_10_1(body)

# %% [markdown]
# The texts of torch first, then the kernel's; the swap back comes even if a question fails.

# %% tags=["exercise-2"]
def same_text(kernel):
    plain = [ask(question, max_tokens=16) for question in questions]
    llm.swap({"norm.rms": kernel})
    try:
        return [ask(question, max_tokens=16) for question in questions] == plain
    finally:
        llm.swap({"norm.rms": "torch"})


check_10_2(same_text)

# %% [markdown]
# Closing the stream closes the connection; the server notices, ends the request and frees its cache blocks.

# %% tags=["exercise-3"]
def leave_early():
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": LONG}], temperature=0, stream=True
    )
    for read, _ in enumerate(stream, 1):
        if read == 5:
            break
    stream.close()
    return read


check_10_3(leave_early)
