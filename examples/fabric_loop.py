"""How do you train the same in your own Fabric loop on any number of processes?

`python examples/fabric_loop.py` trains on two processes on padded sequences, two batches to a step, and compares the
weights with those of one process, in plain PyTorch.
"""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg.fabric import GradAvgStrategy

EPOCHS = 3
WINDOW = 2
TOKENS = 11
LENGTH = 40


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS))


def new_loader() -> DataLoader[Any]:
    torch.manual_seed(1)
    lengths = torch.tensor([2, 3, 4, LENGTH] * 7)
    tokens = torch.randint(TOKENS, (len(lengths), LENGTH + 1))
    targets = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)
    return DataLoader(TensorDataset(tokens[:, :-1], targets), batch_size=9)  # 9, 9, 9 and 1: none for rank 1


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, (targets != -100).sum()


def train(fabric: Fabric) -> nn.Module:
    module = new_model()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
    loader = fabric.setup_dataloaders(new_loader())
    for _ in range(EPOCHS):
        for index, batch in enumerate(loader, start=1):
            ends_window = index % WINDOW == 0 or index == len(loader)
            with fabric.no_backward_sync(model, enabled=not ends_window):
                loss, tokens = mean_loss(model, *batch)
                fabric.backward(loss, weight=tokens)  # the mean over the window's tokens: nothing is to be divided
            if ends_window:
                optimizer.step()
                optimizer.zero_grad()
    return module


def on_one_process() -> nn.Module:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = list(new_loader())
    for _ in range(EPOCHS):
        for start in range(0, len(batches), WINDOW):
            sum_of_losses = torch.tensor(0.0)
            sum_of_tokens = torch.tensor(0)
            for batch in batches[start : start + WINDOW]:
                loss, tokens = mean_loss(model, *batch)
                sum_of_losses = sum_of_losses + loss * tokens
                sum_of_tokens = sum_of_tokens + tokens
            (sum_of_losses / sum_of_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def main() -> None:
    strategy = GradAvgStrategy(reduction="weighted_mean", split_batches=True)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    pairs = zip(train(fabric).parameters(), on_one_process().parameters(), strict=True)
    difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
    fabric.print(f"{fabric.world_size} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
