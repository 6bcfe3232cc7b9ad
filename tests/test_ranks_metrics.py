"""Metrics of torchmetrics under exact evaluation: the values of one process, wherever a metric is held.

Samples come in batches of two. Of 9 samples, 2 ranks have 3 and 2 batches, and 3 ranks have 2, 2 and 1; of one sample,
rank 0 has a batch, and of 3 or 4, ranks 0 and 1. All metrics are updated in one pass over one loader, and in another
over three.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from ranks import make_trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, aggregation, retrieval, text, wrappers
from torchmetrics import classification as classified
from torchmetrics import regression as regressed
from torchmetrics.detection.mean_ap import MeanAveragePrecision
from torchmetrics.image import PeakSignalNoiseRatio
from toys import approx

from lightning_gradavg import GradAvgStrategy

# Advice of torchmetrics and Lightning, which is not what is tested.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "Metric `.*` will save all",
        "The variance of predictions or target is close to zero",
        "You called `self.log.*no logger configured",
        "The 'val_dataloader' does not have many workers",
        ".*was called before the ``update`` method",  # copies of a bootstrapped metric that drew no sample
    )
]

SAMPLES = 9


class Batch(NamedTuple):
    """Predictions and targets of every kind."""

    chance: Tensor  # of class 1
    label: Tensor  # 0 or 1
    scores: Tensor  # of three classes
    category: Tensor  # 0, 1 or 2
    query: Tensor  # of retrieval
    pair: Tensor  # two numbers


def samples(size: int) -> list[Batch]:
    """Return as many of the 9 samples."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(SAMPLES, generator=generator)
    scores = torch.rand(SAMPLES, 3, generator=generator).softmax(1)
    label = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0])
    numbers = torch.arange(SAMPLES)
    pair = torch.rand(SAMPLES, 2, generator=generator)
    rows = zip(chance, label, scores, numbers % 3, numbers // 3, pair, strict=True)
    return [Batch(*row) for row in rows][:size]


class Masks(MeanAveragePrecision):
    """The states and the exchange of a detection metric of masks, which are tuples; its sum needs no pycocotools."""

    detection_mask: list[Any]
    groundtruth_mask: list[Any]

    def __init__(self) -> None:
        Metric.__init__(self)
        self.iou_type = ("segm",)
        self.add_state("detection_mask", default=[], dist_reduce_fx=None)
        self.add_state("groundtruth_mask", default=[], dist_reduce_fx=None)

    def update(self, chance: Any, label: Any) -> None:
        self.detection_mask += [((2, 2), str(float(value)).encode()) for value in chance]
        self.groundtruth_mask += [((2, 2), str(int(value)).encode()) for value in label]

    def compute(self) -> Any:
        total = 0.0
        for (_, detected), (_, truth) in zip(self.detection_mask, self.groundtruth_mask, strict=True):
            total += float(detected) * (1 + int(truth))
        return torch.tensor(total)


class Own(Metric):
    """States that torchmetrics reduces wrongly: a tensor that is concatenated, and the mean of the updates."""

    full_state_update = False
    row: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("row", default=torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("mean", default=torch.zeros(()), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.row = torch.cat([self.row, values])
        self.mean = self.mean + (values.mean() - self.mean) / self.update_count

    def compute(self) -> Tensor:
        return torch.stack([self.row.square().sum(), self.row.numel() * self.mean])


class Half(Metric):
    """A mean in 16 bits, which do not hold its product with the number of updates."""

    full_state_update = False
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", default=torch.zeros((), dtype=torch.half), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.mean = torch.full_like(self.mean, 30_000.0)

    def compute(self) -> Tensor:
        return self.mean.float()


class Case(NamedTuple):
    """A metric, and the arguments of its update."""

    make: Callable[[], Any]
    arguments: Callable[[Batch], tuple[Any, ...]]


def binary(batch: Batch) -> tuple[Any, ...]:
    return batch.chance, batch.label


def classes(batch: Batch) -> tuple[Any, ...]:
    return batch.scores, batch.category


def numbers(batch: Batch) -> tuple[Any, ...]:
    return batch.pair[:, 0].contiguous(), batch.pair[:, 1].contiguous()


def pairs(batch: Batch) -> tuple[Any, ...]:
    return batch.pair, batch.pair.square()


def queries(batch: Batch) -> tuple[Any, ...]:
    return batch.chance, batch.label, batch.query


def values(batch: Batch) -> tuple[Any, ...]:
    return (batch.chance,)


def words(batch: Batch) -> tuple[Any, ...]:
    return [f"a b {name} d" for name in batch.label.tolist()], [["a b 1 d"] for _ in batch.label]


CASES: dict[str, Case] = {
    "binary accuracy": Case(classified.BinaryAccuracy, binary),
    "accuracy by class": Case(lambda: classified.MulticlassAccuracy(3, average="macro"), classes),
    "F1": Case(lambda: classified.MulticlassF1Score(3), classes),
    "AUROC": Case(classified.BinaryAUROC, binary),
    "average precision": Case(classified.BinaryAveragePrecision, binary),
    "calibration": Case(lambda: classified.BinaryCalibrationError(5), binary),
    "confusion": Case(lambda: classified.MulticlassConfusionMatrix(3), classes),
    "kappa": Case(lambda: classified.MulticlassCohenKappa(3), classes),
    "squared error": Case(regressed.MeanSquaredError, numbers),
    "absolute error": Case(regressed.MeanAbsoluteError, numbers),
    "R2": Case(regressed.R2Score, numbers),
    "Pearson": Case(regressed.PearsonCorrCoef, numbers),
    "concordance": Case(regressed.ConcordanceCorrCoef, numbers),
    "Spearman": Case(regressed.SpearmanCorrCoef, numbers),
    "explained variance": Case(regressed.ExplainedVariance, numbers),
    # Its states get a value per output in the first update.
    "explained variance of two": Case(lambda: regressed.ExplainedVariance(multioutput="raw_values"), pairs),
    "MAP": Case(retrieval.RetrievalMAP, queries),
    "MRR": Case(retrieval.RetrievalMRR, queries),
    "mean": Case(MeanMetric, values),
    "sum": Case(aggregation.SumMetric, values),
    "largest": Case(aggregation.MaxMetric, values),
    "smallest": Case(aggregation.MinMetric, values),
    "BLEU": Case(text.BLEUScore, words),
    "perplexity": Case(text.Perplexity, lambda batch: (batch.scores[:, None], batch.category[:, None])),
    "signal to noise": Case(lambda: PeakSignalNoiseRatio(data_range=1.0), pairs),
    "masks": Case(Masks, binary),
    "own states": Case(Own, values),
    "a mean in 16 bits": Case(Half, values),
    "a collection": Case(
        lambda: MetricCollection([classified.MulticlassPrecision(3), classified.MulticlassRecall(3)]), classes
    ),
    "a composition": Case(lambda: MeanMetric() + aggregation.MaxMetric(), values),
    "extremes": Case(lambda: wrappers.MinMaxMetric(MeanMetric()), values),
    "bootstrapped": Case(lambda: wrappers.BootStrapper(MeanMetric(), num_bootstraps=4), values),
    "by class": Case(lambda: wrappers.ClasswiseWrapper(classified.MulticlassAccuracy(3, average=None)), classes),
    "of several outputs": Case(lambda: wrappers.MultioutputWrapper(regressed.MeanSquaredError(), 2), pairs),
}


def shape_follows_the_first_batch() -> bool:
    """Return whether the means of Pearson's coefficient are rows after one sample, and numbers after several.

    So they are before torchmetrics 1.7.4. Ranks whose first batches differ in size then raise: states of two shapes
    cannot be stacked.
    """
    metric = regressed.PearsonCorrCoef()
    metric.update(torch.zeros(2), torch.ones(2))
    return bool(metric.mean_x.ndim == 0)


if shape_follows_the_first_batch():
    del CASES["Pearson"], CASES["concordance"]
HELD = ["attribute", "dict", "callback", "hook"]


def metrics() -> dict[str, Any]:
    return {name: case.make() for name, case in CASES.items()}


def update(held: dict[str, Any], batch: Batch) -> None:
    for name, metric in held.items():
        metric.update(*CASES[name].arguments(batch))


def computed(held: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    for name, metric in held.items():
        leaves = [torch.as_tensor(leaf).flatten().tolist() for leaf in tree_leaves(metric.compute())]
        yield name, [value for leaf in leaves for value in leaf]


class Holder(Callback):
    """Holds metrics, and keeps what all ways to hold them come to."""

    def __init__(self) -> None:
        self.held = metrics()
        self.values: dict[str, dict[str, list[float]]] = {}

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Batch, *args: Any, **kwargs: Any
    ) -> None:
        update(self.held, batch)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.values["callback"] = dict(computed(self.held))


class Net(LightningModule):
    """Updates metrics that it holds as an attribute, in a dict that Lightning does not see, and made in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.attribute = torch.nn.ModuleDict(metrics())
        self.mean = MeanMetric()
        self.unseen = {"dict": metrics()}
        self.values: dict[str, dict[str, list[float]]] = {}

    def on_validation_epoch_start(self) -> None:
        self.unseen["hook"] = metrics()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        update(dict(self.attribute), batch)
        update(self.unseen["dict"], batch)
        update(self.unseen["hook"], batch)
        self.mean.update(batch.chance)
        self.log("mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.values["attribute"] = dict(computed(dict(self.attribute)))
        for way, held in self.unseen.items():
            self.values[way] = dict(computed(held))


def validate(sizes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, float]]:
    """Body: validate once; return what the metrics came to, by the way they were held, and what was logged."""
    seed_everything(5, verbose=False)
    holder = Holder()
    module = Net()
    trainer = make_trainer(GradAvgStrategy(exact_evaluation=True), callbacks=[holder])
    trainer.validate(module, [DataLoader(samples(size), batch_size=2) for size in sizes], verbose=False)
    return module.values | holder.values, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("sizes", [(9,), (9, 1, 3), (4,)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_metrics_have_the_values_of_one_process_wherever_they_are_held(
    world: Any, world_size: int, sizes: tuple[int, ...]
) -> None:
    ((expected, logged),) = world(1).run(validate, sizes)
    assert set(HELD) == expected.keys()
    # As in Lightning, a metric goes on from loader to loader.
    seen: list[float] = []
    by_hand: list[float] = []
    for size in sizes:
        seen += [float(sample.chance) for sample in samples(size)]
        by_hand.append(fmean(seen))
    assert approx(by_hand, 1e-6) == list(logged.values())
    ranks = world(world_size).run(validate, sizes)
    for found, found_logged in ranks:
        for way in HELD:
            for name in CASES:
                assert approx(expected[way][name], 1e-5) == found[way][name], (way, name)
        assert approx(logged, 1e-6) == found_logged
    assert [ranks[0]] * world_size == ranks


def scenes(size: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return predicted and true objects of as many images, as masks: 0 to 2 of each, which overlap in part."""
    generator = torch.Generator().manual_seed(5)
    images = []
    for number in range(size):
        objects = number % 3
        corners = torch.randint(0, 8, (objects, 2), generator=generator)
        moved = corners + torch.randint(0, 3, (objects, 2), generator=generator)
        scores = torch.rand(objects, generator=generator)
        labels = torch.arange(objects)
        predicted = {"masks": squares(moved), "scores": scores, "labels": labels}
        images.append((predicted, {"masks": squares(corners), "labels": labels}))
    return images


def squares(corners: Tensor) -> Tensor:
    """Return a mask of 16 x 16 for each corner of a square of 8 x 8."""
    masks = torch.zeros(len(corners), 16, 16, dtype=torch.bool)
    for mask, (row, column) in zip(masks, corners.tolist(), strict=True):
        mask[row : row + 8, column : column + 8] = True
    return masks


class Segments(LightningModule):
    """Scores masks over all loaders, by a metric that it holds as an attribute, and by one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = MeanAveragePrecision(iou_type="segm")
        self.others = [MeanAveragePrecision(iou_type="segm", class_metrics=True)]
        self.found: list[dict[str, float]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        predicted, true = zip(*batch, strict=True)
        for metric in (self.precision, *self.others):
            metric.update(list(predicted), list(true))

    def on_validation_epoch_end(self) -> None:
        for metric in (self.precision, *self.others):
            numbers: dict[str, float] = {}
            for name, value in metric.compute().items():
                for index, number in enumerate(value.flatten().tolist()):
                    numbers[f"{name} {index}"] = number
            self.found.append(numbers)


def segment(sizes: tuple[int, ...], strategy: dict[str, Any] | None) -> list[dict[str, float]]:
    """Body: validate on masks; return what the metrics came to."""
    # The metric imports a function of torchvision that converts boxes, and calls it for boxes alone.
    boxes: Any = ModuleType("torchvision.ops")
    boxes.box_convert = None
    strategy_of_run: Any = "auto" if strategy is None else GradAvgStrategy(**strategy)
    loaders = [DataLoader[Any](scenes(size), batch_size=2, collate_fn=list) for size in sizes]
    with (
        mock.patch.dict(sys.modules, {"torchvision": boxes, "torchvision.ops": boxes}),
        mock.patch("torchmetrics.detection.mean_ap._TORCHVISION_AVAILABLE", new=True),
    ):
        module = Segments()
        make_trainer(strategy_of_run).validate(module, loaders, verbose=False)
    return module.found


@pytest.mark.skipif(find_spec("pycocotools") is None, reason="pycocotools is not installed, as `make test-all` does")
@pytest.mark.parametrize("sizes", [(9,), (9, 1)])
def test_masks_are_scored_as_in_one_process(world: Any, sizes: tuple[int, ...]) -> None:
    """Of 5 batches; of 1 image in the second loader, which one rank has."""
    ((first, second),) = world(1).run(segment, sizes, None)
    assert 0 < first["map 0"] < 1
    for world_size in (2, 3):
        for found in world(world_size).run(segment, sizes, {"exact_evaluation": True}):
            assert [approx(first, 1e-6), approx(second, 1e-6)] == found
