"""The strategy that users name where the model is sharded: the rules of the reduction on Lightning's FSDP2 engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_gradavg._lightning.internals import sharded_modules
from lightning_gradavg._lightning.options import StrategyFacts
from lightning_gradavg._support.means import averages_integers, mean_of_integers
from lightning_gradavg._support.tree import leaves
from lightning_gradavg._training import WeighedTraining
from lightning_gradavg.batches.part import Batches
from lightning_gradavg.faults.part import Faults
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.guard import BypassGuard
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reduction.sharded import ShardedGradients, sharded_rule
from lightning_gradavg.reduction.uncounted import note_exchange
from lightning_gradavg.report.start_line import StartFacts, drops_out, normalizes_by_rank, start_line
from lightning_gradavg.rules import RULES

__all__ = ["GradAvgModelParallelStrategy"]


class GradAvgModelParallelStrategy(WeighedTraining, ModelParallelStrategy):
    """Trains a sharded model by the gradient of a stated rule, over all ranks and micro-batches.

    Shard the model in `configure_model`, as with Lightning's `ModelParallelStrategy`: by `fully_shard` (FSDP2, or HSDP
    on a mesh of two dimensions), with or without tensor parallelism. Pass weights as with `GradAvgStrategy`: return
    `{"loss": loss, "weight": n}`, or call `self.manual_backward(loss, weight=n)`. Ranks of one tensor-parallel group
    pass equal weights. For loss terms that have counts of their own, use `lightning_gradavg.global_mean` under the
    plain mean. See docs/sharded.md.

    Args:
        reduction: The name of a rule: `"mean"`, `"sum"`, `"weighted_mean"` or `"normalized_sum"`. See
            `lightning_gradavg.rules`.
        options: Options of Lightning's `ModelParallelStrategy`, by name.

    Raises:
        ValueError: If `reduction` names no rule, or none for sharded models.
        TypeError: If an option is unknown.
    """

    def __init__(self, *, reduction: str = "mean", **options: Any) -> None:
        rule = sharded_rule(reduction, options, ModelParallelStrategy)
        super().__init__(**options)
        self._reduction = Reduction(rule, CommHook(), timeout=options.get("timeout", default_pg_timeout))
        self._batches = Batches()
        self._faults = Faults(None, buffers=False)  # the ranks hold different shards, and there is nothing to compare
        self._parts = (self._reduction, self._batches, self._faults)
        self._guard: BypassGuard | None = None
        self._output_hooks: list[RemovableHandle] = []  # of the outermost sharded modules
        self._plain_options = {"reduction": rule.name}
        self._changed_options = {**options, "reduction": reduction}

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if not self._trains:
            return
        rule = self._reduction.rule
        gradients = ShardedGradients(self._run.module, self.device_mesh, self.optimizers)
        # `ModelParallelStrategy` wraps no module, and has no moment `configure_ddp`.
        self._run = replace(self._run, places=tuple(gradients.places))
        self._reduction.begin_run(self._run, gradients)
        if rule != RULES["mean"]:
            self._guard = BypassGuard(gradients.leaves(), rule.name, self._reduction.is_in_backward)
            inner: set[nn.Module] = set()
            for sharded in sharded_modules(self._run.module):  # outer modules first
                if sharded not in inner:
                    self._output_hooks.append(sharded.register_forward_hook(_note_output))
                    inner.update(sharded.modules())

    def on_train_start(self) -> None:
        """Begin with the training loaders, which are known now."""
        super().on_train_start()
        rank_zero_info(self._start_line())

    def _start_line(self) -> str:
        run, mesh = self._run, self.device_mesh
        ranks = mesh["data_parallel"].size()
        copies = mesh["tensor_parallel"].size()
        facts = StartFacts(
            strategy=type(self).__name__,
            rule=self._reduction.rule,
            ranks=ranks,
            place=f"{ranks} data-parallel x {copies} tensor-parallel ranks ({dist.get_backend()})",
            window=run.loop.accumulation,
            last_window=run.loop.short_last_window,
            normalizes_by_rank=normalizes_by_rank(run.module),
            drops_out=drops_out(run.module),
        )
        return start_line(facts)

    def facts(self) -> StrategyFacts:
        """Return what determines the mathematics of a run in training."""
        return StrategyFacts(
            rule=self._reduction.rule,
            accumulation=self._run.loop.accumulation,
            samples=self._batches.samples,
            given=self._changed_options,
        )

    @override
    def teardown(self) -> None:
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        for hook in self._output_hooks:
            hook.remove()
        self._output_hooks.clear()
        super().teardown()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # The engine gathers the shards of all ranks.
        if self._faults.ends_apart():
            return {}
        return super().lightning_module_state_dict()

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce a tensor over the ranks. The mean of integers keeps its decimals, unlike Lightning's."""
        if averages_integers(tensor, reduce_op):
            return mean_of_integers(tensor, lambda wide: self.reduce(wide, group, reduce_op))
        return super().reduce(tensor, group, reduce_op)


def _note_output(module: nn.Module, inputs: object, output: object) -> None:  # noqa: ARG001  # as torch calls it
    """Note what a sharded module returns in a training step: FSDP2 reduces in the backward of its output."""
    for _, leaf in leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            note_exchange("the sharded model", leaf)
