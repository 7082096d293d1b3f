"""The layers of the model, one file per idea, in the order in which they build on each other.

Read them as the data flows: norm, rope, linear, swa, compress, indexer, mla, engram, mhc, moe, dspark.

Shape suffixes used in every file (the symbol of model.md in brackets):

    B requests            T tokens of a step, packed over requests     S cached positions or entries
    D hidden [D]          L layers [L]                                 N residual streams [n]
    A query heads [A]     H head width [d]                             R query rank [Rq]
    G output groups [G]   O output rank per group [Ro]                 W window [w]
    K selected entries    E experts [E]                                J experts per token [k]
    I expert width [I]    Q longest n-gram [N]                         C hash columns
    P cache blocks        V vocabulary                                 M drafted tokens
"""
