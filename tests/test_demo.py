"""The demo: how it arranges data, how it compares runs, and that it reports what happened."""

import io
import json
import math
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from ranks import make_trainer
from rich.console import Console
from rich.progress import Progress
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, SequentialSampler

from examples.demo import convergence, digits, runs, same_bits, text
from examples.demo.comparison import Comparison, TaskResult, compare, losses_difference, weights_difference
from examples.demo.convergence_run import WAYS, Outcome, SentBytes
from examples.demo.global_batches import GlobalBatchSampler, ShuffleSampler, chunk_of_rank, global_batch_loader
from examples.demo.report import final_loss, make_table, save_json, save_plot
from examples.demo.run_one import LossCurve, ProgressFile, ReversedSamples, tasks
from examples.demo.training import make_strategy, train
from lightning_gradavg import GradAvgStrategy, hooks

WORLDS = [1, 2, 3, 4, 5]


def joined(chunks):
    return list(chain.from_iterable(chunks))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("count", [0, 1, 4, 5, 9, 16, 17])
def test_chunks_are_those_of_torch_chunk(count, world_size):
    """Each rank's chunk is the one that `torch.chunk` cuts, and empty where it cuts none (case 27)."""
    indices = list(range(100, 100 + count))
    expected = [chunk.tolist() for chunk in torch.tensor(indices).chunk(world_size)] if count else []
    expected += [[]] * (world_size - len(expected))

    assert expected == [chunk_of_rank(indices, rank, world_size) for rank in range(world_size)]


