"""Every test vector of the specification (model.md appendix A), against the layers and against the oracle."""

import re
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from dskit.config import PRESETS_DIR, ModelConfig, preset
from dskit.layers import engram, linear, mhc, moe, rope
from tests import oracle

PATTERN = torch.tensor([0.1, -0.2, 0.3, 1.0]).repeat(16)


def close(found, wanted, **tolerance) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float32), torch.as_tensor(wanted, dtype=torch.float32), **tolerance
    )


# ---- A.1, A.2: narrow numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("e2m1", [linear.e2m1, oracle.e2m1], ids=["layer", "oracle"])
def test_e2m1_rounds_to_the_nearest_and_ties_to_the_even_code(e2m1):
    given = torch.tensor([0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, 7, -0.25, -0.3])
    wanted = torch.tensor([0, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -0.0, -0.5])
    found = e2m1(given)
    assert torch.equal(found, wanted)
    assert torch.equal(torch.signbit(found), torch.signbit(wanted))  # a small negative keeps its sign


GROUPS = {
    "fp4_16": (0.0859375, -0.171875, 0.2578125, 1.03125),
    "fp4_32": (0.125, -0.25, 0.25, 1.0),
    "fp8_32": (0.1015625, -0.203125, 0.3125, 1.0),
}


@pytest.mark.parametrize("fmt", GROUPS)
def test_quantise_and_restore(fmt):
    wanted = torch.tensor(GROUPS[fmt]).repeat(16)
    assert torch.equal(linear.quantize(PATTERN, fmt, torch.float32), wanted)
    assert torch.equal(linear.quantize(PATTERN, fmt, torch.bfloat16).float(), wanted)  # exact in bf16
    assert torch.equal(
        {"fp4_16": oracle.fq4_16, "fp4_32": oracle.fq4_32, "fp8_32": oracle.fq8}[fmt](PATTERN), wanted
    )


def test_fp4_16_scales_are_e4m3():
    """A.2: the scale of the pattern is e4m3(1/6) = 0.171875, not a power of two."""
    assert oracle.e4m3(torch.tensor(1 / 6)).item() == 0.171875
    assert linear.e4m3(torch.tensor(1 / 6)).item() == 0.171875


@pytest.mark.parametrize("pow2ceil", [linear.pow2ceil, oracle.pow2ceil], ids=["layer", "oracle"])
def test_pow2ceil_keeps_exact_powers_and_rounds_everything_else_up(pow2ceil):
    exact = torch.pow(2.0, torch.arange(-126, 127).float())
    assert torch.equal(pow2ceil(exact), exact)
    assert torch.equal(pow2ceil(torch.nextafter(exact, torch.tensor(1e39))), 2 * exact)
    assert torch.equal(pow2ceil(torch.nextafter(exact, torch.tensor(0.0))[1:]), exact[1:])


@pytest.mark.parametrize("fmt", ["fp8_32", "fp8_64", "fp8_128", "fp4_32", "fp4_16"])
def test_layer_and_oracle_round_alike(fmt):
    """Values over forty binades, zeros, and a last group that is not full."""
    v = torch.randn(64, 4 * 128 + 48) * torch.pow(2.0, torch.randint(-30, 10, (64, 4 * 128 + 48)))
    v[3] = 0
    size = int(fmt.split("_")[1])
    wanted = {"fp8": lambda x: oracle.fq8(x, size), "fp4": oracle.fq4_32 if size == 32 else oracle.fq4_16}[
        fmt[:3]
    ](v)
    assert torch.equal(linear.quantize(v, fmt, torch.float32), wanted)


# ---- A.3: mHC --------------------------------------------------------------------------------------------

B = [[2, 0, -1, 0.5], [0, 1, 0, 0], [-2, 0, 3, 0], [1, 1, 0, -1]]
C = [
    [0.533430, 0.091287, 0.021018, 0.354264],
    [0.121877, 0.418918, 0.096453, 0.362752],
    [0.006677, 0.062378, 0.784118, 0.146826],
    [0.338015, 0.427417, 0.098410, 0.136158],
]


