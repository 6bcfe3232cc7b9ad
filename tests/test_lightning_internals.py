"""What classes of Lightning keep for themselves is touched in one file; ruff finds the private names of all else."""

from __future__ import annotations

import ast

from structure import ROOT

OF_NAMEDTUPLE = {"_make", "_replace"}  # documented, in spite of the underscore
TREES = [ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py") if path.stem != "lightning_internals"]
NODES = [node for tree in TREES for node in ast.walk(tree)]


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def test_a_class_of_ours_uses_no_private_name_of_its_base() -> None:
    """What it uses as `self._name`, a class of the package defines or sets."""
    own = {node.name for node in NODES if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in NODES if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in NODES if is_of_self(node) and isinstance(node.ctx, ast.Store)}  # type: ignore[attr-defined]  # an attribute
    used = {node.attr for node in NODES if is_of_self(node)}  # type: ignore[attr-defined]  # the line above, too
    assert OF_NAMEDTUPLE == {name for name in used - own if name.startswith("_") and not name.startswith("__")}
