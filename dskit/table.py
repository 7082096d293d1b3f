"""Rows that display themselves: aligned text, a ruled table in a terminal, HTML in a notebook.

    Table([{"op": "mhc.read", "ms": 0.31}], "one call")

State: a Table is a list of dicts; whatever takes a list takes it, and `to_pandas` gives a DataFrame.
Errors: ModuleNotFoundError from `to_pandas` where pandas is not installed.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable
from typing import Any


class Table(list):
    """A list of dicts that displays itself as a table; columns are the keys in order of appearance."""

    def __init__(self, rows: Iterable[dict[str, Any]], caption: str = ""):
        super().__init__(rows)
        self.caption = caption

    @property
    def columns(self) -> list[str]:
        """Every key of every row, in order of appearance."""
        return list(dict.fromkeys(key for row in self for key in row))

    def __repr__(self) -> str:
        return self._ruled() if sys.stdout.isatty() else self._plain()

    def __rich__(self) -> Any:
        from rich.box import SIMPLE
        from rich.table import Table as Ruled

        table = Ruled(*self.columns, title=self.caption or None, box=SIMPLE, title_justify="left")
        for row in self._cells():
            table.add_row(*row)
        return table

    def _ruled(self) -> str:
        from rich.console import Console

        console = Console()
        with console.capture() as printed:
            console.print(self)
        return printed.get().rstrip("\n")

    def _plain(self) -> str:
        cells = [self.columns, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in cells]
        return "\n".join(line.rstrip() for line in ([self.caption] if self.caption else []) + lines)

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Iterable[str]) -> str:
            left = f'<{tag} style="text-align:left">'
            return f"<tr>{''.join(f'{left}{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        head = row("th", self.columns)
        body = "".join(row("td", cells) for cells in self._cells())
        style = "text-align:left;white-space:nowrap"
        caption = f'<caption style="{style}">{html.escape(self.caption)}</caption>' if self.caption else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"

    def _cells(self) -> list[list[str]]:
        return [[_cell(row.get(key)) for key in self.columns] for row in self]

    def to_pandas(self) -> Any:
        """The same as a pandas DataFrame; pandas must be installed."""
        import pandas

        return pandas.DataFrame(list(self))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_cell(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
