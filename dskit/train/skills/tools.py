"""Tool calls: the tool that a question needs, arguments copied from it, and a sentence on the result.

Idea
    A handful of everyday tools, and coined ones (`book_room`, `find_recipe`, ...) whose parameters the
    question names, so that a tool unknown to training is read from its schema.  One to four tools are
    offered, in random order.

Shapes
    `Use` holds the question, the call (name and arguments), the tool's result and the closing sentence.

Errors
    None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from dskit.train.skills import draw


class Use(NamedTuple):
    """One use of a tool."""

    question: str
    arguments: dict[str, Any]
    result: str
    sentence: str


def schema(name: str, description: str, required: int | None = None, /, **parameters: str) -> dict[str, Any]:
    """An OpenAI tool; parameters are `name="type"`, all required unless `required` says how many."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    needed = list(parameters)[:required]
    body = {"type": "object", "properties": properties, "required": needed}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


def _weather(rng: Random, split: str) -> Use:
    place, degrees, sky = (
        draw.city(rng, split),
        rng.randrange(-9, 39),
        rng.choice(("sunny", "cloudy", "rainy", "windy")),
    )
    days = rng.randrange(2, 8) if rng.random() < 0.3 else None
    forms = (
        "What is the weather in {c}?", "How is the weather in {c}?", "Weather in {c}, please.",
        "Check the weather in {c}.", "Tell me the weather in {c}.", "what's the weather in {c}?",
    )  # fmt: skip
    long = ("What is the weather in {c} for {d} days?", "Give me the weather in {c} for the next {d} days.")
    question = rng.choice(long if days else forms).format(c=place, d=days)
    arguments = {"city": place} | ({"days": days} if days else {})
    result = json.dumps({"degrees": degrees, "sky": sky})
    return Use(question, arguments, result, f"It is {sky} in {place}, {degrees} degrees.")


def _event(rng: Random, split: str) -> Use:
    name, day, time = draw.title(rng, split), rng.choice(draw.DAYS), draw.clock(rng)
    forms = ("Add {t} to my calendar on {d} at {h}.", "Put {t} on my calendar for {d} at {h}.",
             "Create an event called {t} on {d} at {h}.", "Schedule {t} for {d} at {h}.")  # fmt: skip
    question = rng.choice(forms).format(t=f'"{name}"' if rng.random() < 0.6 else name, d=day, h=time)
    return Use(
        question, {"title": name, "day": day, "time": time}, "ok", f"I added {name} on {day} at {time}."
    )


def _currency(rng: Random, split: str) -> Use:
    amount = draw.number(rng, split, rng.choice((2, 3, 4)))
    source, target = rng.sample(draw.CURRENCIES, 2)
    forms = (
        "Convert {a} {s} to {t}.",
        "How much is {a} {s} in {t}?",
        "What is {a} {s} in {t}?",
        "Change {a} {s} into {t}.",
    )
    value = rng.randrange(2, 9999)
    question = rng.choice(forms).format(a=amount, s=source, t=target)
    arguments = {"amount": amount, "source": source, "target": target}
    return Use(question, arguments, json.dumps({"value": value}), f"{amount} {source} is {value} {target}.")


def _send(rng: Random, split: str) -> Use:
    who, text = draw.person(rng, split), draw.message(rng, split)
    forms = (
        'Send "{m}" to {p}.',
        "Send {p} a message: {m}",
        "Tell {p}: {m}",
        "Write to {p}: {m}",
        'Text {p} "{m}".',
    )
    question = rng.choice(forms).format(m=text, p=who)
    return Use(question, {"to": who, "text": text}, "sent", f"I sent your message to {who}.")


def _timer(rng: Random, split: str) -> Use:
    minutes, label = rng.randrange(1, 120), draw.title(rng, split)
    forms = ("Set a timer of {m} minutes for the {t}.", "Set a {m} minute timer for the {t}.",
             "Start a timer for the {t}, {m} minutes.", "Remind me of the {t} in {m} minutes.")  # fmt: skip
    question = rng.choice(forms).format(m=minutes, t=label)
    return Use(
        question,
        {"minutes": minutes, "label": label},
        "started",
        f"The timer for the {label} runs for {minutes} minutes.",
    )


def _contact(rng: Random, split: str) -> Use:
    who, phone = draw.person(rng, split), draw.number(rng, split, 6)
    forms = (
        "What is the phone number of {p}?",
        "Look up {p} in my contacts.",
        "Find the number of {p}.",
        "Find {p}'s number.",
    )
    return Use(
        rng.choice(forms).format(p=who),
        {"name": who},
        json.dumps({"phone": str(phone)}),
        f"The number of {who} is {phone}.",
    )


def _note(rng: Random, split: str) -> Use:
    text = draw.message(rng, split)
    forms = ("Make a note: {t}", "Note down: {t}", 'Save the note "{t}".', "Write a note that says: {t}")
    return Use(rng.choice(forms).format(t=text), {"text": text}, "saved", "I saved your note.")


