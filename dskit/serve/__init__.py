"""The OpenAI API and the chat page over one LLM, from a notebook or from `dskit serve`.

Idea
    `start` opens both in a thread of this process, on a model that is already loaded:

        server = dskit.serve.start(llm)      # server.url, server.close()

    In reading order: protocol.py (what a body may ask), reply.py (events become chunks), api.py (routes and
    limits), server.py (socket, thread, command), history.py and ui.py (the page).

State
    A Server owns its port and its thread, not the LLM. Starting again on the same port closes the server that
    this process had there, so that a cell can be run twice.

Errors
    OSError when the port is taken by somebody else; ModuleNotFoundError without the extra [serve].

Source
    engine.md sections 18.2, 20, 21; experience.md sections 4, 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dskit.engine.llm import LLM
    from dskit.serve.server import Server


def start(
    llm: LLM,
    host: str = "127.0.0.1",
    port: int = 8000,
    ui: bool = True,
    *,
    name: str | None = None,
    api_key: str | None = None,
) -> Server:
    """Serve `llm` in a thread and return at once; port 0 takes a free one."""
    from dskit.serve import api, server  # here, so that `import dskit.serve` needs no web framework

    if port and (earlier := server.RUNNING.get((host, port))):
        earlier.close()
    return server.Server(api.create(llm, name=name, api_key=api_key, ui=ui), server.bind(host, port), ui)
