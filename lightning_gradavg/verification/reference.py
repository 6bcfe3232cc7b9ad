"""The reference: the same module on one process, fed with the global batches that the ranks trained on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_gradavg.verification.dense import gather_outputs, loss_of_pairs, loss_of_replicas
from lightning_gradavg.verification.recorder import Recorder
from lightning_gradavg.verification.records import Run, Tensors, gradients_of
from lightning_gradavg.verification.replay import VARIANTS, drawing_modules, replay
from lightning_gradavg.verification.script import Act, acts_of

__all__ = ["record_reference", "reference_trainer", "world_of_one"]


class _Acts(IterableDataset[int]):
    """Yields the indices of the acts, one epoch of the run after the other."""

    def __init__(self, acts: Sequence[Act]) -> None:
        self._epochs = [[index for index, act in enumerate(acts) if act.epoch == epoch] for epoch in _epochs(acts)]
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        epoch = self._epochs[min(self._next, len(self._epochs) - 1)]
        self._next += 1
        return iter(epoch)


def _epochs(acts: Sequence[Act]) -> list[int]:
    return sorted({act.epoch for act in acts})


def _itself(value: Any) -> Any:
    return value


def _untouched(batch: Any, dataloader_idx: int = 0) -> Any:
    del dataloader_idx
    return batch


class ReferenceStrategy(SingleDeviceStrategy):
    """One process that takes every step of a run from where the run took it.

    Every stage starts from the run's own result of the stage before: the forward from its weights, buffers and
    optimizer state, clipping from its reduced gradient, the optimizer from its clipped gradient. So a difference is
    seen in the stage that makes it and in no other, and training does not amplify rounding.

    Args:
        runs: What the ranks recorded.
        device: Where to compute.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        super().__init__(device=device)
        self.runs, self.acts = runs, acts_of(runs)
        self.recorder: Recorder | None = None
        self._act: Act | None = None
        self._whole: Any = None

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return the global batch of the act with the index `batch`; hooks on batches ran in the run already."""
        self._act = act = self.acts[batch]
        try:
            self._whole = self._to_device(act.join())
        except ValueError as error:
            self._whole = None
            self._remark(f"{error}; the reference is the mean over its micro-batches")
            return self._to_device(act.pairs[0][1].batch)
        return self._whole

    @override
    def training_step(self, batch: Any, *args: Any) -> Any:
        assert self._act is not None
        assert self.lightning_module is not None
        act, run = self._act, self.runs[0]
        if run.steps[act.steps[0]].micro_batches:
            self._force(act)

        def step(part: Any) -> Any:
            # The batch index is that of the run, not of the act.
            return super(ReferenceStrategy, self).training_step(part, *args)

        if run.facts.automatic:
            self._replay(act, step)
            assert self.recorder is not None
            self.recorder.forget_outputs()
            return self._loss(act, step)
        return step(batch)

    def _loss(self, act: Act, step: Callable[[Any], Any]) -> Any:
        facts = self.runs[0].facts
        module = self.lightning_module
        assert module is not None
        counts = [len(micro_batch.samples) for _, micro_batch, _ in act.pairs]
        if self._whole is None:
            outputs = [step(self._to_device(micro_batch.batch)) for _, micro_batch, _ in act.pairs]
            return loss_of_pairs(outputs, counts, facts.rule)
        if facts.replicas is not None:
            return loss_of_replicas(
                module,
                step,
                self._whole,
                sum(counts),
                facts.replicas,
                facts.rule,
                end=self._step_end,
                counts_replicas=facts.counts_replicas,
            )
        return loss_of_pairs([step(self._whole)], [sum(counts)], facts.rule, end=self._step_end)

    def _to_device(self, batch: Any) -> Any:
        """Return a copy, because a training step may change its batch."""
        return move_data_to_device(copy.deepcopy(batch), self.root_device)

    @property
    def _step_end(self) -> Callable[[Any], Any] | None:
        return getattr(self.lightning_module, "training_step_end", None) if self.runs[0].facts.step_end else None

    def _force(self, act: Act) -> None:
        """Go to where the run was before the act."""
        module, step = self.lightning_module, self.runs[0].steps[act.steps[0]]
        assert module is not None
        _load(dict(module.named_parameters()), step.weights_before)
        _load(dict(module.named_buffers()), step.buffers_before)

    def force_optimizer(self, position: int, optimizer: Optimizer) -> None:
        """Give the optimizer the state that it had in the run, and its options where the strategy scaled them."""
        step, facts = self.runs[0].steps[position], self.runs[0].facts
        state = optimizer.state_dict()
        state["state"] = copy.deepcopy(step.optimizer_before)
        optimizer.load_state_dict(state)
        if facts.scales_rates:
            for group, options in zip(optimizer.param_groups, step.groups, strict=True):
                group.update(copy.deepcopy(options))

    def _replay(self, act: Act, step: Callable[[Any], Any]) -> None:
        module, recorder = self.lightning_module, self.recorder
        assert module is not None
        assert recorder is not None
        assert recorder.run is not None
        parts = [(self._to_device(micro_batch.batch), micro_batch.random) for _, micro_batch, _ in act.pairs]
        end = self._step_end

        def part(batch: Any) -> Any:
            return step(batch) if end is None else end(gather_outputs([step(batch)]))

        def whole() -> Any:
            return self._loss(act, step)

        found = recorder.run.replays.setdefault(act.steps[0], {})
        for variant in VARIANTS:
            random = bool(recorder.run.draws_in) or any(micro_batch.draws for _, micro_batch, _ in act.pairs)
            if (variant == "still" and not random) or (variant == "frozen" and not recorder.run.norms):
                continue
            try:
                with drawing_modules(module, recorder.run.draws_in):
                    result, draws = replay(module, part, variant, parts, None if self._whole is None else whole)
            except Exception as error:  # noqa: BLE001  # the user's code, in a mode that it may not know
                self._remark(f"the step could not be computed again ({variant}): {type(error).__name__}: {error}")
                continue
            if variant == "plain" or not draws:
                found[variant] = result

    def _remark(self, text: str) -> None:
        assert self.recorder is not None
        assert self.recorder.run is not None
        if text not in self.recorder.run.remarks:
            self.recorder.run.remarks.append(text)


class _ReferenceRecorder(Recorder):
    """Records the reference, and hands each stage what it starts from."""

    def __init__(self, strategy: ReferenceStrategy) -> None:
        super().__init__(len(strategy.runs[0].steps))
        self._strategy = strategy
        strategy.recorder = self

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self.run is not None
        _load({**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}, self._strategy.runs[0].initial)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.complete:
            return
        assert self.run is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        position = len(self.run.steps)
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self._strategy.force_optimizer(position, optimizer)
        _set_gradients(pl_module, optimizer, self._strategy.runs[0].steps[position].gradient)
        if not pl_module.automatic_optimization:
            # The user clips before the step is seen.
            self._clipped = gradients_of(pl_module, optimizer)

    @override
    def clip(self, module: LightningModule, optimizer: Optimizer) -> None:
        super().clip(module, optimizer)
        assert self.run is not None
        step = self._strategy.runs[0].steps[len(self.run.steps)]
        _set_gradients(module, optimizer, step.clipped)


def _load(live: Mapping[str, Tensor], recorded: Tensors) -> None:
    with torch.no_grad():
        for name, tensor in recorded.items():
            if name in live and live[name].shape == tensor.shape:
                # Past autograd, which counts versions of buffers that a graph still needs.
                live[name].data.copy_(tensor)


def _set_gradients(module: LightningModule, optimizer: Optimizer, gradients: Tensors) -> None:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        if id(parameter) in trained:
            gradient = gradients.get(name)
            # A copy, because clipping works in place.
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)


@contextmanager
def world_of_one() -> Iterator[None]:
    """Give the code of the user a process group to ask, where there is none."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _ReferenceTrainer(Trainer):
    estimated_steps: float | None = None

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        return super().estimated_stepping_batches if self.estimated_steps is None else self.estimated_steps


