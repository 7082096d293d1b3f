"""`dskit bench spec`: the document that other tools read, and which steps are timed."""

import contextlib
import io
import itertools
import json

import pytest

from dskit import cli
from dskit.bench import spec
from dskit.engine.seq import SamplingParams
from dskit.flags import SpecArgs

SKILLS = ("define", "json")


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A run with a model that knows nothing and answers briefly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "SKILLS", SKILLS)
        for skill in SKILLS:
            patch.setitem(spec.MAX_TOKENS, skill, 6)
        whole = spec._prompts
        patch.setattr(spec, "_prompts", lambda *args: [prompt[:20] for prompt in whole(*args)])
        patch.setattr(spec, "ROWS", (1, 3, 5))
        patch.setattr(spec, "REQUESTS", (1, 2))
        printed, kept = io.StringIO(), tmp_path_factory.mktemp("spec")
        args = SpecArgs(model="tiny", device="cpu", prompts=1, requests=(2,), repeats=1, json=True,
                        result_dir=str(kept))
        with contextlib.redirect_stdout(printed):
            assert spec.main(args, "dskit bench spec tiny") == 0
    (folder,) = kept.iterdir()
    return json.loads(printed.getvalue()), json.loads((folder / "bench.json").read_text())


@pytest.mark.slow
def test_the_document_has_the_keys_that_others_read(document):
    found, kept = document
    assert {name: value for name, value in found.items() if name != "env"} == kept
    G = len(found["acceptance_by_position"])
    assert found["accepted_length"].keys() == {"all", *SKILLS}
    assert all(1 <= length <= 1 + G for length in found["accepted_length"].values())
    assert found["speedup"].keys() == found["throughput"].keys() == {"2"}
    for count, rates in found["throughput"].items():
        assert rates.keys() == {"none", "static", "scheduled"}
        assert found["speedup"][count] == pytest.approx(rates["scheduled"] / rates["none"])
    assert {"before", "after"} <= found["ece"].keys()
    assert len(found["calibration"]["temperatures"]) == G
    assert found["step_cost"]["rows"] == [1, 3, 5] and found["step_cost"]["requests"] == [1, 2]
    for times in (found["step_cost"]["time_ms"], found["step_cost"]["draft_ms"]):
        assert times == sorted(times) and min(times) > 0
    assert found["block_step"] >= 1 and "end of one step" in found["env"]["interval"]


@pytest.mark.slow
def test_the_tables_say_it_too(document, capsys):
    spec.show(document[0])
    printed = capsys.readouterr().out
    assert "times without" in printed and "a whole block's step is" in printed


def test_of_the_steps_only_those_of_decode_count(tiny):
    work = [([300 + i, 301, 302], SamplingParams(max_tokens=6, ignore_eos=True)) for i in range(3)]
    before = tiny.engine.steps
    tokens, seconds = spec._answer((tiny, {}), work)
    ends = [(s.kind, s.ended_s) for s in tiny.engine.trace()[before - tiny.engine.steps :]]
    spent = sum(end - last for (_, last), (kind, end) in itertools.pairwise(ends) if kind == "decode")
    assert tokens == 15 and seconds == pytest.approx(spent)


def test_what_has_no_files_is_not_saved(capsys):
    assert cli.main(["bench", "spec", "tiny", "--save", "--device", "cpu"]) == 1
    assert "has no files" in capsys.readouterr().err
