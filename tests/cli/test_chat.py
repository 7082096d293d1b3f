"""`dskit chat`: one question, a conversation, statistics, and a running server instead of a model."""

from __future__ import annotations

import io
import re

import pytest

from dskit import cli


@pytest.fixture
def loaded(tiny, monkeypatch):
    """`dskit chat tiny` takes the model that is loaded already, and leaves it open."""
    monkeypatch.setattr(tiny, "close", lambda: None)
    monkeypatch.setattr("dskit.engine.llm.LLM", lambda *_, **__: tiny)


def chat(capsys: pytest.CaptureFixture, *argv: str) -> tuple[str, str]:
    """stdout and stderr of a chat that must succeed."""
    assert cli.main(["chat", *argv]) == 0
    return capsys.readouterr()


def test_one_question_prints_the_answer_and_statistics(capsys):
    out, err = chat(capsys, "tiny", "-q", "hello", "--max-tokens", "6", "--think", "off")
    assert out.endswith("\n")
    assert "6 generated" in err and "tokens/s" in err and "ended by length" in err


def test_what_the_draft_guessed_is_told(loaded, capsys):
    _, err = chat(capsys, "tiny", "-q", "hello", "--max-tokens", "12", "--think", "off")
    held, told = re.search(r"(\d+) of (\d+) guesses held", err).groups()
    assert 0 <= int(held) <= int(told) and int(told) > 0


def test_the_same_question_gives_the_same_text(loaded, capsys):
    argv = ("tiny", "-q", "hello", "--max-tokens", "6", "--temperature", "0")
    assert chat(capsys, *argv)[0] == chat(capsys, *argv)[0]


def test_lines_of_input_are_turns_of_one_conversation(loaded, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    _, err = chat(capsys, "tiny", "--max-tokens", "4", "--think", "off")
    prompts = [int(line.split()[0].strip("[")) for line in err.splitlines() if "prompt tokens" in line]
    assert len(prompts) == 2 and prompts[1] > prompts[0], "the second prompt holds the first turn"


def test_a_server_instead_of_a_model(server, capsys):
    out, err = chat(capsys, "--url", f"{server.url}/v1", "-q", "What can you do?", "--max-tokens", "24")
    assert out.strip() or err.strip()
    assert "generated" in err and "tokens/s" in err and "guesses held" in err, "the server's statistics"


def test_a_server_that_is_not_there_is_an_error_with_its_address(capsys):
    assert cli.main(["chat", "--url", "http://127.0.0.1:9/v1", "-q", "hello"]) == 1
    err = capsys.readouterr().err
    assert "127.0.0.1:9" in err and "Traceback" not in err
