# %% [markdown]
# Solutions of 09_ablation: each cell takes the place of the exercise's cell.

# %% tags=["exercise-1"]
def verdict(differences):
    mean, error = ablate.mean_of(differences)
    if error is None or abs(mean) <= ablate.T95[len(differences) - 2] * error:
        return "cannot say"
    return "worse" if mean > 0 else "better"


check_09_1(verdict)

# %% [markdown]
# One more routed expert has the size of the shared one; a token meets it if it is also chosen.

# %% tags=["exercise-2"]
def give_back(config):
    return {
        "n_routed_experts": config.n_routed_experts + 1,
        "num_experts_per_tok": config.num_experts_per_tok + 1,
    }


check_09_2(give_back)

# %% tags=["exercise-3"]
ablate.VARIANTS["one_round"] = ablate.Variant(
    "one round of Sinkhorn", "all parameters", fair=lambda config: {"hc_sinkhorn_iters": 1}
)

check_09_3("one_round")
