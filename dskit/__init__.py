"""dskit: DeepSeek-V4.1-Flash as a kit of parts.

Idea: a model is a stack of layers (`dskit.layers`, one readable file per idea). Every heavy line calls an op
(`dskit.ops`), which can be swapped. The engine (`dskit.engine`) turns requests into steps over those layers,
and `dskit.serve` puts HTTP and the chat page on it.

The names below are loaded when they are first used, so that `import dskit` costs nothing and needs no
optional package. Modules are reached the same way: after `import dskit`, `dskit.serve.start(llm)` works as it
stands.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "dskit.engine.llm",
    "SamplingParams": "dskit.engine.seq",
    "use": "dskit.ops",
    "pin": "dskit.ops",
    "explain": "dskit.ops",
    "compare": "dskit.testing",
    "profile": "dskit.profiling",
    "show": "dskit.viz.notebook",
    "notebook": "dskit.viz.notebook",
    "shapes": "dskit.viz.notebook",
    "tap": "dskit.viz.notebook",
}
_MODULES = {
    *("config", "ops", "layers", "model", "checkpoint", "chat", "engine", "serve"),
    *("train", "evaluate", "viz", "bench", "testing", "table", "traces", "profiling"),
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Load a public name, or a module of the package, on first use."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"dskit.{name}")
    raise AttributeError(f"dskit has no name {name!r}; public names: {', '.join(sorted(_HOMES))}")


def __dir__() -> list[str]:
    """Public names and modules, for completion."""
    return sorted({*globals(), *_HOMES, *_MODULES})
