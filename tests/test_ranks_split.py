"""split_batches inside real Trainers: every global batch is that of one process, whatever the world and the pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel import single
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from noted import Act, Order, drawn_numbers, fit, join_ranks
from ranks import grid, make_trainer
from torch import Tensor
from toys import Toy, approx, make_loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy


@pytest.mark.parametrize(
    ("world_size", "sizes", "limit", "reduction"),
    [
        (4, (24, 12), None, "mean"),
        (4, (5, 5), None, "weighted_mean"),
        (4, (6, 3), None, "weighted_mean"),
        (3, (24, 12), 1, "weighted_mean"),
        (2, (1, 1), 2, "mean"),
    ],
)
def test_gradient_of_a_global_batch(world, world_size, sizes, limit, reduction):
    """Cases 23 and 27: batches of 12 are 2 steps, and 5 samples over 4 ranks are 2, 1, 1, 1: the mean over all."""
    size, batch = sizes
    batches = [[float(x) for x in range(1 + start, 1 + min(start + batch, size))] for start in range(0, size, batch)]
    strategy = {"split_batches": True, "reduction": reduction, "max_device_batch_size": limit}
    seen = same_everywhere(world(world_size).run(train, [batches] * world_size, {"kind": "s", "lr": 0.001}, strategy))
    w = 1.0
    for gradient, xs in zip(seen.gradients, batches, strict=True):
        expected = sum(w * x * x for x in xs) / len(xs)
        assert approx(expected) == gradient.item()
        w -= 0.001 * expected


class AsksForSteps(Callback):
    """Asks for the number of steps before the sanity check, as a warm-up does in `configure_optimizers`."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.estimated_stepping_batches == 10


SHUFFLED = [Order("shuffle")]
SCHEDULE = [GradientAccumulationScheduler({0: 1, 1: 2})]
TWO = [Order("list", 16), Order("list", 80)]
OPTIONS: dict[str, tuple[list[Order], dict[str, Any], int]] = {
    # What is read, in batches of 4; options of the Trainer; and the number of steps.
    "fraction": (SHUFFLED, {"limit_train_batches": 0.7, "max_epochs": 1}, 3),
    "overfit": ([Order("sequential")], {"overfit_batches": 2, "max_epochs": 2}, 4),
    "validation in mid-epoch": (SHUFFLED, {"val_check_interval": 0.5, "max_epochs": 1}, 5),
    "window of 2": (SHUFFLED, {"accumulate_grad_batches": 2, "max_epochs": 1}, 3),
    "scheduled window": (SHUFFLED, {"max_epochs": 2, "callbacks": SCHEDULE}, 8),
    "steps": (SHUFFLED, {"max_epochs": 5, "max_steps": 7}, 7),
    "reloaded": (SHUFFLED, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2, "val_check_interval": 0.5}, 10),
    "epochs of a sampler": ([Order("epochs")], {"max_epochs": 2}, 10),
    "workers": ([Order("persistent workers")], {"max_epochs": 2}, 10),
    "a sanity check": (SHUFFLED, {"max_epochs": 2, "num_sanity_val_steps": 1}, 10),
    "a sanity check after the loaders are set up": (
        SHUFFLED,
        {"max_epochs": 2, "num_sanity_val_steps": 1, "callbacks": [AsksForSteps()]},
        10,
    ),
    "two loaders": ([Order("shuffle"), Order("generator")], {"max_epochs": 1}, 5),
    "half of each of two loaders": (TWO, {"limit_train_batches": 0.5, "max_epochs": 1}, 10),
}


@pytest.mark.parametrize(("name", "limit"), grid(list(OPTIONS), [None, 1], strength=1))
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_trainer_options_count_loader_batches(world, name, limit):
    """What counts batches in stock Lightning means loader batches, on 3 ranks and in pieces of one sample, too.

    Hooks and validation draw in our runs, and not in the stock run: they don't move the order.
    """
    read, options, steps = OPTIONS[name]
    (stock,) = world(1).run(fit, read, None, draws=False, **options)
    (alone,) = world(1).run(fit, read, {}, **options)
    ranks = world(3).run(fit, read, {"max_device_batch_size": limit}, **options)
    assert steps == len(stock.steps)
    if name != "reloaded":  # Lightning makes an iterator there and drops it, for which stock draws a seed of workers
        assert join_ranks([stock]) == join_ranks([alone])
    assert join_ranks([alone]) == join_ranks(ranks)
    assert drawn_numbers(alone) == drawn_numbers(ranks[0])
    for noted in ranks:
        assert (stock.validated, stock.set_up) == (noted.validated, noted.set_up)


