"""A strategy that can observe an optimizer step: the local gradients before the reduction, and what became of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_gradavg.data.collated import batch_samples
from lightning_gradavg.monitoring.measure import CommunicationTimers, LocalGradients, squared_norm
from lightning_gradavg.monitoring.rank_measurement import (
    ObservedMicroBatch,
    RankMeasurement,
    measure_rank,
    spread_of,
    term_reports,
)
from lightning_gradavg.monitoring.step_report import Communication, StepReport
from lightning_gradavg.place import Place
from lightning_gradavg.reduction.accumulate import WeighedLoss
from lightning_gradavg.reduction.reducing import ReducingStrategy
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Window

__all__ = ["ObservingStrategy"]


@dataclass
class _Observation:
    """An optimizer step that is being observed.

    Attributes:
        copies: Whether to keep copies of the local gradients.
        timers: DDP's own, started.
        weighed: The losses whose backward is still to come, with what is known of them.
        micro_batches: Those whose backward has been.
        weights: Their weights.
    """

    copies: bool
    timers: CommunicationTimers
    weighed: list[tuple[WeighedLoss, ObservedMicroBatch]] = field(default_factory=list)
    micro_batches: list[ObservedMicroBatch] = field(default_factory=list)
    weights: list[MicroBatch] = field(default_factory=list)

    def take(self, loss: WeighedLoss | None) -> None:
        """Count a loss among those of the window."""
        unknown = ObservedMicroBatch({}, None)
        self.micro_batches.append(next((seen for weighed, seen in self.weighed if weighed is loss), unknown))
        self.weights.append(MicroBatch({WHOLE_LOSS: 1.0}) if loss is None else loss.micro_batch)
        self.weighed = [(weighed, seen) for weighed, seen in self.weighed if weighed is not loss]


class ObservingStrategy(ReducingStrategy):
    """Reports single optimizer steps. Steps that are not observed cost nothing.

    Args:
        rule: The reduction rule.
        **options: Those of `DDPStrategy`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked_copies: bool | None = None
        self._observation: _Observation | None = None
        self._within_window = False
        self._report: StepReport | None = None

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by."""
        return 1.0

    def observe_next_step(self, *, cosines: bool = True) -> None:
        """Observe the optimizer step whose window begins next; `report()` returns it once its gradients are reduced.

        A collective operation: every rank must call it before the same step. The observed step exchanges one vector of
        240 numbers and, on an accelerator, waits for its gradients.

        Args:
            cosines: Whether to measure the angle between local and reduced gradients, which takes a copy of the
                gradients for the length of a backward.
        """
        self._asked_copies = cosines

    @property
    def observing(self) -> bool:
        """Whether a step that was asked for has not been reported yet."""
        return self._asked_copies is not None or self._observation is not None

    def report(self) -> StepReport:
        """Return what was observed of the last observed step, the same on all ranks.

        Raises:
            RuntimeError: If no step was observed.
        """
        if self._report is None:
            raise RuntimeError(
                "no optimizer step was observed. Add GradAvgMonitor() to the Trainer's callbacks, or call"
                " strategy.observe_next_step() on all ranks before the step."
            )
        return self._report

    @override
    def setup(self, trainer: Trainer) -> None:
        self._observation, self._within_window = None, False
        super().setup(trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        copies, model = self._asked_copies, self.model
        if copies is not None and not self._within_window and isinstance(model, DistributedDataParallel):
            self._observation, self._asked_copies = _Observation(copies, CommunicationTimers(model)), None
            # Before the forward, at which DDP decides whether it times this iteration.
            self._observation.timers.start()
        return super().training_step(*args, **kwargs)

    @override
    def _weigh(self, loss: Any, weight: Any, *, alone: bool, samples: float | None) -> WeighedLoss:
        weighed = super()._weigh(loss, weight, alone=alone, samples=samples)
        if self._observation is not None:
            named = tuple(weighed.micro_batch.weights) != (WHOLE_LOSS,)
            terms: Mapping[str, Tensor] = loss if named else {WHOLE_LOSS: weighed.value}
            losses = {name: term.detach() for name, term in terms.items()}
            seen = ObservedMicroBatch(losses, self._count_samples(samples, weighed.micro_batch))
            self._observation.weighed.append((weighed, seen))
        return weighed

    def _count_samples(self, samples: float | None, micro_batch: MicroBatch) -> float | None:
        if self._crosses_ranks:
            return None
        if samples is not None:
            return samples
        if self._rule.uses_weight and not micro_batch.explicit and micro_batch.problem is None:
            return float(micro_batch.weights[WHOLE_LOSS])
        try:
            return batch_samples(self._batch)
        except ValueError:
            return None

    @override
    def _run(
        self, loss: WeighedLoss | None, run: Callable[..., None], *, first: bool, final: bool
    ) -> Callable[[], None]:
        observation, last = self._observation, self._ends_window(final)
        self._within_window = not last
        if observation is None:
            return super()._run(loss, run, first=first, final=final)
        observation.take(loss)
        model = self.model
        if not last or not isinstance(model, DistributedDataParallel):
            return super()._run(loss, run, first=first, final=final)
        # Whatever happens now, this step is over.
        self._observation = None
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        local = LocalGradients(parameters, copies=observation.copies, accumulated=len(observation.weights) > 1)
        try:
            with local:
                finish = super()._run(loss, run, first=first, final=final)
        except BaseException:
            observation.timers.stop()
            raise

        def finish_observed() -> None:
            window, divisor = self._window_of(observation)
            communication = observation.timers.read()
            if self._accumulator is None:
                finish()  # which completes the mean of a short window
            total, product = squared_norm([p.grad for p in parameters], self.root_device), None
            if observation.copies:
                product = local.product(self.root_device)
            if self._accumulator is not None:
                finish()  # which adds what was accumulated in earlier windows
            scaler = getattr(self.precision_plugin, "scaler", None)
            scale = float(scaler.get_scale()) if scaler is not None else 1.0
            measured = measure_rank(
                window,
                observation.micro_batches[-len(window.micro_batches) :],
                loss_divisor=divisor,
                squared_norm=float(local.squared_norm(self.root_device)) / scale**2,
                product=None if product is None else float(product) / scale**2,
                communication=communication,
            )
            ranks = self._gather(measured, len(window.terms))
            self._report = self._report_of(window.terms, ranks, float(total) / scale**2, observation.copies)

        return finish_observed

    @property
    def _group_of_ddp(self) -> dist.ProcessGroup:
        assert isinstance(self.model, DistributedDataParallel)
        group: dist.ProcessGroup = self.model.process_group
        return group

    def _gather(self, measured: RankMeasurement, terms: int) -> list[RankMeasurement]:
        """Return the measurements of all ranks."""
        group = self._group_of_ddp
        mine = torch.tensor(measured.pack(), dtype=torch.float64, device=self.root_device)
        rows = mine.new_empty(dist.get_world_size(group), len(mine))
        dist.all_gather(list(rows.unbind()), mine, group=group)
        return [RankMeasurement.unpack(row, terms) for row in rows.tolist()]

    def _window_of(self, observation: _Observation) -> tuple[Window, float]:
        """Return the window that was just reduced, and what its losses were divided by."""
        assert self.lightning_module is not None
        by_hand = self._divided_by_hand and not self.lightning_module.automatic_optimization
        if self._accumulator is not None:
            window, divisor = self._accumulator.reducer.closed
        else:
            group = self._group_of_ddp
            place = Place(dist.get_rank(group), dist.get_world_size(group))
            window = Window(self._rule, place, list(observation.weights))
            divisor = len(window.micro_batches) if by_hand else self._trainer.accumulate_grad_batches
        if by_hand:
            length = len(window.micro_batches)
            for index, seen in enumerate(observation.micro_batches):
                losses = {name: loss * length for name, loss in seen.losses.items()}
                observation.micro_batches[index] = ObservedMicroBatch(losses, seen.samples)
        return window, divisor

    def _report_of(
        self, names: tuple[str, ...], ranks: list[RankMeasurement], total: float, has_cosines: bool
    ) -> StepReport:
        norm, own = math.sqrt(total), [math.sqrt(rank.squared_norm) for rank in ranks]
        products = [(rank.product, norm * length) for rank, length in zip(ranks, own, strict=True)]
        cosines = tuple(product / lengths if lengths > 0 else math.nan for product, lengths in products)
        times = [Communication(*rank.communication) for rank in ranks]
        return StepReport(
            step=self._trainer.global_step,
            rule=self._rule.name,
            formula=self._rule.formula,
            terms=term_reports(names, ranks),
            world_size=len(ranks),
            micro_batches=tuple(int(rank.micro_batches) for rank in ranks),
            samples=tuple(None if math.isnan(rank.samples) else rank.samples for rank in ranks),
            gradient_norm=norm,
            local_gradient_norms=tuple(own),
            cosines=cosines if has_cosines else None,
            learning_rates=tuple(
                float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups if "lr" in group
            ),
            lr_scale=self.lr_scale,
            communication=None if any(math.isnan(time.total) for time in times) else tuple(times),
            spread=None if self._crosses_ranks else spread_of(ranks, total),
        )
