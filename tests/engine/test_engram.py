"""Engram placements: the same bits from everywhere, the memory that each takes, and what is refused."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dskit import checkpoint, cli
from dskit.checkpoint import CheckpointError
from dskit.checkpoint.files import Folder
from dskit.checkpoint.spec import layout
from dskit.config import preset
from dskit.engine import engram
from dskit.engine.engram import DoesNotFit, EngramError, Ranks, choose, memory_available, smaps, suited
from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FLASH = preset("flash")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(config, seed) -> a random checkpoint in files."""
    made: dict = {}

    def write(name: str) -> Path:
        if name not in made:
            config = preset(name)
            made[name] = checkpoint.write_random(config, tmp_path_factory.mktemp(name), 3)
        return made[name]

    return write


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint whose tables take 12 MB, and the rest of it much less."""
    size = replace(preset("tiny"), engram_vocab_size=30011, raw={})
    rows = tuple(sum(map(sum, sizes)) for sizes in size.engram_primes)
    config = preset("tiny").replace(engram_vocab_size=30011, engram_num_embeddings=rows)
    return checkpoint.write_random(config, tmp_path_factory.mktemp("large"), 3)


def answers(llm: LLM) -> tuple[torch.Tensor, list]:
    """Logits of a prompt, and what follows two others that are served together."""
    ids = list(range(5, 45))
    return llm.logits(ids), [r.token_ids for r in llm.generate([ids[:3], ids[7:20]], GREEDY)]


@pytest.mark.parametrize("name", ["tiny", pytest.param("odd", marks=pytest.mark.slow)])
def test_every_placement_gives_the_same_bits(folder, name):
    found = {}
    for placement in ("device", "host", "mmap"):
        overlap = placement == "host"
        with LLM(folder(name), engram_placement=placement, overlap=overlap, max_model_len=128) as llm:
            found[placement] = answers(llm)
            report, stats = llm.engram.report(), llm.stats()
        assert report["placement"] == placement and report["lookups"] == stats["engram_lookups"] >= 40 + 16
        layers = () if placement == "device" else preset(name).engram_layer_ids
        assert set(report["wait_us"]) == set(layers)
    (logits, tokens), *others = found.values()
    assert logits.isfinite().all()
    for other in others:
        assert torch.equal(other[0], logits) and other[1] == tokens


# ---- ranks -------------------------------------------------------------------------------------------------


class Here(Ranks):
    """Ranks that are threads of this process: they need no word from each other."""

    def all(self, value):
        return [value] * self.size


RANKS = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from dskit import checkpoint
from dskit.engine.engram import Ranks, choose
from dskit.engine.runner import ModelRunner, Work

rank, size, store, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
                        timeout=timedelta(seconds=60))
for name in names:
    config, found, drawn = checkpoint.configuration(name), {}, checkpoint.is_drawn(name)
    for placement in ("device", "shard", "host"):
        ranks = Ranks.of(dist.new_group())
        tables = choose(config, torch.device("cpu"), placement, files=not drawn, ranks=ranks)
        model = checkpoint.load(name, device="cpu", tables=tables)
        runner = ModelRunner(model, num_blocks=8, block_size=16, num_slots=2, engram=tables.serve(model))
        steps = []
        for start, stop in ((0, 20 + rank), (20 + rank, 30)):  # each rank has rows of its own
            ids = [(7 * rank + 3 * i) % 200 + 3 for i in range(30)]
            steps.append(runner.run([Work(1, [1, 2], ids, start, stop, 30, "all")]))
        found[placement] = torch.cat(steps)
        held = model.layers[config.engram_layer_ids[0]].engram.embed.weight
        rows = ranks.all(len(held))
        total = config.engram_num_embeddings[0]
        if placement == "shard":
            assert sum(rows) == total and max(rows) - min(rows) < size
        else:
            assert set(rows) == {total}
        if placement == "host":  # one copy: what a rank writes the others read
            held.data.view(torch.uint8)[rank] = 17 + rank
            ranks.all(None)
            assert held.data.view(torch.uint8)[:size, 0].tolist() == [17 + r for r in range(size)]
            ranks.all(None)
        tables.close()
    assert torch.equal(found["device"], found["shard"]) and torch.equal(found["device"], found["host"]), name
dist.destroy_process_group()
print("equal")
"""


