"""The package is built in floors of folders: imports stay on a floor or point down, and the core knows no Lightning."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from structure import MODULES, folder_of, imported_names, own_imports

# A module beside the folders is a folder of its own. Put a new one where its imports allow.
FLOORS = (
    "place tree device lightning_internals arguments methods random_state",
    "loaders fingerprint stand_in",
    "rules ranks part",
    "options reduction rates hooks",
    "batches checkpoints evaluation launch termination faults",
    "replicas report reproducible training",
    "strategy sharded plan fabric",
    "verify monitor",
    "cli",
    "__init__ __main__",
)
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS, start=1) for folder in folders.split()}

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
LIGHTNING_IN = (
    "lightning_internals methods stand_in part batches.part checkpoints evaluation faults.part launch rates.part",
    "reduction.reduction replicas.pieces replicas.obstacles replicas.joined",
    "strategy sharded training fabric termination monitor verify cli __init__",
)
"""Folders and modules that may import Lightning. Everything else is the core, and works without."""

KNOWS_LIGHTNING = {name for names in LIGHTNING_IN for name in names.split()}

IMPORTS = {module: own_imports(module, path.read_text("utf-8")) for module, path in MODULES.items()}
ARROWS: dict[tuple[str, str], list[str]] = {}
for module, imports in IMPORTS.items():
    for other in imports:
        if folder_of(module) != folder_of(other):
            ARROWS.setdefault((folder_of(module), folder_of(other)), []).append(f"{module} -> {other}")


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a circle, each of which points to the next one; none if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))  # each is named after those that point to it
    return []


def test_every_folder_stands_on_a_floor():
    """The table names what there is, and nothing that is gone."""
    assert {folder_of(module) for module in MODULES} == set(FLOOR_OF)


def test_the_picture_of_the_floors_is_this_table():
    """docs/architecture.md shows every folder on its floor."""
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text("utf-8")
    picture = page.partition("```text\n")[2].partition("```")[0].splitlines()
    shown = [set(line.partition("#")[0].split()[1:]) for line in picture]
    assert [set(folders.split()) for folders in reversed(FLOORS)] == shown


def test_arrows_between_folders_point_down():
    """A folder imports only from its own floor and from floors below."""
    assert [] == [files for (of, to), files in ARROWS.items() if FLOOR_OF[of] < FLOOR_OF[to]]


def test_folders_form_no_circle():
    """Folders can be read in an order in which each uses only what stands before."""
    graph = {folder: {to for of, to in ARROWS if of == folder} for folder in FLOOR_OF}
    circle = circle_in(graph)

    assert [] == [ARROWS[arrow] for arrow in pairwise(circle)], f"circle of folders: {' -> '.join(circle)}"


def test_files_form_no_circle():
    """Within a folder, too, files can be read in such an order."""
    assert [] == circle_in(IMPORTS)


def may_know_lightning(module: str) -> bool:
    return module in KNOWS_LIGHTNING or folder_of(module) in KNOWS_LIGHTNING


def test_the_core_knows_no_lightning():
    """Nothing imports Lightning but what is listed; move what needs it there."""
    knowing = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] in LIGHTNING for name in imported_names(path.read_text("utf-8")))
    }

    assert set() == {module for module in knowing if not may_know_lightning(module)}
    assert set() == KNOWS_LIGHTNING - knowing - {folder_of(module) for module in knowing}