@pytest.mark.parametrize("sinkhorn", [mhc.sinkhorn, oracle.sinkhorn], ids=["layer", "oracle"])
def test_sinkhorn(sinkhorn):
    close(sinkhorn(torch.tensor([B]), 20, 1e-6)[0], C, atol=1e-6, rtol=0)


def test_mixes():
    """A state whose projection gives just these inputs: one channel of size 1 makes the statistic 1."""
    inputs = torch.tensor([1.0, 0, 0, 0, 0, -1, 0, 0, *[v for row in B for v in row]])
    X = torch.ones(1, 4, 1)
    fn = inputs[:, None].expand(24, 4) / 4
    p, q, mix = mhc.mixes(X, fn, torch.zeros(24), torch.ones(3), 1e-20, 1e-6, 20)
    close(p[0], [0.7310596, 0.5000010, 0.5000010, 0.5000010], atol=1e-6, rtol=0)
    close(q[0], [1, 0.5378829, 1, 1], atol=1e-6, rtol=0)
    close(mix[0], C, atol=1e-6, rtol=0)


def test_write_sums_over_the_first_index_of_the_mix():
    X, y, q = torch.randn(1, 4, 5), torch.randn(1, 5), torch.rand(1, 4)
    mix = torch.tensor([C])
    wanted = torch.stack([q[0, k] * y[0] + sum(mix[0, j, k] * X[0, j] for j in range(4)) for k in range(4)])
    close(mhc.write(y, X, q, mix, torch.float32)[0], wanted)


# ---- A.4: rotary -----------------------------------------------------------------------------------------

YARN = {
    0: 1,
    15: 3.635538509e-3,
    16: 2.265624935e-3,
    20: 2.96977785e-4,
    24: 1.9531253e-5,
    25: 5.372312e-6,
    31: 5.68053e-7,
}
PLAIN = {1: 0.749894202, 16: 0.01, 31: 1.3335215e-4}


@pytest.mark.parametrize(("compressed", "wanted"), [(True, YARN), (False, PLAIN)], ids=["yarn", "plain"])
def test_rotary_frequencies(compressed, wanted):
    config = preset("flash")
    net = oracle.Net({}, config)
    layer = next(l for l in range(40) if (config.compress_ratios[l] > 0) == compressed)
    for table in (rope.frequencies(config, compressed), oracle.frequencies(net, layer)):
        close(table[list(wanted)], list(wanted.values()), rtol=1e-6, atol=0)


# ---- A.5: router -----------------------------------------------------------------------------------------


def test_router_scores():
    z = torch.tensor([[-20.0, -1, 0, 1, 3]])
    topk, weight = moe.route(z, torch.zeros(5), 5, False, 1.0)
    wanted = [4.539993e-5, 0.5596979, 0.8325546, 1.1459763, 1.7460204]
    assert topk[0].tolist() == [4, 3, 2, 1, 0]
    close(weight[0].flip(0), wanted, rtol=1e-6, atol=0)


# ---- A.6, A.7: n-gram hashes -----------------------------------------------------------------------------

DEAD = -1


def grams(folded: list[int], n: int, filler: int) -> torch.Tensor:
    """Newest id first; from a dead position or the start of the sequence outwards, only the filler."""
    out = []
    for t in range(len(folded)):
        row = []
        for s in range(n):
            gone = t - s < 0 or DEAD in folded[t - s : t + 1]
            row.append(filler if gone else folded[t - s])
        out.append(row)
    return torch.tensor(out)


def layer_rows(config, layer: int, folded: list[int], filler: int) -> torch.Tensor:
    primes = np.array(config.engram_primes[config.engram_layer_ids.index(layer)], dtype=np.int64)
    offsets = np.concatenate(([0], primes.reshape(-1).cumsum()[:-1])).reshape(primes.shape)
    multiplier = torch.tensor(engram.multipliers(config, layer))
    gram = grams(folded, config.engram_max_ngram_size, filler)
    return engram.hash_rows(gram, multiplier, torch.tensor(primes), torch.tensor(offsets))


def small() -> ModelConfig:
    """The config of A.6; table sizes are the sums of its primes."""
    return preset("tiny").replace(
        engram_layer_ids=(0, 3),
        engram_vocab_size=64,
        engram_max_ngram_size=3,
        engram_n_heads=2,
        engram_num_embeddings=(67 + 71 + 73 + 79, 83 + 89 + 97 + 101),
        engram_compressed_vocab_size=50,
    )


