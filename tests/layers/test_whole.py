"""Whole packed sequences, as training runs them, against the oracle's view of each conversation alone."""

import pytest
import torch

from dskit.layers.mla import Memory
from dskit.train.whole import whole_step
from tests import models, oracle

# (start, length) of the conversations in each row of 64 tokens; windows are 8 and candidate blocks 4 long
ROWS = (((0, 20), (20, 44)), ((0, 64),))


def packed(made, name: str, numerics: str) -> list[tuple[torch.Tensor, list[int]]]:
    """(logits, ids) of each conversation, computed as one batch."""
    checkpoint = made(name)
    model = checkpoint.load(numerics)
    ids = torch.tensor([models.ids(checkpoint.raw, 64, seed) for seed in range(len(ROWS))])
    start = torch.tensor([sum(([at] * length for at, length in row), []) for row in ROWS])
    with torch.inference_mode():
        folding = torch.as_tensor(model.folding)
        step = whole_step(model, folding, ids, start, sparse=True, probes=4)
        logits = model(step, Memory()).unflatten(0, ids.shape)
    parts = [(b, slice(at, at + n)) for b, row in enumerate(ROWS) for at, n in row]
    return [(logits[part], ids[part].tolist()) for part in parts]


def test_packed_conversations_equal_the_oracle(made):
    net = made("tiny").net()
    for logits, ids in packed(made, "tiny", "exact"):
        run = oracle.forward(net, ids)
        assert min(run.gaps) > 3e-6
        assert models.relative_rms(logits, run.logits) < 1e-5


@pytest.mark.slow
def test_packed_conversations_round_as_the_release_does(made):
    net = made("calm-1").net(release=True)
    for logits, ids in packed(made, "calm-1", "release"):
        wanted = oracle.forward(net, ids).logits
        error = (logits - wanted).pow(2).mean(1).sqrt() / wanted.std(1)
        assert error.median() < 0.15
