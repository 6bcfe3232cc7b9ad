"""The demo: how it arranges data, how it compares runs, and that it reports what happened."""

from __future__ import annotations

import json
import math
from itertools import chain

import pytest
import torch
from lightning.pytorch import LightningModule
from ranks import make_trainer

from examples.demo import digits, runs, same_bits, text
from examples.demo.global_batches import GlobalBatchSampler
from examples.demo.report import Comparison, TaskResult, compare
from examples.demo.run_one import LossCurve, ReversedSamples, tasks
from examples.demo.training import make_strategy, train


def joined(chunks):
    return list(chain.from_iterable(chunks))


def sampled(num_samples, batch_size, rank=0, world_size=1, seed=3, epoch=0):
    sampler = GlobalBatchSampler(num_samples, batch_size, rank=rank, world_size=world_size, seed=seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(sampler) == len(batches)
    return batches


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_ranks_read_the_batches_of_one_process(world_size):
    """Chunks in rank order are the batches of one process; two batches of half the size are one, on any world."""
    whole = sampled(37, 8)
    ranks = [sampled(37, 8, rank, world_size) for rank in range(world_size)]
    halves = [joined(parts) for parts in zip(*(sampled(37, 4, r, world_size) for r in range(world_size)), strict=True)]

    assert [8, 8, 8, 8, 5] == [len(batch) for batch in whole]
    assert list(range(37)) == sorted(joined(whole)) != joined(whole)
    assert whole == [joined(parts) for parts in zip(*ranks, strict=True)]
    assert whole == sampled(37, 8) != sampled(37, 8, epoch=1)
    assert whole == [joined(halves[start : start + 2]) for start in range(0, len(halves), 2)]


def test_text_is_padded_and_its_loss_counts_every_token_once():
    """Inputs begin with the boundary token, targets end with it; the loss is the mean over tokens."""
    inputs, targets = text.collate([b"ab", b""])
    assert [[256, 97, 98], [256, 256, 256]] == inputs.tolist()
    assert [[97, 98, 256], [256, -100, -100]] == targets.tolist()

    module = text.ByteLanguageModel()
    loss, weight = module.mean_loss((inputs, targets))
    terms = [torch.nn.functional.cross_entropy(module(x[None])[0], y) for x, y in ((inputs[0], targets[0]),)]
    last = torch.nn.functional.cross_entropy(module(inputs[1:, :1])[0], targets[1, :1])
    assert 4 == weight.item()
    torch.testing.assert_close(loss, (3 * terms[0] + last) / 4)


@pytest.mark.parametrize("example", [digits, text], ids=["digits", "text"])
def test_an_empty_chunk_has_loss_zero_and_zero_gradients(example, monkeypatch):
    """A rank without samples has loss 0, weight 0 and gradients of 0, not NaN."""
    module = example.TASK.model()
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    output = module.training_step(example.collate([]), 0)
    loss = output["loss"] if isinstance(output, dict) else output
    loss.backward()

    assert 0.0 == loss.item()
    assert isinstance(output, torch.Tensor) or 0 == output["weight"]
    assert all(torch.equal(torch.zeros_like(p), p.grad) for p in module.parameters())


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
    data = text.DocstringData(num_train=41, max_bytes=24, global_batch_size=16)
    options = {"max_epochs": 1, "use_distributed_sampler": False, "accumulate_grad_batches": micro_batches}
    trainer = make_trainer(make_strategy(strategy_name), callbacks=[curve, *callbacks], **options)
    trainer.fit(Still(text.ByteLanguageModel(width=8)), data)
    return curve.values


def test_the_loss_curve_is_that_of_the_global_batches(world):
    """On 3 ranks with 2 micro-batches, the curve has the token mean of each global batch, as on one with any order."""
    torch.manual_seed(0)
    module = text.ByteLanguageModel(width=8)
    data = text.DocstringData(num_train=41, max_bytes=24, global_batch_size=16)
    data.setup("fit")
    batches = sampled(41, 16, seed=0)
    expected = [module.mean_loss(text.collate([data.samples[i] for i in batch]))[0].item() for batch in batches]

    [backwards] = world(1).run(fit_still, "auto", 1, [ReversedSamples()])
    curves = world(3).run(fit_still, "gradavg", 2)
    assert 3 == len(expected)
    assert all(expected == pytest.approx(curve.tolist(), rel=1e-6) for curve in (*curves, backwards))


def result(losses, **weights):
    return TaskResult(torch.tensor(losses), {name: torch.tensor(w) for name, w in weights.items()}, 0.5, 1.0)


def test_relative_differences_by_hand():
    """Weights: the largest ratio of norms over the parameters; losses: the largest of any step; both in float64."""
    reference = result([2.0, 4.0, -1.0], a=[3.0, 4.0], b=[1.0])
    assert Comparison(0.1, 0.5) == compare(reference, result([2.0, 3.0, -1.5], a=[3.0, 4.5], b=[1.0]))
    assert Comparison(0.0, 0.0) == compare(reference, reference)
    assert Comparison(2**-23, 0.0) == compare(result([1.0], a=[1.0]), result([1.0], a=[1 + 2**-23]))
    assert Comparison(1e-5, 1e-5).within_tolerance
    assert not any(Comparison(*pair).within_tolerance for pair in ((1.1e-5, 0.0), (0.0, 1.1e-5), (math.nan, 0.0)))
    assert math.isnan(compare(reference, result([2.0, 4.0, -1.0], a=[3.0, 4.0], b=[math.nan])).weights)
    assert math.isnan(compare(reference, result([math.nan, 4.0, -1.0], a=[3.0, 4.0], b=[1.0])).losses)


@pytest.mark.parametrize(("difference", "status"), [(2e-6, 0), (1e-4, 1), (math.nan, 1)])
def test_the_exit_status_says_whether_gradavg_matches(difference, status, monkeypatch, tmp_path, capsys):
    """The demo fails if GradAvg differs by more than 1e-5, whatever stock DDP does; the table has every run."""
    factors = {"auto": 1.0, "ddp": 1.5, "gradavg": 1.0 + difference}

    def made_up(configuration, *_, **__):
        ones = torch.ones(12, dtype=torch.float64) * factors[configuration.strategy]
        return dict.fromkeys(("digits", "text"), TaskResult(2 * ones, {"a": ones}, 0.75, 3.0))

    monkeypatch.setattr(runs, "run", made_up)
    monkeypatch.setenv("COLUMNS", "80")
    assert status == runs.main(["--worlds", "2", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    failure = "Differs from one process by more than 1e-05: GradAvg, 2 processes, digits; GradAvg, 2 processes, text"
    assert bool(status) == (failure in " ".join(printed.split()))
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "…" not in printed
    assert 2 == rows.count("one process - - 2.00 to 2.00 0.7500 3.0 s")
    assert 2 == rows.count("one process, reversed 0.0e+00 0.0e+00 2.00 to 2.00 0.7500 3.0 s")
    assert 2 == rows.count("stock DDP, 2 processes 5.0e-01 5.0e-01 3.00 to 3.00 0.7500 3.0 s")
    assert 2 == sum(row.startswith("GradAvg, 2 processes ") for row in rows)
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 0.5 == written["stock DDP, 2 processes"]["text"]["difference_of_weights"]


def test_training_on_one_process_is_real():
    """A quick run of the digits learns, and its loss curve has one point per global batch."""
    curve = LossCurve()
    _, accuracy = train(tasks(quick=True)[0], "auto", 1, [curve])
    assert 23 == len(curve.values)
    assert curve.values[-5:].mean() < 0.7 * curve.values[0]
    assert accuracy > 0.6


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
    assert 0 == runs.main(["--quick", "--worlds", "4", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 4 == len(results)
    assert all(results["stock DDP, 4 processes"][task]["difference_of_weights"] > 1e-3 for task in ("digits", "text"))
