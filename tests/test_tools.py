"""What the tests rest on: failed ranks are reported, defects can be planted, benchmarks run, internals are apart."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import re
import sys
import threading
from contextlib import closing, nullcontext, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mutations.__main__ import ROOT, mutations
from ranks import RankError, RankPool
from structure import ROOT as PACKAGE

from benchmarks import growth, host_read, loading, parts, step
from benchmarks.block import WARMUP
from benchmarks.models import MODELS, Measured
from benchmarks.world import World
from lightning_gradavg.batches.progress import TrainingIterator
from lightning_gradavg.reduction.rows import RowExchange


def fail_alone(code: int | None) -> None:
    """Body: raise, or die, on rank 1, for which the others wait."""
    if dist.get_rank() == 1:
        print("last words", flush=True)  # noqa: T201  # the output of a rank is what is tested
        if code is not None:
            os._exit(code)
        raise LookupError("nothing found")
    dist.barrier()


def hang() -> None:
    threading.Event().wait()


def leave_open() -> None:
    """Body: raise on rank 1 what is expected, with a collective of rank 0 left open."""
    if dist.get_rank() == 1:
        raise LookupError("odd")
    dist.all_reduce(torch.zeros(dist.get_world_size()), async_op=True)


@pytest.mark.parametrize(
    ("code", "pattern"),
    [(None, r"LookupError: nothing found\n.*in fail_alone"), (7, "ProcessDied: the process ended with exit code 7\n")],
)
def test_the_rank_that_failed_is_reported_and_the_world_starts_again(world, code, pattern):
    with pytest.raises(RankError, match=rf"(?s)^rank 1: {pattern}.*output of rank 1:\nlast words"):
        world(2).run(fail_alone, code)
    assert [2, 2] == world(2).run(dist.get_world_size)


def test_a_rank_that_hangs_is_ended_with_its_stack():
    expected = r"(?s)^rank 0: ProcessDied: .*output of rank 0:\nTimeout .*in hang"
    with closing(RankPool(1, timeout=0.2)) as pool, pytest.raises(RankError, match=expected):
        pool.run(hang)


def test_ranks_that_are_out_of_step_after_expected_errors_are_found(world):
    with pytest.raises(RankError, match="out of step"):
        world(2).run_expecting_errors(leave_open)


@pytest.mark.parametrize("mutation", [*mutations([])], ids=lambda mutation: mutation.breaks)
def test_defect_can_be_planted(mutation):
    assert mutation.planted(ROOT) != (ROOT / mutation.file).read_text()
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests if Path(test).suffix or "/" in test)


def world_of_torchrun() -> World:
    """Have the process count as one of torchrun's, and return the world of a benchmark in the process group."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="1",
    )
    return World(torch.device("cpu"), size)


def measure(*arguments: str) -> None:
    """Body: be a rank of the benchmark, in the process group that is there."""
    with mock.patch.object(step, "joined", return_value=nullcontext(world_of_torchrun())):
        step.main(arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="the bytes are counted by Linux")
def test_the_benchmark_of_a_step_saves_its_numbers(world, tmp_path):
    names, output = ["DDP", "GradAvg weighted_mean"], tmp_path / "found.json"
    options = ["--models", "mlp", "--rounds", "1", "--steps", "1", "--output", str(output), "--only", *names]
    world(2).run(measure, *options)
    (model,) = json.loads(output.read_text())["models"]
    assert (2, names) == (model["world_size"], sorted(model["seconds"]))
    # Half of a ring's traffic leaves each of two ranks, and both share the interface.
    assert model["sent"]["DDP"][0] > model["gradient_bytes"]


def measure_growth(*arguments: str) -> None:
    """Body: be a rank of the benchmark, in the process group that is there."""
    with (
        mock.patch.object(growth, "joined", return_value=nullcontext(world_of_torchrun())),
        redirect_stdout(io.StringIO()),
    ):
        growth.main(arguments)


def test_the_benchmark_of_growth_saves_and_draws_its_numbers(world, tmp_path):
    output = tmp_path / "found.json"
    options = ["--rounds=2", "--steps=1", "--windows", "1", "2", "--parameters=80", "--seconds=0.001"]
    world(2).run(measure_growth, *options, f"--output={output}")
    saved = json.loads(output.read_text())
    assert [(2, 1), (2, 2)] == [(result["ranks"], result["window"]) for result in saved["results"]]
    for result in saved["results"]:
        assert dict.fromkeys(growth.STRATEGIES, 2) == {name: len(of) for name, of in result["milliseconds"].items()}
    (exchange,) = saved["exchanges"]
    assert min(*exchange["totals"], *exchange["flag"]) > 0
    for name in ("ranks", "delay"):
        # What another world would have saved, so that there is something to compare with.
        more = [{**result, name: 4} for result in saved["results"]]
        saved["results"] += more
    output.write_text(json.dumps(saved))
    growth.main(["--draw", str(output), f"--images={tmp_path}"])
    assert ["growth_delay.svg", "growth_ranks.svg"] == sorted(path.name for path in tmp_path.glob("*.svg"))


def test_times_of_growth_are_drawn_as_their_streams_say():
    drawn = {name: growth.draw_times(name, 0.3, 50, random.Random(0)) for name in growth.STREAMS}
    assert all(times == pytest.approx((0.1, 0.2)) for times in drawn["equal"])
    assert len(set(drawn["together"])) == 50
    assert all(times.backward == pytest.approx(2 * times.forward) for times in drawn["together"])
    assert not any(times.backward == pytest.approx(2 * times.forward) for times in drawn["independent"])