def on_ranks(size: int, tmp_path: Path, *names: str) -> None:
    """Run RANKS in so many processes; all have to end well."""
    command = [sys.executable, "-c", RANKS]
    running = [subprocess.Popen([*command, str(rank), str(size), str(tmp_path / "store"), *names],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for rank in range(size)]
    said = [process.communicate(timeout=200) for process in running]
    assert [out.strip() for out, _ in said] == ["equal"] * size, said[0][1][-2000:] + said[-1][1][-2000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_rows_or_one_copy(tmp_path, folder, size):
    on_ranks(size, tmp_path, "odd", str(folder("tiny")))


def test_rows_come_from_their_owners():
    """Three ranks of Gloo in threads: each asks for rows of its own, the first for none."""
    config, store = preset("odd"), dist.HashStore()
    whole = checkpoint.random(config, device="cpu")
    gram = torch.randint(config.engram_compressed_vocab_size, (17, config.engram_max_ngram_size))

    def look_up(rank: int) -> None:
        group = dist.ProcessGroup(store, rank, 3)
        gloo = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=60))
        group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        tables = choose(config, CPU, "shard", files=False, ranks=Here(group, group, rank, 3))
        tables.serve(checkpoint.random(config, device="cpu", tables=tables))
        for step in range(2):
            asked = gram[step : 8 * rank]
            found = tables.fetch(asked)
            for layer in reversed(config.engram_layer_ids):
                engram = whole.layers[layer].engram
                assert torch.equal(found.rows(layer), engram.embed(engram.rows(asked)))
        tables.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(look_up, range(3)))


@pytest.mark.parametrize("from_files", [False, True])
def test_rows_are_read_where_they_are(monkeypatch, folder, from_files):
    """Three ranks in threads whose memory all of them see, as GPUs do; nothing is exchanged."""
    memory, met = {}, threading.Barrier(3, timeout=60)

    def shared(tables, nbytes):
        at = len(tables._runs)
        memory[tables.ranks.rank, at] = torch.full((nbytes,), 77, dtype=torch.uint8)
        met.wait()
        return [memory[rank, at] for rank in range(3)]

    monkeypatch.setattr(engram.Shard, "_shared", shared)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    source = folder("tiny") if from_files else "odd"
    whole = checkpoint.load(source, device="cpu")
    config = whole.config
    gram = torch.randint(config.engram_compressed_vocab_size, (17, config.engram_max_ngram_size))

    def look_up(rank: int) -> None:
        tables = choose(config, CPU, "shard", files=from_files, ranks=Here(rank=rank, size=3))
        tables.joint = False
        model = checkpoint.load(source, device="cpu", tables=tables)
        met.wait()
        found = tables.serve(model).fetch(gram[: 8 * rank])
        for layer in config.engram_layer_ids:
            own = whole.layers[layer].engram
            assert torch.equal(found.rows(layer), own.embed(own.rows(gram[: 8 * rank])))
        assert tables.report()["direct"] and tables.nbytes > 0
        met.wait()
        tables.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(look_up, range(3)))


class Talking(Ranks):
    """Ranks that are threads of this process, each of which hears what the others say."""

    said, meet = [None] * 3, threading.Barrier(3, timeout=60)

    def all(self, value):
        self.said[self.rank] = value
        self.meet.wait()
        heard = list(self.said)
        self.meet.wait()
        return heard


here = threading.local()  # .rank


def each_of_three(work):
    """Results of work(ranks) on three ranks, or what it raised there."""

    def run(rank: int):
        here.rank = rank
        try:
            return work(Talking(rank=rank, size=3))
        except (EngramError, DoesNotFit) as error:
            return error

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(run, range(3)))


