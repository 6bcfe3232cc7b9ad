"""How far rounding alone moves a run apart: `python -m benchmarks.rounding`.

Two runs start from the same weights and read the same batches. The first computes each batch at once. The second
computes it in two halves and averages their gradients, as two ranks do: the exact result is the same, and the order of
the sums is not. For comparison, the second run is repeated with a fault: it averages the means of 40 and 24 samples as
if they were equal.

Columns: the relative difference (L2 norm) of the gradients of the first step, of the weights after 1, 100 and 1000
steps, and the difference of the loss of step 1000. A difference of weights is relative to how far the first run has
moved from the initial weights, so 1 means that nothing agrees.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

__all__ = ["main"]

SAMPLES = 64
FEATURES = 32
CHECKED = (1, 100, 1000)
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.05),
    "SGD, momentum 0.9": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-3),
}


class Arithmetic(NamedTuple):
    """The types that a run computes in.

    Attributes:
        name: As Lightning's `precision` calls it, in words.
        weights: The type of weights and optimizer state.
        autocast: Whether forward and backward run under autocast to bfloat16.
    """

    name: str
    weights: torch.dtype
    autocast: bool = False

    def forward(self) -> AbstractContextManager[object]:
        """Return the context of a forward."""
        if self.autocast:
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext()


ARITHMETICS = (
    Arithmetic("float64", torch.float64),
    Arithmetic("float32", torch.float32),
    Arithmetic("bf16-mixed", torch.float32, autocast=True),
    Arithmetic("bf16-true", torch.bfloat16),
)


class Trajectory(NamedTuple):
    """What is kept of a run: first gradient, weights at the start and after the checked steps, and last loss."""

    gradient: Tensor
    start: Tensor
    weights: list[Tensor]
    loss: float


def _batches(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(FEATURES, 1, generator=generator, dtype=torch.float64)
    while True:
        inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        yield inputs.to(dtype), (inputs @ teacher).sin().to(dtype)


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


def _train(arithmetic: Arithmetic, optimizer: str, sizes: Sequence[int]) -> Trajectory:
    """Train on batches that are cut into parts of these sizes, whose mean losses are averaged without weights."""
    torch.manual_seed(0)
    hidden = 64
    layers = (nn.Linear(FEATURES, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
    model = nn.Sequential(*layers, nn.Linear(hidden, 1)).to(arithmetic.weights)
    parameters = list(model.parameters())
    start = _flat(parameters)
    steps = OPTIMIZERS[optimizer](model.parameters())
    batches = _batches(arithmetic.weights)
    weights: list[Tensor] = []
    gradient = start
    loss = 0.0
    for step in range(1, CHECKED[-1] + 1):
        inputs, targets = next(batches)
        loss = 0.0
        of_parts: list[tuple[Tensor, ...]] = []
        for part, wanted in zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True):
            with arithmetic.forward():
                part_loss = nn.functional.mse_loss(model(part), wanted)
            of_parts.append(torch.autograd.grad(part_loss, parameters))
            loss += part_loss.item() / len(sizes)
        for parameter, *gradients in zip(parameters, *of_parts, strict=True):
            # Gloo and NCCL add in the type of the gradients; of two addends there is one order only.
            parameter.grad = torch.stack(gradients).sum(0) / len(sizes)
        if step == 1:
            gradient = _flat([parameter.grad for parameter in parameters])
        steps.step()
        if step in CHECKED:
            weights.append(_flat(parameters))
    return Trajectory(gradient, start, weights, loss)


def _row(whole: Trajectory, cut: Trajectory) -> str:
    gradient = float((cut.gradient - whole.gradient).norm() / whole.gradient.norm())
    apart = []
    for weights_of_whole, weights_of_cut in zip(whole.weights, cut.weights, strict=True):
        moved = (weights_of_whole - whole.start).norm()
        apart.append(float((weights_of_cut - weights_of_whole).norm() / moved))
    loss = abs(cut.loss - whole.loss) / whole.loss
    return " ".join(f"{number:9.1e}" for number in (gradient, *apart, loss))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)  # as small operators are fastest
    columns = ("gradient", *(f"after {step}" for step in CHECKED), "loss")
    print(f"{'':34s}", *(f"{column:>9s}" for column in columns))  # noqa: T201  # a benchmark prints
    for optimizer in OPTIMIZERS:
        for arithmetic in ARITHMETICS:
            whole = _train(arithmetic, optimizer, [SAMPLES])
            halves = _train(arithmetic, optimizer, [SAMPLES // 2, SAMPLES // 2])
            faulty = _train(arithmetic, optimizer, [40, 24])
            for name, cut in (("rounding", halves), ("fault", faulty)):
                row = _row(whole, cut)
                print(f"{optimizer:18s}{arithmetic.name:11s}{name:9s}{row}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
