"""The private names of Lightning, torch and torchmetrics are there, and are touched in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from structure import MODULES

from lightning_gradavg.lightning_internals import NEWER, PRIVATE, missing

NAMES = {name for names in (PRIVATE, *NEWER.values()) for each in names.values() for name in each.split()}
OF_NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}  # documented, in spite of the underscore
OVERRIDDEN = {"strategy": {"_register_ddp_hooks", "_ddp_comm_state"}}
"""What a class of ours has from a class of theirs, by module: it is named in the table, and used as `self`."""


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


OWN = set().union(*(defined_in(ast.parse(path.read_text("utf-8"))) for path in MODULES.values()))


def foreign_names(source: str, own_anywhere: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of what a file touches of others: imports, attributes, and names given as text."""
    tree = ast.parse(source)
    own = defined_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            of = (node.module or "").split(".")
            for name in [*of, *(alias.name for alias in node.names)]:
                if is_private(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            on_self = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if node.attr not in (own | own_anywhere if on_self else own):
                yield node.lineno, node.attr
        elif isinstance(node, (ast.Constant, ast.keyword)):
            text = node.value if isinstance(node, ast.Constant) else node.arg
            if isinstance(text, str) and text in NAMES - own:
                yield node.value.lineno if isinstance(node, ast.keyword) else node.lineno, text


def test_all_private_names_are_there():
    """The installed Lightning, torch and torchmetrics have every name that is listed."""
    assert [] == missing(), "gone from what is installed: give each another way in lightning_internals.py"


def test_a_name_that_is_gone_is_named():
    """Of a name that no class, constructor or module has any more, the owner is told, too."""
    assert ["torch:Tensor._gone"] == missing({"torch:Tensor": "_version _gone"}, {})
    assert ["torch.gone:_name"] == missing({"torch.gone:": "_name"}, {})
    assert ["torch:_gone"] == missing({}, {"torch>=1000": {"torch:": "_new"}, "torch>=1": {"torch:": "_gone"}})


@pytest.mark.parametrize("module", MODULES)
def test_private_names_of_others_are_touched_in_one_file(module: str) -> None:
    """No file but `lightning_internals.py` imports, reads, writes or spells a private name of another library."""
    source = MODULES[module].read_text("utf-8")
    allowed = NAMES if module == "lightning_internals" else OVERRIDDEN.get(module, set())

    assert [] == [f"{module}:{line}: {name}" for line, name in foreign_names(source, OWN) if name not in allowed]


def test_every_listed_name_is_used():
    """The table lists nothing that the package no longer touches."""
    used = {name for path in MODULES.values() for _, name in foreign_names(path.read_text("utf-8"), set())}
    used |= {"_register_ddp_hooks", "_iterator"}  # which are overridden

    assert set() == NAMES - used
