"""A strategy that runs a training step once per replica, and can hand the outputs of all replicas to one loss."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_gradavg.collectives.gather import require_allowed
from lightning_gradavg.data.order import random_state, restore_random_state
from lightning_gradavg.presets import Plan
from lightning_gradavg.rates.recipe import RunRecipe
from lightning_gradavg.rates.recipe_strategy import RecipeStrategy
from lightning_gradavg.replication.equivalence import obstacles, remarks
from lightning_gradavg.replication.outputs import join_outputs
from lightning_gradavg.replication.steps import OutputsOfReplicas, ReplicaSteps, evaluate

__all__ = ["ReplicatingStrategy"]

_SEED_KEY = "replica_seed"


class ReplicatingStrategy(RecipeStrategy):
    """Runs the replicas of a loader batch on any number of ranks, so that the ranks no longer matter.

    Args:
        plan: What the user's options come to.
        recipe: What the user stated of batch and learning rate.
        **options: Those of `RecipeStrategy`.
    """

    def __init__(self, plan: Plan, recipe: RunRecipe, **options: Any) -> None:
        super().__init__(plan, recipe, **options)
        self._steps: ReplicaSteps | None = None
        self._seed = 0

    @property
    @override
    def _crosses_ranks(self) -> bool:
        return self._plan.replicated

    @property
    def num_replicas(self) -> int:
        """Chunks that each loader batch is computed in."""
        return self._plan.num_replicas or dist.get_world_size(self._group)

    @override
    def setup_distributed(self) -> None:
        """Join the process group, and go on drawing random numbers as a script on one device would.

        Lightning starts them anew from the seed here, so that ranks draw alike, which loaders see to themselves.
        """
        state = random_state()
        super().setup_distributed()
        if self._plan.replicated:
            restore_random_state(state)

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            # Before DDP wraps the module, which has objections of its own.
            self._object()
        super().setup(trainer)

    def _object(self) -> None:
        """Name what cannot be reproduced, as an error, and what differs without harm, as a warning."""
        module, plan, preset = self.lightning_module, self._plan, self._plan.preset
        assert module is not None
        world_size = dist.get_world_size(self._group)
        if preset is not None and preset.synchronizes_statistics:
            self._layer_sync = None  # ours serves CPUs and idle ranks, too
        found = obstacles(
            module,
            plan,
            world_size=world_size,
            device=self.root_device,
            static_graph=self._ddp_kwargs.get("static_graph", False),
            sync_batchnorm=self._layer_sync is not None,
        )
        if found:
            what = f"equivalent_to={preset.name!r}" if preset is not None else f"num_replicas={plan.num_replicas}"
            raise ValueError(f"{what} cannot hold:\n  " + "\n  ".join(found))
        for remark in remarks(module, plan, world_size=world_size):
            rank_zero_warn(remark)

    @override
    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        model, module, plan = self.model, self.lightning_module, self._plan
        if not plan.replicated:
            return
        assert isinstance(model, DistributedDataParallel)
        assert module is not None
        assert self._data is not None
        assert self._accumulator is not None
        # All ranks take replica 0's, at the end of the forward that changes them.
        model.broadcast_buffers = False
        shapes_result = plan.preset is None or not plan.preset.synchronizes_statistics
        self._recipe.num_replicas = self.num_replicas if shapes_result else None
        self._seed = self._agreed_seed()
        self._steps = ReplicaSteps(
            module,
            plan,
            self._data,
            model.process_group,
            self.root_device,
            seed=self._seed,
            parameters=self._accumulator.parameters,
            sparse=self._sparse,
        )
        self._steps.start()

    def _agreed_seed(self) -> int:
        """Return rank 0's seed, or that of the run that is resumed: ranks that were not seeded differ.

        Rank 0 is that of the run: ranks beside the group may hold other parts of the same replicas.
        """
        saved = self._loaded.get(_SEED_KEY) if self._loaded is not None else None
        seeds = [saved if saved is not None else int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))]
        dist.broadcast_object_list(seeds, 0)
        return seeds[0]

    @override
    def _saved(self) -> dict[str, Any]:
        return super()._saved() if self._steps is None else {**super()._saved(), _SEED_KEY: self._seed}

    @override
    def _samples(self) -> float | None:
        chunk = self._data.chunk if self._data is not None else None
        if chunk is None or self._steps is None:
            return super()._samples()
        return self._steps.weight(chunk, chunk.samples)

    @override
    def _around_step(self) -> AbstractContextManager[None]:
        return super()._around_step() if self._steps is None else self._as_replicas(self._steps)

    @contextmanager
    def _as_replicas(self, steps: ReplicaSteps) -> Iterator[None]:
        model = self.model
        # A forward for several backwards: DDP must not expect the gradients of the first, which stay local.
        several = self.num_replicas > dist.get_world_size(self._group) and not steps.gathers
        if not (several and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync):
            with steps.in_place_of("training_step"):
                yield
            return
        model.require_backward_grad_sync, self._unprepared = False, True
        try:
            with steps.in_place_of("training_step"):
                yield
        finally:
            model.require_backward_grad_sync = True

    @override
    def _take_loss(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        outputs: Any = output
        if not isinstance(outputs, OutputsOfReplicas):
            self._refuse_weight(output)
            return super()._take_loss(output)
        assert self._data is not None
        assert self._data.chunk is not None
        assert self._steps is not None
        chunk = self._data.chunk
        values: list[Tensor] = []
        for of_replica, samples in outputs:
            self._refuse_weight(of_replica)
            weight = of_replica.get("weight") if isinstance(of_replica, Mapping) else None
            loss = of_replica.get("loss") if isinstance(of_replica, Mapping) else of_replica
            if loss is None:
                raise RuntimeError(
                    "training_step returned no loss for one of the replicas of a batch. Return"
                    ' {"loss": loss, "weight": 0} for samples that are not to count.'
                )
            weighed = self._weigh(loss, weight, alone=False, samples=self._steps.weight(chunk, samples))
            self._losses.append(weighed)
            values.append(weighed.value * samples)
        mean = sum(values[1:], values[0]) / chunk.samples
        if not all(isinstance(of_replica, Mapping) for of_replica, _ in outputs):
            return mean
        rest: dict[str, Any] = {}
        for key in dict.fromkeys(key for of_replica, _ in outputs for key in of_replica if key != "loss"):
            values_of_key = [of_replica.get(key) for of_replica, _ in outputs]
            try:
                rest[key] = join_outputs(values_of_key, self.root_device)
            except (TypeError, RuntimeError):  # of no tensors, or of shapes that do not fit
                rest[key] = values_of_key
        return {**rest, "loss": mean}

    def _refuse_weight(self, output: Any) -> None:
        if self._plan.counts_replicas and isinstance(output, Mapping) and output.get("weight") is not None:
            raise ValueError(
                f'training_step returned "weight": {output["weight"]!r}, but reduction={self._rule.name!r} gives every'
                " replica the same say. Leave the weight out, or leave reduction out."
            )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        module, step = self.lightning_module, super().validation_step
        context = self.precision_plugin.val_step_context
        return evaluate(module, self._plan, self.num_replicas, "validation", step, args, kwargs, context)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        module, step = self.lightning_module, super().test_step
        context = self.precision_plugin.test_step_context
        return evaluate(module, self._plan, self.num_replicas, "test", step, args, kwargs, context)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        require_allowed()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def _start_evaluation(self) -> None:
        if self._steps is not None:
            self._steps.stop()
        super()._start_evaluation()

    @override
    def _end_evaluation(self) -> None:
        super()._end_evaluation()
        if self._steps is not None:
            self._steps.start()

    @override
    def _describe(self) -> str:
        if self._steps is None:
            return ""
        gathered = ", training_step_end gets all outputs" if self._steps.gathers else ""
        if self._recipe.num_replicas is None:
            return f"; equivalent to single_device{gathered}"
        replicas, world_size = self.num_replicas, dist.get_world_size(self._group)
        idle = world_size - -(-replicas // -(-replicas // world_size))
        without = f" ({idle} of {world_size} ranks without one)" if idle else ""
        reference = f"; equivalent to {self._plan.preset.name}" if self._plan.preset is not None else ""
        return f"{reference}; {replicas} replicas{without}{gathered}"

    @override
    def teardown(self) -> None:
        if self._steps is not None:
            self._steps.stop()
            self._steps = None
        super().teardown()
