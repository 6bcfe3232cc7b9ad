"""What the tests rest on: failed ranks are reported, defects can be planted, benchmarks run, internals are apart."""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mutations.__main__ import ROOT, mutations
from ranks import RankError, RankPool
from structure import ROOT as PACKAGE

from benchmarks import check, epoch, gpu, growth, step
from benchmarks.models import MODELS
from benchmarks.report import STOCK, Row, begin_file, load, save
from benchmarks.variants import VARIANTS
from benchmarks.world import World
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


def run_benchmark(name: str, *arguments: str) -> str:
    """Body: be a rank of a benchmark, in the process group that is there; return what it prints."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    with (
        mock.patch.object(benchmark, "joined", return_value=nullcontext(world_of_torchrun())),
        mock.patch.object(epoch, "EPOCHS", 2),  # the first, which stands apart, and one that counts
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(io.StringIO()),
    ):
        benchmark.main(arguments)
    return printed.getvalue()


SMALL_EPOCH = ["--batch=4", "--batches=2", "--rounds=1", "--milliseconds=0.1", "--compute=0.1"]
BENCHMARKS = {
    "step": (["--models", "layer", "--rounds=1", "--steps=1"], list(VARIANTS)),
    "epoch": ([*SMALL_EPOCH, "--workers", "1"], list(epoch.STRATEGIES)),
    "growth": (
        ["--rounds=1", "--steps=1", "--cases", "crossed:1", "equal:2", "--parameters=80", "--seconds=0.001"],
        ["exchange of rows", "stock's flag", *growth.STRATEGIES, *growth.STRATEGIES],
    ),
    "gpu": (
        ["--models", "mlp", "--rounds=1", "--steps=1", f"--epoch={' '.join(SMALL_EPOCH)} --workers 0"],
        list(gpu.READS),
    ),
}
"""Of each benchmark, options for small worlds, and the variants of the rows that it saves."""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_saves_its_rows_and_prints_them(world, tmp_path, name):
    options, variants = BENCHMARKS[name]
    file = tmp_path / "found.json"
    printed, nothing = world(2).run(run_benchmark, name, *options, f"--output={file}")
    assert nothing == ""
    rows = load(file)
    assert variants == [row.variant for row in rows]
    assert all(min(row.seconds) > 0 and row.case["ranks"] == 2 for row in rows)
    for text in (*variants, f"torch {torch.__version__}", f"found.json{chr(10)}", "    $ python -m"):
        assert name == "growth" or text in printed
    if name == "epoch":
        # By hand, 2 batches of 4 for each of 2 ranks, and 4 samples of validation. In the first batch of a run, what is
        # split loads one sample five times, and under a preset rank 0 loads the whole batch of 8.
        split = [25, 17]
        first = [[12, 12], [12, 12], split, split, split]
        assert first == [row.more["loaded"][0] for row in rows]
        assert 5 * [[12, 12]] == [row.more["loaded"][-1] for row in rows]
        assert all(sum(row.more["parts"][0]) == pytest.approx(row.seconds[0], rel=0.5) for row in rows)


def test_pictures_are_drawn_of_saved_rows(tmp_path):
    parts = [0.1] * len(epoch.PARTS)
    rows = []
    for name in epoch.STRATEGIES:
        rows.append(Row({"ranks": 2, "workers": 0}, name, [0.6], {"parts": [parts]}))
    epochs = file_of(tmp_path / "epoch.json", rows)
    epoch.main([f"--draw={epochs}", f"--image={tmp_path / 'epoch.svg'}"])
    rows = []
    for ranks, delay in ((2, 0.0), (4, 0.0), (2, 1.0)):
        for name in growth.STRATEGIES:
            case = growth.Case(ranks, delay, 80, 1, "equal")
            rows.append(Row(case._asdict(), name, [0.1, 0.2]))
    growth.main([f"--draw={file_of(tmp_path / 'growth.json', rows)}", f"--images={tmp_path}"])
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert ["epoch.svg", "growth_delay.svg", "growth_ranks.svg"] == drawn


def file_of(file: Path, rows: list[Row]) -> Path:
    """Return a file that holds rows."""
    begin_file(file)
    save(file, rows)
    return file


def test_times_of_growth_are_drawn_as_they_say():
    fast = (0.1, 0.2)
    drawn = {}
    for times in growth.TIMES:
        drawn[times] = [growth.draw_times(times, 0.3, 4, rank, 2) for rank in range(2)]
    for rank, first in ((0, (0.2, 0.4)), (1, fast)):
        second = fast if rank == 0 else (0.2, 0.4)
        assert [pytest.approx(fast)] * 4 == drawn["equal"][rank]
        assert 2 * [pytest.approx(first), pytest.approx(second)] == drawn["in turn"][rank]
    assert 2 * [pytest.approx((0.2, 0.2)), pytest.approx((0.1, 0.4))] == drawn["crossed"][0]
    assert 2 * [pytest.approx((0.1, 0.4)), pytest.approx((0.2, 0.2))] == drawn["crossed"][1]
    assert all(time.backward == pytest.approx(2 * time.forward) for time in drawn["together"][1])
    assert 8 == len({*drawn["together"][0], *drawn["together"][1]})


def reads_under(*, reads_once: bool) -> tuple[int, list[torch.Tensor]]:
    """Body: train under `weighted_mean`; return how often the host read rows, and the parameters."""
    setting = step.setting_of("mlp", world_of_torchrun(), steps=2)
    read = RowExchange.read
    with mock.patch.object(RowExchange, "read", autospec=True, side_effect=read) as counted:
        around = gpu.one_read() if reads_once else nullcontext()
        step.measure(VARIANTS["weighted_mean"], setting, around)
    return counted.call_count, [parameter.detach() for parameter in setting.module.parameters()]


def test_the_switch_of_the_benchmark_of_gpus_reads_the_first_rows_alone(world):
    """It changes how often the host reads rows, and no parameter. One read is for u."""
    steps = step.WARM_UP + 2 + 1
    for (reads, as_it_is), (reads_once, unread) in zip(
        world(2).run(reads_under, reads_once=False), world(2).run(reads_under, reads_once=True), strict=True
    ):
        assert (steps + 1, 2) == (reads, reads_once)
        assert all(map(torch.equal, as_it_is, unread))


def test_every_row_of_a_step_and_of_an_epoch_has_a_bound():
    for model in MODELS:
        for name in [*VARIANTS][1:]:
            assert 0.9 < check.bound_of("step", model, name).ratio < 2.5
    for name in [*epoch.STRATEGIES][1:]:
        for workers in ("0 workers", "4 workers"):
            assert 1 < check.bound_of("epoch", workers, name).ratio < 1.15


def measured(ratio: float, counts: list[int]) -> Callable[[Sequence[str], int], list[Row]]:
    """Return what measures rows of that ratio to stock, but for the noise of a first round."""

    def measure(names: Sequence[str], rounds: int) -> list[Row]:
        counts.append(rounds)
        rows = [Row({}, STOCK, [2.0] * rounds)]
        for name in names[1:]:
            rows.append(Row({}, name, [5.0, *[2 * ratio] * (rounds - 1)]))
        return rows

    return measure


def test_a_regression_of_a_tenth_fails_in_each_row_and_noise_does_not(tmp_path):
    for bound in check.BOUNDS:
        for where in bound.where:
            for factor, rounds, fails in ((1.0, 1, False), (1.1, 2, True)):
                counts = []
                names = list(bound.variants)
                found = check._find(bound.benchmark, where, names, measured(factor * bound.ratio, counts))
                assert names == [finding.variant for finding in found]
                assert all(fails == check.fails(finding.ratios, bound) for finding in found)
                assert rounds == len(counts) or bound.benchmark == "epoch"
    case = {"benchmark": "step", "where": "mlp"}
    good = Row(case, "mean", [1.0, 1.01, 0.99])
    with redirect_stdout(io.StringIO()):
        check.main([f"--table={file_of(tmp_path / 'good.json', [good])}"])
        with pytest.raises(SystemExit, match="step of mlp under sum"):
            check.main([f"--table={file_of(tmp_path / 'bad.json', [good, Row(case, 'sum', [1.1, 1.1, 1.0])])}"])


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


MOST_PRIVATE_NAMES = 24
"""Each is a release of Lightning or torch that may break the package. Lower this number when one goes. Before you raise
it, look for a public name, an error, or a sentence that serves as well."""


def test_private_names_are_few_and_each_has_its_reason():
    text = (PACKAGE / "_lightning" / "internals.py").read_text("utf-8")
    names = names_of_others(ast.parse(text))
    comments = re.findall(r"# Private: (?:[^\n]*\n *#)*[^\n]*", text)
    without_reason = {name for name in names if not any(name in comment for comment in comments)}
    assert set() == without_reason
    assert len(names) <= MOST_PRIVATE_NAMES, f"{len(names)} private names: {sorted(names)}"
