"""Random checkpoints, drawn once per run and read by the oracle and by dskit from the same files."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from dskit import checkpoint
from dskit.config import PRESETS_DIR
from dskit.model import Model
from tests import models, oracle


@dataclass
class Made:
    """One checkpoint folder and the two views of it."""

    folder: Path
    raw: dict

    def load(self, numerics: str = "exact", **settings) -> Model:
        return checkpoint.load(self.folder, numerics=numerics, device="cpu", **settings)

    def net(self, **settings) -> oracle.Net:
        return models.net(self.folder, **settings)

    def ids(self, count: int, seed: int = 0) -> list[int]:
        """Random ids, one of them an image token where the model knows any."""
        image = (min(7, count - 1),) if self.raw.get("image_token_id") is not None else ()
        return models.ids(self.raw, count, seed, image_at=image)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """made("tiny") , made("odd"), made("v41-3"), made("v4-3"), made("calm"): a checkpoint of that name."""

    @cache
    def make(name: str) -> Made:
        kind, _, seed = name.partition("-")
        folder = tmp_path_factory.mktemp(name)
        if kind == "v4":
            raw = models.random_v4(int(seed))
            stored = models.released_v4(models.transformers_v4(raw, int(seed)).state_dict())
        else:
            raw = (
                models.random_v41(int(seed))
                if kind == "v41"
                else json.loads((PRESETS_DIR / f"{'tiny' if kind == 'calm' else kind}.json").read_text())
            )
            if kind == "calm":  # nothing that a rounding could choose differently
                raw["text_config"] |= {"index_topk": 64, "candidate_topk_blocks": 20}
            stored = models.draw(models.flat(raw), int(seed or 0), calm=kind == "calm")
        return Made(models.save(folder, raw, stored), raw)

    return make


@pytest.fixture(autouse=True)
def few_threads():
    """Models this small are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
