"""What the page shows, and the conversation it stands for."""

from __future__ import annotations

import json
import subprocess
import sys

from dskit.engine.seq import Usage
from dskit.serve import history as pages
from tests.serve.conftest import CALL, WEATHER


def turn(*deltas: dict, reason: str | None = None) -> pages.Turn:
    """A turn from deltas, ended by `reason`."""
    one = pages.Turn()
    for delta in deltas:
        one.add([{"choices": [{"delta": delta, "finish_reason": None}]}])
    if reason:
        one.add([{"choices": [{"delta": {}, "finish_reason": reason}]}])
        one.end(Usage(10, 7, 4, 0.25, 30.0), reasoning_tokens=3, seed=5)
    return one


def titles(one: pages.Turn) -> list[str | None]:
    """Title of each shown part, None for plain text."""
    return [(message.get("metadata") or {}).get("title") for message in one.messages()]


def test_a_thought_is_open_while_it_grows_and_folds_when_the_answer_begins():
    growing = turn({"reasoning_content": "hm"})
    (thought,) = growing.messages()
    assert thought["metadata"]["status"] == "pending" and thought["content"] == "hm"
    growing.add([{"choices": [{"delta": {"content": "Yes."}, "finish_reason": None}]}])
    thought, answer = growing.messages()
    assert thought["metadata"]["status"] == "done" and thought["metadata"]["duration"] >= 0
    assert answer["content"] == "Yes."


def test_before_the_first_token_the_prompt_is_being_read():
    assert titles(turn()) == ["Reading"]


def test_thinking_that_ran_out_of_tokens_says_so():
    cut = turn({"reasoning_content": "hm"}, reason="length")
    assert titles(cut)[0] == "Thought, ran out of tokens" and "no answer" in cut.messages()[1]["content"]
    assert "the limit of tokens" in cut.messages()[-1]["content"]


def test_statistics_are_under_the_reply():
    stats = turn({"reasoning_content": "hm"}, {"content": "Yes."}, reason="stop").messages()[-1]
    assert stats["metadata"]["title"] == "10 + 7 tokens · first after 0.25 s · 30.0 tokens/s"
    assert stats["metadata"]["status"] == "done", "folded"
    for words in ("10 tokens, 4 of them from the cache", "thinking: 3 tokens", "answer: 4 tokens", "seed: 5"):
        assert words in stats["content"]


def test_what_the_draft_guessed_is_told_where_there_is_one():
    one = turn({"content": "Yes."}, reason="stop")
    assert "draft" not in one.messages()[-1]["content"]
    one.end(Usage(10, 7, 4, 0.25, 30.0, rounds=2, drafted=9, accepted=6), reasoning_tokens=0, seed=5)
    assert "draft: 6 of 9 guesses held, in 2 rounds" in one.messages()[-1]["content"]


def test_a_conversation_comes_back_as_its_messages():
    function = CALL["function"]
    parts = [{"index": 0, "id": "x", "function": {"name": function["name"], "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": function["arguments"]}}]
    calling = turn({"reasoning_content": "tool"}, {"content": "One moment."}, {"tool_calls": parts},
                   {"tool_calls": more}, reason="tool_calls")  # fmt: skip
    shown = [{"role": "user", "content": [{"type": "text", "text": "weather?"}]}, *calling.messages()]
    shown += [
        {"role": "user", "content": '{"degrees": 3}'},
        *turn({"content": "Cold."}, reason="stop").messages(),
    ]
    shown += [pages.note("stopped"), {"role": "user", "content": "Thanks"}]
    system, question, call, result, answer, thanks = pages.conversation(shown, "Be brief.")
    assert system == {"role": "system", "content": "Be brief."} and question["content"] == "weather?"
    assert call["content"] == "One moment." and call["reasoning_content"] == "tool"
    assert call["tool_calls"][0]["function"] == function
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": '{"degrees": 3}',
    }
    assert answer == {"role": "assistant", "content": "Cold."} and thanks["content"] == "Thanks"


def test_the_code_shown_runs(server):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "What's the weather? No harbour."}]}
    body |= {"reasoning_effort": "none", "tools": [WEATHER], "max_tokens": 100}
    python = pages.as_python(f"{server.url}/v1", body)
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("A sheltered place"), done.stderr
    curl = pages.as_curl(f"{server.url}/v1", body)
    shell = subprocess.run(
        ["sh", "-c", curl.replace("curl ", "printf '%s|' ", 1)], capture_output=True, text=True
    )
    assert json.loads(shell.stdout.split("|")[-2]) == body, "the quoting survives a shell"
