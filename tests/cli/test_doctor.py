"""`dskit doctor`: findings, exit codes, and a bundle that names nobody."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from dskit import cli, doctor


def test_this_machine_is_fit(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    status = {check["check"]: check["status"] for check in report["checks"]}
    assert len(status) == len(doctor.CHECKS) and set(status.values()) <= {"ok", "warn"}


def test_one_line_per_check(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (doctor.python, doctor.compiler))
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["python", "compiler"]


def test_a_check_that_raises_is_a_finding(capsys, monkeypatch):
    def broken():
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.python))
    assert cli.main(["doctor"]) == 1
    assert "the disk is on fire" in capsys.readouterr().out


def test_versions_outside_the_tested_range():
    tested = ((3, 11), (3, 13))
    found = [
        doctor._within("python", text, tested, "mend").status
        for text in ("3.10.2", "3.11.0", "3.13.1", "3.14")
    ]
    assert found == ["fail", "ok", "ok", "warn"]


def test_a_taken_port_is_seen():
    with socket.create_server(("127.0.0.1", 8000)) if doctor.port().status == "ok" else socket.socket():
        assert doctor.port().status == "warn"


def test_the_bundle_names_no_user_host_or_home(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("USER", "someone")
    monkeypatch.setenv("HF_HOME", str(Path.home() / "models"))
    monkeypatch.setattr(socket, "gethostname", lambda: "the-host")
    finding = doctor.Finding("who", "ok", f"someone at the-host in {Path.home()}/models")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: finding,))
    bundle = tmp_path / "report.txt"
    assert cli.main(["doctor", "--bundle", str(bundle)]) == 0
    text = bundle.read_text()
    assert "... at ... in ~/models" in text and os.environ["USER"] not in text