@pytest.mark.parametrize(
    ("mode", "kind", "sizes", "limit"),
    grid(["min_size", "max_size", "max_size_cycle"], ["list", "unsized"], [(7, 22), (22, 7), (13,)], [1.0, 1]),
)
def test_several_loaders_are_read_as_in_stock_lightning(world, mode, kind, sizes, limit):
    """Fetched ahead or not, cycled, exhausted, left early, looked at between: every batch meets its own samples."""
    read = [Order(kind, size) for size in sizes]
    looks = [Act("look", "batch start", 0, 1)]
    options: dict[str, Any] = {"mode": mode, "max_epochs": 2, "limit_train_batches": limit}
    (stock,) = world(1).run(fit, read, None, draws=False, **options)
    ranks = world(2).run(fit, read, {}, looks, **options)
    assert join_ranks([stock]) == join_ranks(ranks)
    assert approx(stock.weight) == ranks[0].weight


class Merged(Toy):
    """Trains on the samples of two loaders as one batch, and logs the mean of their numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log the mean."""
        self.log("mean", batch.mean())
        return super().training_step(batch, batch_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Tensor:
        """Return the samples of both."""
        return torch.cat(list(batch))


def train_merged(strategy: dict[str, Any] | None) -> tuple[float, float]:
    """Body: train three steps on 8 samples of one loader and 5 of another; return the weight, and the last mean."""
    trainer = make_trainer(GradAvgStrategy(**strategy) if strategy is not None else "auto", max_epochs=1)
    loaders = [
        make_loader([[float(8 * step + sample) for sample in range(8)] for step in range(3)]),
        make_loader([[-float(5 * step + sample) for sample in range(5)] for step in range(3)]),
    ]
    module = Merged(lr=0.001)
    trainer.fit(module, loaders)
    return module.w.item(), trainer.callback_metrics["mean"].item()


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (3, {"split_batches": True, "reduction": "weighted_mean"}),
        (3, single()),
        (2, {"num_replicas": 2, "reproducible": True}),
    ],
)
def test_samples_of_several_loaders_that_a_hook_merges_weigh_together(world, world_size, strategy):
    """3 ranks have 3 + 2, 3 + 2 and 2 + 1 samples. No loader's batch counts the 13 of each step, also not later."""
    ((weight, mean),) = world(1).run(train_merged, None)
    of_ranks = world(world_size).run(train_merged, strategy)
    assert [approx(weight)] * world_size == [weight_of_rank for weight_of_rank, _ in of_ranks]
    if "reduction" not in strategy:  # under the presets, what is logged is that of the whole batch
        assert [approx(mean)] * world_size == [mean_of_rank for _, mean_of_rank in of_ranks]


@pytest.mark.parametrize("hook", ["start", "batch start", "batch"])
def test_a_user_may_replace_the_callbacks_of_the_trainer(world, hook):
    """The strategy's own is among them while it trains, and learns of the short last batch."""
    acts = [Act("replace callbacks", hook, 0, 1)]
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    read = [Order("shuffle", 18)]
    (stock,) = world(1).run(fit, read, None, acts, draws=False, **options)
    (alone,) = world(1).run(fit, read, {"num_replicas": 4}, acts, **options)
    ranks = world(2).run(fit, read, {"num_replicas": 4}, acts, **options)
    assert join_ranks([stock]) == join_ranks([alone]) == join_ranks(ranks)
    assert drawn_numbers(alone) == drawn_numbers(ranks[0])


def changed(batch: Any, device: Any, index: int) -> Any:
    return batch[1:]


REPLICAS = {"num_replicas": 4}
UNEQUAL = [Order("list", 8, 8), Order("list", 5, 5)]
UNWEIGHED = "the number of samples cannot be read from a batch of type list"
REFUSED: list[tuple[list[Order], dict[str, Any], dict[str, Any], str]] = [
    # What is read, options of the strategy, of the run, and what the errors of all 3 ranks say; one has no samples.
    (UNEQUAL, REPLICAS, {}, "now 8 samples in 2 + 1 + 1 pieces and 5 samples in 2 + 1 + 0 pieces on the ranks"),
    ([Order("list", 8, 8)], REPLICAS, {"transfer_batch_to_device": changed}, "rows for 2 samples of the dataset"),
    # 3, 3 and 2 samples of one beside 2, 2 and 1 of the other: no loader's samples weigh a loss over both.
    (UNEQUAL, {}, {"weighs": False}, UNWEIGHED),
    (UNEQUAL, {"max_device_batch_size": 4}, {"weighs": False}, UNWEIGHED),
]


@pytest.mark.parametrize(("read", "strategy", "options", "message"), REFUSED)
def test_what_cannot_be_cut_is_an_error_on_all_ranks(world, read, strategy, options, message):
    raised = world(3).run_expecting_errors(fit, read, strategy, **options)
    assert {"ValueError", "RuntimeError"} >= {one.type_name for one in raised}
    assert all(message in one.message for one in raised)
