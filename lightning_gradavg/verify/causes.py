"""Why a run on several processes parts from one process: the causes that a comparison can name, and what to do.

A cause is named only where what it predicts is what was seen, see `judge`. What no cause predicts is "unexplained".
"""

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
        plain: What it means, for a reader who does not know the name.
        advice: What to do, in one line.
        diff: The change to the user's script, with the strategy in use as `{strategy}`; "" where there is no one way.
        is_difference: Whether the run trains otherwise than the reference. If not, it is a note.
    """

    name: str
    plain: str
    advice: str
    diff: str = ""
    is_difference: bool = True

    def advice_for(self, detail: str, strategy: str) -> dict[str, str]:
        """Return what to do about a finding, as advice and diff, where `strategy` is in use."""
        # A mean over anything but samples needs to be told of what.
        of_terms = self.name == "mean of means" and "terms" in detail
        advice = f"{self.advice}; {CAUSES['counts'].advice}" if of_terms else self.advice
        diff = CAUSES["counts"].diff if of_terms else self.diff
        return {"advice": advice, "diff": diff.format(strategy=f"{strategy}()")}

    @property
    def page(self) -> str:
        """Where it is explained."""
        return f"{PAGE}#{self.name.replace(' ', '-')}"


def _strategy(options: str) -> str:
    return (
        "+from lightning_gradavg import GradAvgStrategy\n"
        "-trainer = Trainer(strategy={strategy}, ...)\n"
        f"+trainer = Trainer(strategy=GradAvgStrategy({options}), ...)"
    )


_WEIGHT = (
    " def training_step(self, batch, batch_idx):\n"
    "     ...\n"
    "-    return loss\n"
    '+    return {{"loss": loss, "weight": n}}  # n: the terms of the mean, such as (targets != -100).sum()\n'
)

CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        cause.name: cause
        for cause in (
            Cause(
                "initial weights",
                "the run starts from other weights than one process",
                "seed before the module is built, and build the same module on all processes",
                "+seed_everything(0)\n model = Net()",
            ),
            Cause(
                "padding",
                "some samples are trained on twice, to fill the ranks",
                "use GradAvgStrategy(split_batches=True): no sample is repeated to fill a rank",
                _strategy("split_batches=True"),
            ),
            Cause(
                "duplicated stream",
                "all ranks train on the same samples",
                "let every rank read its own part, or use GradAvgStrategy(split_batches=True)",
                _strategy("split_batches=True"),
            ),
            Cause(
                "stochastic",
                "random numbers are drawn",
                "nothing, if the random numbers are meant to differ from run to run",
                is_difference=False,
            ),
            Cause(
                "batch norm",
                "batch norm sees only the samples of its own rank",
                'use GradAvgStrategy(equivalent_to="single_device"), or sync_batchnorm=True on GPUs',
                _strategy('equivalent_to="single_device"'),
            ),
            Cause(
                "non-decomposable loss",
                "the loss compares samples with each other, and a rank has only its own",
                "compute it on all outputs: training_step_end or lightning_gradavg.gather",
                "+from lightning_gradavg import gather\n"
                " def training_step(self, batch, batch_idx):\n"
                "     rows = self(batch)\n"
                "-    return contrast(rows, rows)\n"
                "+    return contrast(rows, gather(rows))  # this rank's rows against those of all",
            ),
            Cause(
                "sum loss",
                "the loss is a sum over samples, but the ranks' gradients were averaged",
                'use GradAvgStrategy(reduction="sum"), or a mean in training_step',
                _strategy('reduction="sum"'),
            ),
            Cause(
                "constant term",
                "a part of the loss that depends on no sample, such as a penalty, is added once by every rank",
                "leave it to the optimizer's weight_decay, or divide it by the ranks and micro-batches of a step",
                "-    return data_loss + penalty\n"
                "+    share = self.trainer.world_size * self.trainer.accumulate_grad_batches\n"
                "+    return data_loss + penalty / share",
            ),
            Cause(
                "mean of means",
                "means over different numbers of terms were averaged as if they were equal",
                'use GradAvgStrategy(reduction="weighted_mean")',
                _strategy('reduction="weighted_mean"'),
            ),
            Cause(
                "counts",
                "the ranks are weighted, but not by the terms of their losses",
                'return {"loss": loss, "weight": n} with the number of terms that the loss is a mean of',
                _WEIGHT + _strategy('reduction="weighted_mean"'),
            ),
            Cause(
                "short window",
                "an accumulation window with fewer micro-batches is divided by the full number",
                "use GradAvgStrategy, which divides by the micro-batches that a window has",
                _strategy(""),
            ),
            Cause(
                "hand-compensated loss",
                "the ranks' losses carry a factor that the reduction does not undo",
                "remove the factor from the loss, or use reduction='mean'",
                "-    return loss * factor\n+    return loss",
            ),
            Cause(
                "double division",
                "divided twice: by the run's own code, and by the reduction",
                "divide once: leave the division to the strategy",
                "-    return loss / world_size\n+    return loss",
            ),
            Cause(
                "clipped before the reduction",
                "every rank clips its own gradient, and the clipped ones are reduced",
                "clip after the reduction: leave it to the Trainer",
                "-    # clipping in a hook on parameters, in a ddp_comm_hook, or before the reduction\n"
                "+trainer = Trainer(gradient_clip_val=norm, ...)",
            ),
            Cause(
                "gradient hooks",
                "a hook on parameters changes every rank's gradient before it is reduced",
                "change the gradient after the reduction, in on_before_optimizer_step",
                "-    parameter.register_hook(change)\n"
                "+    def on_before_optimizer_step(self, optimizer):\n"
                "+        for parameter in self.parameters():\n"
                "+            parameter.grad = change(parameter.grad)",
            ),
            Cause("bf16 wire", "gradients travel as bfloat16", "send gradients in their own type, if this matters"),
            Cause("fp16 wire", "gradients travel as float16", "send gradients in their own type, if this matters"),
            Cause(
                "different optimizers",
                "the ranks' optimizers have different options",
                "let configure_optimizers return the same on all ranks",
            ),
            Cause(
                "unsynchronised replicas",
                "the ranks hold different weights or gradients",
                "let every backward go through the strategy, and every rank do the same",
                "-    loss.backward()\n+    self.manual_backward(loss)",
            ),
            Cause(
                "learning-rate scale",
                "the learning rate depends on the number of processes",
                "leave the learning rate alone, or state it: GradAvgStrategy(lr_scaling=...)",
                "-    return SGD(self.parameters(), lr=self.lr * self.trainer.world_size)\n"
                "+    return SGD(self.parameters(), lr=self.lr)",
            ),
            Cause(
                "optimizer options",
                "options of the optimizer depend on the number of processes",
                "let configure_optimizers not depend on the number of processes",
            ),
            Cause(
                "buffers of one rank",
                "buffers follow the samples of one rank",
                "gather over the ranks what training_step writes to the buffer",
            ),
            Cause(
                "data order",
                "one process would train on these samples in another order",
                "use GradAvgStrategy(split_batches=True), which keeps the order of one process",
                _strategy("split_batches=True"),
            ),
            Cause(
                "unexplained",
                "there is a difference, and nothing that is known predicts it",
                "compare the stages of the report, first the first that differs",
            ),
        )
    }
)
"""All causes, in the order in which they lead a report where they part in the same step and stage."""
