"""Reports of single optimizer steps: the local gradients before the reduction, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.loss import WeighedLoss, loss_terms
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Window
from lightning_gradavg.report.measure import LocalGradients, squared_norm
from lightning_gradavg.report.rank_measurement import (
    ObservedMicroBatch,
    RankMeasurement,
    measure_rank,
    spread_of,
    term_reports,
)
from lightning_gradavg.report.report import StepReport
from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.timers import DDPTimers
from lightning_gradavg.tree import batch_samples

__all__ = ["Reports"]


@dataclass
class _Observation:
    """An optimizer step that is being observed.

    Attributes:
        copies: Whether to keep copies of the local gradients.
        timers: DDP's own, started.
        losses: What is known of losses, by the identity of their weighed form.
        micro_batches: What is known of those whose backward has been, and
        weights: their weights.
        local: The local gradients of the last backward.
    """

    copies: bool
    timers: DDPTimers
    losses: dict[int, ObservedMicroBatch] = field(default_factory=dict)
    micro_batches: list[ObservedMicroBatch] = field(default_factory=list)
    weights: list[MicroBatch] = field(default_factory=list)
    local: LocalGradients | None = None


class Reports(Part):
    """Reports single optimizer steps. Steps that are not observed cost nothing.

    Args:
        rule: The reduction rule.
        crosses_ranks: Whether gradients of one rank's loss reach another within the backward.
    """

    def __init__(self, rule: Rule, *, crosses_ranks: bool) -> None:
        self._rule, self._crosses_ranks = rule, crosses_ranks
        self._asked_copies: bool | None = None
        self._observation: _Observation | None = None
        self._within_window = False
        self._report: StepReport | None = None

    def setup(self, run: Run) -> None:
        """Forget a step that was not finished."""
        super().setup(run)
        self._observation, self._within_window = None, False

    def observe_next_step(self, *, copies: bool) -> None:
        """Observe the step whose window begins next."""
        self._asked_copies = copies

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

    def begin_step(self) -> None:
        """Begin to observe where that is asked for: before the forward, at which DDP decides whether it takes times."""
        copies = self._asked_copies
        if copies is not None and not self._within_window and self.run.model is not None:
            self._observation, self._asked_copies = _Observation(copies, DDPTimers(self.run.model)), None
            self._observation.timers.start()

    def postpone(self) -> None:
        """Observe the next step instead of one that is left out."""
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.timers.stop()
            self._asked_copies = observation.copies

    def weighed(self, loss: Any, weighed: WeighedLoss, samples: float | None, batch: Any) -> None:
        """Note a loss that was weighed.

        Args:
            loss: What the user returned: a tensor, or terms by name.
            weighed: Its weighed form.
            samples: The samples of its batch where the strategy knows, and
            batch: the batch, to count them where it does not.
        """
        if self._observation is None:
            return
        named = tuple(weighed.micro_batch.weights) != (WHOLE_LOSS,)
        terms = loss_terms(loss) if named else {WHOLE_LOSS: weighed.value}
        losses = {name: term.detach() for name, term in terms.items()}
        counted = self._count_samples(samples, batch)
        self._observation.losses[id(weighed)] = ObservedMicroBatch(losses, counted)

    def _count_samples(self, samples: float | None, batch: Any) -> float:
        if self._crosses_ranks:
            return math.nan
        if samples is not None:
            return samples
        try:
            return batch_samples(batch)
        except ValueError:
            return math.nan

    @contextmanager
    def backward(self, loss: WeighedLoss, *, last: bool) -> Iterator[None]:
        """Surround the backward of a loss, the last one of its window or not."""
        observation, self._within_window = self._observation, not last
        if observation is None:
            yield
            return
        observation.micro_batches.append(observation.losses.pop(id(loss), ObservedMicroBatch({}, math.nan)))
        observation.weights.append(loss.micro_batch)
        if not last:
            yield
            return
        several = len(observation.weights) > 1
        observation.local = LocalGradients(self._parameters, copies=observation.copies, accumulated=several)
        try:
            with observation.local:
                yield
        except BaseException:
            observation.timers.stop()
            self._observation = None
            raise

    @property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for parameter in self.run.ddp.parameters() if parameter.requires_grad]

    @property
    def measures(self) -> bool:
        """Whether a step is observed whose last backward has been."""
        return self._observation is not None and self._observation.local is not None

    def end_window(self, closed: tuple[Window, float] | None, optimizers: Sequence[Optimizer], **facts: Any) -> None:
        """Report the step, with its gradients reduced and nothing added to them. A collective operation if observed.

        Args:
            closed: The window, and what its losses were divided by; None under stock DDP.
            optimizers: Those of the run.
            facts: `lr_scale`, and `loss_scale`: what the losses were multiplied by for half precision.
        """
        observation, self._observation = self._observation, None
        if observation is None or observation.local is None:
            return
        device, local = self.run.device, observation.local
        window, divisor = self._window_of(observation, closed)
        total = squared_norm([parameter.grad for parameter in self._parameters], device)
        loss_scale = facts["loss_scale"] ** 2
        measured = measure_rank(
            window,
            observation.micro_batches[-window.length :],
            divisor=divisor,
            squared_norm=float(local.squared_norm(device)) / loss_scale,
            product=float(local.product(device)) / loss_scale if observation.copies else math.nan,
            communication=observation.timers.read(),
        )
        rows = World.of(self.run.ddp.process_group).gather_floats(measured.pack())
        ranks = [RankMeasurement.unpack(row, len(window.terms)) for row in rows]
        self._report = self._report_of(
            window.terms, ranks, float(total) / loss_scale, observation.copies, optimizers, facts["lr_scale"]
        )

    def _window_of(self, observation: _Observation, closed: tuple[Window, float] | None) -> tuple[Window, float]:
        """Return the window that was just reduced, and what its losses were divided by."""
        by_hand = self._rule == RULES["mean"] and not self.run.module.automatic_optimization
        if closed is None:
            window = Window(self._rule, self.run.places, World.of(self.run.ddp.process_group).rank)
            for micro_batch in observation.weights:
                window.add(micro_batch)
            closed = window, window.length if by_hand else self.run.trainer.accumulate_grad_batches
        window, divisor = closed
        if by_hand:
            observation.micro_batches = [
                ObservedMicroBatch(_times(seen.losses, window.length), seen.samples)
                for seen in observation.micro_batches
            ]
        return window, divisor

    def _report_of(
        self,
        names: tuple[str, ...],
        ranks: list[RankMeasurement],
        total: float,
        has_cosines: bool,
        optimizers: Sequence[Optimizer],
        lr_scale: float,
    ) -> StepReport:
        norm, own = math.sqrt(total), [math.sqrt(rank.squared_norm) for rank in ranks]
        products = [(rank.product, norm * length) for rank, length in zip(ranks, own, strict=True)]
        cosines = tuple(product / lengths if lengths > 0 else math.nan for product, lengths in products)
        times = tuple(rank.communication for rank in ranks)
        return StepReport(
            step=self.run.trainer.global_step,
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
                float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group
            ),
            lr_scale=lr_scale,
            communication=times if all(time.total for time in times) else None,
            spread=None if self._crosses_ranks else spread_of(ranks, total),
        )


def _times(losses: Mapping[str, Tensor], factor: int) -> dict[str, Tensor]:
    return {name: loss * factor for name, loss in losses.items()}
