"""The loops in which a user says where a window ends, behind one interface: the Trainer's, Fabric's and torch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from ranks import RankEnvironment
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg import GradAvgReducer
from lightning_gradavg.fabric import GradAvgStrategy


class OfTrainer:
    """Manual optimization, within a training step of a module."""

    def __init__(self, module: LightningModule) -> None:
        self.optimizer: Any = module.optimizers()
        self.backward = module.manual_backward

    def set_up(self, module: nn.Module) -> Any:
        return module

    def no_sync(self, model: Any, *, enabled: bool) -> Any:
        return self.optimizer.toggle_model(sync_grad=not enabled)


class OfFabric:
    """A loop with Fabric."""

    def __init__(self, strategy: Any = None, nodes: Sequence[int] | None = None, **options: Any) -> None:
        environment = RankEnvironment(nodes)
        self.fabric = Fabric(
            accelerator="cpu",
            devices=environment.ranks_on_node,
            num_nodes=environment.num_nodes,
            strategy=GradAvgStrategy(**options) if strategy is None else strategy,
            plugins=[environment],
        )
        self.strategy: Any = self.fabric.strategy
        self.set_up, self.backward = self.fabric.setup, self.fabric.backward
        self.fabric.launch()

    def no_sync(self, model: Any, *, enabled: bool) -> Any:
        return self.fabric.no_backward_sync(model, enabled=enabled)


class OfTorch:
    """A loop without Lightning."""

    def __init__(self, nodes: Sequence[int] | None = None, ddp: Any = None, **options: Any) -> None:
        self.reducer = GradAvgReducer(**options)
        self.ddp, self.node = ddp or {}, None if nodes is None else nodes[dist.get_rank()]

    def set_up(self, module: nn.Module) -> Any:
        model = DistributedDataParallel(module, **self.ddp)
        self.reducer.register(model, node=self.node)
        return model

    def backward(self, loss: Any, *, retain_graph: bool | None = None, **weight: Any) -> None:
        self.reducer.weigh(loss, **weight).backward(retain_graph=retain_graph)

    @contextmanager
    def no_sync(self, model: Any, *, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        with model.no_sync():
            yield