def _room(rng: Random, split: str) -> str:
    """A room of an unlikely name; training also meets halls and shops, so that any noun may begin one."""
    if split == "train" and rng.random() < 0.6:
        return draw.held(rng, split, lambda: f"{draw.any_noun(rng)} {rng.choice(('hall', 'office', 'shop'))}")
    return draw.held(rng, split, lambda: f"{draw.noun(rng)} room")


def _light(rng: Random, split: str) -> Use:
    room, level = _room(rng, split), rng.randrange(0, 101)
    forms = (
        "Set the light in the {r} to {v} percent.",
        "Dim the light of the {r} to {v} percent.",
        "{r} light to {v} percent",
    )
    return Use(
        rng.choice(forms).format(r=room, v=level),
        {"room": room, "level": level},
        "ok",
        f"The light in the {room} is at {level} percent.",
    )


TOOLS: dict[str, tuple[dict[str, Any], Callable[[Random, str], Use]]] = {
    tool["function"]["name"]: (tool, make)
    for tool, make in (
        (schema("get_weather", "Current weather of a city", 1, city="string", days="integer"), _weather),
        (schema("add_event", "Add a calendar event", title="string", day="string", time="string"), _event),
        (
            schema("convert_currency", "Convert money", amount="number", source="string", target="string"),
            _currency,
        ),
        (schema("send_message", "Send a message to a person", to="string", text="string"), _send),
        (schema("set_timer", "Start a timer", minutes="integer", label="string"), _timer),
        (schema("find_contact", "Look up a contact", name="string"), _contact),
        (schema("save_note", "Save a note", text="string"), _note),
        (schema("set_light", "Set the light of a room", room="string", level="integer"), _light),
    )
}  # fmt: skip
VERBS = [
    "book", "find", "order", "check", "start", "open", "rate", "rent", "plan", "list", "move", "copy",
    "print", "clean", "watch", "track",
]  # fmt: skip
PARAMETERS: dict[str, tuple[str, Callable[[Random, str], Any]]] = {
    "guest": ("string", draw.person),
    "owner": ("string", draw.person),
    "place": ("string", draw.city),
    "origin": ("string", draw.city),
    "topic": ("string", draw.title),
    "nights": ("integer", lambda rng, split: rng.randrange(1, 30)),
    "count": ("integer", lambda rng, split: draw.number(rng, split, 2)),
    "price": ("number", lambda rng, split: draw.number(rng, split, 3)),
    "code": ("string", lambda rng, split: str(draw.number(rng, split, 4))),
    "day": ("string", lambda rng, split: rng.choice(draw.DAYS)),
    "color": ("string", lambda rng, split: rng.choice(draw.COLORS)),
    "urgent": ("boolean", lambda rng, split: rng.random() < 0.5),
}


def coined(rng: Random, split: str) -> tuple[dict[str, Any], Use]:
    """A tool that does not exist elsewhere, and a question that names its parameters."""
    name = draw.held(rng, split, lambda: f"{rng.choice(VERBS)}_{draw.noun(rng)}")
    first = rng.choice(("guest", "place", "topic", "code"))
    keys = [first, *rng.sample([key for key in PARAMETERS if key != first], rng.randrange(0, 3))]
    tool = schema(
        name, f"{name.replace('_', ' the ').capitalize()}", **{key: PARAMETERS[key][0] for key in keys}
    )
    arguments = {key: PARAMETERS[key][1](rng, split) for key in keys}
    shown = [
        f"{key} {json.dumps(value) if isinstance(value, bool) else value}" for key, value in arguments.items()
    ]
    lead = rng.choice(("Call {n} with ", "Use {n} with ", "Please {w} with ", "{w}: ")).format(
        n=name, w=name.replace("_", " the ")
    )
    question = lead + (", ".join(shown[:-1]) + " and " + shown[-1] if len(shown) > 1 else shown[0]) + "."
    return tool, Use(question, arguments, "done", "Done.")


def offer(rng: Random, split: str, wanted: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """One to four tools in random order, `wanted` among them."""
    others = [tool for tool, _ in TOOLS.values() if wanted is None or tool is not wanted]
    if rng.random() < 0.25:
        others.append(coined(rng, split)[0])
    count = rng.choice((0, 1, 1, 2, 3)) if wanted else rng.choice((1, 1, 2))
    tools = rng.sample(others, count) + ([wanted] if wanted else [])
    rng.shuffle(tools)
    return tools


def use(rng: Random, split: str) -> tuple[dict[str, Any], Use]:
    """A tool and a question that needs it."""
    if rng.random() < 0.25:
        return coined(rng, split)
    tool, make = rng.choice(list(TOOLS.values()))
    return tool, make(rng, split)
