# %% [markdown]
# Solutions of 07_assemble_the_engine: each cell takes the place of the exercise's cell.
#
# A prompt of 40 takes three blocks, 60 tokens take four. With six blocks the second request waits until the
# first has ended; with eight both have room to the end. With seven both start, and one block is missing.

# %% tags=["exercise-1"]
num_blocks = 7

check_07_1(num_blocks)

# %% [markdown]
# A block that is begun is held.

# %% tags=["exercise-2"]
def blocks_of(tokens, block_size):
    return -(-tokens // block_size)


check_07_2(blocks_of)

# %% [markdown]
# A position is reused only if all before it are the same: whatever stands in front changes every block
# behind. Of the 40 known positions two blocks are whole.

# %% tags=["exercise-3"]
prompt = [*known, 9]

check_07_3(prompt)
