"""A rank without samples leaves no trace in what is logged, whatever it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, SumMetric
from toys import AWARE, Toy

from lightning_gradavg import GradAvgStrategy

pytestmark = [*AWARE, pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")]


class Logging(Toy):
    """Logs samples in every way; a stand-in's are NaN if so asked."""

    def __init__(self, *, nan: bool) -> None:
        super().__init__(lr=0.0)
        self.nan = nan
        self.metrics = nn.ModuleDict({"sum": SumMetric(), "mean": MeanMetric(), "max": MaxMetric()})
        self.register_buffer("sums", torch.zeros((), dtype=torch.float64))
        self.steps: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        chunk = strategy._batches.chunk
        spoilt = self.nan and chunk is not None and chunk.stand_in
        batch = batch * float("nan") if spoilt else batch
        self.sums += batch.sum()
        for name, metric in self.metrics.items():
            metric.update(torch.tensor(9.0) if spoilt else batch)
            self.log(f"metric {name}", metric, on_step=False, on_epoch=True)
        value = batch.mean()
        for reduction in ("mean", "sum", "max", "min"):
            self.log(reduction, value, reduce_fx=reduction, on_step=False, on_epoch=True, sync_dist=True)
            self.log(f"own {reduction}", value, reduce_fx=reduction, on_step=False, on_epoch=True)
        self.log("step", value, on_step=True, on_epoch=False, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(self.trainer.fit_loop.epoch_loop._results["training_step.step"].value.item())


def fit(split: bool, nan: bool) -> Any:
    """Body: 3 samples, of which rank 1 has one or, split in batches of 2, none of the last batch."""
    module = Logging(nan=nan)
    samples: Any = [1.0, 1.5, 2.75] if split else [[1.0, 2.75], [1.5]][dist.get_rank()]
    loader: Any = DataLoader(torch.tensor(samples, dtype=torch.float64), batch_size=2 if split else 1)
    reduction: Any = {} if split else {"reduction": "weighted_mean"}
    trainer = make_trainer(
        GradAvgStrategy(split_batches=split, **reduction), max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, loader)
    assert module.w.grad is None or module.w.grad.isfinite()
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, module.steps, module.sums.item()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("nan", [True, False])
def test_a_stand_in_leaves_no_trace(world, split, nan):
    """Samples 1, 1.5 and 2.75 on 2 ranks: their sum is 5.25, their mean 1.75; the second step has one of them only."""
    for rank, (logged, steps, sums) in enumerate(world(2).run(fit, split, nan)):
        assert (5.25, 1.75, 2.75) == tuple(pytest.approx(logged[f"metric {name}"]) for name in ("sum", "mean", "max"))
        assert (1.75, 5.25, 2.75, 1.0) == tuple(pytest.approx(logged[name]) for name in ("mean", "sum", "max", "min"))
        assert [1.25, 2.75] == pytest.approx(steps)
        assert {0: 3.75, 1: 1.5}[rank] == sums, "a buffer that sums samples"
        own = {0: (1.875, 3.75, 2.75, 1.0), 1: (1.5, 1.5, 1.5, 1.5)}[rank]
        assert own == tuple(pytest.approx(logged[f"own {name}"]) for name in ("mean", "sum", "max", "min"))
