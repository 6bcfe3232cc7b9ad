"""How do you train the same in a plain PyTorch loop on any number of processes?

`torchrun --nproc-per-node 2 examples/plain_pytorch.py` trains under DistributedDataParallel, and once more without it,
and compares the weights of both with those of one process. With 21 samples in batches of 8, the last
batch gives the processes 3 and 2.
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgReducer, average_gradients, split_batches

EPOCHS = 3


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))


def new_loader() -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, 84).reshape(21, 4)
    data = TensorDataset(inputs, inputs.prod(1, keepdim=True).exp())
    return DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, loader: Iterable[Any], backward: Callable[[Tensor], None]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return model


def with_ddp() -> nn.Module:
    model = DistributedDataParallel(new_model())
    loader = split_batches(new_loader())
    reducer = GradAvgReducer(reduction="weighted_mean")  # weighs the loss; DDP averages
    reducer.register(model)

    def backward(loss: Tensor) -> None:
        reducer.weigh(loss, samples=loader.samples).backward()

    return train(model, loader, backward)


def without_ddp() -> nn.Module:
    model = new_model()
    loader = split_batches(new_loader())

    def backward(loss: Tensor) -> None:
        loss.backward()
        average_gradients(model, reduction="weighted_mean", weight=loader.samples)

    return train(model, loader, backward)


def main() -> None:
    if not dist.is_initialized():
        if "RANK" not in os.environ:  # which every launcher sets
            sys.exit("Start this example by: torchrun --nproc-per-node 2 examples/plain_pytorch.py")
        dist.init_process_group("gloo")
    reference = train(new_model(), new_loader(), lambda loss: loss.backward())
    for name, trained in (("DDP", with_ddp()), ("average_gradients", without_ddp())):
        pairs = zip(trained.parameters(), reference.parameters(), strict=True)
        difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
        if dist.get_rank() == 0:
            print(f"{name}, {dist.get_world_size()} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