def test_every_node_has_one_copy(large, monkeypatch):
    monkeypatch.setattr(engram, "_node", lambda: ("one", "other", "other")[here.rank])
    found = each_of_three(lambda ranks: tables_of(large, "host", ranks))
    first, second, third = (tables.tensors_of[0].view(torch.uint8) for tables in found)
    assert torch.equal(first, second) and torch.equal(first, third) and first.any()
    first[3], second[4] = 99, 98
    assert (third[4] == 98).all() and not (third[3] == 99).all() and not (first[4] == 98).all()


def test_what_one_rank_cannot_have_no_rank_takes(monkeypatch):
    monkeypatch.setattr(engram, "memory_available", lambda: (300, 200, 300)[here.rank] << 30)
    monkeypatch.setattr(engram, "_node", lambda: str(here.rank))
    first, second, third = each_of_three(lambda ranks: choose(FLASH, CPU, "host", files=True, ranks=ranks))
    assert isinstance(second, DoesNotFit) and "another rank cannot: engram_placement 'host'" in str(first)
    assert str(third) == str(first)
    placed = each_of_three(lambda ranks: choose(preset("demo"), CPU, files=True, ranks=ranks).name)
    assert placed == ["device"] * 3


# ---- memory ------------------------------------------------------------------------------------------------


def tables_of(folder: Path, placement: str, ranks: Ranks | None = None) -> engram.Placement:
    """A placement with the tables of a checkpoint, and no model around them."""
    files = Folder(folder)
    tables = choose(files.config, CPU, placement, files=True, ranks=ranks)
    for weight, tensor, scale in files.weights(tables=tables):
        if weight.table:
            tables.tensors_of = [*getattr(tables, "tensors_of", []),
                                 *tables.keep(weight, tensor, scale, CPU)]
    return tables


def test_a_mapped_table_takes_no_memory_of_its_own(large):
    size = engram.table_bytes(checkpoint.configuration(large))
    mapped, own = tables_of(large, "mmap"), tables_of(large, "device")
    assert mapped.stats()["engram_bytes"] == 0
    assert smaps(mapped.tensors_of)["Anonymous"] == 0  # clean pages of the file, which the system may drop
    assert smaps(own.tensors_of)["Anonymous"] >= size


