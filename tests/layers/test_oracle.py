"""The judge judged: the oracle against transformers where V4 shares its parts, and what it notices."""

import json
from functools import cache

import pytest
import torch

from dskit.config import PRESETS_DIR
from tests import models, oracle

TINY = json.loads((PRESETS_DIR / "tiny.json").read_text())
IDS = models.ids(TINY, 33, seed=4, image_at=(17,))


@cache
def tiny(dtype: torch.dtype = torch.float32) -> oracle.Net:
    config = models.flat(TINY)
    return oracle.Net(models.dense(config, models.draw(config, seed=3), dtype), config)


def v4_against_transformers(seed: int) -> float:
    raw = models.random_v4(seed)
    theirs = models.transformers_v4(raw, seed)
    net = oracle.Net(models.released_v4(theirs.state_dict()), models.flat(raw))
    ids = models.ids(raw, 53, seed)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    return models.relative_rms(oracle.forward(net, ids).logits, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_v4_equals_transformers(seed):
    assert v4_against_transformers(seed) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 40))
def test_v4_equals_transformers_often(seed):
    assert v4_against_transformers(seed) < 5e-6


def test_float32_equals_float64():
    """What the oracle loses to float32 is far below what any test allows."""
    narrow, wide = (oracle.forward(tiny(dtype), IDS).logits for dtype in (torch.float32, torch.float64))
    assert models.relative_rms(narrow, wide) < 3e-6


# ---- the test of the tests -------------------------------------------------------------------------------


def transposed_mix(write):
    return lambda net, y, X, q, C: write(net, y, X, q, C.transpose(1, 2))


def no_inverse_rotation(unrotate):
    return lambda net, l, v, positions: v


def unshifted_read(read_weights):
    return lambda net, carried, own: own


def window_too_wide(window):
    return lambda t, size, floor=0: window(t, size + 1, floor)


def window_too_narrow(window):
    return lambda t, size, floor=0: window(t, size - 1, floor)


def index_keys_of_rotated_latents(index_source):
    return lambda net, l, lat: oracle.rotate(net, l, lat, oracle.starts(len(lat), net.ratio(l)))


def entries_at_the_last_token(starts):
    return lambda count, ratio: [j * ratio + ratio - 1 for j in range(count)]


def own_group_hidden(visible):
    return lambda t, ratio: t // ratio


def one_table_for_all_layers(frequencies):
    return lambda net, l: frequencies(net, 0)


def leading_channels_rotated(rotate):
    return lambda net, l, v, positions, sign=1: rotate(net, l, v.flip(-1), positions, sign).flip(-1)


def no_sink(attend):
    return lambda net, Q, entries, sink: attend(net, Q, entries, torch.full_like(sink, -1e30))


def interleaved_groups(output):
    def wrong(net, l, at, O, positions):
        groups = net.config.o_groups
        return output(net, l, at, O.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2), positions)

    return wrong


def gain_plus_one(rms):
    return lambda net, v, gain: rms(net, v, 1 + gain)


def softmax_for_sinkhorn(sinkhorn):
    return lambda B, rounds, eps: torch.softmax(B, 2)


def no_candidate_filter(restrict):
    return lambda net, seen, blocks: list(range(seen))


def smallest_scores_chosen(largest):
    return lambda scores, pool, k, gaps=None: largest([-s for s in scores], pool, k, gaps)


def score_without_rectifier(index_scores):
    def wrong(net, l, at, x, a, keys, positions):
        """sum_h w_h (q_h . k) = the rectified score of q minus that of -q."""
        return index_scores(net, l, at, x, a, keys, positions) - index_scores(
            net, l, at, x, -a, keys, positions
        )

    return wrong


def primes_reused_across_layers(engram_primes):
    def wrong(config):
        return [
            engram_primes(models.replaced(config, engram_layer_ids=[l]))[0] for l in config.engram_layer_ids
        ]

    return wrong


def gate_without_root(engram_gate):
    def wrong(net, x, key, q_weight, k_weight):
        logit = torch.logit(engram_gate(net, x, key, q_weight, k_weight))
        return torch.sigmoid(logit.sign() * logit**2)

    return wrong


def n_grams_across_images(engram_rows):
    return lambda config, layer, folded, dead, filler: engram_rows(
        config, layer, folded, [False] * len(dead), filler
    )


def unnormalised_routing(routing_weights):
    return lambda net, scores: scores * net.config.routed_scaling_factor


def text_bias_for_images(choose):
    return lambda net, at, scores, token, image, k, gaps: choose(net, at, scores, token, False, k, gaps)


def gate_and_up_swapped(swiglu):
    return lambda gate, up, limit: swiglu(up, gate, limit)


MISTAKES = {
    "write": transposed_mix,
    "unrotate": no_inverse_rotation,
    "read_weights": unshifted_read,
    "window": window_too_wide,
    "window ": window_too_narrow,
    "index_source": index_keys_of_rotated_latents,
    "starts": entries_at_the_last_token,
    "visible": own_group_hidden,
    "frequencies": one_table_for_all_layers,
    "rotate": leading_channels_rotated,
    "attend": no_sink,
    "output": interleaved_groups,
    "rms": gain_plus_one,
    "sinkhorn": softmax_for_sinkhorn,
    "restrict": no_candidate_filter,
    "largest": smallest_scores_chosen,
    "index_scores": score_without_rectifier,
    "engram_primes": primes_reused_across_layers,
    "engram_gate": gate_without_root,
    "engram_rows": n_grams_across_images,
    "routing_weights": unnormalised_routing,
    "choose": text_bias_for_images,
    "swiglu": gate_and_up_swapped,
}


@pytest.fixture(scope="module")
def right() -> torch.Tensor:
    return oracle.forward(tiny(), IDS).logits


@pytest.mark.parametrize("where", MISTAKES, ids=[m.__name__ for m in MISTAKES.values()])
def test_each_typical_mistake_moves_the_logits(where, right, monkeypatch):
    function = where.strip()
    monkeypatch.setattr(oracle, function, MISTAKES[where](getattr(oracle, function)))
    assert models.relative_rms(oracle.forward(tiny(), IDS).logits, right) > 0.05
