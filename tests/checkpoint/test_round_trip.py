"""Write, read, write again: nothing changes, nothing is held twice, and an independent packer agrees."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file

from dskit import checkpoint
from dskit.checkpoint import draw, place
from dskit.checkpoint.files import INDEX, Folder
from dskit.checkpoint.spec import layout, spec
from dskit.config import ModelConfig, preset
from dskit.layers.linear import Linear
from tests import models
from tests.checkpoint.conftest import CONFIGS

NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.int8: "I8",
         torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def stored(folder) -> dict[str, torch.Tensor]:
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {shard: load_file(folder / shard) for shard in set(where.values())}
    return {name: files[shard][name] for name, shard in where.items()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_files_hold_what_the_spec_lists(kind, written):
    tensors, config = stored(written(kind)), CONFIGS[kind]
    found = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    wider = {} if config.quantized else {"BF16": "F32"}  # what is not quantised keeps float32 numbers
    expected = {name: (wider.get(dtype, dtype), shape) for name, (dtype, shape) in spec(config).items()}
    assert found == expected and list(found) == list(expected)
    assert ModelConfig.from_folder(written(kind)) == config


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("storage", ["packed", "expanded"])
def test_loading_gives_what_was_drawn(kind, storage, written):
    if (kind, storage) == ("fp8-experts", "packed"):  # w1 on w3 needs whole blocks
        with pytest.raises(ValueError, match="moe_intermediate_size = 160"):
            checkpoint.load(written(kind), device="cpu", storage=storage)
        return
    loaded = checkpoint.load(written(kind), device="cpu", storage=storage)
    made = checkpoint.random(CONFIGS[kind], seed=3, device="cpu", storage=storage)
    pairs = list(zip(loaded.named_parameters(), made.named_parameters(), strict=True))
    assert all(a == b and same(x, y) for (a, x), (b, y) in pairs), kind
    assert any("float8" in str(x.dtype) and "engram" not in a for (a, x), _ in pairs) == (
        storage == "packed" and CONFIGS[kind].quantized)


@pytest.mark.parametrize("kind", ["tiny", "v4", "plain"])
def test_saving_what_was_loaded_gives_the_same_bytes(kind, written, tmp_path):
    model = checkpoint.load(written(kind), device="cpu", storage="packed")
    checkpoint.save(model, tmp_path, shard_size=1_200_000)
    for file in written(kind).iterdir():
        if not (kind == "plain" and file.name != "config.json"):
            assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    again = checkpoint.load(tmp_path, device="cpu", storage="packed")
    assert all(same(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_shared_scales_hold_the_same_numbers(written, tmp_path):
    packed, shared = (checkpoint.load(written("tiny"), device="cpu", storage=s) for s in ("packed", "shared"))
    checkpoint.save(shared, tmp_path)
    again = checkpoint.load(tmp_path, device="cpu", storage="packed")
    found = 0
    for name, module in packed.named_modules():
        if isinstance(module, Linear) and module.scale is not None:
            mine, theirs, saved = (m.get_submodule(name).dense().float() for m in (shared, packed, again))
            assert shared.get_submodule(name).block == (module.block[0], 128)
            assert (mine - theirs).norm() <= 1e-6 * theirs.norm() and torch.equal(mine, saved), name
            found += 1
    assert found


@pytest.mark.parametrize("kind", ["tiny", "v4", "fp8-experts"])
def test_numbers_survive_packing_again(kind, written, tmp_path):
    model = checkpoint.load(written(kind), device="cpu", numerics="exact")
    checkpoint.save(model, tmp_path)
    again = checkpoint.load(tmp_path, device="cpu", numerics="exact")
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert same(a, b), name


@pytest.mark.parametrize("seed", [0, 1])
def test_independently_packed_checkpoints_load(seed, tmp_path):
    raw = models.random_v41(seed)
    tensors = models.draw(models.flat(raw), seed)
    folder = models.save(tmp_path, raw, tensors)
    numbers = models.dense(models.flat(raw), tensors)
    exact = checkpoint.load(folder, device="cpu", numerics="exact")
    packed = checkpoint.load(folder, device="cpu", storage="packed")
    for weight, (_, tensor, scale) in zip(layout(exact.config), place.weights(packed), strict=True):
        assert torch.equal(bits(tensor), bits(tensors[weight.name].to(tensor.dtype))), weight.name
        assert scale is None or torch.equal(bits(scale), bits(tensors[weight.scale_name])), weight.name
        if weight.fmt != "row":
            assert torch.equal(place._held(exact, weight)[0].float(), numbers[weight.name]), weight.name


def test_one_weight_is_in_flight_at_a_time(written, monkeypatch):
    alive: list[weakref.ref] = []
    most = 0
    read = Folder.read

    def watched(self, name, dtype):
        nonlocal most
        tensor = read(self, name, dtype)
        if "engram.embed.weight" not in name:  # those stay in the mapped file
            alive.append(weakref.ref(tensor.untyped_storage()))
            alive[:] = [ref for ref in alive if ref() is not None]
            most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(Folder, "read", watched)
    checkpoint.load(written("tiny"), device="cpu")
    assert 1 <= most <= 2  # a weight and its scale


def test_checks_read_headers_only(written, monkeypatch):
    def read(*_):
        raise AssertionError("a number was read")

    monkeypatch.setattr(Folder, "read", read)
    Folder(written("odd")).check()
    assert checkpoint.convert(written("odd"), dry_run=True).complete


def test_loaded_weights_own_their_memory(copy):
    folder = copy()
    model = checkpoint.load(folder, device="cpu", storage="packed")
    before = [p.clone() for n, p in model.named_parameters() if "engram.embed" not in n]
    for shard in folder.glob("*.safetensors"):
        size = shard.stat().st_size
        with shard.open("r+b") as data:
            data.write(bytes(size))
    after = [p for n, p in model.named_parameters() if "engram.embed" not in n]
    assert all(same(a, b) for a, b in zip(before, after, strict=True))


def test_rewriting_leaves_no_old_shards(tmp_path):
    config = CONFIGS["v4"]
    checkpoint.write_random(config, tmp_path, shard_size=100_000)
    many = set(tmp_path.glob("model-*"))
    (tmp_path / "notes.safetensors.txt").write_text("mine")
    checkpoint.write_random(config, tmp_path)
    assert len(many) > 3 and {p.name for p in tmp_path.iterdir()} == {
        "model-00001-of-00001.safetensors", "mtp.safetensors", INDEX, "config.json", "notes.safetensors.txt"}


def test_a_new_draft_leaves_the_bytes_of_the_backbone(written, tmp_path):
    plain = checkpoint.write_random(preset("tiny").without_draft(), tmp_path, seed=3, shard_size=1_200_000)
    shards = sorted(file.name for file in plain.glob("*.safetensors"))
    assert sorted(file.name for file in written("tiny").glob("*.safetensors")) == [*shards, "mtp.safetensors"]
    assert all((plain / shard).read_bytes() == (written("tiny") / shard).read_bytes() for shard in shards)
    held = json.loads((written("tiny") / INDEX).read_text())["weight_map"]
    assert {name.startswith("mtp.") for name, shard in held.items() if shard == "mtp.safetensors"} == {True}


def test_demo_fits_two_shards_below_12_mb(tmp_path):
    checkpoint.write_random(preset("demo").without_draft(), tmp_path, shard_size=12_000_000)
    sizes = {file.name: file.stat().st_size for file in tmp_path.glob("*.safetensors")}
    assert sizes.keys() == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert max(sizes.values()) <= 12_000_000


# ---- random weights ---------------------------------------------------------------------------------------

def test_each_weight_is_drawn_from_its_own_seed():
    one = {weight.name: tensor for weight, tensor, _ in draw.weights(preset("tiny"), 5)}
    fewer = preset("tiny").without_draft()
    other = {weight.name: tensor for weight, tensor, _ in draw.weights(fewer, 5)}
    assert all(same(one[name], tensor) for name, tensor in other.items()) and len(one) > len(other)
    changed = {weight.name: tensor for weight, tensor, _ in draw.weights(fewer, 6)}
    assert not any(same(tensor, other[name]) for name, tensor in changed.items())


@pytest.mark.parametrize("kind", ["tiny", "odd", "v4"])
def test_index_heads_are_exact_opposites(kind):
    model = checkpoint.random(CONFIGS[kind], numerics="exact", device="cpu")
    layer = CONFIGS[kind].index_source_layer_ids[0]
    rows = model.layers[layer].attn.indexer.wq_b.weight.unflatten(0, (CONFIGS[kind].index_n_heads, -1))
    assert torch.equal(rows[0::2], -rows[1::2]) and rows.abs().max() > 0


def test_calm_biases_are_far_apart():
    model = checkpoint.random(preset("tiny"), device="cpu", calm=True)
    bias = model.layers[0].ffn.gate.bias.sort().values
    assert bias.diff().min() >= 4


def test_activations_stay_of_order_one():
    for weight, tensor, scale in draw.weights(preset("odd"), 1):
        if weight.fmt == "fp8":
            numbers = place.unpack_fp8(tensor, scale, (32, 32), torch.float32)
            assert 0.9 < numbers.std() * weight.shape[1] ** 0.5 < 1.1, weight.name


def test_arguments_that_make_no_sense():
    with pytest.raises(ValueError, match="storage is 'compressed'"):
        checkpoint.load("tiny", device="cpu", storage="compressed")
    with pytest.raises(ValueError, match="numerics is 'fast'"):
        checkpoint.load("tiny", device="cpu", numerics="fast")


@pytest.mark.parametrize("storage", ["packed", "expanded"])
def test_a_rank_reads_its_experts_only_and_has_them_slot_by_slot(written, storage, monkeypatch):
    folder, read, names = written("tiny"), Folder.read, []
    whole = checkpoint.load(folder, device="cpu", storage=storage)
    noting = lambda self, name, dtype: names.append(name) or read(self, name, dtype)  # noqa: E731
    monkeypatch.setattr(Folder, "read", noting)
    rank = checkpoint.load(folder, device="cpu", storage=storage, held=lambda experts: [experts - 1, 0, 0])
    experts = {name.partition(".experts.")[2].partition(".")[0] for name in names} - {""}
    config = whole.config
    assert experts == {"0", str(config.n_routed_experts - 1), str(config.draft_experts[0] - 1)}
    for (name, a), b in zip(whole.named_parameters(), rank.parameters(), strict=True):
        assert same(a[[len(a) - 1, 0, 0]] if ".ffn.experts." in name else a, b), name
    with pytest.raises(ValueError, match="ep=1"):
        next(place.weights(rank))
