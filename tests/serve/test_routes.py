"""Completions, models, tokens, health and the limits of a server."""

from __future__ import annotations

import httpx
import openai
import pytest

from dskit import serve
from dskit.serve import server as server_module
from tests.serve.conftest import client_of, idle, running
from tests.serve.scripted import ENDLESS, ScriptedLLM


def test_a_completion(client):
    reply = client.completions.create(model="scripted", prompt="Once", max_tokens=20)
    assert reply.choices[0].text == ENDLESS[:20] and reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 20)
    assert reply.object == "text_completion"


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(client):
    assert client.completions.create(model="scripted", prompt="Once").usage.completion_tokens == 16


def test_a_streamed_completion_adds_up(client):
    chunks = list(
        client.completions.create(
            model="scripted", prompt="Once", max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ENDLESS[:9]
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage.completion_tokens == 9


def test_many_prompts_and_choices_are_numbered_prompt_by_prompt(client):
    reply = client.completions.create(model="scripted", prompt=["a", [3, 4]], n=2, max_tokens=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 12)


def test_a_completion_with_a_stop_string_and_log_probabilities(client):
    reply = client.completions.create(model="scripted", prompt="x", max_tokens=50, stop=" and", logprobs=1)
    choice = reply.choices[0]
    assert choice.text == "All work" and choice.finish_reason == "stop"
    assert choice.logprobs.tokens[:8] == list("All work") and choice.logprobs.text_offset[:3] == [0, 1, 2]
    assert choice.logprobs.top_logprobs[0] == {"A": pytest.approx(0.0, abs=1e-6)}


def test_models(client):
    (model,) = client.models.list()
    assert model.id == "scripted" and client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError, match="this server has 'scripted'"):
        client.models.retrieve("gpt")


def test_tokens_there_and_back(http, scripted):
    ids = http.post("/tokenize", json={"prompt": "ships — é"}).json()["tokens"]
    assert ids == scripted.encode("ships — é")
    assert http.post("/detokenize", json={"tokens": ids[1:]}).json() == {"prompt": "ships — é"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/tokenize", json=body).json()["tokens"] == scripted.render(body)[0].ids


def test_health_readiness_and_metrics(http, client):
    client.completions.create(model="scripted", prompt="Once", max_tokens=1)
    assert http.get("/health").json() == {"status": "ok"}
    ready = http.get("/ready")
    assert ready.status_code == 200 and ready.json()["status"] == "ready"
    text = http.get("/metrics").text
    assert 'dskit_requests_total{status="200"}' in text and "dskit_blocks_free" in text


def test_a_request_can_be_aborted_by_its_id(client, http, scripted):
    stream = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Go on."}], stream=True
    )
    first = next(iter(stream))
    assert http.post("/abort", json={"request_id": first.id}).json()["aborted"]
    assert [chunk for chunk in stream][-1].choices[0].finish_reason == "abort"
    idle(scripted)
    assert http.post("/abort", json={"request_id": first.id}).status_code == 404


def test_a_client_that_leaves_a_stream_frees_its_blocks(client, scripted):
    stream = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Go on."}], stream=True, n=2
    )
    next(iter(stream))
    assert running(scripted, 2)["blocks_free"] < scripted.stats()["blocks_total"]
    stream.close()
    idle(scripted, seconds=3)


def test_a_client_that_stops_waiting_frees_its_blocks(server, scripted):
    body = {"messages": [{"role": "user", "content": "Go on."}]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.5)
    idle(scripted, seconds=3)


def test_the_event_loop_answers_while_a_long_prompt_is_read(http, server):
    """A prompt of a megabyte is tokenised in a thread: /health answers meanwhile."""
    import concurrent.futures
    import time

    body = {"prompt": "many words " * 30_000}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(httpx.post, f"{server.url}/tokenize", json=body, timeout=60)
        waits = []
        while not long.done():
            begin = time.monotonic()
            http.get("/health")
            waits.append(time.monotonic() - begin)
        assert long.result().json()["count"] == 330_001
    assert len(waits) > 2, "the long request ended before anything could be asked"


