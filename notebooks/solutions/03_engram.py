# %% [markdown]
# Solutions of 03_engram: each cell takes the place of the exercise's cell.
#
# There are about 3,000 rows and millions of pairs of tokens: nearly every beginning has an end that
# collides.

# %% tags=["exercise-1"]
older, newer = next(
    (older, newer)
    for older in (" of", " the", " a", " and")
    for newer in single
    if row_of(older, newer) == row_of("What", " does")
)

check_03_1(older, newer)

# %% [markdown]
# Another odd number sends both 2-grams elsewhere, and only by chance to one row again.

# %% tags=["exercise-2"]
changed = [multiplier[0] + 2, *multiplier[1:]]

check_03_2(changed)

# %% [markdown]
# The numbers are joined by xor, not added.

# %% tags=["exercise-3"]
def rows_by_hand(gram, multiplier, prime, offset):
    rows, h = [], gram[0] * multiplier[0]
    for size in range(2, len(gram) + 1):
        h = h ^ gram[size - 1] * multiplier[size - 1]
        rows += [start + h % p for start, p in zip(offset[size - 2], prime[size - 2], strict=True)]
    return rows


check_03_3(rows_by_hand)