def test_a_mapped_table_fits_under_a_limit_that_a_copy_breaks(large):
    def data_bytes() -> int:
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) << 10 for row in rows if row.startswith("VmData"))

    before = resource.getrlimit(resource.RLIMIT_DATA)
    files = Folder(large)
    mapped, copied = (choose(files.config, CPU, placement, files=True) for placement in ("mmap", "host"))
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (4 << 20), before[1]))
    try:
        for weight in (weight for weight in layout(files.config) if weight.table):
            kept, _ = mapped.keep(weight, files.read(weight.name, "F8_E4M3"), None, CPU)
            assert kept.view(torch.uint8)[:: len(kept) // 50].any()
            with pytest.raises(OSError, match="Cannot allocate memory"):
                copied.keep(weight, kept, None, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_huge_pages_are_looked_for_and_their_lack_is_said(large, monkeypatch, caplog):
    monkeypatch.setattr(engram, "smaps", lambda tensors: Counter(Rss=100 << 20, AnonHugePages=40 << 20))
    tables = tables_of(large, "host")
    assert "40 % of it lies in huge pages" in caplog.text
    assert "/sys/kernel/mm/transparent_hugepage/enabled is '" in caplog.text
    assert tables.report()["huge_fraction"] == pytest.approx(0.4)
    tables.close()


def test_pages_of_a_table_are_counted(large):
    tables = tables_of(large, "host")
    report, knob = tables.report(), Path("/sys/kernel/mm/transparent_hugepage/enabled")
    assert report["resident_bytes"] == report["bytes"] == engram.table_bytes(checkpoint.configuration(large))
    if knob.exists() and "[never]" not in knob.read_text():
        assert report["huge_fraction"] > 0
    tables.close()
    assert tables.stats()["engram_bytes"] == 0


def test_what_a_process_may_take(tmp_path):
    for name, text in (("proc/meminfo", "MemTotal: 900 kB\nMemAvailable: 500 kB\n"),
                       ("sys/fs/cgroup/memory.max", "max"), ("sys/fs/cgroup/memory.current", "90000"),
                       ("sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 20000\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_available(tmp_path) == 500 << 10
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("100000")
    assert memory_available(tmp_path) == 100000 - 90000 + 20000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("10000")
    assert memory_available(tmp_path) == 0


# ---- the choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "ranks", "host_gib", "files", "placement"), [
    (None, 1, 300, True, "device"), (None, 1, 200, True, "mmap"), (None, 2, 300, True, "host"),
    (None, 2, 200, False, "shard"), (1.5e11, 1, 300, True, "host"), (1.5e11, 4, 300, False, "host"),
    (1.5e11, 8, 300, True, "shard"), (1.5e11, 4, 200, True, "mmap"), (1.5e11, 4, 200, False, "shard")])
def test_tables_go_where_they_fit(gpu, ranks, host_gib, files, placement):
    flash, demo = (engram.table_bytes(config) for config in (FLASH, preset("demo")))
    assert suited(flash, gpu, host_gib << 30, files, ranks) == placement
    assert suited(demo, gpu, host_gib << 30, files, ranks) == "device"


def test_what_cannot_be_had_is_refused_with_numbers(monkeypatch, folder):
    monkeypatch.setattr(engram, "memory_available", lambda: 200 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (20 << 30, 141 << 30))
    with pytest.raises(DoesNotFit, match="needs 207.7 GiB of host memory for tables of 188.8 GiB, and 200"):
        choose(FLASH, CPU, "host", files=True)
    with pytest.raises(DoesNotFit, match=r"needs 188.8 GiB of the memory of cuda .* 20.0 GiB are available"):
        choose(FLASH, GPU, "device", files=True)
    for config, name, ranks, words in (
            (FLASH, "mmap", None, "drawn from a seed"), (FLASH, "shard", None, "there is one rank"),
            (FLASH, "disk", None, "choose device, shard, host, mmap"), (FLASH, "peer", None, "all-to-all"),
            (preset("v4-flash"), "host", None, "no Engram layers")):
        with pytest.raises(EngramError, match=words):
            choose(config, CPU, name, files=False, ranks=ranks)
    assert choose(preset("v4-flash"), CPU, files=False) is None
    with pytest.raises(DoesNotFit) as found:
        choose(FLASH, CPU, "host", files=True)
    said = cli.explain(found.value)
    assert said.code == cli.MEMORY and said.remedy == "another --engram-placement: device, shard, mmap"
    with pytest.raises(EngramError, match="ready Model's tables stay"):
        LLM(checkpoint.load("tiny"), engram_placement="host")


def test_a_part_of_a_table_is_never_saved_as_the_whole(tmp_path, folder):
    tables = choose(preset("tiny"), CPU, "shard", files=True, ranks=Here(rank=1, size=2))
    model = checkpoint.load(folder("tiny"), tables=tables)
    assert len(model.layers[1].engram.embed.weight) == 231
    with pytest.raises(ValueError, match="231 of 462 rows are here"):
        checkpoint.save(model, tmp_path)


def test_rows_of_a_table_are_checked_where_they_are_read(folder, tmp_path):
    """A NaN in a table: found by whoever reads that row; the rank that does not read it goes on."""
    from safetensors.torch import load_file, save_file

    name = "layers.1.engram.embed.weight"
    for path in folder("tiny").iterdir():
        tensors = load_file(path) if path.suffix == ".safetensors" else {}
        if name in tensors:
            tensors[name].view(torch.uint8)[300, 5] = 0x7F
            save_file(tensors, tmp_path / path.name, metadata={"format": "pt"})
        else:
            os.symlink(path, tmp_path / path.name)
    for rank in (0, 1):
        tables = choose(preset("tiny"), CPU, "shard", files=True, ranks=Here(rank=rank, size=2))
        if rank == 0:
            checkpoint.load(tmp_path, tables=tables)
        else:
            with pytest.raises(CheckpointError, match="a weight is NaN"):
                checkpoint.load(tmp_path, tables=tables)
