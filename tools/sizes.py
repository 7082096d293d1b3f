"""Print how large each room of dskit is: files, lines, median file, median and 90th-percentile function."""

import ast
from pathlib import Path
from statistics import median, quantiles

PACKAGE = Path(__file__).resolve().parent.parent / "dskit"


def row(name: str, paths: list[Path]) -> str:
    """One line of the table for a set of files."""
    lines = [len(path.read_text().splitlines()) for path in paths]
    trees = [ast.parse(path.read_text()) for path in paths]
    functions = [
        node.end_lineno - node.lineno + 1
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ] or [0]
    p90 = quantiles(functions, n=10)[-1] if len(functions) > 1 else functions[0]
    middle = f"{median(lines):>8.0f} {median(functions):>10.0f} {p90:>6.0f}"
    return f"{name:<12} {len(paths):>5} {sum(lines):>7} {middle}"


def main() -> None:
    """Print one line per room and the total."""
    print(f"{'room':<12} {'files':>5} {'lines':>7} {'file':>8} {'function':>10} {'p90':>6}")
    print(row("(landing)", sorted(PACKAGE.glob("*.py"))))
    for room in sorted(path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))):
        print(row(room.name, sorted(room.glob("*.py"))))
    print(row("all", sorted(PACKAGE.rglob("*.py"))))


if __name__ == "__main__":
    main()