def reads_under(name: str) -> tuple[int, list[torch.Tensor]]:
    """Body: train two steps under a variant; return how often the host read rows, and the parameters."""
    torch.manual_seed(0)
    module = Measured(MODELS["mlp"].model())
    read = RowExchange.read
    with mock.patch.object(RowExchange, "read", autospec=True, side_effect=read) as counted:
        world = world_of_torchrun()
        seconds = host_read.seconds_of(host_read.VARIANTS[name], module, MODELS["mlp"].batch(), 2, world)
    assert seconds > 0
    return counted.call_count, [parameter.detach() for parameter in module.parameters()]


def test_the_benchmark_of_host_reads_leaves_out_all_but_the_first(world):
    """The switch of the benchmark changes how often the host reads rows, and no parameter. One read is for u."""
    steps = WARMUP + 2 + 1
    found = {name: world(2).run(reads_under, name) for name in host_read.VARIANTS}
    expected = dict(zip(host_read.VARIANTS, (0, 2, steps + 1, steps + 1), strict=True))
    assert expected == {name: reads for name, ((reads, _), _) in found.items()}
    assert expected == {name: reads for name, (_, (reads, _)) in found.items()}
    _, (_, unread), (_, as_it_is), (_, on_device) = (of_ranks[0] for of_ranks in found.values())
    assert all(map(torch.equal, unread, as_it_is))
    assert all(map(torch.equal, on_device, as_it_is))


def table_of_reads(*arguments: str) -> str:
    """Body: be a rank of the benchmark of host reads, in the process group that is there; return what it prints."""
    with (
        mock.patch.object(host_read, "joined", return_value=nullcontext(world_of_torchrun())),
        redirect_stdout(io.StringIO()) as printed,
    ):
        host_read.main(arguments)
    return printed.getvalue()


def test_the_benchmark_of_host_reads_prints_a_table(world):
    table, nothing = world(2).run(table_of_reads, "--models", "mlp", "--rounds", "1", "--steps", "1")
    assert nothing == ""
    assert f"host reads: CPU, torch {torch.__version__}" in table
    assert [name for name in host_read.VARIANTS if f" {name} " not in table] == []


def table_of_parts(*arguments: str) -> str:
    """Body: be a rank of the benchmark of parts, in the process group that is there; return what it prints.

    It fails if a function of the package stays replaced.
    """
    sound = TrainingIterator.__next__
    with (
        mock.patch.object(parts, "joined", return_value=nullcontext(world_of_torchrun())),
        redirect_stdout(io.StringIO()) as printed,
    ):
        parts.main(arguments)
    assert sound is TrainingIterator.__next__
    return printed.getvalue()


def test_the_benchmark_of_parts_times_every_part(world):
    """Every row has a time under the strategy that runs all of them."""
    table, nothing = world(2).run(table_of_parts, "--models", "layer", "--steps", "2")
    assert nothing == ""
    rows = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in table.splitlines() if "│" in line}
    assert ["step", *(row.strip() for row in parts.PARTS)] == list(rows)
    assert [] == [row for row, milliseconds in rows.items() if milliseconds == "-"]


def table_of_loading(*arguments: str) -> str:
    """Body: be a rank of the benchmark of loading, in the process group that is there; return what it prints."""
    with (
        mock.patch.object(loading, "joined", return_value=nullcontext(world_of_torchrun())),
        redirect_stdout(io.StringIO()) as printed,
    ):
        loading.main(arguments)
    return printed.getvalue()


def test_the_benchmark_of_loading_counts_the_samples_of_each_rank(world):
    """By hand, 2 batches of 8 on 2 ranks: 8 samples each.

    In the first batch, all but stock load one twice more, and under a preset rank 0 loads the whole batch.
    """
    options = ["--workers", "0", "2", "--batch", "8", "--batches", "2", "--rounds", "1", "--milliseconds", "0.1"]
    table, nothing = world(2).run(table_of_loading, *options)
    assert nothing == ""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    compared, collated = "10 10", "18 10"
    first = ("8 8", compared, collated, collated, compared, collated)
    expected = []
    for workers in ("0", "2"):
        for name, loaded in zip(loading.STRATEGIES, first, strict=True):
            expected.append((workers, name, loaded, "8 8"))
    assert expected == [(row[0], row[1], row[-2], row[-1]) for row in rows]


OF_NAMEDTUPLE: set[str] = set()  # `_replace` and the like are documented, in spite of the underscore


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def test_only_one_file_uses_private_names_of_base_classes():
    """What a class uses as `self._name`, a class of the package defines or sets; ruff finds the names of all else."""
    defined = set()
    used = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and is_of_self(node):
                used.add(node.attr)
                if isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
    private = {name for name in used - defined if name.startswith("_") and not name.startswith("__")}
    assert OF_NAMEDTUPLE == private


def names_of_others(tree: ast.AST) -> set[str]:
    """Return the names with one underscore that a file takes from others, also by `getattr` and as arguments."""
    defined = set()
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and not is_of_self(node):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            used.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            used.update(node.value.split("."))
    return {name for name in used - defined if re.fullmatch(r"_[A-Za-z]\w*", name)}


MOST_PRIVATE_NAMES = 42
"""Each is a release of Lightning or torch that may break the package. Lower this number when one goes. Before you raise
it, look for a public name, an error, or a sentence that serves as well."""


def test_private_names_are_few_and_each_has_its_reason():
    text = (PACKAGE / "_lightning" / "internals.py").read_text("utf-8")
    names = names_of_others(ast.parse(text))
    comments = re.findall(r"# Private: (?:[^\n]*\n *#)*[^\n]*", text)
    without_reason = {name for name in names if not any(name in comment for comment in comments)}
    assert set() == without_reason
    assert len(names) <= MOST_PRIVATE_NAMES, f"{len(names)} private names: {sorted(names)}"
