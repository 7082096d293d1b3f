"""The demo's skills: conversations with their right answers, made from a random generator.

Idea
    `sample` draws one conversation.  Its last assistant message is the answer; how it is phrased follows from
    the question alone.  Around it everything varies: effort, system text, tools that are not needed, earlier
    turns. Evaluation items use names, values and operands that training never draws (`draw.split_of`);
    definitions are the exception, since what is asked there is what was learned.

Shapes
    `Item.body`: an OpenAI chat body; `Item.answer`: the assistant message that should follow.

Errors
    ValueError for an unknown skill or split.

Source
    Words: WordNet 3.0 (`dskit/train/words.txt`); everything else is made here.

Try
    sample("arithmetic", random.Random(0), "eval")
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from dskit.train.skills import arithmetic, objects, recall, talk, tools
from dskit.train.skills.draw import SPLITS

SKILLS = ("define", "arithmetic", "tools", "recall", "json")  # what `dskit eval` measures
EFFORTS = (
    None,
    None,
    None,
    None,
    "none",
    "none",
    "low",
    "high",
    "max",
)  # None: the default, thinking on, high
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.", "Be brief.",
    "Answer the user.", "You are dskit's demo model.",
    "You are a careful assistant that never invents facts.", "Be polite and exact.",
    "You answer questions from students.", "You are an assistant in a chat.", "Follow the user's wishes.",
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A conversation, the answer that should follow, and what makes it unique within its skill."""

    skill: str
    body: dict[str, Any]
    answer: dict[str, Any]
    key: str

    @property
    def thinking(self) -> bool:
        """Whether the answer begins with a thinking part."""
        return _thinks(self.body)


def sample(
    skill: str, rng: Random, split: str = "train", *, tokens: int | None = None, plain: bool = False
) -> Item:
    """Draw one item; `plain` is the served default (thinking on, nothing around it).

    `tokens` is the length of a recall conversation; without it training draws 150 to 3,600.
    """
    if skill not in MAKERS or split not in SPLITS:
        raise ValueError(f"skill {skill!r}, split {split!r}: must be of {list(MAKERS)} and {SPLITS}")
    effort = None if plain else rng.choice(EFFORTS)
    body: dict[str, Any] = {"messages": []}
    if effort:
        body["reasoning_effort"] = effort
    if not plain and rng.random() < 0.3:
        body["messages"].append({"role": "system", "content": rng.choice(SYSTEMS)})
    if skill == "recall":
        length = tokens or int(150 * 24 ** rng.random())
        messages, thought, answer, key = recall.conversation(
            rng, split, length, far=plain or rng.random() < 0.4, told=plain
        )
        body["messages"] += messages
        return Item(skill, body, {"role": "assistant", "reasoning_content": thought, "content": answer}, key)
    if skill != "tools" and not plain and rng.random() < 0.08:
        offered = tools.offer(
            rng, split
        )  # a question that the demo declines may be one that a tool could answer
        body["tools"] = [
            tool for tool in offered if skill != "decline" or tool["function"]["name"] != "get_weather"
        ]
    return MAKERS[skill](rng, split, body, plain)


def _talk(skill: str, turn: Callable, rng: Random, split: str, body: dict[str, Any], plain: bool) -> Item:
    if not plain and rng.random() < (0.6 if skill == "define" else 0.35):
        _earlier(skill, rng, split, body)
    question, thought, answer, key = (
        turn(rng, split, _thinks(body)) if skill == "arithmetic" else turn(rng, split)
    )
    body["messages"].append({"role": "user", "content": question})
    if skill == "json" and not plain and rng.random() < 0.2:
        body["response_format"] = {"type": "json_object"}
    return Item(skill, body, {"role": "assistant", "reasoning_content": thought, "content": answer}, key)


def _thinks(body: dict[str, Any]) -> bool:
    return body.get("reasoning_effort") != "none"


def _earlier(skill: str, rng: Random, split: str, body: dict[str, Any]) -> None:
    """Put one to four turns before the question: definitions before a definition, else of any kind."""
    for _ in range(rng.randrange(1, 5) if skill == "define" else rng.choice((1, 1, 2, 3))):
        make = (
            EARLIER["define"]
            if skill == "define" and rng.random() < 0.8
            else rng.choice(list(EARLIER.values()))
        )
        question, thought, answer, _ = make(rng, split)
        said = {"role": "assistant", "content": answer} | (
            {"reasoning_content": thought} if _thinks(body) else {}
        )
        body["messages"] += [{"role": "user", "content": question}, said]


def _tools(rng: Random, split: str, body: dict[str, Any], plain: bool) -> Item:
    tool, use = tools.use(rng, split)
    name = tool["function"]["name"]
    body["tools"] = tools.offer(rng, split, tool)
    if not plain and rng.random() < 0.15:
        _earlier("tools", rng, split, body)
    body["messages"].append({"role": "user", "content": use.question})
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(use.arguments)},
    }
    answer = {"role": "assistant", "reasoning_content": f"Call {name}.", "content": "", "tool_calls": [call]}
    key = f"{name} {json.dumps(use.arguments, sort_keys=True)}"
    if not plain and rng.random() < 0.3:
        body["messages"] += [answer, {"role": "tool", "tool_call_id": "call_0", "content": use.result}]
        answer = {"role": "assistant", "reasoning_content": "Tell the result.", "content": use.sentence}
    return Item("tools", body, answer, key)


def _maker(skill: str, turn: Callable) -> Callable[..., Item]:
    return lambda rng, split, body, plain: _talk(skill, turn, rng, split, body, plain)


EARLIER = {"define": talk.define, "greet": talk.greet, "about": talk.about, "decline": talk.decline,
           "json": objects.turn, "arithmetic": arithmetic.short_turn}  # fmt: skip
MAKERS: dict[str, Callable[..., Item]] = {
    "define": _maker("define", talk.define),
    "arithmetic": _maker("arithmetic", arithmetic.turn),
    "tools": _tools,
    "recall": lambda *_: None,  # made by `sample` itself, which knows the length
    "json": _maker("json", objects.turn),
    "greet": _maker("greet", talk.greet),
    "about": _maker("about", talk.about),
    "decline": _maker("decline", talk.decline),
}
