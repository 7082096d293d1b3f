"""A chat of twenty turns with tools: every turn starts behind what the earlier ones left, and computes the
rest."""

from itertools import takewhile

import pytest

from tests.serve.scripted import ScriptedLLM

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bergen"}'},
}
SCRIPT = {
    "weather": {"reasoning_content": "It needs the tool.", "content": "One moment.", "tool_calls": [CALL]},
    "harbour": {"reasoning_content": "A word about ships.", "content": "A sheltered place for ships."},
    "degrees": {"reasoning_content": "The tool has answered.", "content": "It is sunny in Bergen."},
}


def converse(llm, turns: int) -> list[dict]:
    """The turns of one conversation: prompt and answer ids, and what the cache gave."""
    messages, found = [{"role": "system", "content": "You are a helpful guide to harbours."}], []
    for turn in range(turns):
        if calls := messages[-1].get("tool_calls"):
            reply = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "14 degrees and sun"}
        else:
            word = "weather" if turn % 2 else "harbour"
            reply = {"role": "user", "content": f"Question {turn}: what of the {word}?"}
        messages.append(reply)
        body = {"messages": messages, "tools": [TOOL], "temperature": 0}
        prompt, _ = llm.render(body)
        result = llm.chat(body)
        answer = {"role": "assistant", "content": result.text, "reasoning_content": result.reasoning}
        messages.append(answer | ({"tool_calls": result.tool_calls} if result.tool_calls else {}))
        found.append({"ids": prompt.ids, "all": prompt.ids + result.token_ids, "usage": result.usage})
    return found


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_twenty_turns(exact):
    """The canary checks every window; the table shows what each turn computes."""
    with ScriptedLLM(SCRIPT, exact_prefix=exact, canary="raise") as llm:
        turns, block = converse(llm, 20), llm.engine.cfg.block_size
        llm.engine.check()
    print("turn  prompt  cached  prefilled")
    for number, (before, turn) in enumerate(zip([None, *turns], turns, strict=False), 1):
        usage = turn["usage"]
        print(f"{number:4}  {usage.prompt_tokens:6}  {usage.cached_tokens:6}", end="  ")
        print(f"{usage.prompt_tokens - usage.cached_tokens:9}")
        if before is None:
            assert usage.cached_tokens == 0
            continue
        pairs = zip(before["all"], turn["ids"], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert same > len(before["ids"])  # with tools the thinking of earlier turns stays: answers are reused
        known = min(same, len(before["all"]) - 1)  # the last token was never computed
        assert usage.cached_tokens == known // block * block
    prefilled = sum(turn["usage"].prompt_tokens - turn["usage"].cached_tokens for turn in turns)
    assert prefilled < 0.25 * sum(turn["usage"].prompt_tokens for turn in turns)
