# %% [markdown]
# Solutions of 08_speculative_dspark: each cell takes the place of the exercise's cell.
#
# The model's own token counts in every round. The second guess is only looked at where the first was kept,
# so the rounds that threw the first one away are left out.

# %% tags=["exercise-1"]
held = [row["held"] for row in rounds]
length = 1 + sum(held) / len(held)
second = sum(n >= 2 for n in held) / sum(n >= 1 for n in held)

check_08_1(length, second)

# %% [markdown]
# Drawing from p again would give tokens that the draft likes a second chance. What is missing after the kept
# guesses is exactly max(p - q, 0).

# %% tags=["exercise-2"]
def emit(p, q, guess, coin, draw):
    if coin * q[guess] < p[guess]:
        return guess
    return pick([max(a - b, 0.0) for a, b in zip(p, q, strict=True)], draw)


check_08_2(emit)

# %% tags=["exercise-3"]
def best_count(alive, time_ms):
    rates = [(1 + sum(alive[:count])) / time_ms[count] for count in range(len(alive) + 1)]
    return rates.index(max(rates))


check_08_3(best_count)
