"""A DDP strategy that registers the reduction with DDP: what runs in the hook, over which groups, and by which wire."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_gradavg.reduction.accumulate import Accumulator
from lightning_gradavg.reduction.groups import gather_places, twin_group
from lightning_gradavg.reduction.hooks import adapt_hook, power_sgd
from lightning_gradavg.reduction.reducer import AveragingHook, Reducer
from lightning_gradavg.rules import RULES, Rule
from lightning_gradavg.wire.build import build_exchange
from lightning_gradavg.wire.exchange import Exchange
from lightning_gradavg.wire.options import WireOptions

__all__ = ["HookingStrategy"]


class HookingStrategy(DDPStrategy):
    """Has DDP run a reducer's hook, unless DDP's own reduction is what the rule asks for.

    Args:
        rule: The reduction rule.
        wire: How buckets travel.
        **options: Those of `DDPStrategy`.
    """

    def __init__(self, rule: Rule, *, wire: WireOptions, **options: Any) -> None:
        super().__init__(**options)
        self._rule = rule
        self._wire = wire
        self._exchange: Exchange | None = None
        hooked = self._ddp_comm_hook is not None or self._ddp_comm_wrapper is not None or wire.asked_for is not None
        # Stock DDP is the mean; a hook of any kind would change how it divides, and so its bits.
        self._stock = rule is RULES["mean"] and not hooked
        self._accumulator: Accumulator | None = None
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._reduced: list[str] = []
        self._sparse: set[int] = set()
        self._withheld = False
        self._static_graph_seen = False
        self._warned: set[str] = set()

    @property
    def _crosses_ranks(self) -> bool:
        """Whether gradients of one rank's loss reach another within the backward."""
        return False

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _num_nodes_seen(self) -> int:
        return len({place.node for place in self._accumulator.reducer.places}) if self._accumulator else self.num_nodes

    @override
    def setup(self, trainer: Trainer) -> None:
        self._accumulator = None
        self._static_graph_seen = False
        super().setup(trainer)

    @override
    def _register_ddp_hooks(self) -> None:
        """Register the reduction, on CPU as on CUDA, where Lightning would drop a hook without a word."""
        model, module = self.model, self.lightning_module
        assert isinstance(model, DistributedDataParallel)
        assert module is not None
        manual = not module.automatic_optimization
        if manual and model.static_graph and not hasattr(self, "_pl_static_graph_delay_done"):
            raise ValueError(
                "static_graph=True with manual optimization needs a lightning that starts the reduction of the first"
                f" backward, as 2.6 does; in lightning {lightning.__version__} it would not be reduced."
                " Leave static_graph out, or use a newer lightning."
            )
        self._frozen = [(name, p) for name, p in model.module.named_parameters() if not p.requires_grad]
        names = {p: name for name, p in model.module.named_parameters()}
        # Now: a user may toggle which parameters require gradients.
        self._reduced = [names[p] for p in model._build_params_for_reducer()[0]]
        if self._stock and not (model.static_graph and self._accumulates):
            return
        self._sparse = {
            id(layer.weight)
            for layer in model.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        }
        reducer = self._make_reducer(model, manual=manual)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._accumulator = Accumulator(reducer, parameters, preserves_gradients=manual)
        model.register_comm_hook(None, reducer.hook)

    @property
    def _accumulates(self) -> bool:
        """Whether a window may have several micro-batches."""
        trainer = self._trainer
        return trainer.accumulate_grad_batches > 1 or any(
            isinstance(callback, GradientAccumulationScheduler)
            for callback in trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        )

    def _make_reducer(self, model: DistributedDataParallel, *, manual: bool) -> Reducer:
        """Return what reduces the gradients. Call it on all ranks."""
        group = model.process_group
        rank, places = dist.get_rank(group), gather_places(self.node_rank, group)
        trained = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        hook: AveragingHook | None = None
        if self._ddp_comm_hook is not None or self._ddp_comm_wrapper is not None:
            user_hook = self._ddp_comm_hook or allreduce_hook
            hook = adapt_hook(user_hook, self._ddp_comm_state, self._ddp_comm_wrapper, group)
        if self._wire.power_sgd_rank is not None:
            hook = power_sgd(self._wire.power_sgd_rank, self._wire.power_sgd_start_step, group, trained)
        if hook is None and not self._stock:
            self._exchange, obstacle = build_exchange(self._wire, places, rank, group, self.root_device, trained)
            if obstacle is not None:
                self._warn(obstacle)
        return Reducer(
            self._rule,
            places,
            rank,
            group,
            self.root_device,
            hook,
            manual,
            not self._crosses_ranks,
            exchange=self._exchange,
            bucket_group=self._bucket_group(group) if hook is None and self._exchange is None else None,
        )

    def _bucket_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """Return a process group for the buckets alone, where a hook would otherwise wait for the totals."""
        # On an accelerator nothing waits on the host; and where DDP skips buckets, the last may not come.
        skips = self._ddp_kwargs.get("skip_all_reduce_unused_params", False)
        if not self._rule.uses_weight or dist.get_backend(group) != "gloo" or dist.get_world_size(group) == 1 or skips:
            return None
        return twin_group(group, self._timeout)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep the gradients of a micro-batch local.

        With a static graph DDP must see its first backward, or an assertion of torch's reducer fails; there the hook
        runs, and leaves the buckets as they are.
        """
        model = self.model
        static = isinstance(model, DistributedDataParallel) and model.static_graph and self._accumulator is not None
        if not static or self._static_graph_seen:
            with super().block_backward_sync():
                yield
            return
        self._withheld = True
        try:
            yield
        finally:
            self._withheld = False

    @override
    def teardown(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        super().teardown()

    def on_train_end(self) -> None:
        """Check the weights of the last step, which no further step does."""
        super().on_train_end()
        if self._accumulator is not None:
            self._accumulator.reducer.check()

    def _warn(self, message: str, *, everywhere: bool = False) -> None:
        if message not in self._warned:
            self._warned.add(message)
            (warnings.warn if everywhere else rank_zero_warn)(message, stacklevel=2)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the parameters that DDP only counts when it misses their gradients."""
        message = str(exception)
        indices = re.search(r"Parameter indices which did not receive grad for rank (\d+): ([\d ]+)", message)
        if indices is None or not self._reduced:
            super().on_exception(exception)
            return
        unused = ", ".join(self._reduced[int(index)] for index in indices[2].split())
        advice = (
            f"parameters without gradient on rank {indices[1]}: {unused}. They are not used in the loss that"
            " training_step returns. If that is meant, use GradAvgStrategy(find_unused_parameters=True), or freeze"
            " them with requires_grad_(False)."
        )
        exception.args = (advice,)
