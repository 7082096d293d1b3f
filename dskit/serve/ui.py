"""The chat page: Gradio at /ui of the same application, on the same LLM.

Idea
    The conversation is what the page shows (history.py). Every way to a reply (a question, retry, edit, an
    example) prepares the history, then runs `Chat.answer`, then settles the buttons. Stop, a closed tab and
    an error all end in the `finally` of `answer`, which frees the cache.

State
    None on the server: every reader of the page has their own history, in the page.

Errors
    A refused request shows as Gradio's red note, in the API's words.

Source
    experience.md section 5. Works without a network: system fonts, no analytics, no share link.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported

import gradio as gr
from fastapi import FastAPI

from dskit.chat import ChatError
from dskit.config import PRESETS_DIR
from dskit.engine.llm import LLM
from dskit.engine.seq import RequestError
from dskit.serve.history import (
    History,
    Turn,
    as_curl,
    as_python,
    conversation,
    is_pending,
    kind_of,
    note,
    shown,
    text_of,
)
from dskit.serve.protocol import ApiError, Body, check_chat
from dskit.serve.reply import ChatChoice, EngineFailure, Reply

EVERY = 0.05  # seconds between two redrawings of a reply
LEVELS = ("off", "low", "high", "max")
SKILLS = (
    "It defines common English words, calculates with its steps shown, calls tools, recalls what you told "
    "it, and writes JSON. Anything else it declines."
)
NOISE = (
    "**Random weights: every reply is noise.** The mechanics are real: caches, batching, streaming, speed. "
    "`dskit serve demo` has a trained model."
)
CSS = """
.gradio-container { max-width: 880px !important; margin: 0 auto !important; }
#title h1 { margin: 0; } #title p { margin: .15em 0 0; color: var(--body-text-color-subdued); }
#banner { border-left: 3px solid var(--color-accent); padding: .1em .9em; }
#chat { border: 1px solid var(--border-color-primary) !important; border-radius: 12px; }
#chat .thought-group { border: none; background: none; padding: 0; margin: 0; }
#chat .thought-group .title { padding: 2px 0; color: var(--body-text-color-subdued); }
#box textarea { border-radius: 12px; }
.form:has(> #level) { border: none; background: none; }
#level { display: flex; flex-direction: row; align-items: center; gap: 1em; padding: 0; background: none; }
#level > span { margin: 0; }
#examples { gap: 6px; } #examples button { min-width: 0; flex: 0 1 auto; border-radius: 999px; }
body:not(.dark) .gradio-container { --body-text-color-subdued: var(--neutral-500); }
footer { display: none !important; }
"""


def mount(app: FastAPI, api: Any) -> None:
    """Put the page of `api` (its LLM, the model's name, the key) at /ui of `app`."""
    auth = {}
    if api.key is not None:
        auth = {
            "auth": lambda _, word: secrets.compare_digest(word.encode(), api.key.encode()),
            "auth_message": "Any user name; the password is the server's API key.",
        }
    theme = gr.themes.Default(
        primary_hue="indigo",
        font=["ui-sans-serif", "system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    gr.mount_gradio_app(
        app,
        page(api.llm, api.name, api.key is not None),
        "/ui",
        css=CSS,
        theme=theme,
        ssr_mode=False,
        footer_links=[],
        run_history=False,
        max_file_size="1kb",
        enable_monitoring=False,
        **auth,
    )


def page(llm: LLM, name: str, keyed: bool = False) -> gr.Blocks:
    """The page itself; `keyed` when the API asks for a key."""
    chat = Chat(llm, name, keyed)
    with gr.Blocks(title=f"dskit · {name}", analytics_enabled=False, fill_height=True) as blocks:
        gr.Markdown(f"# {name}\n{facts(llm)}", elem_id="title")
        if text := banner(llm):
            gr.Markdown(text, elem_id="banner")
        history = gr.Chatbot(
            elem_id="chat",
            height="52vh",
            show_label=False,
            editable="user",
            buttons=["copy"],
            layout="bubble",
            allow_tags=False,
            placeholder="Ask something, or take one of the examples below.",
        )
        box = gr.Textbox(
            placeholder="Ask something",
            show_label=False,
            elem_id="box",
            autofocus=True,
            submit_btn=True,
            max_lines=8,
        )
        again = gr.Button("Try again with twice the limit", visible=False, elem_id="again", size="sm")
        with gr.Row(elem_id="examples"):
            buttons = [(gr.Button(one["label"], size="sm"), one) for one in examples(llm.name)]
        level = gr.Radio(LEVELS, value="high", label="Thinking", elem_id="level")
        settings = [level, *_settings(llm)]
        with gr.Accordion("The last request as code", open=False):
            code = [
                gr.Code(label=word, language=kind, interactive=False)
                for word, kind in (("curl", "shell"), ("Python", "python"))
            ]
        _wire(chat, history, box, again, buttons, settings, code)
    blocks.queue(default_concurrency_limit=None)
    return blocks


def _settings(llm: LLM) -> list[Any]:
    """The fields of the accordion, in the order of `Chat.body`."""
    known = llm.tokenizer.generation
    temperature = 0.0 if known.get("do_sample") is False else known.get("temperature", 1.0)
    limit = max(16, llm.max_model_len // 2)
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        system = gr.Textbox(label="System prompt", lines=2)
        with gr.Row():
            fields = [
                gr.Slider(
                    0, 2, temperature, step=0.05, label="Temperature", info="0 takes the likeliest token"
                ),
                gr.Slider(0.05, 1, known.get("top_p", 1.0), step=0.05, label="Top-p"),
                gr.Slider(
                    1,
                    llm.max_model_len,
                    limit,
                    step=1,
                    label="Limit",
                    info="Most tokens, thinking too",
                    elem_id="limit",
                ),
                gr.Textbox(label="Seed", info="empty: a new one each time", elem_id="seed"),
            ]
        tools = gr.Textbox(
            label="Tools",
            lines=3,
            max_lines=8,
            elem_id="tools",
            placeholder="[]",
            info="A JSON list in OpenAI's form. After a call, what you type is taken as its result.",
        )
    return [system, *fields, tools]


def _wire(chat: Chat, history: Any, box: Any, again: Any, buttons: list, settings: list, code: list) -> None:
    """Say what each button does. Every way to a reply is: prepare the history, answer, settle."""
    limit, tools = settings[4], settings[6]
    starts = [
        box.submit(_ask, [box, history], [history, box], queue=False),
        history.retry(_rewind, history, history, queue=False),
        history.edit(_edit, history, history, queue=False),
        again.click(_double, [history, limit], [history, limit], queue=False),
        *(
            button.click(lambda one=one: _example(one), None, [history, tools], queue=False)
            for button, one in buttons
        ),
    ]
    busy = {"submit_btn": False, "stop_btn": True, "interactive": False}
    idle = {"submit_btn": True, "stop_btn": False, "interactive": True}
    answers = []
    for start in starts:
        begun = start.success(
            lambda: (gr.update(**busy), gr.update(visible=False)), None, [box, again], queue=False
        )
        answers.append(
            begun.then(
                chat.answer, [history, *settings], history, concurrency_limit=None, show_progress="hidden"
            )
        )
        settled = answers[-1].then(
            lambda h: (_settle(h), gr.update(**idle), gr.update(visible=_was_cut(h))),
            history,
            [history, box, again],
            queue=False,
        )
        settled.then(chat.code, [history, *settings], code, queue=False)
    box.stop(None, None, None, cancels=answers)
    history.undo(_undo, history, [history, box], queue=False)


class Chat:
    """What the page does with the LLM."""

    def __init__(self, llm: LLM, name: str, keyed: bool):
        self.llm, self.name, self.keyed = llm, name, keyed

    async def answer(self, history: History, *settings: Any) -> AsyncIterator[History]:
        """The history with the reply in it, growing; ends the request however it is left."""
        if not history or history[-1]["role"] != "user":
            return
        reply = None
        try:
            body = self.body(history, *settings)
            check_chat(body)
            prompt, params = await asyncio.to_thread(self.llm.render, body)
            params = replace(params, max_tokens=min(int(settings[4]), params.max_tokens))
            loop, name = asyncio.get_running_loop(), f"page-{secrets.token_hex(8)}"
            reply = await asyncio.to_thread(Reply, self.llm, name, [(prompt.ids, params)], loop)
            choice, turn = ChatChoice(0, prompt, reply, self.name, self.llm.tokenizer, False), Turn()
            turn.add(choice.start())
            yield history + turn.messages()
            async for batch in reply.batches(EVERY):
                for _, event in batch:
                    turn.add(choice.push(event))
                if turn.finish_reason:
                    turn.end(reply.handles[0].usage, choice.reasoning_tokens, reply.handles[0].result().seed)
                yield history + turn.messages()
        except (RequestError, ChatError, ApiError, EngineFailure) as error:
            raise gr.Error(str(error), title="No reply", print_exception=False) from error
        finally:
            if reply is not None:
                reply.cancel()

    def body(
        self,
        history: History,
        level: str,
        system: str,
        temperature: float,
        top_p: float,
        limit: int,
        seed: str,
        tools: str,
    ) -> Body:
        """The chat body that asks for the next reply, without `limit`, which is lowered to what fits."""
        body: Body = {"messages": conversation(history, system), "reasoning_effort": level}
        body |= {"temperature": temperature, "top_p": top_p}
        if (seed or "").strip():
            try:
                body["seed"] = int(seed)
            except ValueError:
                raise ApiError(f"Seed is {seed!r}; it must be a whole number", "seed") from None
        if (tools or "").strip():
            try:
                body["tools"] = json.loads(tools)
            except ValueError as error:
                raise ApiError(f"Tools is not valid JSON: {error}", "tools") from None
        return body

    def code(self, request: gr.Request, history: History, *settings: Any) -> tuple[str, str]:
        """The last request as a curl command and as Python."""
        if not any(message["role"] == "user" for message in history):
            return "", ""
        body = {"model": self.name, **self.body(_rewind(history), *settings), "max_tokens": int(settings[4])}
        url = f"http://{request.headers['host']}/v1"
        return as_curl(url, body, self.keyed), as_python(url, body, self.keyed)


# ---- buttons ----


def _ask(text: str, history: History) -> tuple[History, str]:
    if not text.strip():
        raise gr.Error("Type a question first.", title="No question", print_exception=False)
    return [*history, {"role": "user", "content": text}], ""


def _rewind(history: History) -> History:
    """Back to the last question."""
    last = max(i for i, message in enumerate(history) if message["role"] == "user")
    return history[: last + 1]


def _edit(history: History, edited: gr.EditData) -> History:
    """Back to a question, with its new text."""
    at = edited.index[0] if isinstance(edited.index, (list, tuple)) else edited.index
    return [*history[:at], {"role": "user", "content": edited.value}]


def _undo(history: History) -> tuple[History, str]:
    """Take the last question back into the box."""
    kept = _rewind(history)
    return kept[:-1], text_of(kept[-1])


def _double(history: History, limit: int) -> tuple[History, int]:
    """The last question again, with more room."""
    return _rewind(history), 2 * limit


def _example(one: Body) -> tuple[History, str]:
    """Start over with an example."""
    return shown(one["messages"]), json.dumps(one["tools"], indent=1) if one.get("tools") else ""


def _settle(history: History) -> History:
    """After a stop nothing is pending any more, and the reply says that it was stopped."""
    if not history or history[-1]["role"] == "user" or kind_of(history[-1]) == "stats":
        return history
    kept = [message for message in history if text_of(message) or not is_pending(message)]
    for message in filter(is_pending, kept):
        message["metadata"] = {**message["metadata"], "status": "done", "title": "Thought"}
    return [*kept, note("stopped")]


def _was_cut(history: History) -> bool:
    """Whether the last reply ended at its limit."""
    return bool(history) and kind_of(history[-1]) == "stats" and "the limit of tokens" in text_of(history[-1])


# ---- texts ----


def folder_of(name: str) -> Path | None:
    """The checkpoint's folder: a preset's or a path; None where there is none."""
    return next((path for path in (PRESETS_DIR / name, Path(name)) if path.is_dir()), None)


def examples(name: str) -> list[Body]:
    """The checkpoint's own examples (`examples.json`), else one that fits any model."""
    folder = folder_of(name)
    if folder and (file := folder / "examples.json").is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    return [{"label": "What can you do?", "messages": [{"role": "user", "content": "What can you do?"}]}]


def banner(llm: LLM) -> str:
    """What to expect of this model."""
    folder = folder_of(llm.name)
    if folder is None or not any(folder.glob("*.safetensors")):
        return NOISE
    return f"**A small trained model.** {SKILLS}" if llm.name == "demo" else ""


def facts(llm: LLM) -> str:
    """Size, device and settings in one line."""
    weights = sum(p.numel() for p in llm.model.parameters()) if llm.model is not None else 0
    words = [f"{weights / 1e6:,.1f} M parameters"] if weights else []
    words += [
        str(llm.device),
        f"{llm.numerics} numerics",
        f"{llm.max_model_len:,} tokens of context",
        "dskit",
    ]
    return " · ".join(words)