def test_primes_of_the_small_config():
    assert small().engram_primes == (((67, 71), (73, 79)), ((83, 89), (97, 101)))
    assert oracle.engram_primes(small()) == [[[67, 71], [73, 79]], [[83, 89], [97, 101]]]


def test_multipliers():
    assert engram.multipliers(small(), 0).tolist() == [
        117498692307770743,
        49766864632892517,
        7558281098489961,
    ]
    assert engram.multipliers(small(), 3).tolist() == [
        54554062212587201,
        161835550649018353,
        21558319152623205,
    ]
    release = SimpleNamespace(engram_compressed_vocab_size=99092, engram_max_ngram_size=4)
    assert engram.multipliers(release, 1).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert engram.multipliers(release, 14).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


SMALL_ROWS = {
    0: [[24, 114, 198, 271], [2, 134, 199, 218], [64, 124, 152, 216], [33, 71, 164, 246], [4, 130, 145, 250]],
    3: [[4, 153, 185, 334], [76, 130, 180, 277], [74, 96, 265, 273], [20, 90, 218, 342], [69, 88, 240, 352]],
}


@pytest.mark.parametrize("layer", [0, 3])
def test_hash_of_the_small_config(layer):
    """The fourth position is an image token; its own row is never used, and listed with its id as filler."""
    found = layer_rows(small(), layer, [1, 2, 3, DEAD, 4], 2)
    assert found.tolist() == SMALL_ROWS[layer]
    dead = [False, False, False, True, False]
    assert oracle.engram_rows(small(), layer, [1, 2, 3, 2, 4], dead, 2) == SMALL_ROWS[layer]


RELEASE_PRIMES = {
    0: (
        (16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183),
        (16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321),
        (16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463),
    ),
    1: (
        (16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627),
        (16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769),
        (16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889),
    ),
}
RELEASE_ROWS = {
    1: {
        0: [8939594, 121427189, 128454377, 241631034, 263018334, 373889199],
        1: [9314804, 121408812, 137419150, 246120556, 258585581, 368548801],
        3: [2008568, 125647891, 134138602, 253556857, 264495124, 370110214],
        4: [13131409, 115341818, 135168683, 252870089, 263344940, 369255912],
        6: [6526173, 124740676, 139294487, 246964813, 261950276, 383676317],
    },
    14: {
        0: [11595187, 119551817, 142795052, 240801687, 256183825, 371414676],
        1: [8484457, 119883674, 132049061, 247013490, 270569545, 376225741],
        3: [10569928, 118275352, 141663274, 245765119, 264810417, 372021888],
        4: [3275938, 121693602, 135666223, 251558928, 259143510, 370579897],
        6: [10320148, 125259555, 133194214, 254372650, 271527919, 380731833],
    },
}


def test_primes_of_the_release():
    config = preset("flash")
    assert dict(enumerate(config.engram_primes)) == RELEASE_PRIMES
    assert [sum(map(sum, p)) for p in config.engram_primes] == [384006168, 384016682]


@pytest.mark.parametrize("layer", [1, 14])
def test_hash_of_the_release(layer):
    found = layer_rows(preset("flash"), layer, [7, 123, DEAD, 99091, 42, 42, 5000], 2)
    for t, row in RELEASE_ROWS[layer].items():
        assert found[t, [0, 7, 8, 15, 16, 23]].tolist() == row


# ---- 3.10.1: the folding ---------------------------------------------------------------------------------


def fold(text: str) -> str:
    """NFKC, NFD, no combining marks, lower case, one space for any white space; a lone space survives."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


def test_folding_of_the_demo_tokenizer():
    tokenizer = Tokenizer.from_file(str(PRESETS_DIR / "demo" / "tokenizer.json"))
    numbers: dict[str, int] = {}
    wanted = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else fold(text) or text
        wanted.append(numbers.setdefault(key, len(numbers)))
    assert engram.fold_vocabulary(tokenizer).tolist() == wanted
    assert len(numbers) < len(wanted)  # something did fold
