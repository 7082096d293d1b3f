"""`dskit serve` as a process: what it prints, that it answers, that Ctrl-C ends it in order."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import httpx

from dskit import cli


def test_serve_says_where_it_is_answers_and_stops_on_ctrl_c():
    command = [sys.executable, "-m", "dskit", "serve", "tiny", "--port", "0", "--max-num-seqs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            page, api = process.stdout.readline(), process.stdout.readline()
            assert re.fullmatch(r"Chat page +http://127\.0\.0\.1:\d+/ui\n", page), page
            assert re.fullmatch(r"API +http://127\.0\.0\.1:\d+/v1\n", api), api
            url = api.split()[-1]
            body = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: {")
                assert httpx.get(page.split()[-1], follow_redirects=True, timeout=60).status_code == 200
                process.send_signal(signal.SIGINT)
                assert '"finish_reason":"abort"' in "".join(lines), "an open reply is ended, not cut"
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and out == "" and "Traceback" not in err
    assert "loading tiny" in err and "2 requests at once" in err and "stopped after 1 requests" in err


def test_a_taken_port_is_an_error_before_anything_is_loaded(server, capsys):
    assert cli.main(["serve", "tiny", "--port", str(server.port)]) == 1
    err = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{server.port}" in err and "--port 0" in err and "loading" not in err
