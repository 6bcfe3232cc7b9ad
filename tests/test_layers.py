"""The package is built in floors: imports stay on a floor or point down, and the lower two floors know no Lightning."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_gradavg"
SPEC = importlib.util.find_spec(PACKAGE)
assert SPEC is not None
assert SPEC.origin is not None
ROOT = Path(SPEC.origin).parent  # the sources, or the installed wheel where that is what is tested

# A subpackage stands for those of its modules that are not listed; the ten that come first hold listed ones only.
# Add a new module where it belongs; its imports must allow it.
FLOORS = (
    (
        "collectives costs data evaluation monitoring planning profiling rates reduction replication place rules"
        " weights rates.scaling planning.noise monitoring.step_report rates.global_batch presets"
        " planning.recipe planning.runs planning.plans"
        " costs.links costs.allreduce costs.overlap costs.predict costs.plot costs.tables"
    ),
    (
        "reduction.reduce reduction.reducer reduction.terms reduction.window reduction.accumulate"
        " reduction.hooks reduction.groups reduction.sums wire reduction.ddp_options"
        " collectives.average collectives.agreement collectives.buckets collectives.contribution"
        " profiling.intervals profiling.timeline profiling.chrome_trace"
        " profiling.ddp_buckets profiling.recording profiling.summary profiling.report"
        " data.batches data.collated data.order data.sources data.whole_batches data.loaders data.split_loader"
        " data.resume data.loader_state collectives.gather collectives.rows replication.replicas"
        " replication.buffers replication.outputs rates.learning_rate rates.parameter_groups rates.watched"
        " rates.run_recipe replication.batch_norm replication.random_streams monitoring.measure"
        " monitoring.rank_measurement monitoring.noise_scale monitoring.drift costs.measure"
    ),
    (
        "reduction.outputs data.training_data evaluation.dealt evaluation.logged evaluation.evaluation"
        " reduction.hooking reduction.reducing"
        " monitoring.observing monitoring.monitor profiling.profiler evaluation.evaluating"
        " rates.recipe_strategy replication.equivalence replication.log replication.steps"
        " replication.replicating strategy termination verify"
    ),
    "__init__ __main__ cli",
)
WITHOUT_LIGHTNING = (0, 1)
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")

FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}


def module_name(path: Path) -> str:
    """Return the dotted name below the package; `__init__` for the package itself, `cli` for `cli/__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def floor_of(module: str) -> int:
    listed = module if module in FLOOR_OF else module.partition(".")[0]
    assert listed in FLOOR_OF, (
        f"{PACKAGE}.{module} stands on no floor: add {listed!r} to FLOORS in tests/test_layers.py,"
        " on a floor that its imports allow"
    )
    return FLOOR_OF[listed]


def imported_names(module: str, source: str) -> Iterator[str]:
    """Yield the absolute name of everything that `source` imports, wherever in the file, for types only or not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                inside = [PACKAGE, *(part for part in module.split(".") if part != "__init__")]
                is_package = module == "__init__" or MODULES.get(module, Path()).name == "__init__.py"
                above = inside[: len(inside) - node.level + is_package]
                base = ".".join([*above, base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(module: str, source: str) -> set[str]:
    """Return the modules of the package that `source` imports, as they are named in MODULES."""
    found = set()
    for name in imported_names(module, source):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            inner = name.removeprefix(PACKAGE).removeprefix(".")
            while inner and inner not in MODULES:  # from the imported object up to the module that holds it
                inner = inner.rpartition(".")[0]
            found.add(inner or "__init__")
    return found - {module}


def test_every_listed_module_exists() -> None:
    """The table names nothing that is gone."""
    present = {module.partition(".")[0] for module in MODULES} | set(MODULES)

    assert set() == set(FLOOR_OF) - present


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    """A module imports only from its own floor and from floors below."""
    floor = floor_of(module)
    upward = {name for name in own_imports(module, MODULES[module].read_text("utf-8")) if floor_of(name) > floor}

    assert set() == upward, f"{module} stands on floor {floor} and must not import {sorted(upward)} from above"


@pytest.mark.parametrize("module", [module for module in MODULES if FLOOR_OF.get(module) in WITHOUT_LIGHTNING])
def test_the_core_knows_no_lightning(module: str) -> None:
    """The lower two floors import nothing from Lightning."""
    names = {
        name for name in imported_names(module, MODULES[module].read_text("utf-8")) if name.split(".")[0] in LIGHTNING
    }

    assert set() == names, f"{module} must work without Lightning; move what needs it to the strategy's floor"


def test_imports_form_no_cycle() -> None:
    """Within a floor, too, modules can be read in an order in which each uses only what stands before."""
    graph = {module: own_imports(module, path.read_text("utf-8")) for module, path in MODULES.items()}

    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle

    assert set(MODULES) == set(order)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("rules", "from lightning_gradavg.place import Place", {"place"}),
        ("rules", "import lightning_gradavg.place as p", {"place"}),
        ("rules", "from lightning_gradavg import place", {"place"}),
        ("rules", "from lightning_gradavg import GradAvgStrategy", {"__init__"}),
        ("rules", "from .place import Place", {"place"}),
        ("rules", "from . import place", {"place"}),
        ("rules", "def late():\n    from .place import Place", {"place"}),
        ("__init__", "from .rules import resolve_rule", {"rules"}),
        ("cli.plan", "from ..rules import resolve_rule", {"rules"}),
        ("rules", "import torch, lightning_gradavg_extras", set()),
    ],
)
def test_imports_are_found_however_they_are_written(module: str, source: str, expected: set[str]) -> None:
    """Absolute, relative, aliased and late imports all count."""
    assert expected == own_imports(module, source)
