"""One process that trains freely on the samples that the ranks took, and where its record differs from that of a run.

A global batch is what the user's own `collate_fn` makes of the samples of all ranks. Nothing but the samples comes from
the run: up to the first difference both have the same state, so what differs first is the culprit. What one process
makes of some of the samples is found by training anew up to a step that has only those.
"""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from numbers import Number
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gradavg._lightning.loaders import LoaderWrapper
from lightning_gradavg._support.tree import leaves
from lightning_gradavg.verify.record import (
    Facts,
    MicroBatch,
    Record,
    Recorder,
    Refused,
    Replica,
    Tensors,
    loss_and_weight,
)
from lightning_gradavg.verify.report import Difference
from lightning_gradavg.verify.rounding import Perturbation, plugin_of
from lightning_gradavg.verify.shards import on_mesh_of_one
from lightning_gradavg.verify.trace import Followed

__all__ = [
    "Build",
    "Built",
    "Group",
    "RankBatch",
    "Seen",
    "StepResult",
    "Twin",
    "compare_records",
    "compare_tensors",
    "filled",
    "flat",
    "gap_between",
    "multiple_of",
]


class Built(NamedTuple):
    """What a run of the Trainer is made of, new for each run."""

    module: LightningModule
    data: Mapping[str, Any]  # the argument of `Trainer.fit` that has the data; empty if the module has them
    options: Mapping[str, Any]  # of the Trainer


Build: TypeAlias = Callable[[], Built]


class RankBatch(NamedTuple):
    """A micro-batch that a rank took."""

    window_index: int  # its position in the window of its rank
    rank: int
    micro_batch: MicroBatch


Group: TypeAlias = Sequence[RankBatch]
"""Micro-batches that one process takes as one batch."""


class StepResult(NamedTuple):
    """What one process computes of a group."""

    gradient: Tensors
    loss: float
    followed: Sequence[Followed]  # what the ranks noted, held against the step; empty if that was not asked for


_OPTIONS_OF_ONE_DEVICE: Mapping[str, Any] = {
    "devices": 1,
    "sync_batchnorm": False,
    # These count batches of one rank, while the batches of one process come from a record.
    "limit_train_batches": None,
    "overfit_batches": 0.0,
}


class _OneProcess(SingleDeviceStrategy):
    """One device, with what a module may ask of a strategy of several."""

    lr_scale = 1.0

    def __init__(self, device: torch.device, recorder: Recorder, facts: Facts) -> None:
        super().__init__(device)
        self._recorder = recorder
        self._facts = facts  # of the run

    @property
    def global_batch_size(self) -> int:
        return len(self._recorder.sample_keys)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return one loss, as Lightning takes it, normalized as the run's rule does."""
        output = super().training_step(*args, **kwargs)
        training_step_end = getattr(self._recorder.module, "training_step_end", None)
        if training_step_end is not None:
            if self._facts.replicas is not None:
                _require_rows(output)
            output = training_step_end(output)
        loss, weight = loss_and_weight(output)
        if loss is None:
            return output
        if self._facts.rule.name == "normalized_sum":
            if weight is None:
                weight = len(self._recorder.mode.sample_keys)
            loss = loss / weight
        if isinstance(output, Mapping):
            return {**output, "loss": loss}
        return loss

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("weight", None)  # `manual_backward(loss, weight=n)` is for strategies of this package
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: object = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)  # with its gradient, as one device has it


def _require_rows(output: object) -> None:
    """Raise `Refused` if an output of `training_step` is a number, which every replica has one of."""
    for place, leaf in leaves(output, "the output"):
        if isinstance(leaf, Number) or (isinstance(leaf, Tensor) and leaf.ndim == 0):
            raise Refused(
                f"training_step_end gets a number of every replica ({place}), and one process computes one number:"
                " return the values of the samples from training_step"
            )


def _all_gather(tensor_list: list[Tensor], tensor: Tensor, *_: object, **__: object) -> None:
    """Gather in a world of one, with the gradient, so that what a detached gather lacks on several ranks is seen."""
    tensor_list[0].copy_(tensor)


