"""How do you average over padded tokens with Accelerate, over all processes and accumulated batches?

`torchrun --nproc-per-node 2 examples/accelerate_ddp.py` (or `accelerate launch`) compares the weights with those of one
process. `accelerator.backward` divides every loss by `gradient_accumulation_steps`. Tell the reducer, so that
it does not divide again.
"""

import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgReducer, split_batches

EPOCHS = 3
WINDOW = 2
TOKENS = 11
LENGTH = 12


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS))


def new_loader(batch_size: int) -> DataLoader[Any]:
    inputs = torch.randint(TOKENS, (24, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(24) % (LENGTH - 1) + 1
    targets = inputs.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)
    return DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size)


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)


def train(accelerator: Accelerator) -> nn.Module:
    module = new_model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.5))
    loader = split_batches(new_loader(6))  # instead of Accelerate's own, which repeats samples to fill batches up
    reducer = GradAvgReducer(reduction="weighted_mean")
    reducer.register(model)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = mean_loss(model, inputs, targets)
                tokens = (targets != -100).sum()
                loss = reducer.weigh(loss, weight=tokens, samples=loader.samples, divided_by=WINDOW)
                accelerator.backward(loss)
                optimizer.step()  # at the end of each window, as Accelerate sees to
                optimizer.zero_grad()
    return module


def on_one_process() -> nn.Module:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(EPOCHS):
        for inputs, targets in new_loader(6 * WINDOW):
            optimizer.zero_grad()
            mean_loss(model, inputs, targets).backward()
            optimizer.step()
    return model


def main() -> None:
    if "RANK" not in os.environ:  # which torchrun sets, and accelerate launch for several processes
        sys.exit("Start this example by: torchrun --nproc-per-node 2 examples/accelerate_ddp.py")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    pairs = zip(train(accelerator).parameters(), on_one_process().parameters(), strict=True)
    difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
    accelerator.print(f"{accelerator.num_processes} processes: largest difference to one process {difference:.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
