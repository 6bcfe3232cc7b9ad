"""How the package is built: its imports, which `test_layers.py` holds to, and its figures.

`python -m tests.structure` prints files, lines and branches per folder, and how often control goes from one file of the
package into another on the journeys of `journeys.py`. `--no-journeys` leaves those out, which start two processes.

- A *line of code* holds something other than a comment, a blank, or a docstring (a string that is a statement).
- A *branch* is an `if`, a conditional expression, a `for`, a `while`, a `try`, a chain of `and` or of `or`, a condition
  of a comprehension, or a `case`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["MODULES", "ROOT", "Size", "folder_of", "imported_names", "module_name", "own_imports", "size_of", "sizes"]

PACKAGE = "lightning_gradavg"
SPEC = importlib.util.find_spec(PACKAGE)
assert SPEC is not None
assert SPEC.origin is not None
ROOT = Path(SPEC.origin).parent  # the sources, or the installed wheel where that is what is tested

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.BoolOp, ast.match_case)
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def module_name(path: Path) -> str:
    """Return the dotted name below the package; `__init__` for the package itself, `cli` for `cli/__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def folder_of(module: str) -> str:
    """Return the folder of a module; a module beside the folders is one of its own."""
    return module.partition(".")[0]


@cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def imported_names(source: str) -> Iterator[str]:
    """Yield the absolute name of everything that `source` imports, wherever in the file, for types only or not."""
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import of the package names it"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module: str, source: str) -> set[str]:
    """Return the modules of the package that `source` imports, as they are named in MODULES."""
    found = set()
    for name in imported_names(source):
        if f"{name}.".startswith(f"{PACKAGE}."):
            inner = name.removeprefix(PACKAGE).removeprefix(".")
            while inner and inner not in MODULES:  # from the imported object up to the module that holds it
                inner = inner.rpartition(".")[0]
            found.add(inner or "__init__")
    return found - {module}


@dataclass(frozen=True)
class Size:
    """Files, lines, lines of code, comments and branches of a file, or of several."""

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    branches: int = 0

    @classmethod
    def of_all(cls, found: Iterable[Size]) -> Size:
        """Return the size of several."""
        return cls(*map(sum, zip(*map(astuple, found), strict=True)))

    @property
    def branches_per_100(self) -> float:
        """Branches per 100 lines of code."""
        return 100 * self.branches / max(1, self.code)


def size_of(source: str) -> Size:
    """Return the size of one file."""
    nodes = list(ast.walk(_tree(source)))
    docstrings = {line for node in nodes if _is_docstring(node) for line in _lines(node)}
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    code = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
        if line not in docstrings
    }
    branches = sum(isinstance(node, _BRANCHES) for node in nodes)
    branches += sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    comments = sum(token.type == tokenize.COMMENT for token in tokens)
    return Size(1, len(source.splitlines()), len(code), comments, branches)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _lines(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


def sizes() -> dict[str, Size]:
    """Return the size of every folder."""
    found: dict[str, list[Size]] = {}
    for module, path in MODULES.items():
        found.setdefault(folder_of(module), []).append(size_of(path.read_text("utf-8")))
    return {folder: Size.of_all(of_files) for folder, of_files in found.items()}


def _print(rows: Iterable[Iterable[object]]) -> None:
    """Print rows under their headings, in columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        sys.stdout.write("  ".join(map(str.ljust, row, widths)) + "\n")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description="How the package is built.")
    parser.add_argument("--no-journeys", action="store_true", help="leave out what starts processes")
    parser.add_argument("--arrows", metavar="NAME", help="print every call between files on this journey instead")
    given = parser.parse_args()
    if given.arrows is None:
        found = sizes()
        folders = [*sorted(found.items()), ("all", Size.of_all(found.values()))]
        headings = ("folder", "files", "lines", "code", "comments", "branches", "branches per 100 lines of code")
        _print([headings, *([name, *astuple(size), f"{size.branches_per_100:.1f}"] for name, size in folders)])
    if given.no_journeys:
        return
    # The ranks import test modules by their own names.
    sys.path.insert(0, str(Path(__file__).parent))
    journeys = importlib.import_module("journeys")
    rows: list[Sequence[object]] = [("journey on rank 0 of 2", "files", "calls between files")]
    for name, arrows in journeys.travel([given.arrows] if given.arrows else list(journeys.JOURNEYS)):
        if given.arrows:
            _print(arrows)
        rows.append((name, len({one.target for one in arrows}), len(arrows)))
    _print(rows)


if __name__ == "__main__":
    main()
