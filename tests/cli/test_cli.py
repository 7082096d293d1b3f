"""The command line: dispatch, exit codes, the three lines of an error, and the flags of other engines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file

from dskit import cli, flags


def said(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command run in this process."""
    try:
        code = cli.main(list(argv))
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def assert_error(code: int, err: str, expected: int, *words: str) -> None:
    """An error has its exit code, its three lines, no traceback, and names what it is about."""
    assert code == expected, err
    lines = err.strip().splitlines()
    assert [line.split(":")[0].strip() for line in lines[-3:]] == ["error", "because", "try"], err
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_help_lists_every_command(capsys):
    code, out, _ = said(capsys, "--help")
    assert code == 0
    for command in cli.COMMANDS:
        assert f"\n  {command} " in out


def test_no_command_is_wrong_usage(capsys):
    code, out, err = said(capsys)
    assert code == 2 and out == "" and "commands:" in err


def test_version(capsys):
    import dskit

    assert said(capsys, "--version")[:2] == (0, f"dskit {dskit.__version__}\n")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_on_stdout(command, capsys):
    code, out, err = said(capsys, command, "--help")
    assert code == 0 and out.startswith(f"usage: dskit {command}") and err == ""


def test_an_unknown_command_is_answered_with_those_there_are(capsys):
    code, _, err = said(capsys, "serv")
    assert_error(code, err, 2, "'serv'", "serve, chat")


def test_an_unknown_bench_is_answered_with_those_there_are(capsys):
    code, _, err = said(capsys, "bench", "nothing")
    assert_error(code, err, 2, "no dskit bench nothing", "throughput, prefill, decode")


@pytest.mark.parametrize("flag", sorted(cli.ABSENT))
def test_flags_of_other_engines_are_answered_with_the_reason(flag, capsys):
    code, _, err = said(capsys, "serve", "demo", flag, "2")
    assert_error(code, err, 2, f"dskit has no {flag}", cli.ABSENT[flag])


def test_a_flag_that_asks_for_what_is_done_anyway_is_taken():
    argv = ["demo", "--enable-prefix-caching", "--port", "1"]
    assert cli.translate("serve", argv) == ["demo", "--port", "1"]


def test_no_flag_is_both_there_and_absent():
    ours = {"--" + field.name.replace("_", "-") for field in fields(flags.ServeArgs)}
    assert not ours & set(cli.ABSENT)
    assert set(cli.ALIASES.values()) <= ours


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--model-path", "tiny"], "model", "tiny"),
        (["--model=tiny"], "model", "tiny"),
        (["tiny", "--context-length", "64"], "max_model_len", 64),
        (["--max-running-requests=3"], "max_num_seqs", 3),
        (["--max_num_batched_tokens", "32"], "max_num_batched_tokens", 32),
        (["--random-seed", "7"], "seed", 7),
        (["--no-ui"], "ui", False),
        ([], "model", "demo"),
        ([], "host", "127.0.0.1"),
        ([], "port", 8000),
    ],
)
def test_spellings(argv, field, value):
    assert getattr(cli.parse(flags.ServeArgs, "serve", argv), field) == value


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["serve", "--port", "eight"], "--port"),
        (["serve", "--prot", "8"], "--prot"),
        (["serve", "--numerics", "half"], "half"),
        (["serve", "a", "b"], "b"),
        (["chat", "--think", "deeply"], "deeply"),
        (["convert"], "SOURCE"),
        (["convert", "somewhere"], "no target folder"),
        (["train", "nothing"], "nothing"),
    ],
)
def test_wrong_usage(argv, word, capsys):
    code, out, err = said(capsys, *argv)
    assert_error(code, err, 2, word)
    assert out == ""


def test_an_unknown_model_is_an_error_with_its_name(capsys):
    code, _, err = said(capsys, "chat", "no-such-model", "-q", "hello")
    assert code in (1, 2)
    assert_error(code, err, code, "no-such-model")


def test_an_unknown_kernel_choice_suggests_the_right_one(capsys):
    code, _, err = said(capsys, "chat", "tiny", "-q", "hello", "--kernels", "moe=trito")
    assert_error(code, err, 2, "trito", "triton")


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (ModuleNotFoundError("No module named 'gradio'", name="gradio"), 3, "dskit-llm[serve]"),
        (MemoryError("12 GB asked, 3 GB free"), 4, "12 GB asked"),
        (FileNotFoundError(2, "No such file", "weights"), 1, "weights"),
        (cli.CliError("a", "b", "c", 3), 3, "b"),
    ],
)
def test_known_errors_have_their_exit_code(error, code, word, capsys, monkeypatch):
    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "dispatch", fail)
    found, _, err = said(capsys, "doctor")
    assert_error(found, err, code, word)


def test_a_bug_shows_its_traceback(capsys, monkeypatch):
    monkeypatch.setattr(cli, "dispatch", lambda argv: [][0])
    code, _, err = said(capsys, "doctor")
    assert code == 1 and "IndexError" in err and "Traceback" in err


def test_debug_shows_the_traceback_of_a_known_error(capsys):
    code, _, err = said(capsys, "--debug", "bench", "nothing")
    assert code == 2 and "Traceback" in err and "error: there is no dskit bench nothing" in err


def test_an_interrupt_exits_with_130(capsys, monkeypatch):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "dispatch", interrupt)
    assert said(capsys, "doctor")[0] == 130


def test_the_module_can_be_run():
    done = subprocess.run([sys.executable, "-m", "dskit", "no"], capture_output=True, text=True, timeout=60)
    assert_error(done.returncode, done.stderr, 2, "'no'")


def test_kernels_flag_reaches_the_registry(monkeypatch):
    from dskit import ops

    monkeypatch.setattr(ops, "_rules", [])
    cli.choose_kernels("mhc=auto")
    rows = [row for row in ops.explain() if row["op"].startswith("mhc.")]
    assert rows and {(row["selected"], row["decided_by"]) for row in rows} == {("auto", "--kernels")}
    monkeypatch.undo()
    ops._apply(ops.all_ops().values())


def test_every_command_that_loads_a_model_takes_kernels():
    kinds = (flags.ServeArgs, flags.ChatArgs, flags.LatencyArgs, flags.ProfileArgs, flags.TrainArgs)
    for kind in (*kinds, flags.EvalArgs, flags.DoctorArgs):
        assert "kernels" in {field.name for field in fields(kind)}, kind.__name__


def test_convert_exits_with_1_when_something_has_no_place(tmp_path, capsys):
    """A sound checkpoint converts; one tensor of an unknown name makes the dry run fail and name it."""
    from dskit import checkpoint
    from dskit.config import preset

    source, target = tmp_path / "source", tmp_path / "target"
    checkpoint.write_random(preset("tiny"), source)
    code, out, _ = said(capsys, "convert", str(source), "--dry-run", "--json")
    counts = json.loads(out)
    assert code == 0 and counts["mapped"] > 500 and counts["unmapped"] == counts["missing"] == 0
    assert said(capsys, "convert", str(source), str(target))[0] == 0

    shard, index = next(target.glob("*.safetensors")), target / "model.safetensors.index.json"
    save_file(load_file(shard) | {"stray.weight": torch.zeros(2)}, shard)
    known = json.loads(index.read_text())
    known["weight_map"]["stray.weight"] = shard.name
    index.write_text(json.dumps(known))
    code, out, _ = said(capsys, "convert", str(target), "--dry-run")
    assert code == 1 and "stray.weight" in out
