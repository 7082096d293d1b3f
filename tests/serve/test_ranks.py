"""`dskit serve` on two ranks: one address for all; a rank that is silent ends all of it in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from dskit.serve.server import bind

BODY = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
COMMAND = ["-m", "dskit", "serve", "tiny", "--device", "cpu", "--no-ui"]
COMMAND += ["--dp", "2", "--enable-expert-parallel"]


def children(process: subprocess.Popen) -> list[int]:
    """Process ids of what a process has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def ask(url: str, **fields) -> httpx.Response:
    return httpx.post(f"{url}/completions", json=BODY | fields, timeout=60)


@pytest.mark.slow  # tests/engine/test_ranks.py kills a rank in the default run
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="child processes are found in /proc")
def test_two_ranks_answer_at_one_address_and_a_stuck_one_ends_the_server():
    command = [sys.executable, *COMMAND, "--port", "0", "--distributed-timeout-seconds", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[-1]
            with ThreadPoolExecutor(4) as pool:
                replies = list(pool.map(lambda _: ask(url), range(4)))
                assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
                ready = httpx.get(url.replace("/v1", "/ready"), timeout=60).json()
                assert ready["status"] == "ready" and ready["tokens"] > 0
                cut = {"max_tokens": 900, "stream": True}
                with httpx.stream("POST", f"{url}/completions", json=BODY | cut, timeout=60) as left:
                    next(left.iter_lines())  # and leave
                late = [pool.submit(ask, url, max_tokens=900) for _ in range(2)]
                time.sleep(0.5)
                [rank] = children(process)
                subprocess.run(["kill", "-STOP", str(rank)], check=True)
                for reply in (future.result() for future in late):
                    assert reply.status_code == 500
                    assert "group of 2 ranks has ended" in reply.json()["error"]["message"]
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 1 and "on each of 2 ranks" in err and "error: the group of 2 ranks" in err
    assert not Path(f"/proc/{rank}").exists(), "no rank is left behind"
    bind("127.0.0.1", int(url.split(":")[2].split("/")[0])).close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_starts_a_killed_rank_again_and_the_port_comes_back():
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, *run, "-m", *COMMAND[1:], "--port", str(port)]
    url = f"http://127.0.0.1:{port}/v1"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(url)
            ranks = children(process)
            assert len(ranks) == 2 and ask(url).status_code == 200
            subprocess.run(["kill", "-KILL", str(max(ranks))], check=True)
            while max(ranks) in children(process) or min(ranks) in children(process):
                time.sleep(0.2)
            wait_for(url)
            assert ask(url).status_code == 200
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()


def wait_for(url: str, seconds: float = 180) -> None:
    """Until the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return httpx.get(f"{url}/models", timeout=10).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError("no answer")
