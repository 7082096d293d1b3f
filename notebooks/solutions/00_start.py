# %% [markdown]
# Solutions of 00_start: each cell takes the place of the exercise's cell.

# %% tags=["exercise-1"]
sum_text = llm.chat("What is 347 + 85?").text

check_00_1(sum_text)

# %% [markdown]
# At temperature 0 nothing is drawn, so every seed gives the same text.

# %% tags=["exercise-2"]
def draw_text(seed):
    return llm.generate("What does", dskit.SamplingParams(temperature=1.0, seed=seed, max_tokens=8)).text


check_00_2(draw_text(5), draw_text(5), draw_text(6))

# %% [markdown]
# The learned gain of each channel was missing.

# %% tags=["exercise-3"]
@ops.implement("norm.rms", "forgetful")
def forgetful(x, gain_D, eps, dtype):
    wide = norm.up(x)
    y = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
    return (y if gain_D is None else y * gain_D).to(dtype)


check_00_3()
