"""What is written must be true: docstrings, the command line against the documents, figures and folders."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest

import dskit
from dskit import cli

PACKAGE = Path(dskit.__file__).parent
ROOT = PACKAGE.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LAYERED = [path for room in ("layers", "kernels") for path in sorted((PACKAGE / room).glob("*.py"))]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_every_module_says_what_it_is(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and doc.splitlines()[0].rstrip().endswith((".", ":")), (
        "the docstring's first line is a sentence"
    )


@pytest.mark.parametrize(
    "path", [p for p in LAYERED if p.stem not in ("__init__", "common")], ids=lambda p: p.stem
)
def test_layers_and_kernels_have_their_sections(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    for section in ("Shapes", "Errors", "Source"):
        assert re.search(rf"^{section}\b", doc, re.MULTILINE), f"{path.name} has no section {section}"


def commands_in(page: Path) -> list[tuple[str, str]]:
    """Each `dskit COMMAND ...` in a page, as (command, the whole line)."""
    return re.findall(
        r"\bdskit (serve|chat|bench \w+|train|eval|convert|doctor|profile)\b([^`\n|]*)", page.read_text()
    )


def help_of(command: str, capsys: pytest.CaptureFixture) -> str:
    """What `dskit COMMAND --help` prints."""
    with pytest.raises(SystemExit) as end:
        cli.dispatch([*command.split(), "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_in_the_documents_exist(page, capsys):
    found = commands_in(page)
    assert found, f"{page.name} shows no command"
    for command, rest in found:
        words = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_of(command, capsys)))
        for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest.replace("...", "")):
            assert flag in words, f"{page.name}: dskit {command} has no {flag}"


def test_the_readme_names_every_command():
    named = {command.split()[0] for command, _ in commands_in(PAGES[0])}
    assert named == set(cli.COMMANDS)


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        asked = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert asked <= targets, f"{page.name}: no target {asked - targets}"


def test_links_to_files_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"


def test_recorded_runs_follow_the_schema():
    schema = json.loads((ROOT / "profiles" / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for run in sorted((ROOT / "profiles").glob("*/run.json")):
        jsonschema.validate(json.loads(run.read_text()), schema)


def tracked() -> list[Path]:
    """Files of the repository, as git knows them."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_files_are_small_enough_to_review():
    for path in tracked():
        large = {"presets", "profiles"} & set(path.relative_to(ROOT).parts)
        size = path.stat().st_size
        assert size <= (12_000_000 if large else 500_000), f"{path.relative_to(ROOT)} has {size} bytes"


def test_no_file_names_a_machine_a_registry_or_a_loose_end():
    pieces = [
        ("py", r"pi\.org"),
        ("python", "hosted"),
        ("registry", r"\.npm"),
        ("deb", r"\.debian"),
        ("huggingface", r"\.co/api"),
    ]
    words = ["".join(pair) for pair in pieces] + [
        r"/home/\w+",
        "/" + r"root/",
        r"\bTO" + r"DO\b",
        r"\bFIX" + r"ME\b",
    ]
    pattern = re.compile("|".join(words))
    for path in tracked():
        if (
            path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".yaml", ".ipynb", "")
            and path.name != "tokenizer.json"
        ):
            found = pattern.search(path.read_text(errors="ignore"))
            assert not found, f"{path.relative_to(ROOT)} contains {found.group()!r}"