def test_eight_clients_at_once(server, scripted):
    import concurrent.futures

    def one(i: int) -> str:
        with client_of(server) as client:
            messages = [{"role": "user", "content": "What is a harbour?" if i % 2 else "Give me an object."}]
            return (
                client.chat.completions.create(model="scripted", messages=messages).choices[0].message.content
            )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, range(8)))
    assert replies == ['{"name": "Mira", "age": 34}', "A sheltered place for ships — quiet."] * 4
    idle(scripted)


def test_a_key_is_asked_for_where_one_is_set():
    with ScriptedLLM({}) as llm, serve.start(llm, port=0, name="mine", api_key="sesame") as running:
        fields = {"model": "mine", "prompt": "x", "max_tokens": 1}
        with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
            client_of(running).completions.create(**fields)
        right = openai.OpenAI(base_url=f"{running.url}/v1", api_key="sesame", max_retries=0)
        assert right.completions.create(**fields).model == "mine"
        assert httpx.post(f"{running.url}/tokenize", json={"prompt": "x"}).status_code == 401
        assert httpx.get(f"{running.url}/health").status_code == 200
        page = httpx.Client(base_url=f"{running.url}/ui")
        assert page.get("/config").status_code == 401, "the page asks for the key too"
        assert page.post("/login", data={"username": "me", "password": "open"}).status_code == 400
        assert page.post("/login", data={"username": "me", "password": "sesame"}).status_code == 200
        assert page.get("/config").status_code == 200


def test_a_full_queue_says_when_to_come_back():
    with (
        ScriptedLLM({}, pause=0.01, max_num_seqs=1, max_queued_requests=1) as llm,
        serve.start(llm, port=0, ui=False) as server,
    ):
        body = {"prompt": "x", "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30):
            running(llm)
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30):
                refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        idle(llm)


def test_a_server_shows_its_page_while_it_runs(server, tiny_server):
    assert f'<iframe src="{server.url}/ui/" title="dskit chat page"' in server._repr_html_()
    assert f"{server.url}/v1" in server._repr_html_() and "<iframe" not in tiny_server._repr_html_()
    with ScriptedLLM({}) as llm, serve.start(llm, port=0, ui=False) as running:
        pass
    assert running._repr_html_() == f"the server at <code>{running.url}</code> is closed"


def test_closing_ends_replies_and_a_second_start_takes_the_port_over():
    with ScriptedLLM({}, pause=0.01) as llm:
        first = serve.start(llm, port=0, ui=False)
        body = {"prompt": "x", "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{first.url}/v1/completions", json=body, timeout=30) as stream:
            running(llm)
            second = serve.start(llm, port=first.port, ui=False)
            text = "".join(stream.iter_text())
        assert '"finish_reason":"abort"' in text and text.endswith("data: [DONE]\n\n")
        assert first.url == second.url and httpx.get(f"{second.url}/health").status_code == 200
        second.close()
        second.close()
        idle(llm)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{second.url}/health")


def test_a_port_that_is_taken_is_said_so(server):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="--port 0 takes a free port"):
            server_module.bind("127.0.0.1", other.getsockname()[1])


def test_a_stalled_reader_is_cut_off(server, scripted, monkeypatch):
    """Nobody reads the events for longer than allowed: the request ends, and its blocks are free."""
    import asyncio

    from dskit.engine.seq import SamplingParams
    from dskit.serve import reply

    monkeypatch.setattr(reply, "UNREAD", 5)
    monkeypatch.setattr(reply, "STALLED", 0.05)

    async def stall() -> None:
        loop = asyncio.get_running_loop()
        one = reply.Reply(scripted, "stalled", [([5, 6], SamplingParams(max_tokens=900))], loop)
        await asyncio.sleep(0.3)
        assert one.handles[0].finished
        assert [event for batch in [b async for b in one.batches()] for _, event in batch][
            -1
        ].finish_reason == "abort"

    asyncio.run(stall())
    idle(scripted)
