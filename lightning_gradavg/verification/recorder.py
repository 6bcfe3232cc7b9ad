"""The callback that records a run, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.seed import _collect_rng_states
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gradavg.verification.facts import facts_of, samples_that_count
from lightning_gradavg.verification.records import Facts, MicroBatch, Part, Run, Step, Tensors, copied, gradients_of
from lightning_gradavg.verification.samples import digest, sample_fingerprints

__all__ = ["Recorder", "random_states", "reached"]

_CPU = torch.device("cpu")


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of torch, Python and NumPy."""
    return _collect_rng_states(include_cuda=torch.cuda.is_available())


class Recorder(Callback):
    """Records the first optimizer steps of a run on this rank, then stops it.

    It adds one differentiation per micro-batch, which leaves gradients, buckets and random numbers alone, and copies
    what it sees to the CPU: weights, gradients and optimizer state, several times per step.

    Args:
        steps: Optimizer steps to record.
        stops: Whether training ends with the last of them.
    """

    def __init__(self, steps: int, *, stops: bool = True) -> None:
        if steps < 1:
            raise ValueError(f"steps must be 1 or more, got {steps}")
        self.steps = steps
        self.run: Run | None = None
        self._stops = stops
        self._handles: list[RemovableHandle] = []
        self._clipping: Callable[..., None] | None = None
        self._micro_batches: list[MicroBatch] = []
        self._parts: list[Part] = []
        self._buffers: Tensors = {}
        self._outputs: dict[str, Tensors] = {}

    @property
    def complete(self) -> bool:
        """Whether all steps are recorded."""
        return self.run is not None and len(self.run.steps) >= self.steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the weights, and begin to listen."""
        facts: Facts = facts_of(trainer, pl_module)
        initial = copied({**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())})
        self.run = Run(trainer.global_rank, trainer.world_size, initial, [], facts)
        self.run.norms = [
            name for name, module in pl_module.named_modules() if isinstance(module, _BatchNorm) and module.training
        ]
        self._micro_batches, self._parts, self._outputs = [], [], {}
        self._handles = [
            part.register_forward_hook(self._on_forward(name))
            for name, part in (("", pl_module), *pl_module.named_children())
        ]
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._on_step(pl_module)))
        self._clipping = clip = pl_module.configure_gradient_clipping

        def clip_and_record(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            clip(optimizer, *args, **kwargs)
            if not self.complete:
                self.clip(pl_module, getattr(optimizer, "_optimizer", optimizer))

        pl_module.configure_gradient_clipping = clip_and_record  # type: ignore[method-assign]  # for this run only

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the batch."""
        if self.complete:
            return
        if not self._micro_batches:
            self._buffers = copied(dict(pl_module.named_buffers()))
        self._outputs = {}
        batch = copy.deepcopy(move_data_to_device(batch, _CPU))
        samples = samples_that_count(trainer, sample_fingerprints(batch))
        self._micro_batches.append(MicroBatch(batch_idx, batch, samples, random_states()))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Record the loss and its gradient on this rank."""
        if self.complete or not self._micro_batches:
            return
        assert self.run is not None
        micro_batch = self._micro_batches[-1]
        micro_batch.draws |= digest(micro_batch.random) != digest(random_states())
        if not micro_batch.outputs:
            own = self._outputs.pop("", {})
            found = own or {name: tensor for of_child in self._outputs.values() for name, tensor in of_child.items()}
            micro_batch.outputs = copied(found)
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        factor = divisor / (scaler.get_scale() if scaler is not None else 1.0)
        names = {name: parameter for name, parameter in pl_module.named_parameters() if parameter.requires_grad}
        try:
            gradients = torch.autograd.grad(loss, list(names.values()), retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            self._remark(f"the local gradients could not be computed apart: {error}")
            return
        gradient = {name: part * factor for name, part in reached(names, gradients)}
        self._parts.append(Part(len(self._micro_batches) - 1, float(loss.detach()) * factor, copied(gradient)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Record the reduced gradient, and everything that the step starts from."""
        if self.complete:
            return
        assert self.run is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        state = optimizer.state_dict()
        gradient = gradients_of(pl_module, optimizer)
        self._clipped: Tensors = gradient
        self._step = Step(
            epoch=trainer.current_epoch,
            micro_batches=self._micro_batches,
            parts=self._parts,
            buffers_before=self._buffers,
            weights_before=copied(dict(pl_module.named_parameters())),
            optimizer_before=copy.deepcopy(move_data_to_device(state["state"], _CPU)),
            groups=[
                {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
                for group in state["param_groups"]
            ],
            optimizer=trainer.optimizers.index(optimizer),
            gradient=gradient,
        )

    def clip(self, module: LightningModule, optimizer: Optimizer) -> None:
        """Record the gradient after clipping."""
        self._clipped = gradients_of(module, optimizer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,  # noqa: ARG002  # Lightning's
        batch_idx: int,  # noqa: ARG002  # likewise
    ) -> None:
        """Record the weight of the loss, and end the run after the last step."""
        if self.run is None:
            return
        if self._micro_batches:
            weight = outputs.get("weight") if isinstance(outputs, Mapping) else None
            self._micro_batches[-1].weight = _numbers(weight)
            if self.run.steps and self.run.steps[-1].micro_batches is self._micro_batches:
                self._micro_batches = []
        if not pl_module.automatic_optimization:
            self._micro_batches, self._parts = [], []
        if self.complete and self._stops:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002  # Lightning's
        """Stop listening."""
        self._release(pl_module)

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002  # Lightning's
        pl_module: LightningModule,
        exception: BaseException,  # noqa: ARG002  # likewise
    ) -> None:
        """Stop listening."""
        self._release(pl_module)

    def _release(self, module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._clipping is not None:
            del module.configure_gradient_clipping
            self._clipping = None

    def _remark(self, text: str) -> None:
        assert self.run is not None
        if text not in self.run.remarks:
            self.run.remarks.append(text)

    def forget_outputs(self) -> None:
        """Forget the outputs since the batch began."""
        self._outputs = {}

    def _on_forward(self, name: str) -> Callable[..., None]:
        def record(module: Any, args: Any, output: Any) -> None:
            del module, args
            # A wrapper such as DDP runs training_step within a forward, whose output is the loss.
            if self.complete or (not name and isinstance(output, Mapping) and "loss" in output):
                return
            found = self._outputs.setdefault(name, {})
            for tensor in _tensors(output):
                if tensor.ndim > 0:
                    found[f"{name or 'forward'} {len(found)}"] = tensor.detach()

        return record

    def _on_step(self, module: LightningModule) -> Callable[..., None]:
        def record(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del optimizer, args, kwargs
            if self.complete or self.run is None or not hasattr(self, "_step"):
                return
            step = self._step
            step.clipped = self._clipped
            step.weights_after = copied(dict(module.named_parameters()))
            step.buffers_after = copied(dict(module.named_buffers()))
            step.random_after = digest(random_states())
            self.run.steps.append(step)
            self._parts = []

        return record


def reached(names: Iterable[str], gradients: Iterable[Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of the parameters that the loss depends on."""
    yield from ((name, part) for name, part in zip(names, gradients, strict=True) if part is not None)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _numbers(weight: Any) -> float | dict[str, float] | None:
    if weight is None:
        return None
    if isinstance(weight, Mapping):
        return {name: float(value) for name, value in weight.items()}
    return float(weight)