def test_five_samples_on_four_ranks_leave_one_without():
    """Five samples on four ranks are chunks of 2, 2, 1 and 0."""
    assert [[0, 1], [2, 3], [4], []] == [chunk_of_rank(range(5), rank, 4) for rank in range(4)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_cover_each_global_batch_once_and_in_order(world_size):
    """The ranks' chunks, joined in rank order, are the batches of one process, the short last one included."""
    whole = list(GlobalBatchSampler(ShuffleSampler(37, seed=3), 8))
    ranks = [
        list(GlobalBatchSampler(ShuffleSampler(37, seed=3), 8, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]

    assert [8, 8, 8, 8, 5] == [len(batch) for batch in whole]
    assert list(range(37)) == sorted(joined(whole))
    assert whole == [joined(chunks) for chunks in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 8), (2, 4), (3, 3), (4, 2), (5, 2)])
def test_every_rank_has_the_same_number_of_batches(world_size, batch_size):
    """Ranks agree on the number of batches and on the size of the largest, which is the first chunk's."""
    samplers = [
        GlobalBatchSampler(SequentialSampler(range(37)), 8, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]

    assert [5] * world_size == [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]
    assert [batch_size] * world_size == [sampler.batch_size for sampler in samplers]
    assert batch_size == len(next(iter(samplers[0])))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("num_samples", "sizes"), [(41, [8, 8, 8, 8, 8, 1]), (37, [8, 8, 8, 8, 5])])
def test_a_window_holds_one_global_batch(num_samples, sizes, world_size):
    """Two loader batches of half the size are, joined, one global batch; the last window may have one only."""
    whole = list(GlobalBatchSampler(ShuffleSampler(num_samples, seed=0), 16))
    ranks = [
        GlobalBatchSampler(ShuffleSampler(num_samples, seed=0), 8, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    halves = [joined(chunks) for chunks in zip(*ranks, strict=True)]

    assert sizes == [len(half) for half in halves]
    assert whole == [joined(halves[start : start + 2]) for start in range(0, len(halves), 2)]


def test_epochs_shuffle_differently_and_reproducibly():
    """The order depends on seed and epoch alone."""
    first, second = ShuffleSampler(50, seed=1), ShuffleSampler(50, seed=1)
    orders = []
    for epoch in (0, 1):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        torch.manual_seed(epoch + 100)  # the global random state must not matter
        orders.append(list(first))
        assert orders[-1] == list(second)

    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader_batch_size": 0}, "loader_batch_size must be at least 1, got 0"),
        ({"loader_batch_size": 4, "rank": 2, "world_size": 2}, r"rank must be in \[0, world_size=2\), got 2"),
        ({"loader_batch_size": 4, "rank": -1, "world_size": 2}, r"rank must be in \[0, world_size=2\), got -1"),
    ],
)
def test_impossible_arrangements_are_refused(options, message):
    """A batch size or a rank that cannot be is quoted in the error."""
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(SequentialSampler(range(4)), **options)


def test_a_loader_without_trainer_reads_everything():
    """Outside a trainer the loader yields the whole batches of one process, in order."""
    loader = global_batch_loader([b"a", b"bc", b"d"], 2, lambda samples: samples, trainer=None)

    assert [[b"a", b"bc"], [b"d"]] == list(loader)


def test_docstrings_come_in_a_fixed_order(tmp_path):
    """Docstrings are read by file name and position; files and definitions without one give none."""
    (tmp_path / "b.py").write_text('"""Module b, ünïcode."""\n')
    (tmp_path / "a.py").write_text('x = 1\nclass C:\n    "Class C."\n    def f(self):\n        "Method f."\n')
    (tmp_path / "c.txt").write_text('"""Not Python."""\n')

    assert [b"Class C.", b"Method f.", "Module b, ünïcode.".encode()] == list(text.docstrings(tmp_path))


def test_the_corpora_are_the_same_every_time():
    """Two set-ups give the same samples in the same order, of very different lengths where it is text."""
    first, second = text.DocstringData(), text.DocstringData()
    images, again = digits.DigitsData(), digits.DigitsData()
    for data in (first, second, images, again):
        data.setup("fit")
    lengths = [len(sample) for sample in first.samples]

    assert first.samples == second.samples
    assert 969 + text.NUM_TEST == len(lengths)
    assert min(lengths) < 32
    assert max(lengths) == 192
    assert 1797 == len(images.samples)
    assert all(a[1] == b[1] and torch.equal(a[0], b[0]) for a, b in zip(images.samples, again.samples, strict=True))


def test_too_small_a_standard_library_is_an_error():
    """More docstrings than there are cannot be asked for; the error has both numbers."""
    with pytest.raises(RuntimeError, match=r"has [0-9]+ docstrings, but 1000128 are needed: run this with a Python"):
        text.DocstringData(num_train=1_000_000).setup("fit")


def test_text_batches_mark_padding():
    """Inputs begin with the boundary token, targets end with it, and padding is ignored."""
    inputs, targets = text.collate([b"ab", b""])

    assert [[256, 97, 98], [256, 256, 256]] == inputs.tolist()
    assert [[97, 98, 256], [256, -100, -100]] == targets.tolist()


@pytest.mark.parametrize("example", [digits, text], ids=["digits", "text"])
def test_an_empty_chunk_has_loss_zero_and_zero_gradients(example, monkeypatch):
    """A rank without samples has loss 0, weight 0 and gradients of 0, not NaN (case 5)."""
    module = example.TASK.model()
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    batch = example.collate([])
    output = module.training_step(batch, 0)
    loss = output["loss"] if isinstance(output, dict) else output
    loss.backward()

    assert 0 == len(batch[0]) == len(batch[1])
    assert 0.0 == loss.item()
    assert isinstance(output, torch.Tensor) or 0 == output["weight"]
    assert all(torch.equal(torch.zeros_like(p), p.grad) for p in module.parameters())


def test_text_loss_is_the_mean_over_valid_tokens():
    """The loss counts every byte and boundary once, and no padding; its weight is their number."""
    module = text.ByteLanguageModel()
    samples = [b"def", b"a", b"return x"]
    loss, weight = module.mean_loss(text.collate(samples))
    terms = []
    for sample in samples:
        inputs, targets = text.collate([sample])
        terms.append(cross_entropy(module(inputs)[0], targets[0], reduction="none"))

    assert 4 + 2 + 9 == weight.item()
    torch.testing.assert_close(loss, torch.cat(terms).mean())


class Still(LightningModule):
    """Takes steps of size zero, so that every loss is that of the first weights."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def training_step(self, batch, batch_idx):
        self.module.log = self.log
        return self.module.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_still(strategy_name, micro_batches, callbacks=()):
    curve = LossCurve()
    torch.manual_seed(0)
    module = text.ByteLanguageModel(width=8)
    data = text.DocstringData(num_train=41, max_bytes=24, global_batch_size=16)
    options = {"max_epochs": 1, "use_distributed_sampler": False, "accumulate_grad_batches": micro_batches}
    trainer = make_trainer(make_strategy(strategy_name), callbacks=[curve, *callbacks], **options)
    trainer.fit(Still(module), data)
    return curve.values


@pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0")  # the last loader batch has one sample
def test_the_loss_curve_is_that_of_the_global_batches(world):
    """On 3 ranks with 2 micro-batches the curve has the token mean of each global batch, on every rank (case 4)."""
    torch.manual_seed(0)
    module = text.ByteLanguageModel(width=8)
    data = text.DocstringData(num_train=41, max_bytes=24, global_batch_size=16)
    data.setup("fit")
    batches = GlobalBatchSampler(ShuffleSampler(41, seed=0), 16)
    expected = [module.mean_loss(text.collate([data.samples[i] for i in batch]))[0].item() for batch in batches]

    curves = world(3).run(fit_still, "gradavg", 2)

    assert 3 == len(expected)
    for curve in curves:
        assert expected == pytest.approx(curve.tolist(), rel=1e-6)


def test_reversed_samples_are_the_same_global_batches(world):
    """Reversing the samples of each batch leaves the losses as they were, up to rounding."""
    [straight] = world(1).run(fit_still, "auto", 1)
    [backwards] = world(1).run(fit_still, "auto", 1, [ReversedSamples()])
    images, labels = torch.arange(3.0), torch.tensor([7, 8, 9])
    ReversedSamples().on_train_batch_start(Trainer.__new__(Trainer), LightningModule(), (images, labels), 0)

    assert [[2.0, 1.0, 0.0], [9, 8, 7]] == [images.tolist(), labels.tolist()]
    assert straight.tolist() == pytest.approx(backwards.tolist(), rel=1e-6)


def test_relative_differences_by_hand():
    """Weights: the largest ratio of norms over the parameters. Losses: |l - l_ref| / |l_ref| of each step."""
    reference = TaskResult(
        torch.tensor([2.0, 4.0, -1.0]), {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(1)}, 0.5, 1.0
    )
    other = TaskResult(torch.tensor([2.0, 3.0, -1.5]), {"a": torch.tensor([3.0, 4.5]), "b": torch.ones(1)}, 0.5, 1.0)

    assert Comparison(weights=0.1, losses=0.5) == compare(reference, other)
    assert [0.0, 0.25, 0.5] == losses_difference(reference.losses, other.losses).tolist()
    assert Comparison(weights=0.0, losses=0.0) == compare(reference, reference)


def test_differences_below_float32_resolution_are_seen():
    """Differences are computed in float64: one unit in the last place of 1.0 is 2 ** -23, not 0."""
    one = {"a": torch.ones(4)}
    next_to_one = {"a": torch.ones(4) + 2**-23}

    assert 2**-23 == weights_difference(one, next_to_one)


@pytest.mark.parametrize(
    ("reference", "value", "expected"), [(0.0, 0.0, 0.0), (0.0, 1.0, math.inf), (1.0, math.nan, math.nan)]
)
def test_degenerate_differences(reference, value, expected):
    """Nothing to nothing is no difference, something to nothing is infinite, and a NaN stays one anywhere."""
    fine = torch.ones(2)
    weights = weights_difference(
        {"a": fine, "b": torch.tensor([reference]), "c": fine}, {"a": fine, "b": torch.tensor([value]), "c": fine}
    )
    losses = losses_difference(torch.tensor([1.0, reference]), torch.tensor([1.0, value]))

    assert weights == pytest.approx(expected, nan_ok=True)
    assert [0.0, expected] == pytest.approx(losses.tolist(), nan_ok=True)


@pytest.mark.parametrize(
    ("weights", "losses", "expected"),
    [(1e-5, 1e-5, True), (1.1e-5, 0.0, False), (0.0, 1.1e-5, False), (math.nan, 0.0, False), (0.0, math.nan, False)],
)
def test_tolerance(weights, losses, expected):
    """Both differences must be at most 1e-5, and a NaN is not."""
    assert expected is Comparison(weights, losses).within_tolerance


def test_runs_of_different_shape_cannot_be_compared():
    """Another number of steps, or another model, is an error that quotes both."""
    with pytest.raises(ValueError, match="different numbers of steps: 3, but 2 in the reference run"):
        losses_difference(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"different models: parameters {'a': \(3,\)}, but {'a': \(2,\)}"):
        weights_difference({"a": torch.zeros(2)}, {"a": torch.zeros(3)})


def made_up_results(difference):
    """Results of the configurations on 2 processes: GradAvg differs by `difference`, stock DDP by a half."""
    factors = {"auto": 1.0, "ddp": 1.5, "gradavg": 1.0 + difference}
    return {
        configuration.name: {
            task: TaskResult(
                losses=torch.full((12,), 2.0, dtype=torch.float64) * factors[configuration.strategy],
                weights={"a": torch.ones(2, dtype=torch.float64) * factors[configuration.strategy]},
                metric=0.75,
                seconds=3.0,
            )
            for task in ("digits", "text")
        }
        for configuration in runs.configurations([2])
    }


@pytest.mark.parametrize(("difference", "status"), [(1e-6, 0), (1e-4, 1), (math.nan, 1)])
def test_the_exit_status_says_whether_gradavg_matches(difference, status, monkeypatch, tmp_path, capsys):
    """The demo fails if GradAvg differs by more than 1e-5, whatever stock DDP does, and names the run and the task."""
    results = made_up_results(difference)
    monkeypatch.setattr(runs, "run", lambda configuration, *_, **__: results[configuration.name])

    assert status == runs.main(["--worlds", "2", "--output", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    failure = "Differs from one process by more than 1e-05: GradAvg, 2 processes, digits; GradAvg, 2 processes, text"
    assert bool(status) == (failure in printed)
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results.json").read_text())["runs"]["stock DDP, 2 processes"]["text"][
        "difference_of_weights"
    ] == pytest.approx(0.5)


def test_the_table_reports_both_differences_of_every_run():
    """Every run has a row per task with both differences, in 80 columns and without abbreviations."""
    results = made_up_results(2.5e-6)
    reference, *others = results
    comparisons = {
        run: {task: compare(results[reference][task], result) for task, result in results[run].items()}
        for run in others
    }
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(make_table(results, comparisons, {"digits": "test_accuracy", "text": "test_loss"}))
    printed = console.export_text()

    assert "…" not in printed
    rest = ["2.00", "to", "2.00", "0.7500", "3.0", "s"]
    rows = [line.split() for line in printed.splitlines()]
    assert 2 == rows.count(["one", "process", "-", "-", *rest])
    assert 2 == rows.count(["one", "process,", "reversed", "0.0e+00", "0.0e+00", *rest])
    assert 2 == rows.count(["stock", "DDP,", "2", "processes", "5.0e-01", "5.0e-01", "3.00", "to", "3.00", *rest[3:]])
    assert 2 == rows.count(["GradAvg,", "2", "processes", "2.5e-06", "2.5e-06", *rest])


def test_numbers_that_json_lacks_are_written_as_text(tmp_path):
    """A run that diverged is reported as "nan", and the file stays JSON."""
    results = made_up_results(math.nan)
    reference, *others = results
    comparisons = {run: {t: compare(results[reference][t], r) for t, r in results[run].items()} for run in others}
    save_json(tmp_path / "results.json", results, comparisons)
    save_plot(tmp_path / "plot.png", results, comparisons, dict.fromkeys(results, "black"))
    written = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)

    assert "nan" == written["runs"]["GradAvg, 2 processes"]["text"]["difference_of_weights"]
    assert ["nan"] * 12 == written["runs"]["GradAvg, 2 processes"]["text"]["losses"]
    assert 0.0 == written["runs"]["one process"]["text"]["difference_of_weights"]


def test_the_final_loss_is_the_mean_of_ten_steps():
    """The final loss does not hang on the samples of one step."""
    result = TaskResult(torch.tensor([100.0, 50.0, *range(10)]), {}, 0.0, 0.0)

    assert 4.5 == final_loss(result)


def test_a_run_inherits_no_launcher(monkeypatch):
    """Variables of a launcher around the demo are removed, and each process has one thread."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.setenv("KEPT", "yes")
    environment = runs.environment()

    assert {"LOCAL_RANK", "SLURM_NTASKS"}.isdisjoint(environment)
    assert ("1", "yes") == (environment["OMP_NUM_THREADS"], environment["KEPT"])


def run_broken(monkeypatch, folder, code, timeout):
    """Run `code` in place of a configuration."""
    folder.mkdir(exist_ok=True)
    stand_in = folder / "stand_in.py"
    stand_in.write_text(f"#!{sys.executable}\n{code}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(stand_in))
    with Progress(disable=True) as progress:
        return runs.run(runs.configurations([2])[0], folder, progress, quick=True, timeout=timeout)


def test_a_failed_run_shows_the_end_of_its_log(monkeypatch, tmp_path):
    """A run that fails is an error with its name, its exit status and the end of its log."""
    with pytest.raises(runs.RunFailedError, match=r"(?s)one process: exit status 3\.\nthe reason\nThe whole log is "):
        run_broken(monkeypatch, tmp_path / "a", "print('the reason'); raise SystemExit(3)", timeout=60)


def test_a_run_without_result_has_failed(monkeypatch, tmp_path):
    """Success without a result is no success, and a result of an earlier run does not count."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "results.pt").touch()
    with pytest.raises(runs.RunFailedError, match="one process: exit status 0"):
        run_broken(monkeypatch, folder, "", timeout=60)


def test_a_run_that_hangs_is_killed_with_its_children(monkeypatch, tmp_path):
    """At the time limit a run and the processes it started are killed; the pipe that they share closes."""
    folder = tmp_path / "a"
    read, write = os.pipe()
    os.set_inheritable(write, True)
    code = f"""
import pathlib, signal, subprocess
subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.DEVNULL, close_fds=False)
pathlib.Path({str(folder / "started")!r}).touch()
signal.pause()
"""
    popen = subprocess.Popen
    monkeypatch.setattr(runs.subprocess, "Popen", lambda *args, **options: popen(*args, pass_fds=[write], **options))
    clock = SimpleNamespace(monotonic=lambda: 1000.0 if (folder / "started").exists() else 0.0)
    monkeypatch.setattr(runs, "time", clock)
    with pytest.raises(runs.RunFailedError, match="one process: not finished after 60 s"):
        run_broken(monkeypatch, folder, code, timeout=60)
    os.close(write)

    with os.fdopen(read, "rb") as pipe:
        assert b"" == pipe.read()  # the end of the file: no process holds the other end


def test_progress_is_read_from_the_last_complete_line(tmp_path):
    """A line that is being written is not read."""
    marks = tmp_path / "progress"
    with Progress(disable=True) as progress:
        bar = progress.add_task("starting")
        runs.show_progress(progress, bar, "GradAvg", marks)
        assert ("starting", 0) == (progress.tasks[0].description, progress.tasks[0].completed)
        marks.write_text("digits 1 9\ndigits 2 9\ndigits 3")
        runs.show_progress(progress, bar, "GradAvg", marks)
        assert ("GradAvg: digits", 2, 9) == (
            progress.tasks[0].description,
            progress.tasks[0].completed,
            progress.tasks[0].total,
        )


def test_training_on_one_process_is_real(tmp_path):
    """A quick run of the digits learns, marks its progress, and its loss curve has one point per global batch."""
    task = tasks(quick=True)[0]
    curve = LossCurve()
    module, accuracy = train(task, "auto", 1, [curve, ProgressFile(tmp_path / "progress", task.name)])

    assert 23 == len(curve.values)
    assert curve.values[-5:].mean() < 0.7 * curve.values[0]
    assert accuracy > 0.6
    assert [f"digits {step} 23" for step in range(1, 24)] == (tmp_path / "progress").read_text().splitlines()
    assert 0 == module.global_rank


def test_the_line_of_bits():
    """It has the digits of every number of processes, and says whether they are the same."""
    same = same_bits.line({1: "a" * 64, 2: "a" * 64})
    assert same.endswith(f"reproducible=True: {'a' * 16} on 1, {'a' * 16} on 2: the same bits")
    assert same_bits.line({1: "a" * 64, 4: "b" * 64}).endswith(f"{'b' * 16} on 4: DIFFERENT BITS")


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_leaves_the_same_bits(tmp_path, capsys):
    """Trained by Lightning's own launcher on one process and on two, the language model has the same weights."""
    assert 0 == same_bits.main(["--worlds", "1", "2", "--samples", "41", "--output", str(tmp_path)])
    assert "the same bits" in capsys.readouterr().out
    one, two = ((tmp_path / f"same_bits_{devices}.sha").read_text() for devices in (1, 2))
    assert one == two


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)  # 40 s on two idle cores
def test_the_demo_runs_on_four_processes(tmp_path):
    """On real processes GradAvg is within 1e-5 of one process in both tasks, where stock DDP is far off."""
    command = [sys.executable, "-m", "examples.demo", "--quick", "--worlds", "4", "--output", str(tmp_path)]
    done = subprocess.run(
        command, cwd=runs.REPOSITORY, env=runs.environment(), timeout=280, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr

    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 4 == len(results)
    for task in ("digits", "text"):
        ours, stock = results["GradAvg, 4 processes"][task], results["stock DDP, 4 processes"][task]
        assert ours["difference_of_weights"] <= 1e-5
        assert ours["difference_of_losses"] <= 1e-5
        assert stock["difference_of_weights"] > 1e-3
    assert Path(tmp_path / "comparison.png").stat().st_size > 10_000


def made_up_outcomes():
    """Outcomes of 3 seeds on 2 ranks: each way loses a tenth more than the one before it, half of that with seed 1."""
    return [
        Outcome(
            task=task,
            way=way.name,
            seed=seed,
            devices=2,
            losses=[100.0] * 5 + [seed + 0.1 * index / (1 + (seed == 1))] * 10,
            metric=seed + 0.2 * index,
            distance=0.5 * index,
            bytes_per_step=1000.0 / (1 + index),
        )
        for seed in range(3)
        for task in ("digits", "text")
        for index, way in enumerate(WAYS)
    ]


def test_ways_are_compared_within_a_seed():
    """Differences are from the exact run of the same seed, so that what the seed itself makes drops out."""
    summaries = convergence.summarize(made_up_outcomes())
    assert [("digits", 2), ("text", 2)] == list(summaries)
    exact, second = summaries["text", 2]["float32"], summaries["text", 2][WAYS[1].name]
    assert (1.0, 1.0) == (exact.loss.mean, exact.loss.deviation)
    assert (0.0, 0.0) == (exact.loss_change.mean, exact.loss_change.deviation)
    # 0.1, 0.05 and 0.1
    assert pytest.approx((0.25 / 3, 0.05 / 3**0.5)) == (second.loss_change.mean, second.loss_change.deviation)
    assert pytest.approx((0.2, 0.0), abs=1e-12) == (second.metric_change.mean, second.metric_change.deviation)
    assert (0.5, 500.0) == (second.distance, second.bytes_per_step)


def test_table_of_ways_fits_in_80_columns(tmp_path):
    """Every way has a row per setting, without abbreviations; one seed has no deviation."""
    outcomes = made_up_outcomes()
    summaries = convergence.summarize(outcomes)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(convergence.make_table(summaries, 3))
    printed = console.export_text()
    assert "…" not in printed
    rows = [line.split() for line in printed.splitlines()]
    assert all(2 == sum(row[: len(name)] == name for row in rows) for name in (way.name.split() for way in WAYS[1:]))
    assert 2 == rows.count(["float16", "1.33±1.01", "+333.3±115.5", "1.800±1.000", "+800.0±0.0", "2.0e+00", "0.2"])

    alone = [outcome for outcome in outcomes if outcome.seed == 0]
    assert "0.40" == convergence.summarize(alone)["digits", 2]["float16"].loss.text(2)
    convergence.save_json(tmp_path / "one.json", convergence.summarize(alone), alone)
    assert alone == [
        Outcome(**run) for run in json.loads((tmp_path / "one.json").read_text(), parse_constant=pytest.fail)["runs"]
    ]


class Constant(LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(8))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        return (self.w * batch).sum()

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.w.grad.tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def count_bytes(options):
    sent = SentBytes()
    strategy = GradAvgStrategy(reduction="sum", **options)
    trainer = make_trainer(strategy, callbacks=[sent], max_epochs=1, use_distributed_sampler=False)
    with sent.counting():
        trainer.fit(Wide(), DataLoader([torch.ones(1)] * 3, batch_size=None))
    return sent.per_step


class Wide(Constant):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(64, 64))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"ddp_comm_hook": allreduce_hook}, 16384), ({"ddp_comm_hook": hooks.bfloat16}, 8192)],
)
def test_bytes_of_a_step(options, expected, world):
    """On 2 ranks each sends half of 16 KiB twice, and in bfloat16 half of that."""
    for counted in world(2).run(count_bytes, options):
        assert expected <= counted <= expected + 32


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--worlds", "1"]])
def test_convergence_refuses_bad_arguments(arguments, capsys):
    """No seed, or one process, which sends nothing, is quoted before anything is started."""
    with pytest.raises(SystemExit):
        convergence.main(arguments)
    given = {"--seeds": 3, "--worlds": [2, 4], arguments[0]: [1] if arguments[1] == "1" else 0}
    message = f"--seeds is 1 or more and --worlds 2 or more each; got {given['--seeds']} and {given['--worlds']}"
    assert message in capsys.readouterr().err