def _all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: object, **__: object) -> None:
    output_tensor.copy_(input_tensor.reshape(output_tensor.shape))


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Give the user's code a process group of one rank to ask."""
    replaced: dict[str, Any] = {"all_gather": _all_gather}
    for name in ("all_gather_into_tensor", "all_gather_single"):  # the second is the name from torch 2.13 on
        if hasattr(dist, name):
            replaced[name] = _all_gather_into_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.multiple(dist, **replaced):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _batch_norm_of_replicas(recorder: Recorder) -> Iterator[None]:
    """Have batch norm normalize the samples of each replica by themselves, as `nn.DataParallel` does.

    Everything else is computed of the whole batch, also its loss. So what a replica's loss counts for is not taken from
    the run.
    """
    stock_batch_norm = nn.functional.batch_norm

    def batch_norm(
        input: Tensor,  # noqa: A002  # torch's names
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return stock_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        rows_per_sample, rest = divmod(len(input), len(recorder.sample_keys))
        if rest > 0:
            raise Refused(
                f"batch norm gets {len(input)} rows of {len(recorder.sample_keys)} samples, so one process does not"
                " know which rows are those of a replica"
            )
        sizes = [rows_per_sample * replica.samples for replica in recorder.replicas]
        outputs = []
        for replica, rows in zip(recorder.replicas, input.split(sizes), strict=True):
            mean_of_replica = None
            variance_of_replica = None
            if replica.is_first:
                mean_of_replica = running_mean
                variance_of_replica = running_var
            # Not the function that is replaced: under `Trace` it calls itself by its name, which is that of this one.
            output = torch.batch_norm(
                rows,
                weight,
                bias,
                mean_of_replica,
                variance_of_replica,
                training,
                momentum,
                eps,
                torch.backends.cudnn.enabled,
            )
            outputs.append(output)
        return torch.cat(outputs)

    with mock.patch.object(nn.functional, "batch_norm", batch_norm):
        yield


class _Replay:
    """Makes the batches of one process, in place of those of the user's loader.

    Args:
        steps: The groups that one process takes in each step, one after the other.
        epochs: The epoch of each step of the run, which may have more steps than `steps`.
        recorder: What records the run of one process.
        epoch_length: The number of batches in an epoch; infinity if the run's loader has no length.

    Attributes:
        trainer: The Trainer of one process. It is set before training, because it needs the loaders first.
    """

    trainer: Trainer

    def __init__(
        self, steps: Sequence[Sequence[Group]], epochs: Sequence[int], recorder: Recorder, epoch_length: float
    ) -> None:
        self._steps, self._epochs, self._recorder = steps, epochs, recorder
        self.epoch_length = epoch_length

    def batches(self, loader: DataLoader[Any]) -> Iterator[object]:
        """Yield the batches of the Trainer's epoch, which `loader` collates."""
        epoch = self.trainer.current_epoch
        for groups, epoch_of_step in zip(self._steps, self._epochs, strict=False):
            if epoch_of_step != epoch:
                continue
            for group in groups:
                yield self._batch(loader, group)
        # The recorder ended the run within an epoch, when a further batch arrived. It ends this run in the same way.
        last_step = len(self._steps) - 1
        if epoch >= self._epochs[last_step]:
            while True:
                yield self._batch(loader, self._steps[last_step][-1])

    def _batch(self, loader: DataLoader[Any], group: Group) -> object:
        samples, sample_keys, replicas = [], [], []
        for window_index, rank, micro_batch in group:
            samples += [pickle.loads(packed) for packed in micro_batch.packed_samples]
            sample_keys += [(window_index, rank, place) for place in range(micro_batch.size)]
            for number, size in enumerate(micro_batch.sizes_of_pieces):
                replicas.append(Replica(size, is_first=rank == 0 and number == 0))
        batch = loader.collate_fn(samples)
        micro_batch = MicroBatch(size=len(sample_keys), unknown_because="", sample_keys=sample_keys, replicas=replicas)
        self._recorder.loading.note(batch, micro_batch)
        return batch

    def replace_train_dataloader(self, owner: LightningModule | LightningDataModule) -> None:
        """Have a module or data module return a stand-in for its own loader."""
        own_method = owner.train_dataloader

        def train_dataloader() -> _ReplayLoader:
            return _ReplayLoader(own_method(), self)

        vars(owner)["train_dataloader"] = train_dataloader


class _ReplayLoader(LoaderWrapper):
    """Stands for the user's loader, whose attributes it has, and reads what the ranks took."""

    def __init__(self, loader: DataLoader[Any], replay: _Replay) -> None:
        super().__init__(loader, read=loader, shown=loader, shared=False)
        self._replay = replay

    def __iter__(self) -> Iterator[object]:
        return self._replay.batches(self.loader)

    def __len__(self) -> int:
        if not math.isfinite(self._replay.epoch_length):
            raise TypeError("the loader has no length")
        return math.ceil(self._replay.epoch_length)


@dataclass
class Twin:
    """Trains on one process on what the ranks took.

    Every method but `group_of_step` builds the module and the data anew, and trains from the first step on.

    Attributes:
        records: What the ranks recorded, in their order.
        build: Builds what is trained.
        double: Whether to compute in float64.
        device: The type of the device.
        precision: The 16-bit precision to compute in, if any.
    """

    records: Sequence[Record]
    build: Build
    double: bool
    device: str = "cpu"
    precision: str | None = None

    def group_of_step(self, step: int) -> Group:
        """Return what all ranks took in a step, in the order of the window, and there of the ranks."""
        group = []
        for rank, record in enumerate(self.records):
            for window_index, micro_batch in enumerate(record.steps[step].micro_batches):
                if micro_batch.counts:
                    group.append(RankBatch(window_index, rank, micro_batch))
        return sorted(group, key=_place_in_step)

    def are_replicas_known(self) -> bool:
        """Return whether the ranks computed the replicas that `torch.chunk` makes of each loader batch, if any."""
        replicas = self.records[0].facts.replicas
        if replicas is None:
            return True
        for step in range(len(self.records[0].steps)):
            for _, batch in groupby(self.group_of_step(step), key=_window_index):
                sizes: list[int] = []
                for _, _, micro_batch in batch:
                    sizes += micro_batch.sizes_of_pieces
                chunks = torch.arange(sum(sizes)).chunk(replicas)
                if sizes != [len(chunk) for chunk in chunks]:
                    return False
        return True

    def train(self) -> Record:
        """Train on one batch in each step, which holds the micro-batches of all ranks, and read an epoch."""
        number = len(self.records[0].steps)
        return self._train([[self.group_of_step(step)] for step in range(number)], reads=True)

    def train_in_precision(self, perturbation: Perturbation | None) -> Record:
        """Train as `train` does, from weights and inputs that are moved if there is a perturbation; read no epoch."""
        number = len(self.records[0].steps)
        groups = [[self.group_of_step(step)] for step in range(number)]
        return self._train(groups, reads=False, perturbation=perturbation)

    def train_in_windows(self) -> Record:
        """Train on windows, as the ranks do, of which each micro-batch holds those of all ranks."""
        steps = []
        for step in range(len(self.records[0].steps)):
            by_window_index = groupby(self.group_of_step(step), key=_window_index)
            steps.append([list(group) for _, group in by_window_index])
        return self._train(steps, reads=False)

    def train_step(self, group: Group, step: int, *, follows: bool = False) -> StepResult:
        """Return what a step on these micro-batches alone computes, after the steps before it.

        With `follows`, the calls of `training_step` are compared with those that the ranks noted.
        """
        steps: list[list[Group]] = [[self.group_of_step(earlier)] for earlier in range(step)]
        steps.append([group])
        gc.collect()  # the module of the run before, which its Trainer and it hold in a circle
        followed: list[Followed] = []
        traced_steps = range(0)
        if follows:
            followed = _followed(group)
            traced_steps = range(step, step + 1)
        record = self._train(steps, reads=False, traced_steps=traced_steps, followed=followed)
        if record.problem:
            raise Refused(record.problem)
        micro_batch = record.steps[step].micro_batches[-1]
        for of_piece in followed:
            of_piece.alone = micro_batch.pieces[0]
        for snapshot in record.steps[step].snapshots:
            if snapshot.stage == "reduced gradient":
                return StepResult(snapshot.tensors, micro_batch.loss, followed)
        raise AssertionError("a step that was recorded has a reduced gradient")

    def _train(
        self,
        steps: Sequence[Sequence[Group]],
        *,
        reads: bool,
        perturbation: Perturbation | None = None,
        traced_steps: range = range(0),
        followed: Sequence[Followed] = (),
    ) -> Record:
        """Train on groups, which are the micro-batches of each step."""
        facts = self.records[0].facts
        epochs = [step.epoch for step in self.records[0].steps]
        window = max(len(groups) for groups in steps)
        module, data, options = self.build()
        plugin = None
        if self.precision is not None:
            plugin = plugin_of(options["plugins"], self.precision, self.device)
        recorder = Recorder(
            len(steps),
            double=self.double,
            reads=reads,
            by_content=self.records[0].by_content,
            plugin=plugin,
            perturbation=perturbation,
            traced_steps=traced_steps,
            followed=followed,
        )
        replay = _Replay(steps, epochs, recorder, facts.epoch_batches / facts.accumulation * window)
        if "train_dataloaders" in data:
            data = {**data, "train_dataloaders": _ReplayLoader(data["train_dataloaders"], replay)}
        for owner in (module, data.get("datamodule")):
            if isinstance(owner, (LightningModule, LightningDataModule)) and is_overridden("train_dataloader", owner):
                replay.replace_train_dataloader(owner)
        trainer = self._trainer(options, recorder, window)
        replay.trainer = trainer
        with ExitStack() as stack:
            stack.enter_context(_world_of_one())
            if facts.sharded:
                stack.enter_context(on_mesh_of_one(module, self.device))
            if facts.replicas is not None:
                stack.enter_context(_batch_norm_of_replicas(recorder))
            stack.enter_context(recorder.watching(module))
            trainer.fit(module, **data)
        record = recorder.record
        if not record.problem and len(record.steps) < len(steps):
            record.problem = "one process takes fewer steps than the run"
        return record

    def _trainer(self, options: Mapping[str, Any], recorder: Recorder, window: int) -> Trainer:
        """Return a Trainer as the run has, but for one device, with windows of `window` batches."""
        callbacks = []
        for callback in options["callbacks"]:
            if not isinstance(callback, GradientAccumulationScheduler):  # `window` is the length that counts
                callbacks.append(callback)
        changed = {
            **_OPTIONS_OF_ONE_DEVICE,
            "strategy": _OneProcess(torch.device(self.device), recorder, self.records[0].facts),
            "callbacks": [*callbacks, recorder],
            "plugins": [recorder.plugin],
            "accumulate_grad_batches": window,
        }
        return Trainer(**{**options, **changed})


def _followed(group: Group) -> list[Followed]:
    """Return what the ranks noted of a group, by where its samples are in the batch of one process."""
    followed = []
    samples_before = 0
    for _, _, micro_batch in group:
        for piece in micro_batch.pieces:
            followed.append(Followed(piece, samples_before + piece.start))
        samples_before += micro_batch.size
    return followed


def _place_in_step(rank_batch: RankBatch) -> tuple[int, int]:
    return rank_batch.window_index, rank_batch.rank


def _window_index(rank_batch: RankBatch) -> int:
    return rank_batch.window_index


class Seen(NamedTuple):
    """A difference at a stage of a step, and what was compared there."""

    stage: str
    step: int
    difference: Difference  # the largest
    found: Tensors
    expected: Tensors
    names: set[str]  # of all that differ


def compare_tensors(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: Mapping[str, Tensor] | None = None,
    *,
    together: bool = True,
) -> list[Difference]:
    """Return the differences of sketches beyond the tolerance, the largest first. A missing tensor is zero.

    Args:
        found: The sketches of the run.
        expected: The sketches of one process.
        tolerance: The largest difference that counts as equal, relative to the largest element of the same tensor.
        noise: What some tensors were computed from, whose rounding they carry; by default the largest of `expected`.
        together: Whether the factor of the first difference must be that of all tensors, or is its own.
    """
    differences = []
    like = {**found, **expected}
    found, expected = filled(found, like), filled(expected, like)
    # What is zero but for rounding, of what both were computed from, would differ by 100 %.
    largest = max((_size(tensor) for tensor in expected.values()), default=0.0)
    for name in like:
        found_tensor, expected_tensor = found[name], expected[name]
        same = torch.isclose(found_tensor, expected_tensor, rtol=0.0, atol=0.0, equal_nan=True)
        gaps = torch.where(same, 0.0, (found_tensor - expected_tensor).abs().nan_to_num(math.inf, math.inf))
        index = int(gaps.argmax())
        gap = float(gaps[index])
        scale = _size(expected_tensor)
        magnitude = largest
        if noise and name in noise:
            magnitude = _size(noise[name])
        rounding = 1e-5 * tolerance * magnitude
        if gap > rounding + tolerance * scale:
            relative = math.inf
            if scale > 0:
                relative = gap / scale
            differences.append(Difference(name, relative, float(found_tensor[index]), float(expected_tensor[index])))
    if not differences:
        return []
    differences.sort(key=lambda difference: -difference.relative)
    first = differences[0]
    if not together:
        like = {first.name: like[first.name]}
    near = 1e4 * tolerance
    factor = multiple_of(flat(found, like), flat(expected, like), near)
    if factor is not None and factor != 0 and abs(factor - 1) > near:
        differences[0] = replace(first, factor=factor)
    return differences


def _size(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 if it is not finite, so that it widens no tolerance."""
    size = float(tensor.abs().max())
    if not math.isfinite(size):
        return 0.0
    return size


def filled(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensors:
    """Return sketches of the names and sizes of `like`: zeros for a missing one, and NaN for one of another size."""
    sketches = {}
    for name, model in like.items():
        tensor = tensors.get(name)
        if tensor is None:
            sketches[name] = torch.zeros_like(model)
        elif len(tensor) == len(model):
            sketches[name] = tensor
        else:
            sketches[name] = torch.full_like(model, math.nan)
    return sketches


def flat(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    empty = torch.zeros(0, dtype=torch.float64)  # `torch.cat` refuses to join nothing
    return torch.cat([empty, *filled(tensors, like).values()])


def gap_between(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two vectors over the largest element expected."""
    gap = float((found - expected).abs().max())
    largest = float(expected.abs().max())
    if largest:  # NaN, too, which makes the result NaN
        return gap / largest
    if gap:
        return math.inf
    return 0.0


def multiple_of(found: Tensor, expected: Tensor, near: float) -> float | None:
    """Return the factor between two vectors; None if one is no multiple of the other."""
    factor = float(found.dot(expected) / expected.dot(expected))  # by least squares
    if math.isfinite(factor) and gap_between(found, factor * expected) <= near:
        return factor
    return None


def compare_records(run: Record, expected_run: Record, tolerance: float) -> Iterator[Seen]:
    """Yield where a run differs from another, in its order.

    | stage | what is compared |
    |---|---|
    | "weights" | by how much the step moved the weights, because a wrong move is small beside the weights |
    | "optimizer options" | each option by itself, because options have no common factor |
    | any other | the tensors |

    Raises:
        Refused: If one takes other optimizer steps than the other, so that stages cannot be assigned to each other.
    """
    weights_before: Tensors = {}  # of the other run, after the step before
    for position, (step, expected_step) in enumerate(zip(run.steps, expected_run.steps, strict=False)):
        negligible: Tensors = {}  # masks of gradients that are zero but for rounding
        for snapshot, expected_snapshot in zip_longest(step.snapshots, expected_step.snapshots):
            if snapshot is None or expected_snapshot is None or snapshot.stage != expected_snapshot.stage:
                raise Refused("one process takes other optimizer steps in a batch than the run, or more of them")
            stage, found, expected = snapshot.stage, snapshot.tensors, expected_snapshot.tensors
            noise: Tensors = {}
            if stage == "initial weights":
                weights_before = expected
            elif stage == "clipped gradient":
                negligible.update(_zero_but_for_rounding(expected))
            elif stage == "weights":
                weights = expected
                found = _moved(found, weights_before)
                expected = _moved(weights, weights_before)
                # Optimizers enlarge what is zero but for rounding: it counts as moved as expected.
                for name in negligible.keys() & found.keys() & expected.keys():
                    found[name] = torch.where(negligible[name], expected[name], found[name])
                noise = weights
                weights_before = weights
            together = stage != "optimizer options"
            differences = compare_tensors(found, expected, tolerance, noise, together=together)
            if differences:
                names = {difference.name for difference in differences}
                yield Seen(stage, position, differences[0], found, expected, names)


def _moved(weights: Tensors, before: Tensors) -> Tensors:
    """Return by how much weights differ from those before; sketches are linear."""
    return {name: weight - before[name] for name, weight in weights.items() if name in before}


def _zero_but_for_rounding(gradients: Tensors) -> Tensors:
    """Return masks of the elements of gradients that are next to nothing beside the largest of all."""
    largest = max((_size(gradient) for gradient in gradients.values()), default=0.0)
    least = 1e-10 * largest
    masks = {}
    for name, gradient in gradients.items():
        mask = gradient.abs() < least
        # An exact zero is a gradient like any other, as of a word that does not occur. In a tensor of rounding alone,
        # as of a bias before batch norm, it is rounding, too.
        if not 0 < _size(gradient) < least:
            mask &= gradient != 0
        masks[name] = mask
    return masks
