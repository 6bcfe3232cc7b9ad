"""How the package is built: its size and its journeys, which docs/architecture.md states.

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
from collections import Counter
from pathlib import Path

__all__ = ["ROOT", "sizes"]

SPEC = importlib.util.find_spec("lightning_gradavg")
assert SPEC is not None
assert SPEC.origin is not None
ROOT = Path(SPEC.origin).parent  # the sources, or the installed wheel where that is what is tested

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.BoolOp, ast.match_case)
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
COLUMNS = ("files", "lines", "code", "branches")  # a last one are the branches per 100 lines of code


def size_of(source: str) -> Counter[str]:
    """Return the lines, the lines of code and the branches of a file."""
    code, branches = set[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        code.update(range(token.start[0], token.end[0] + 1) if token.type not in _NO_CODE else ())
    for node in ast.walk(ast.parse(source)):
        branches += isinstance(node, _BRANCHES) + len(getattr(node, "ifs", ()))
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            code.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return Counter(files=1, lines=len(source.splitlines()), code=len(code), branches=branches)


def sizes() -> dict[str, Counter[str]]:
    """Return the size of every folder, of every module beside the folders, and of all."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        folder = path.relative_to(ROOT).with_suffix("").parts[0]
        found.setdefault(folder, Counter()).update(size_of(path.read_text("utf-8")))
    return {**found, "all": sum(found.values(), Counter())}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description="How the package is built.")
    parser.add_argument("--no-journeys", action="store_true", help="leave out what starts processes")
    parser.add_argument("--arrows", metavar="NAME", help="print every call between files on this journey instead")
    given = parser.parse_args()
    if given.arrows is None:
        _print("folder", *COLUMNS, "per 100")
        for folder, size in sizes().items():
            _print(folder, *(size[column] for column in COLUMNS), f"{100 * size['branches'] / size['code']:.1f}")
    if given.no_journeys:
        return
    # The ranks import test modules by their own names.
    sys.path.insert(0, str(Path(__file__).parent))
    journeys = importlib.import_module("journeys")
    _print("\njourney on rank 0 of 2", "files", "calls")
    for name, arrows in journeys.travel([given.arrows] if given.arrows else journeys.JOURNEYS):
        for arrow in arrows if given.arrows else ():
            _print(*arrow)
        _print(name, len({target for _, target, _ in arrows}), len(arrows))


def _print(name: object, *cells: object) -> None:
    sys.stdout.write(f"{name:50}{''.join(f'{cell!s:>10}' for cell in cells)}\n")


if __name__ == "__main__":
    main()