def test_convergence_shows_a_failed_run(monkeypatch, tmp_path, capsys):
    """Ranks that fail end the command with status 1 and the end of their log."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(f"#!{sys.executable}\nprint('the reason')\nraise SystemExit(3)\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(convergence.sys, "executable", str(stand_in))
    assert 1 == convergence.main(["--worlds", "2", "--output", str(tmp_path / "output")])
    printed = capsys.readouterr().out
    assert "2 processes: exit status 3." in printed
    assert "the reason" in printed


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(200)  # 30 s on two busy cores
def test_convergence_from_command_to_files(tmp_path):
    """A few steps on two ranks print the table, and leave every run."""
    command = [sys.executable, "-m", "examples.demo.convergence", "--quick", "--seeds", "1", "--worlds", "2"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=runs.REPOSITORY,
        env=runs.environment(),
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    results = json.loads((tmp_path / "convergence.json").read_text())["runs"]
    assert [(task, way.name) for task in ("digits", "text") for way in WAYS] == [
        (run["task"], run["way"]) for run in results
    ]
    of_digits = {run["way"]: run for run in results if run["task"] == "digits"}
    assert of_digits["float32, reversed"]["distance"] <= 1e-5
    assert of_digits["float16"]["distance"] < of_digits["bfloat16"]["distance"]
    assert 0.5 < of_digits["bfloat16"]["bytes_per_step"] / of_digits["float32"]["bytes_per_step"] < 0.55
