# %% [markdown]
# Solutions of 02_sliding_window: each cell takes the place of the exercise's cell.
#
# The window ends at the query itself, so it begins `window - 1` tokens earlier.

# %% tags=["exercise-1"]
def window_start(position, window):
    return max(0, position - window + 1)


check_02_1(window_start)

# %% [markdown]
# A query at position p has seen p + 1 tokens, its own included; so many full groups are in them.

# %% tags=["exercise-2"]
def complete(position, ratio):
    return (position + 1) // ratio


check_02_2(complete)

# %% [markdown]
# Only visible entries compete; sorting by falling score and then by place lets the earlier of two equals win.

# %% tags=["exercise-3"]
def choose(score_S, visible, k):
    ranked = sorted(range(visible), key=lambda entry: (-score_S[entry], entry))
    return sorted(ranked[:k])


check_02_3(choose)
