"""Weights in real Trainers: of samples and tokens, with numbers by hand, and what is said where they are not given."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from ranks import make_trainer
from torch import nn
from toys import WEIGHTED, Recorded, Seen, Toy, approx, flat, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

BATCHES = [[[1.0, 2.0], [3.0]], [[4.0], [5.0]]]


def test_uneven_batches(world):
    """Case 2: ranks with 3 and 1 samples; the mean over samples is 7.5, also after 20 steps."""
    seen = same_everywhere(world(2).run(train, [[[1, 2, 3]] * 20, [[4]] * 20], {"kind": "s"}, WEIGHTED))
    assert (approx(7.5), approx(0.21029776386659413)) == (seen.gradients[0].item(), seen.weights[19].item())


def train_and_hear(*args: Any, **options: Any) -> tuple[Seen, list[str]]:
    """Body: return also what this rank is told of the samples n, and warned of weights."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a handler of one line
    rank_zero_module.log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = train(*args, **options)
    finally:
        rank_zero_module.log.removeHandler(handler)
    told = [line.removeprefix("GradAvgStrategy: ") for line in lines if line.startswith("GradAvgStrategy: n")]
    warned = [str(one.message) for one in caught if "weight" in str(one.message)]
    return seen, [line.partition(".")[0] for line in told + warned]


class Embedded(Recorded):
    """Logits of an embedding, cross-entropy over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        return {"loss": nn.functional.cross_entropy(self.net(tokens), labels), "weight": (labels != -100).sum()}


def test_all_labels_of_a_rank_ignored(world):
    """The rank with only ignored labels changes nothing in the other's mean gradient, and is warned once."""
    tokens, labels, model = torch.arange(6), torch.arange(1, 7), Embedded()
    batches = [[(tokens, labels)] * 3, [(tokens, torch.full_like(labels, -100))] * 3]
    loss = nn.functional.cross_entropy(model.net(tokens), labels)
    expected = flat(torch.autograd.grad(loss, list(model.parameters())))
    for rank, (seen, said) in enumerate(world(2).run(train_and_hear, batches, None, WEIGHTED, module=Embedded)):
        warned = ["rank 1 has a micro-batch of weight 0, which contributes nothing to the gradient"]
        assert warned * rank == said
        torch.testing.assert_close(seen.gradients[-1], expected, rtol=1e-6, atol=1e-6)


class Returns(Toy):
    """Returns what it is told to beside the loss."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__()
        self.result = result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = {name: value(batch) if callable(value) else value for name, value in self.result.items()}
        return {"loss": self.losses(batch).mean(), **given}


def targets_that_count(batch: Any) -> Any:
    return (batch != -100).sum()


TARGETS = [[torch.tensor([1, 2]), torch.tensor([3, -100]), torch.tensor([-100, 4])]] * 2
SAMPLES = "n = samples of the batch, as no weight is given"
IGNORED = (
    "integer tensors of a batch hold -100, the targets that torch's losses ignore, and no weight is given: the loss is"
    " then weighted by its samples, including the ignored ones"
)


@pytest.mark.parametrize(
    ("result", "strategy", "batches", "said"),
    [
        ({}, WEIGHTED, BATCHES, [SAMPLES]),
        ({"weight": None}, WEIGHTED, BATCHES, [SAMPLES]),
        ({"height": 4, "length": 3, "weights_of": 1}, WEIGHTED, BATCHES, [SAMPLES]),
        ({"weight": 3}, WEIGHTED, BATCHES, []),
        ({"weights": 3}, {}, BATCHES, []),
        ({"weights": 3}, {"reduction": "sum"}, BATCHES, []),
        ({}, WEIGHTED, TARGETS, [SAMPLES, IGNORED]),
        ({}, {"split_batches": True}, TARGETS, [SAMPLES, IGNORED]),
        ({"weight": targets_that_count}, WEIGHTED, TARGETS, []),
        ({}, {}, TARGETS, []),
    ],
)
def test_what_stands_in_for_a_weight_is_said_once_by_rank_0(world, result, strategy, batches, said):
    of_ranks = world(2).run(train_and_hear, batches, {"result": result}, strategy, module=Returns)
    assert [said, []] == [heard for _, heard in of_ranks]


class Iterates(Toy):
    """Takes its batches itself."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]  # Lightning's other form
        batch, *_ = next(dataloader_iter)
        loss = self.losses(batch).mean()
        return {"loss": loss, "weight": len(batch)} if self.weighted else loss


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
def test_a_step_that_reads_its_batches_needs_a_weight(world):
    for raised in world(2).run_expecting_errors(train, BATCHES, {"weighted": False}, WEIGHTED, module=Iterates):
        assert 'return {"loss": loss, "weight": n} from training_step' in raised.message
    seen = same_everywhere(world(2).run(train, BATCHES, {"weighted": True}, WEIGHTED, module=Iterates))
    assert [approx(7 / 3), 4.0] == [gradient.item() for gradient in seen.gradients]


def resume_from_stock(path: str) -> tuple[int, int]:
    """Body: continue a checkpoint of stock DDP under a rule; return how many times the steps of the first it has."""
    saving = make_trainer(DDPStrategy(), max_epochs=1, use_distributed_sampler=False)
    saving.fit(Toy(), loader(BATCHES[dist.get_rank()]))
    saving.save_checkpoint(path)
    trainer = make_trainer(GradAvgStrategy(reduction="weighted_mean"), max_epochs=2, use_distributed_sampler=False)
    trainer.fit(Toy(weight=lambda batch, _: len(batch)), loader(BATCHES[dist.get_rank()]), ckpt_path=path)
    return dist.get_rank(), trainer.global_step // saving.global_step


def test_a_checkpoint_of_stock_ddp_goes_on_under_another_rule(world, tmp_path):
    assert [(0, 2), (1, 2)] == world(2).run(resume_from_stock, str(tmp_path / "stock.ckpt"))
