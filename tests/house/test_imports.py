"""Who may import whom: the arrows of the house, read from import statements; and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dskit

PACKAGE = Path(dskit.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "presets" not in path.parts)

# layers in reading order (each may use earlier ones), then what each room or module may import of dskit
LAYERS = ["norm", "rope", "linear", "cache", "swa", "compress", "indexer", "mla", "engram", "mhc", "moe",
          "dspark"]
BELOW_SERVE = {"engine", "chat", "config"}
ALLOWED = {
    "__init__": set(),
    "__main__": {"cli"},
    "flags": set(),
    "config": set(),
    "table": set(),
    "ops": {"table"},
    "kernels": {"ops"},
    "layers": {"ops", "config"},
    "model": {"layers", "config", "ops"},
    "checkpoint": {"config", "model", "layers"},
    "chat": {"config"},
    "engine": {"model", "ops", "checkpoint", "config", "chat"},
    "serve": BELOW_SERVE | {"viz"},
    "viz": {"ops", "config", "table"},
    "traces": {"table"},
    "profiling": {"ops", "config", "table", "traces"},
    "testing": {"ops", "config", "table", "layers"},
    "terminal": {"engine", "chat"},
}
TRAIN = {
    "model",
    "ops",
    "checkpoint",
    "engine",
    "chat",
    "config",
    "profiling",
    "viz",
    "train",
    "evaluate",
    "layers",
    "table",
}
ALLOWED |= {"train": TRAIN, "evaluate": TRAIN}
ALLOWED["bench"] = set(ALLOWED) | {"bench"}
ALLOWED["doctor"] = ALLOWED["cli"] = {*ALLOWED, "doctor", "cli"}
# the runner and its pools lay out the plans and cache rows that the layers read, and a plan of memory counts
# them; ops judge guesses and restore rows of tables; the exchange is handed to a layer, in its formats
FURTHER = {f"engine.{name}": {"layers"}
           for name in ("runner", "graphs", "pools", "plan", "draft", "exchange", "engram")}

PLANNERS = [  # plain data and decisions: no process group, no HTTP
    name
    for name in ("seq", "scheduler", "tree", "spec", "eplb")
    if (PACKAGE / "engine" / f"{name}.py").exists()
]
OPTIONAL = {
    "triton",
    "gradio",
    "fastapi",
    "uvicorn",
    "openai",
    "ipywidgets",
    "matplotlib",
    "tensorboard",
    "transformers",
}


def name_of(path: Path) -> str:
    """Dotted name of a module without the leading `dskit`."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, only_top: bool = False) -> list[str]:
    """Dotted names that a module imports, everywhere or only when it is itself imported."""
    nodes = top_level(tree) if only_top else ast.walk(tree)
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def top_level(tree: ast.AST):
    """Statements that run at import: everything outside functions and `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from top_level(node)


def own(dotted: str) -> list[str]:
    """Parts of a dskit name after `dskit`; [] for other packages and for the version."""
    parts = dotted.split(".")
    return parts[1:] if parts[0] == "dskit" and len(parts) > 1 and parts[1] != "__version__" else []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows(path):
    here = name_of(path).split(".")
    for dotted in imports(ast.parse(path.read_text())):
        there = own(dotted)
        if not there or there[0] == here[0]:
            continue
        allowed = ALLOWED[here[0]] | FURTHER.get(".".join(here), set())
        assert there[0] in allowed, f"{'.'.join(here)} may not import dskit.{'.'.join(there)}"


@pytest.mark.parametrize("stem", LAYERS)
def test_a_layer_uses_earlier_layers_only(stem):
    path = PACKAGE / "layers" / f"{stem}.py"
    for dotted in imports(ast.parse(path.read_text())):
        there = own(dotted)
        if there[:1] == ["layers"] and len(there) > 1 and there[1] in LAYERS:
            assert LAYERS.index(there[1]) < LAYERS.index(stem), (
                f"layers/{stem}.py imports layers/{there[1]}.py"
            )


def test_every_layer_file_has_its_place_in_the_order():
    found = {path.stem for path in (PACKAGE / "layers").glob("*.py")} - {"__init__"}
    assert found == set(LAYERS)


@pytest.mark.parametrize("stem", PLANNERS)
def test_planners_know_no_process_group_and_no_http(stem):
    path = PACKAGE / "engine" / f"{stem}.py"
    roots = {dotted.split(".")[0] for dotted in imports(ast.parse(path.read_text()))}
    assert not roots & {"fastapi", "starlette", "uvicorn", "http", "gradio"}
    assert "torch.distributed" not in path.read_text()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_optional_packages_are_imported_where_they_are_used(path):
    here = name_of(path).split(".")
    homes = {
        "kernels": {"triton"},
        "serve": {"fastapi", "uvicorn", "gradio"},
        "viz": {"matplotlib", "ipywidgets"},
    }
    allowed = homes.get(here[0], set()) if len(here) > 1 else set()
    roots = {dotted.split(".")[0] for dotted in imports(ast.parse(path.read_text()), only_top=True)}
    assert not (roots & OPTIONAL) - allowed


def test_dskit_never_imports_transformers_outside_the_peer():
    for path in MODULES:
        if name_of(path) != "bench.peer" and "transformers" in path.read_text():
            roots = {dotted.split(".")[0] for dotted in imports(ast.parse(path.read_text()))}
            assert "transformers" not in roots or name_of(path) == "bench.latency", name_of(path)


def test_no_public_name_equals_a_module():
    modules = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert not set(dskit.__all__) & modules


@pytest.mark.parametrize("name", dskit.__all__)
def test_public_names_load(name):
    assert getattr(dskit, name) is not None


def test_an_unknown_name_is_refused_with_the_public_ones():
    with pytest.raises(AttributeError, match="public names: LLM"):
        dskit.llm_engine  # noqa: B018


def run(code: str, *flags: str) -> subprocess.CompletedProcess:
    """Run a snippet in a fresh interpreter; it must succeed."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_import_dskit_loads_nothing_heavy():
    heavy = {"torch", "tyro", "numpy", *OPTIONAL}
    run(f"import sys, dskit, dskit.cli; assert not {heavy!r} & set(sys.modules), set(sys.modules)")


def test_the_model_and_engine_import_in_time_and_without_optional_packages():
    """At most 1.5 s beyond torch itself, with every optional package refused."""
    code = f"""
import sys, time, torch
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL - {"transformers", "triton"}!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
start = time.process_time()
import dskit
dskit.LLM
print(time.process_time() - start)
"""
    assert float(run(code).stdout) < 1.5


@pytest.mark.slow
def test_nothing_is_looked_up_on_the_network_at_import():
    names = [f"dskit.{name_of(path)}" for path in MODULES if name_of(path) not in ("__main__", "__init__")]
    run(f"""
import importlib, socket
def refuse(*args, **kwargs):
    raise AssertionError(f"network used at import: {{args[:2]}}")
socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
for name in {names!r}:
    importlib.import_module(name)
""")
