"""The private names of Lightning, torch and torchmetrics are touched in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from structure import ROOT

OF_NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}  # documented, in spite of the underscore
OVERRIDDEN = {"strategy.py": {"_register_ddp_hooks", "_ddp_comm_state"}}
"""What a class of ours has from a class of theirs, by file, and uses as `self`."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMEDTUPLE


def defined_in(tree: ast.Module) -> set[str]:
    """Return the private names that classes and functions of a file define, or set on `self`."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return own


TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}
OWN = set().union(*map(defined_in, TREES.values()))


def foreign_names(tree: ast.Module, own_anywhere: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of what a file touches of others: imports and attributes."""
    own = defined_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            on_self = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if node.attr not in (own | own_anywhere if on_self else own):
                yield node.lineno, node.attr


NAMES = {name for _, name in foreign_names(TREES["lightning_internals.py"], set())}


@pytest.mark.parametrize("file", [file for file in TREES if file != "lightning_internals.py"])
def test_private_names_of_others_are_touched_in_one_file(file: str) -> None:
    """No file but `lightning_internals.py` imports, reads, writes or spells a private name of another library."""
    found, allowed = list(foreign_names(TREES[file], OWN)), OVERRIDDEN.get(file, set())
    own = defined_in(TREES[file])
    texts = [node for node in ast.walk(TREES[file]) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found += [(node.lineno, node.value) for node in texts if node.value in NAMES - own]
    assert [] == [f"{file}:{line}: {name}" for line, name in found if name not in allowed]
