"""Why a run on several processes parts from one process: the causes that a comparison can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CAUSES", "PAGE", "Cause"]

PAGE = "docs/causes.md"
"""The page with one section per cause."""


@dataclass(frozen=True)
class Cause:
    """A cause.

    Attributes:
        name: What reports call it; also the title of its section.
        advice: What to do, in one line.
        is_difference: Whether the run trains otherwise than the reference. If not, it is a note.
    """

    name: str
    advice: str
    is_difference: bool = True

    @property
    def page(self) -> str:
        """Where it is explained."""
        return f"{PAGE}#{self.name.replace(' ', '-')}"


CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        cause.name: cause
        for cause in (
            Cause("initial weights", "seed before the module is built, and build the same module on all processes"),
            Cause("data order", "use GradAvgStrategy(split_batches=True), which keeps the order of one process"),
            Cause("padding", "use GradAvgStrategy(split_batches=True): no sample is repeated to fill a rank"),
            Cause(
                "duplicated stream",
                "let every rank read its own part, or use GradAvgStrategy(split_batches=True)",
            ),
            Cause("stochastic", "nothing, if the random numbers are meant to differ from run to run", False),
            Cause("batch norm", 'use GradAvgStrategy(equivalent_to="single_device"), or sync_batchnorm=True on GPUs'),
            Cause(
                "non-decomposable loss",
                "compute it on all outputs: training_step_end or lightning_gradavg.gather",
            ),
            Cause("sum loss", 'use GradAvgStrategy(reduction="sum"), or a mean in training_step'),
            Cause("mean of means", 'use GradAvgStrategy(reduction="weighted_mean")'),
            Cause("counts", 'return {"loss": loss, "weight": n} with the number of terms that the loss is a mean of'),
            Cause("short window", "use GradAvgStrategy, which divides by the micro-batches that a window has"),
            Cause("hand-compensated loss", "remove the factor from the loss, or use reduction='mean'"),
            Cause("double division", "divide once: leave the division to the strategy"),
            Cause("bf16 wire", "send gradients in their own type, if this precision matters"),
            Cause("fp16 wire", "send gradients in their own type, if this precision matters"),
            Cause("unsynchronised replicas", "let every backward go through the strategy, and every rank do the same"),
            Cause("learning-rate scale", "leave the learning rate alone, or state it: GradAvgStrategy(lr_scaling=...)"),
            Cause("unexplained", "compare the stages of the report, first the first that differs"),
        )
    }
)
"""All causes, in the order in which they lead a report where they part in the same stage."""
