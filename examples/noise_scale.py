"""How large may the batch become? The gradient noise scale, estimated from the norms of the ranks' gradients.

`python examples/noise_scale.py` trains with two processes that share batches of 9 samples. The noise scale is
tr(Sigma) / |G|^2, with Sigma the covariance of single samples' gradients and G their mean (McCandlish et al. 2018,
arXiv 1812.06162). Here it is known: a sample's gradient is the sample itself, drawn around (1, ..., 1) with a standard
deviation of 3 in each of 100 directions, so the scale is 100 * 9 / 100 = 9. Linear scaling is safe up to
a batch of about that size.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy

QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class NoiseScale:
    """Estimates the noise scale in samples, under a rule that is the mean over the samples.

    With b_r of B samples on each of W ranks, A = sum(b_r / B |g_r|^2) and N = |g|^2,
    (A - N) B / (W - 1) is an unbiased estimate of tr(Sigma), and (W N - A) / (W - 1) one of |G|^2. Each is averaged
    separately, because the mean of their ratios is biased.
    """

    def __init__(self) -> None:
        self.trace = 0.0
        self.squared_gradient = 0.0

    def note(self, samples: Tensor, squared_local: Tensor, squared: float) -> None:
        """Note a step: each rank's number of samples, the squared norm of its gradient, and that of the reduced one."""
        total = samples.sum().item()
        ranks = int((samples > 0).sum())
        mean_of_squares = (samples / total * squared_local).sum().item()
        if ranks > 1:  # the gradient of a single rank has no spread
            self.trace += (mean_of_squares - squared) * total / (ranks - 1)
            self.squared_gradient += (ranks * squared - mean_of_squares) / (ranks - 1)

    def value(self) -> float:
        """Return the noise scale; NaN while an average is not above 0, which takes more steps."""
        if self.trace <= 0 or self.squared_gradient <= 0:
            return float("nan")
        return self.trace / self.squared_gradient


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(100))
        self.noise = NoiseScale()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (batch[0] @ self.w).mean()
        # This rank's own gradient, by a backward of its own: that of the training step ends in the reduction. Where
        # that costs too much, do it in every n-th step.
        (gradient,) = torch.autograd.grad(loss, [self.w], retain_graph=True)
        self.local = torch.stack([torch.tensor(float(len(batch[0]))), gradient.square().sum()])
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        of_ranks = [torch.empty_like(self.local) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, self.local)
        samples, squared_local = torch.stack(of_ranks, dim=1)
        reduced: Any = self.w.grad
        self.noise.note(samples, squared_local, reduced.square().sum().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    module = Linear()
    strategy = GradAvgStrategy(split_batches=True)
    samples = 1 + 3 * torch.randn(9 * 100, 100, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(samples), batch_size=9))
    if trainer.is_global_zero:
        print(f"noise scale {module.noise.value():.2f} samples, of {trainer.global_step} steps; by definition 9")


if __name__ == "__main__":
    main()
