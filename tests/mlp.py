"""A small network, and what one process makes of it: for whatever depends on the model or on how it is trained."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

COUNTS = (3, 1)


class MLP(LightningModule):
    """8-16-4 with tanh and cross-entropy; `variant` names what is special about it."""

    def __init__(self, variant: str = "", lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.variant, self.lr = variant, lr
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        if variant == "unused":
            self.extra = nn.Linear(3, 3)
        if variant == "frozen":
            self.first.requires_grad_(False)
        self.body = nn.Sequential(self.first, nn.Tanh(), self.second)
        # In a list, so that the compiled module's parameters are not registered under a second name.
        self.calls = [torch.compile(self.body, backend="aot_eager") if variant == "compile" else self.body]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.variant.startswith("checkpoint"):
            reentrant = self.variant == "checkpoint_reentrant"
            hidden = checkpoint(
                lambda y: torch.tanh(self.first(y)), x.requires_grad_(reentrant), use_reentrant=reentrant
            )
            return checkpoint(self.second, hidden, use_reentrant=reentrant)
        return self.calls[0](x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


def samples(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    size = sum(COUNTS)
    return [
        (torch.randn(size, 8, generator=generator, dtype=dtype), torch.randint(4, (size,), generator=generator))
        for _ in range(steps)
    ]


def reference(variant: str, steps: int, window: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Train one process on whole global batches, without Lightning."""
    model = MLP("frozen" if variant == "frozen" else "").to(dtype)
    optimizer = model.configure_optimizers()
    batches = samples(steps, dtype)
    for start in range(0, steps, window):
        x, y = (torch.cat(part) for part in zip(*batches[start : start + window], strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return dict(model.state_dict())


def assert_reference(ranks: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert [rank["rank"].item() for rank in ranks] == [0, 1]
    for name, value in expected.items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], value, rtol=tolerance, atol=tolerance)
