"""The HTTP side: routes, limits and streams.

Idea
    A request is read, checked (protocol.py), rendered in a thread, submitted (reply.py) and streamed. The
    event loop itself only moves events; the engine steps in its own thread. A client that goes away cancels
    its request before the next step, whether it streams or waits.

Routes
    with the key, if there is one: /v1/chat/completions /v1/completions /v1/models /tokenize /detokenize
    /abort
    without: /health (it answers), /ready (steps are made), /metrics (Prometheus text)

State
    `Api` knows the live replies by their id, so that /abort finds them and a stopping server can end them.

Errors
    Every refusal has OpenAI's error object: 400 with `param`, context_length_exceeded, 401, 404, 413, 415,
    429 with Retry-After, 500, 503 while stopping. A step that fails in the middle of a stream sends the
    object as its last event.

Source
    engine.md 18.2, 20, 21; OpenAI's API reference.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from dskit import chat
from dskit.engine.llm import LLM
from dskit.engine.seq import RequestError, SamplingParams
from dskit.serve import protocol
from dskit.serve.protocol import ApiError, Body
from dskit.serve.reply import ChatChoice, EngineFailure, Reply, TextChoice

logger = logging.getLogger("dskit.serve")
ENGINE_FIELDS = ("priority", "cache_salt")  # of a body, for the scheduler; vLLM's names
STUCK = 10.0  # seconds without a step, while there is work, after which /ready says no


class Api:
    """One LLM behind HTTP; `name` is what clients call the model."""

    def __init__(self, llm: LLM, name: str | None = None, api_key: str | None = None):
        self.llm, self.name, self.key = llm, name or llm.name, api_key
        self.created, self.draining = int(time.time()), False
        self.live: dict[str, Reply] = {}
        self.outcomes: Counter[str] = Counter()
        self.ended: deque[float] = deque(maxlen=64)  # when the newest replies ended
        self._progress = (-1, time.monotonic())  # steps made, and when that was noticed

    # ---- answers ----

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self.read(request)
        protocol.check_chat(body)
        prompt, params = await off_loop(body, self.llm.render, body)
        n, want = body.get("n") or 1, bool(body.get("logprobs"))
        reply = await self.submit(body, "chatcmpl", [(prompt.ids, params.fork(i)) for i in range(n)])
        choices = [ChatChoice(i, prompt, reply, self.name, self.llm.tokenizer, want) for i in range(n)]
        return await self.answer(request, body, reply, choices, 1)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self.read(request)
        prompts, n = protocol.check_completion(body), body.get("n") or 1
        ids = await off_loop(body, lambda: [self.llm.encode(prompt) for prompt in prompts])
        params = SamplingParams.from_body(
            {"max_tokens": 16} | {k: v for k, v in body.items() if v is not None}
        )
        reply = await self.submit(body, "cmpl", [(one, params.fork(i)) for one in ids for i in range(n)])
        choices = [
            TextChoice(i, reply, self.name, self.llm.tokenizer, params.logprobs)
            for i in range(n * len(prompts))
        ]
        return await self.answer(request, body, reply, choices, len(prompts))

    async def submit(self, body: Body, kind: str, work: list[tuple[list[int], SamplingParams]]) -> Reply:
        """Hand a request to the engine, unless the server is stopping."""
        if self.draining or self.llm.engine.closed:
            raise ApiError(
                "the server is stopping", code="unavailable", status=503, headers={"Retry-After": "5"}
            )
        request_id = f"{kind}-{secrets.token_hex(12)}"
        options = {name: body[name] for name in ENGINE_FIELDS if body.get(name) is not None}
        reply = await off_loop(body, Reply, self.llm, request_id, work, asyncio.get_running_loop(), options)
        self.live[request_id] = reply
        return reply

    async def answer(
        self, request: Request, body: Body, reply: Reply, choices: list, prompts: int
    ) -> Response:
        """Stream the choices, or wait for all of them."""
        headers = {"x-request-id": reply.request_id}
        if body.get("stream"):
            return Stream(self.events(body, reply, choices, prompts), lambda: self.end(reply), headers)
        try:
            if not await unless_gone(request, self.collect(reply, choices)):
                return Response(status_code=499)  # nobody is there to read it
        finally:
            self.end(reply)
        whole = {
            "id": reply.request_id,
            "object": self.kind(choices),
            "created": reply.created,
            "model": self.name,
            "choices": [choice.whole() for choice in choices],
            "usage": usage(reply, choices, prompts),
        }
        return JSONResponse(whole, headers=headers)

    async def collect(self, reply: Reply, choices: list) -> None:
        """Let every choice read its events."""
        for choice in choices:
            choice.start()
        async for batch in reply.batches():
            for index, event in batch:
                choices[index].push(event)

    async def events(self, body: Body, reply: Reply, choices: list, prompts: int) -> AsyncIterator[str]:
        """Server-sent events of a reply: chunks, the usage if asked for, and [DONE]."""
        options = body.get("stream_options") or {}
        often = bool(options.get("continuous_usage_stats"))
        try:
            if opening := [chunk for choice in choices for chunk in choice.start()]:
                yield sse(opening)
            async for batch in reply.batches():
                chunks = [chunk for index, event in batch for chunk in choices[index].push(event)]
                if often:
                    chunks = [chunk | {"usage": usage(reply, choices, prompts)} for chunk in chunks]
                if chunks:
                    yield sse(chunks)
            if options.get("include_usage"):
                last = {
                    "id": reply.request_id,
                    "object": self.kind(choices, chunk=True),
                    "created": reply.created,
                    "model": self.name,
                    "choices": [],
                    "usage": usage(reply, choices, prompts),
                }
                yield sse([last])
        except EngineFailure as error:
            yield sse([engine_error(error).body()])
        yield "data: [DONE]\n\n"

    def end(self, reply: Reply) -> None:
        """Forget a reply; what it still holds is freed."""
        reply.cancel()
        if self.live.pop(reply.request_id, None):
            self.ended.append(time.monotonic())

    @staticmethod
    def kind(choices: list, chunk: bool = False) -> str:
        """The `object` of a body."""
        chat_like = isinstance(choices[0], ChatChoice)
        return ("chat.completion" + ".chunk" * chunk) if chat_like else "text_completion"

    # ---- small routes ----

    async def models(self) -> Body:
        """GET /v1/models."""
        return {"object": "list", "data": [self.card()]}

    async def model(self, name: str) -> Body:
        """GET /v1/models/NAME."""
        self.check_name(name)
        return self.card()

    def card(self) -> Body:
        """The model as the API lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dskit",
            "max_model_len": self.llm.max_model_len,
        }

    async def tokenize(self, request: Request) -> Body:
        """POST /tokenize: ids of `prompt`, or of `messages` as they would be rendered."""
        body = await self.read(request)
        if "messages" in body:
            protocol.check_chat(body)
            ids = (await off_loop(body, self.llm.render, body))[0].ids
        elif isinstance(body.get("prompt"), str):
            ids = await off_loop(body, self.llm.encode, body["prompt"])
        else:
            raise ApiError("give a prompt (a string) or messages", "prompt", "missing_required_parameter")
        return {"tokens": ids, "count": len(ids), "max_model_len": self.llm.max_model_len}

    async def detokenize(self, request: Request) -> Body:
        """POST /detokenize: the text of `tokens`."""
        body = await self.read(request)
        ids, limit = body.get("tokens"), self.llm.config.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < limit for i in ids):
            raise ApiError(f"tokens must be a list of ids from 0 to {limit - 1}", "tokens")
        return {"prompt": await off_loop(body, self.llm.tokenizer.decode, ids)}

    async def abort(self, request: Request) -> Body:
        """POST /abort: end the reply with this `request_id` (the `id` in its chunks)."""
        name = (await self.read(request)).get("request_id")
        reply = self.live.get(name) if isinstance(name, str) else None
        if reply is None:
            raise ApiError(f"no request {name!r} is being served", "request_id", "request_not_found", 404)
        reply.cancel()
        return {"request_id": name, "aborted": True}

    async def health(self) -> Body:
        """GET /health: the process answers."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """GET /ready: 200 while the engine makes steps whenever there is work."""
        stats, now = self.llm.stats(), time.monotonic()
        if stats["steps"] != self._progress[0] or not (stats["running"] or stats["waiting"]):
            self._progress = (stats["steps"], now)
        longest = max((record.launch_us for record in self.llm.engine.trace()), default=0) / 1e6
        stuck = now - self._progress[1] > max(STUCK, 20 * longest)
        state = (
            "closed"
            if self.llm.engine.closed
            else "draining"
            if self.draining
            else "stuck"
            if stuck
            else "ready"
        )
        return JSONResponse({"status": state, **stats}, 200 if state == "ready" else 503)

    async def metrics(self) -> Response:
        """GET /metrics: the engine's counts, and the requests by status."""
        gauges = ("running", "waiting", "blocks_free", "blocks_total", "slots_free", "engram_bytes")
        gauges += ("eplb_balance", "eplb_draft_balance")
        lines = []
        for name, value in self.llm.stats().items():
            full, kind = (f"dskit_{name}", "gauge") if name in gauges else (f"dskit_{name}_total", "counter")
            lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
        lines.append("# TYPE dskit_requests_total counter")
        lines += [
            f'dskit_requests_total{{status="{status}"}} {n}' for status, n in sorted(self.outcomes.items())
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # ---- reading and refusing ----

    async def read(self, request: Request) -> Body:
        """The JSON object of a request, small enough and for this model."""
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(
                f"the body must be JSON: send Content-Type: application/json, not {kind}",
                code="unsupported_media_type",
                status=415,
            )
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > protocol.MAX_BODY:
                raise ApiError(
                    f"the body is larger than {protocol.MAX_BODY} bytes", code="body_too_large", status=413
                )
        try:
            body = parse(raw) if len(raw) < 1e5 else await asyncio.to_thread(parse, raw)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise ApiError(f"the body must be a JSON object, not {type(body).__name__}", code="invalid_json")
        if (name := body.get("model")) is not None:
            self.check_name(name)
        return body

    def check_name(self, name: Any) -> None:
        """ApiError unless this is the served model."""
        if not isinstance(name, str):
            raise ApiError(f"model must be a string, not {type(name).__name__}", "model", "invalid_type")
        if name != self.name:
            raise ApiError(
                f"there is no model {name!r} here; this server has {self.name!r}",
                "model",
                "model_not_found",
                404,
            )

    async def authorise(self, request: Request) -> None:
        """ApiError unless the bearer key is right, where one is set."""
        if self.key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), self.key.encode()):
            raise ApiError(
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Any failure as OpenAI's error object."""
        if isinstance(error, HTTPException):
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
            error = ApiError(
                f"{request.method} {request.url.path}: {error.detail}",
                code=code,
                status=error.status_code,
                headers=dict(error.headers or {}),
            )
        elif isinstance(error, EngineFailure):
            error = engine_error(error)
        elif not isinstance(error, ApiError):
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
            error = ApiError("the server failed; its log says why", code="internal_error", status=500)
        if error.status == 429:
            error.headers["Retry-After"] = str(self.retry_after())
        return JSONResponse(error.body(), error.status, error.headers)

    def retry_after(self) -> int:
        """Seconds until a place in the queue is likely, from how fast replies have ended lately."""
        if len(self.ended) < 2:
            return 1
        rate = (len(self.ended) - 1) / max(self.ended[-1] - self.ended[0], 1e-3)
        return min(60, math.ceil(1 / rate))

    def drain(self) -> None:
        """Refuse what comes, end what is there."""
        self.draining = True
        for reply in list(self.live.values()):
            reply.cancel()


def create(llm: LLM, *, name: str | None = None, api_key: str | None = None, ui: bool = True) -> FastAPI:
    """The application: the API, and the chat page at /ui."""
    api = Api(llm, name, api_key)
    app = FastAPI(
        title="dskit", docs_url=None, redoc_url=None, openapi_url=None
    )  # their pages need a network
    app.state.api = api
    keyed, free = APIRouter(dependencies=[Depends(api.authorise)]), APIRouter()
    for path, post in (
        ("/v1/chat/completions", api.chat_completions),
        ("/v1/completions", api.completions),
        ("/tokenize", api.tokenize),
        ("/detokenize", api.detokenize),
        ("/abort", api.abort),
    ):
        keyed.add_api_route(path, post, methods=["POST"], response_model=None)
    for router, path, get in (
        (keyed, "/v1/models", api.models),
        (keyed, "/v1/models/{name:path}", api.model),
        (free, "/health", api.health),
        (free, "/ready", api.ready),
        (free, "/metrics", api.metrics),
    ):
        router.add_api_route(path, get, methods=["GET"], response_model=None)
    app.include_router(keyed)
    app.include_router(free)
    for kind in (ApiError, EngineFailure, HTTPException, Exception):
        app.add_exception_handler(kind, api.refuse)
    app.add_middleware(Count, outcomes=api.outcomes)
    if ui:
        from dskit.serve import ui as page

        app.add_api_route("/", lambda: RedirectResponse("/ui"), methods=["GET"], response_model=None)
        page.mount(app, api)
    return app


class Count:
    """ASGI middleware: counts the answers of the API by status."""

    def __init__(self, app: Any, outcomes: Counter[str]):
        self.app, self.outcomes = app, outcomes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass everything on, and look at the status."""

        async def look(message: Any) -> None:
            if message["type"] == "http.response.start" and scope["path"].startswith("/v1/"):
                self.outcomes[str(message["status"])] += 1
            await send(message)

        await self.app(scope, receive, look)


class Stream(StreamingResponse):
    """Server-sent events; `end` is called however the stream ends."""

    def __init__(self, events: AsyncIterator[str], end: Any, headers: dict[str, str]):
        super().__init__(
            events, headers={"Cache-Control": "no-cache", **headers}, media_type="text/event-stream"
        )
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream; a client that leaves ends it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def parse(raw: bytes | bytearray) -> Any:
    """JSON in UTF-8, in which each text is text: half of a surrogate pair is refused (ValueError)."""
    text = raw.decode()
    body = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(body, ensure_ascii=False).encode()
    return body


async def off_loop(body: Body, work: Any, *args: Any) -> Any:
    """Run `work` in a thread; what it refuses becomes an ApiError."""
    try:
        return await asyncio.to_thread(work, *args)
    except (RequestError, chat.ChatError) as error:
        raise protocol.refusal(error, body) from None


async def unless_gone(request: Request, work: Any) -> bool:
    """Await `work`, unless the client leaves first; returns whether it was finished."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


def usage(reply: Reply, choices: list, prompts: int) -> Body:
    """Token counts of a reply; thinking is counted for chats."""
    chat_like = isinstance(choices[0], ChatChoice)
    return reply.usage(prompts, sum(choice.reasoning_tokens for choice in choices) if chat_like else None)


def sse(chunks: list[Body]) -> str:
    """Chunks as server-sent events."""
    return "".join(
        f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in chunks
    )


def engine_error(error: EngineFailure) -> ApiError:
    """A failed step in the API's words."""
    return ApiError(str(error), code="engine_error", status=500)
