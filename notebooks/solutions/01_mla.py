# %% [markdown]
# Solutions of 01_mla: each cell takes the place of the exercise's cell.
#
# The demo's vectors have 96 channels: 96 bytes and 3 scale bytes. Eight heads with a key and a value each: 16
# vectors of 96 numbers of 2 bytes.

# %% tags=["exercise-1"]
shared = vector_bytes(llm.config.head_dim, "fp8")
separate = 2 * llm.config.num_attention_heads * vector_bytes(llm.config.head_dim, "bf16")

check_01_1(shared, separate)

# %% [markdown]
# The sink takes part in the denominator only: weights add up to less than one.

# %% tags=["exercise-2"]
def attend_one(q_H, entries_SH, sink):
    z_S = entries_SH @ q_H / len(q_H) ** 0.5
    weight_S = z_S.exp() / (z_S.exp().sum() + sink.exp())
    return weight_S @ entries_SH


check_01_2(attend_one)

# %% [markdown]
# Turning back is turning by the negative angle, the conjugate. A rotation keeps lengths with or without it,
# so that test could not notice; the layer's output depended on absolute positions, which the shift shows and
# the answer suffers from.

# %% tags=["exercise-3"]
@ops.implement("rope.rotate", "one_way")
def one_way(x, turn_T, inverse=False):
    """Turns queries and keys, and turns the output back."""
    return rotate(x, turn_T.conj() if inverse else turn_T)


check_01_3()
