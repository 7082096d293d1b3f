"""The server around the application: its socket, its thread or the foreground, and the command `dskit serve`.

Idea
    The port is bound before anything is loaded, so that a taken one shows at once. Stopping first ends the
    open replies, so that no connection has to be waited for.

State
    A Server owns its port and its thread, not the LLM. RUNNING knows those of this process.

Errors
    OSError when the port is taken.

Source
    experience.md sections 4 and 9. `dskit serve` ended by Ctrl-C is a success: it is how a server is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams
from dskit.serve.api import create

QUEUE_TIMEOUT_S = 120.0  # whoever waits longer has most likely gone

RUNNING: dict[tuple[str, int], Server] = {}


class Server:
    """A running server: `url`, `close()`, and a context manager."""

    def __init__(self, app: Any, listening: socket.socket, ui: bool):
        self.host, self.port = listening.getsockname()[:2]
        self.url, self.ui = address(self.host, self.port), ui
        self._server = uvicorn_server(app)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="dskit-serve", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start; its log says why")
        RUNNING[self.host, self.port] = self

    def close(self) -> None:
        """End open replies, free the port; the LLM stays. Calling it twice is fine."""
        self._server.should_exit = True
        self._thread.join()
        RUNNING.pop((self.host, self.port), None)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        return f"Server({self.url!r}, {state})"

    def _repr_html_(self) -> str:
        """The chat page under the cell, and where everything is."""
        if not self._thread.is_alive():
            return f"the server at <code>{self.url}</code> is closed"
        line = f"API at <code>{self.url}/v1</code>"
        if not self.ui:
            return line
        style = "width:100%;height:640px;border:1px solid #8885;border-radius:8px"
        page = f'<iframe src="{self.url}/ui/" title="dskit chat page" style="{style}"></iframe>'
        return f'<div><a href="{self.url}/ui/" target="_blank">chat page</a> · {line}</div>{page}'


class UvicornServer(uvicorn.Server):
    """uvicorn, which ends open replies before it waits for their connections to close."""

    async def shutdown(self, sockets: Any = None) -> None:
        """Drain, then stop."""
        self.config.app.state.api.drain()
        await super().shutdown(sockets)


def uvicorn_server(app: FastAPI) -> UvicornServer:
    """A server for `app`. Failures are logged by `Api.refuse`, so uvicorn's own log is quiet."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return UvicornServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
            ws="none",
            http="h11",
            loop="asyncio",
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port shows before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise OSError(
            f"cannot listen on {host}:{port} ({error.strerror}); --port 0 takes a free port"
        ) from error
    listening.set_inheritable(False)
    return listening


def address(host: str, port: int) -> str:
    """The URL of a server; one that listens everywhere is reached at the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# ---- the command ----


def main(args: Any) -> int:
    """`dskit serve`: bind, load, test with one token, say where everything is, serve until Ctrl-C."""
    front = int(os.environ.get("RANK", 0)) == 0  # under torchrun the other ranks listen to this one only
    listening = bind(args.host, args.port if front else 0)
    host, port = listening.getsockname()[:2]
    if host not in ("127.0.0.1", "::1") and not args.api_key:
        say(f"warning: {host} is reachable from other machines and there is no --api-key")
    say(f"loading {args.model} ...")
    begin = time.perf_counter()
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    names += ("enable_prefix_caching", "exact_prefix", "num_redundant_experts", "enable_eplb")
    names += ("eplb_interval", "eplb_min_balance", "eplb_algorithm")
    with (
        listening,
        LLM(
            args.model,
            device=args.device,
            numerics=args.numerics,
            seed=args.seed,
            batch_invariant=args.batch_invariant,
            speculate=args.speculate,
            accept=args.accept,
            enforce_eager=args.enforce_eager,
            engram_placement=args.engram_placement,
            queue_timeout=QUEUE_TIMEOUT_S,
            dp=args.data_parallel_size,
            ep=args.data_parallel_size if args.enable_expert_parallel else args.expert_parallel_size,
            distributed_timeout=args.distributed_timeout_seconds,
            progress=say,
            **{name: getattr(args, name) for name in names},
        ) as llm,
    ):
        loaded = time.perf_counter() - begin
        first = llm.generate([llm.tokenizer.bos_id], SamplingParams(max_tokens=1)).usage.ttft_s
        server = uvicorn_server(create(llm, name=args.served_model_name, api_key=args.api_key, ui=args.ui))
        cfg = llm.engine.cfg
        llm.engine.on_failure = partial(setattr, server, "should_exit", True)
        say(f"loaded in {loaded:.1f} s; a first token takes {first:.2f} s")
        say(
            f"{args.model} on {llm.device}, {llm.numerics} numerics, seed {args.seed}, "
            f"{cfg.max_model_len} tokens of context, {cfg.max_num_seqs} requests at once, "
            f"{cfg.max_num_batched_tokens} prompt tokens a step"
            + (f" on each of {args.data_parallel_size} ranks" if args.data_parallel_size > 1 else "")
            + (", batch invariant" if args.batch_invariant else "")
            + ("" if args.enable_prefix_caching else ", no prefix cache")
            + ("" if args.exact_prefix else ", windows behind a cached prefix approximate")
            + (f", Engram tables: {cfg.engram_placement}" if cfg.engram_placement else "")
        )
        if args.ui:
            print(f"Chat page  {address(host, port)}/ui")
        print(f"API        {address(host, port)}/v1", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn stops on Ctrl-C, then raises it again
            server.run(sockets=[listening])
        requests = sum(server.config.app.state.api.outcomes.values())
        say(f"stopped after {requests} requests, {llm.stats()['tokens']} tokens")
        if llm.engine.failure:
            say(f"error: {llm.engine.failure}")
            return 1
    return 0


def say(line: str) -> None:
    """One line of progress, beside the results on stdout."""
    print(line, file=sys.stderr, flush=True)
