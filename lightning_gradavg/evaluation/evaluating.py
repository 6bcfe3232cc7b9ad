"""A strategy that can evaluate every sample once, on any number of ranks."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_gradavg.evaluation.evaluation import ExactEvaluation
from lightning_gradavg.monitoring.observing import ObservingStrategy
from lightning_gradavg.rules import Rule

__all__ = ["EvaluatingStrategy"]


class EvaluatingStrategy(ObservingStrategy):
    """Hands Lightning's evaluation to `ExactEvaluation`, where that is asked for.

    Args:
        rule: The reduction rule.
        exact_evaluation: Whether validation, test and prediction see each sample exactly once.
        **options: Those of `DDPStrategy`.
    """

    def __init__(self, rule: Rule, *, exact_evaluation: bool, **options: Any) -> None:
        super().__init__(rule, **options)
        self._exact_evaluation = exact_evaluation
        self._evaluation: ExactEvaluation | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        wanted = self._exact_evaluation and self.world_size > 1
        self._evaluation = ExactEvaluation(trainer, self.lightning_module) if wanted else None
        super().setup(trainer)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Lightning names the loaders here that it is about to prepare."""
        loaders = name if name is not None and name.endswith("_dataloader()") else None
        if loaders is not None and self._evaluation is not None:
            self._evaluation.put_options_back()
        super().barrier(name, *args, **kwargs)
        if loaders is not None:
            self._prepare_loaders(loaders)
            if self._evaluation is not None:
                self._evaluation.before_loaders(loaders)

    def _prepare_loaders(self, name: str) -> None:
        """Get ready for the loaders of `name`, which Lightning asked the user for and does not know the samplers of."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        evaluation = self._evaluation
        return evaluation.wrap(dataloader) if evaluation is not None and evaluation.prepares else dataloader

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._start_evaluation()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._start_evaluation()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._start_evaluation()

    def _start_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.start(self.model)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._evaluation is None:
            return super().validation_step(*args, **kwargs)
        # Not through DDP, whose forward broadcasts buffers: ranks with fewer batches would not take part.
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce a tensor over the ranks. The mean of integers is not floored, as Lightning's is on gloo."""
        if group is None and self._evaluation is not None:
            group = self._evaluation.group()
        # Lightning passes on what is not a tensor, too, whatever the annotation says.
        value: Any = tensor
        integral = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        if integral and isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if group in (None, dist.group.WORLD) and self._evaluation is not None:
            group = self._evaluation.group()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()

    @override
    def teardown(self) -> None:
        if self._evaluation is not None:
            self._evaluation.restore()
            self._evaluation = None
        super().teardown()