def reference_trainer(strategy: ReferenceStrategy, options: Mapping[str, Any]) -> Trainer:
    """Return the Trainer of the reference: the user's options but for those of devices, windows and lengths."""
    dropped = {"strategy", "devices", "num_nodes", "plugins", "accumulate_grad_batches", "limit_train_batches"}
    dropped |= {"overfit_batches", "sync_batchnorm", "use_distributed_sampler", "fast_dev_run", "max_steps", "max_time"}
    kept = {name: value for name, value in options.items() if name not in dropped}
    callbacks = kept.pop("callbacks", None) or []
    kept["callbacks"] = [
        _ReferenceRecorder(strategy),
        *(
            callback
            for callback in (callbacks if isinstance(callbacks, list) else [callbacks])
            if not isinstance(callback, (GradientAccumulationScheduler, Recorder))
        ),
    ]
    trainer = _ReferenceTrainer(strategy=strategy, **kept)
    trainer.estimated_steps = strategy.runs[0].facts.estimated_steps
    return trainer


def record_reference(
    runs: Sequence[Run], module: LightningModule, options: Mapping[str, Any], datamodule: Any = None
) -> Run:
    """Run the reference of a run and return what it recorded.

    Args:
        runs: What the ranks recorded, in rank order.
        module: A module as the ranks had it before training.
        options: The options of the run's Trainer.
        datamodule: The data module whose attributes the module may read through its Trainer; its loaders are not used.
    """
    if not runs[0].steps:
        raise ValueError("the run took no optimizer step, so there is nothing to compare")
    device = torch.device("cuda", 0) if options.get("accelerator") in ("cuda", "gpu") else torch.device("cpu")
    strategy = ReferenceStrategy(runs, device)
    trainer = reference_trainer(strategy, options)
    loader = DataLoader(_Acts(strategy.acts), batch_size=None, collate_fn=_itself)
    # The hooks of the data module on batches ran in the run already.
    module._on_before_batch_transfer = _untouched  # type: ignore[method-assign]  # for this run only
    if datamodule is not None:
        trainer.datamodule = datamodule  # type: ignore[attr-defined]  # set by a connector
    with world_of_one(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*", category=UserWarning, module="lightning")
        trainer.fit(module, loader)
    recorder: Any = strategy.recorder
    if recorder.run is None or not recorder.complete:
        raise RuntimeError("the reference did not take the steps of the run")
    run: Run = recorder.run
    return run
