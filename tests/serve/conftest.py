"""One scripted server for the session (protocol, page), and one over `tiny` (what a model's noise shows)."""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from dskit import serve
from dskit.engine.llm import LLM
from tests.serve.scripted import ScriptedLLM

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bergen", "days": 3}'},
}
SCRIPT = {
    "harbour": {
        "reasoning_content": "A word about ships.",
        "content": "A sheltered place for ships — quiet.",
    },
    "weather": {"reasoning_content": "It needs the tool.", "content": "One moment.", "tool_calls": [CALL]},
    "object": {"reasoning_content": "As JSON.", "content": '{"name": "Mira", "age": 34}'},
    "degrees": {"reasoning_content": "The tool has answered.", "content": "It is sunny in Bergen."},
}


@pytest.fixture(scope="session")
def scripted():
    """The scripted LLM; 4 ms a step, so that a reply without an end lasts seconds."""
    with ScriptedLLM(SCRIPT, pause=0.004, max_num_seqs=12) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(scripted):
    """API and page over the scripted LLM."""
    with serve.start(scripted, port=0) as running:
        yield running


@pytest.fixture(scope="session")
def tiny():
    """A model with random weights."""
    with LLM("tiny", max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_server(tiny):
    """The API over it."""
    with serve.start(tiny, port=0, ui=False) as running:
        yield running


def client_of(running: serve.Server, **settings) -> openai.OpenAI:
    """OpenAI's own client, without retries."""
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60, **settings)


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's own client of the scripted server."""
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="session")
def http(server):
    """Plain HTTP to the scripted server."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def idle(llm: LLM, seconds: float = 10.0) -> dict:
    """The engine's counts once nothing runs; fails if blocks or slots stay taken."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = llm.stats()
        if not stats["running"] and not stats["waiting"]:
            break
        time.sleep(0.01)
    assert stats["running"] == stats["waiting"] == 0, stats
    assert (
        stats["blocks_free"] == stats["blocks_total"] and stats["slots_free"] == llm.engine.cfg.max_num_seqs
    )
    return stats


def running(llm: LLM, count: int = 1, seconds: float = 10.0) -> dict:
    """The engine's counts once so many replies run."""
    end = time.monotonic() + seconds
    while (stats := llm.stats())["running"] < count and time.monotonic() < end:
        time.sleep(0.005)
    assert stats["running"] >= count, stats
    return stats
