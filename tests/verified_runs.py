"""What the rows of `test_ranks_verify.py` are made of: layers, training steps, optimizers, hooks and loaders.

A row is built on every rank of a run, and again in the one process that judges it. There, `world_size()` is 1.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from orders import Augmented
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy, dropout, pad, softplus
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)
from toys import GATHERS

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy, gather, global_mean

MakeLayers = Callable[[], nn.Module]
Step = Callable[[Any, Any], Any]
"""A training step: `(module, batch) -> loss`, or what else a training step may return."""
MakeLoader = Callable[[], Any]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class FunctionModule(LightningModule):
    """A module whose layers, training step and hooks are functions of a row."""

    def __init__(self, make_layers: MakeLayers, step: Step, hooks: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.net = make_layers()
        self.step = step
        self.batch_idx = 0
        for name, hook in hooks.items():
            setattr(self, name, MethodType(hook, self))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return self.step(self, batch)


# Layers. Inputs have 6 numbers, and there are 3 classes.


def do_nothing(net: nn.Sequential) -> None:
    pass


def make_layers(*middle: nn.Module, change: Callable[[nn.Sequential], Any] = do_nothing) -> nn.Sequential:
    """Return two linear layers with others between them, after a change."""
    net = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))
    change(net)
    return net


def make_batch_norm(**options: Any) -> nn.Module:
    return make_layers(nn.BatchNorm1d(8, **options))


def make_dropout() -> nn.Module:
    return make_layers(nn.Dropout(0.5))


def make_frozen() -> nn.Module:
    """Return layers with dropout, of which the first one is frozen."""
    net = make_layers(nn.Dropout(0.5))
    net[0].requires_grad_(requires_grad=False)
    return net


def make_generator_and_critic() -> nn.Module:
    return nn.ModuleList([nn.Linear(3, 6), make_layers()])


def make_words(dropped: float = 0.0) -> nn.Module:
    """Return a model of 7 words, with this probability of dropout."""
    return nn.Sequential(nn.Embedding(7, 8), nn.Dropout(dropped), nn.Linear(8, 7))


def make_words_with_dropout() -> nn.Module:
    return make_words(0.3)


class Similarity(nn.Module):
    """Layers, and a scale for the products of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = make_layers()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rows(inputs)


class OneNumber(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w * inputs.sum(1, keepdim=True)


class Texts(nn.Module):
    """A transformer over padded texts, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.table = nn.Embedding(7, 8)
        self.out = nn.Linear(8, 7)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.rows(self.table(batch), src_key_padding_mask=batch == 0))


def make_layers_times_ranks() -> nn.Module:
    """Return layers whose initial weights depend on the number of ranks."""
    return make_layers(change=lambda net: net[0].weight.data.mul_(world_size()))


def make_layers_by_rank() -> nn.Module:
    """Return layers whose initial weights depend on the rank, as without a seed."""
    return make_layers(change=lambda net: net[0].weight.data.mul_(1 + rank()))


def make_layers_with_tiny_gradient() -> nn.Module:
    """Return layers with a tiny gradient of one bias, which is multiplied by the number of ranks."""
    return make_layers(change=lambda net: net[0].bias.register_hook(lambda gradient: 1e-9 * world_size() * gradient))


def make_clamped_layers() -> nn.Module:
    net = make_layers()
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return net


def make_layers_with_buffer() -> nn.Module:
    return make_layers(change=lambda net: net.register_buffer("seen", torch.zeros(())))


def make_layers_with_temperature() -> nn.Module:
    """Return layers with a plain tensor, which is no parameter."""
    net = make_layers()
    net.temperature = torch.ones((), requires_grad=True)
    return net


def make_layers_with_registered_temperature() -> nn.Module:
    net = make_layers()
    net.temperature = nn.Parameter(torch.ones(()))
    return net


def make_layers_in_list() -> nn.Module:
    """Return layers with a Python list of layers, whose parameters are none of the module."""
    net = make_layers()
    vars(net)["heads"] = [nn.Linear(3, 3)]
    return net


class FrozenEncoder(Texts):
    """A transformer of which only the last layer trains, over what the others compute in evaluation, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(self.rows, 1)

    def forward(self, batch: Tensor) -> Tensor:
        self.layers.eval()
        with torch.no_grad():
            rows = self.layers(self.table(batch), src_key_padding_mask=batch == 0)
        # It leaves out what is padding in all texts.
        return self.out(pad(rows, (0, 0, 0, batch.shape[1] - rows.shape[1])))


class NoisyLinear(nn.Linear):
    """Moves its weight, whose first dimension is a multiple of the batch, by noise."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + 0.1 * torch.randn_like(self.weight), self.bias)


def make_noisy_layers() -> nn.Module:
    return nn.Sequential(NoisyLinear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class ScaledByRank(nn.Module):
    """Multiplies by a number that depends on the rank."""

    def forward(self, x: Tensor) -> Tensor:
        moved = x + 1
        return moved * (1 + 0.1 * rank())


def make_normalizing_generator_and_critic() -> nn.Module:
    return nn.ModuleList([nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6)), make_layers()])


# Training steps. Functions that are called `make_...` return one.


def call(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


def make_step(forward: Callable[[Any, Tensor], Tensor] = call, **options: Any) -> Step:
    """Return a step of cross-entropy; `options` are those of `cross_entropy`."""
    return lambda module, batch: cross_entropy(forward(module.net, batch[0]), batch[1], **options)


mean_loss = make_step()
sum_loss = make_step(reduction="sum")
# The mean over the samples of other classes, as over tokens that are not padding.
mean_loss_without_class_0 = make_step(ignore_index=0)
CLASS_WEIGHTS = torch.tensor([1.0, 0.1, 0.3])
mean_loss_of_weighted_classes = make_step(weight=CLASS_WEIGHTS)


def call_compiled(net: nn.Module, x: Tensor) -> Tensor:
    return torch.compile(net)(x)


def call_reentrant(net: nn.Module, x: Tensor) -> Tensor:
    """Call a net whose activations are computed again in the backward, with the same random numbers."""
    return checkpoint(net, x.requires_grad_(), use_reentrant=True)


def call_checkpointed(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(net, x, use_reentrant=False)


def call_and_write(net: nn.Module, x: Tensor) -> Tensor:
    """Change in place what a layer returned, and a view of it."""
    outputs = net(x)
    outputs[:, 0] += 1
    outputs[:, 1].mul_(2)
    return outputs.relu_()


def call_with_draw_of_python(net: nn.Module, x: Tensor) -> Tensor:
    return net(x * random.betavariate(1, 1))


def call_with_draw_of_batch(net: nn.Module, x: Tensor) -> Tensor:
    """Draw one number for a whole batch."""
    return net(x * torch.rand(1))


def call_with_noise_of_each(net: nn.Module, x: Tensor) -> Tensor:
    """Add noise to each sample, by a generator that is seeded for it."""
    noise = []
    for row in x:
        generator = torch.Generator().manual_seed(int(1000 * row.abs().sum()))
        noise.append(torch.randn(6, generator=generator))
    return net(x + torch.stack(noise))


def call_with_normalized_gradient(net: nn.Module, x: Tensor) -> Tensor:
    """Call a net whose gradient is normalized over all samples of a batch, while the loss stays as it is."""
    outputs = net(x)
    outputs.register_hook(lambda gradient: gradient / gradient.norm())
    return outputs


def make_scaled_step(factor: Callable[[], float], step: Step = mean_loss) -> Step:
    return lambda module, batch: factor() * step(module, batch)


def one_over_ranks() -> float:
    return 1 / world_size()


def infinite() -> float:
    return math.inf


def hundredth_of_ranks() -> float:
    return 0.01 * world_size()


def scale_by_calls(module: Any, batch: Any) -> Any:
    """Multiply the loss by the number of calls, which the module keeps."""
    counter = vars(module).setdefault("factors", iter(range(1, 99)))
    return next(counter) * mean_loss(module, batch)


def make_weighted_step(step: Step, weight: Callable[[Any], Tensor]) -> Step:
    return lambda module, batch: {"loss": step(module, batch), "weight": weight(batch).sum()}


def weigh_by_class(batch: Any) -> Tensor:
    """Return the weights of a class-weighted mean, which a plain float32 tensor has."""
    return CLASS_WEIGHTS[batch[1]]


def count_without_class_0(batch: Any) -> Tensor:
    return batch[1] != 0


def count_tokens(batch: Tensor) -> Tensor:
    return batch != 0


def count_none(batch: Any) -> Tensor:
    return torch.zeros(())


def count_one(batch: Any) -> Tensor:
    return torch.ones(())


def make_penalized_step(step: Step) -> Step:
    """Return a step whose loss has an L2 penalty."""

    def penalized(module: Any, batch: Any) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in module.parameters())
        return step(module, batch) + 0.3 * penalty

    return penalized


def weigh_by_position(module: Any, batch: Any) -> Tensor:
    """Weigh the first samples of a batch most, whichever these are."""
    losses = make_step(reduction="none")(module, batch)
    return (losses / torch.arange(1, len(losses) + 1)).mean()


def global_means(module: Any, batch: Any) -> Tensor:
    """The loss of every sample, and a penalty of those of a class other than 0, each by its count on all ranks."""
    outputs = module.net(batch[0])
    is_counted = batch[1] != 0
    totals = cross_entropy(outputs, batch[1], reduction="sum"), outputs[is_counted].square().sum()
    mean, mean_of_counted = global_mean(totals, (len(outputs), is_counted.sum()))
    return mean + mean_of_counted


def spread_of_batch(module: Any, batch: Any) -> Tensor:
    """Return a loss that depends on all samples of a batch together."""
    return module.net(batch[0]).var(dim=0, correction=0).sum()


def sum_of_two_means(module: Any, batch: Any) -> Tensor:
    """Return a mean over the samples of some classes and one over all."""
    outputs = module.net(batch[0])
    return cross_entropy(outputs, batch[1], ignore_index=0) + outputs.square().mean()


def square_of_batch(module: Any, batch: Any) -> Tensor:
    return module.net(batch).square().mean()


def mean_product(module: Any, batch: Any) -> Tensor:
    return (module.net(batch) * batch).mean()


def gather_at_once(_: Any, rows: Tensor) -> Tensor:
    """Gather the rows of all ranks by one collective, without their gradient."""
    rows_of_all = torch.zeros(world_size() * len(rows), rows.shape[1], dtype=rows.dtype)
    # The new name from torch 2.13 on.
    all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    all_gather_single(rows_of_all, rows)
    return rows_of_all


DETACHED: dict[str, Any] = {
    "`self.all_gather`": lambda module, rows: module.all_gather(rows).flatten(0, 1),
    "`torch.distributed.all_gather_single`": gather_at_once,
}
"""Ways to gather all ranks' rows without gradient."""


def make_contrastive_step(way: str) -> Step:
    """Return the loss of this rank's rows against those of all, which are gathered in a way."""
    gather = (GATHERS | DETACHED)[way]

    def step(module: Any, batch: Any) -> Tensor:
        rows = module.net(batch[0])
        rows_of_all = gather(module, module.net(batch[0] + 0.1))
        targets = torch.arange(len(rows)) + rank() * len(rows)
        return cross_entropy(rows @ rows_of_all.T, targets)

    return step


def contrast_all_rows(module: Any, batch: Any) -> Tensor:
    """Return the loss of all ranks' rows against each other; this rank's own have a gradient, and so has the scale."""
    rows = module.net(batch[0])
    if world_size() > 1:
        of_ranks = module.all_gather(rows)
        of_ranks[rank()] = rows
        rows = of_ranks.flatten(0, 1)
    return cross_entropy(module.net.scale * rows @ rows.T, torch.arange(len(rows)))


def make_manual_step(step: Step = mean_loss, *, every: int = 1, outside: bool = False) -> Step:
    """Return manual optimization, every so many batches; `outside` runs the backward past Lightning."""

    def manual(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()
        loss = step(module, batch) / every
        if module.batch_idx % every == 0:
            optimizer.zero_grad()
        if outside:
            no_sync: Any = nullcontext()
            if world_size() > 1:
                no_sync = module.trainer.strategy.model.no_sync()
            with no_sync:
                loss.backward()
        else:
            module.manual_backward(loss)
        if (module.batch_idx + 1) % every == 0:
            module.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

    return manual


def step_on_sum(module: Any, batch: Any) -> None:
    """Take a step on a sum over samples that count twice, in manual optimization."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(sum_loss(module, batch), weight=2 * len(batch[0]))
    optimizer.step()


def step_once_per_rank(module: Any, batch: Any) -> None:
    """Take as many optimizer steps in a batch as there are ranks."""
    for _ in range(world_size()):
        make_manual_step()(module, batch)
    module.log("loss", mean_loss(module, batch), sync_dist=True)


def train_generator_and_critic(module: Any, batch: Any) -> None:
    """Train a generator and a critic, which have an optimizer each."""
    generator, critic = module.net
    optimizer_of_generator, optimizer_of_critic = module.optimizers()
    generated = generator(torch.randn(len(batch[0]), 3))
    optimizer_of_critic.zero_grad()
    module.manual_backward((softplus(-critic(batch[0])) + softplus(critic(generated.detach()))).mean())
    optimizer_of_critic.step()
    optimizer_of_generator.zero_grad()
    module.manual_backward(softplus(-critic(generated)).mean())
    optimizer_of_generator.step()


def mean_over_texts(module: Any, batch: Tensor) -> Tensor:
    """Average the tokens of each text, and then the texts."""
    losses = cross_entropy(module.net(batch).transpose(1, 2), batch, reduction="none") * (batch != 0)
    return (losses.sum(1) / (batch != 0).sum(1)).mean()


def mean_over_tokens(module: Any, batch: Tensor) -> Tensor:
    return cross_entropy(module.net(batch).flatten(0, 1), batch.flatten(), ignore_index=0)


weighted_mean_over_tokens = make_weighted_step(mean_over_tokens, count_tokens)


def drop_word_by_word(module: Any, batch: Tensor) -> Tensor:
    """Draw for one word after the other, and once more for all."""
    rows = torch.stack([dropout(row, 0.1) for row in module.net(batch).unbind(1)], 1)
    return (dropout(rows, 0.1).square().sum(-1) * (batch != 0)).sum(1).mean()


def log_sum_over_ranks(module: Any, batch: Any) -> Tensor:
    """Return a loss whose value is the sum over the ranks, and whose gradient is that of this rank."""
    loss = mean_loss(module, batch)
    total = loss.detach().clone()
    dist.all_reduce(total)
    module.log("loss", total)
    return loss + (total - loss.detach())


def count_in_step(module: Any, batch: Any) -> Tensor:
    """Count the samples of a step in a buffer."""
    module.net.seen.add_(len(batch[0]))
    return mean_loss(module, batch)


def compensate_by_hand(module: Any, batch: Tensor) -> Tensor:
    """Case 7: loss w * x, multiplied by W / global count in the user's code."""
    total = torch.tensor(float(len(batch)))
    dist.all_reduce(total)
    return module.net.losses(batch).sum() * world_size() / total


def mean_loss_of_graphs(module: Any, batch: Any) -> Tensor:
    return mean_loss(module, default_collate(batch.samples))


def mean_loss_of_first_batch(module: Any, batch: Any) -> Tensor | None:
    """Skip the steps of the other batches."""
    if module.batch_idx > 0:
        return None
    return mean_loss(module, batch)


def write_bias_of_own_rows(module: Any, batch: Any) -> Tensor:
    """Write a weight from the rows of this rank, as a layer does that normalizes by its first batch."""
    with torch.no_grad():
        module.net[0].bias.copy_(batch[0].mean())
    return mean_loss(module, batch)


def write_bias_of_all_rows(module: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        module.net[0].bias.copy_(gather(batch[0]).mean())
    return mean_loss(module, batch)


def mean_loss_of_first_loader(module: Any, batch: Any) -> Tensor:
    return mean_loss(module, batch["one"])


def loss_and_temperature(module: Any, batch: Any) -> Tensor:
    """Return a loss whose gradient with respect to the temperature is a loss, as in SAC. No other depends on it."""
    loss = mean_loss(module, batch)
    return loss + module.net.temperature * loss.detach()


def call_with_list(net: Any, x: Tensor) -> Tensor:
    return net.heads[0](net(x))


def divide_by_count_of_all_ranks(module: Any, batch: Any) -> Tensor:
    """Divide by the samples of all ranks, as if the gradients were added up."""
    count = torch.tensor(float(len(batch[0])))
    dist.all_reduce(count)
    return sum_loss(module, batch) / count


def mean_of_hardest(module: Any, batch: Any) -> Tensor:
    return make_step(reduction="none")(module, batch).topk(2).values.mean()


def clamped_mean(module: Any, batch: Any) -> Tensor:
    return mean_loss(module, batch).square().clamp(min=0.1)


def contrast_on_rank(module: Any, batch: Any) -> Tensor:
    rows = module.net(batch[0])
    return cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def mean_loss_with_state(module: Any, batch: Any) -> Tensor:
    """Multiply the loss by a number that is next to 1, and that each rank changes by its own loss."""
    loss = mean_loss(module, batch)
    factor = vars(module).setdefault("own_factor", torch.ones(()))
    vars(module)["own_factor"] = factor.double() + 1e-6 * loss.detach()
    return factor * loss


def log_rising_on_rank_0(module: Any, batch: Any) -> Tensor:
    """Log a value that rises on rank 0 and falls on the others, without `sync_dist`."""
    module.log("seen", float(module.batch_idx * (1 - 2 * rank())))
    return mean_loss(module, batch)


def log_mean(module: Any, batch: Any) -> Tensor:
    loss = mean_loss(module, batch)
    module.log("loss", loss, sync_dist=True)
    return loss


def log_count(module: Any, batch: Any) -> Tensor:
    module.log("samples", float(len(batch[0])))
    return mean_loss(module, batch)


def log_mean_of_all(module: Any, batch: Any) -> Tensor:
    module.log("loss", global_mean(sum_loss(module, batch).detach(), len(batch[0])))
    return mean_loss(module, batch)


def log_own(module: Any, batch: Any) -> Tensor:
    loss = mean_loss(module, batch)
    module.log("loss", loss)
    return loss


def log_nan_of_rank_1(module: Any, batch: Any) -> Tensor:
    """Log, beside the loss, a mean of nothing on rank 1: NaN on all ranks."""
    values = torch.ones(1 - rank())
    module.log("seen", values.mean(), sync_dist=True)
    return log_mean(module, batch)


def contrast_with_all(module: Any, batch: Any) -> Tensor:
    rows = module.net(batch[0])
    return cross_entropy(rows @ gather(rows).T, torch.arange(len(rows)) + rank() * len(rows))


def spread_of_all(module: Any, batch: Any) -> Tensor:
    return gather(module.net(batch[0])).var(dim=0, correction=0).sum()


def two_global_means(module: Any, batch: Any) -> Tensor:
    """Do what `sum_of_two_means` does, each by its count on all ranks."""
    outputs = module.net(batch[0])
    total = cross_entropy(outputs, batch[1], ignore_index=0, reduction="sum")
    mean, mean_of_squares = global_mean((total, outputs.square().sum()), ((batch[1] != 0).sum(), outputs.numel()))
    return mean + mean_of_squares


def divide_by_global_mean(module: Any, batch: Any) -> Tensor:
    return global_mean(sum_loss(module, batch), len(batch[0]))


# Optimizers.


def make_sgd_on_plateau(module: Any, interval: str = "step", monitor: str = "seen") -> Any:
    optimizer = make_sgd(module)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": interval, "monitor": monitor},
    }


def make_sgd_on_validation_plateau(module: Any) -> Any:
    return make_sgd_on_plateau(module, "epoch", "validation_loss")


def make_sgd_of_unregistered(module: Any) -> Any:
    """Return an optimizer that also holds what the module does not register."""
    parameters = list(module.parameters())
    if hasattr(module.net, "temperature"):
        parameters.append(module.net.temperature)
    for layer in getattr(module.net, "heads", []):
        parameters += layer.parameters()
    return torch.optim.SGD(parameters, lr=0.1)


def make_sgd(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def make_lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)


class Langevin(torch.optim.SGD):
    """SGD that adds noise to the weights behind each step."""

    generator: torch.Generator | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                noise = torch.empty_like(parameter).normal_(generator=self.generator)
                parameter.add_(0.01 * noise)
        return loss


def make_langevin(module: Any) -> Any:
    return Langevin(module.parameters(), lr=0.1)


def make_seeded_langevin(module: Any) -> Any:
    optimizer = make_langevin(module)
    optimizer.generator = torch.Generator().manual_seed(3)
    return optimizer


def make_adams(module: Any) -> Any:
    """Return an optimizer for each child of the net."""
    return [torch.optim.Adam(child.parameters(), 0.01) for child in module.net.children()]


def make_sgd_by_rank(module: Any) -> Any:
    """Return another learning rate on every rank."""
    return make_sgd(module, lr=0.1 * (1 + module.global_rank))


def make_sgd_times_ranks(module: Any) -> Any:
    return make_sgd(module, lr=0.1 * world_size(), momentum=0.9)


def make_sgd_with_decay(module: Any) -> Any:
    return make_sgd(module, weight_decay=0.6)


def make_sgd_with_decay_times_ranks(module: Any) -> Any:
    return make_sgd(module, weight_decay=0.01 * world_size())


def make_one_cycle(module: Any) -> Any:
    """Return AdamW, which makes much of gradients that are zero but for rounding, as of a bias before batch norm."""
    trainer = module.trainer
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    steps = int(trainer.estimated_stepping_batches)
    assert trainer.num_training_batches < 100, "known once the loaders are set up"
    assert len(trainer.train_dataloader) * trainer.max_epochs >= steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# Hooks of the module, and communication hooks.


def add_noise_to_batch(module: Any, batch: Any, dataloader_idx: int) -> Any:
    inputs, classes = batch
    return inputs + 0.1 * torch.randn_like(inputs), classes


def read_length_of_loader(module: Any) -> None:
    len(module.trainer.train_dataloader)


def read_norms_of_gradients(module: Any, optimizer: Any) -> None:
    for parameter in module.net[-1].parameters():
        float(parameter.grad.norm())


def multiply_gradients_by_ranks(module: Any) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(world_size())


def add_noise_to_gradients(module: Any, optimizer: Any) -> None:
    for parameter in module.parameters():
        parameter.grad.add_(torch.randn_like(parameter))


def add_seeded_noise_to_gradients(module: Any, optimizer: Any) -> None:
    torch.manual_seed(module.global_step)
    add_noise_to_gradients(module, optimizer)


def clip_norm_of_shards(module: Any, optimizer: Any) -> None:
    """Clip the gradients of a rank's shards by their own norm."""
    shards = [parameter.grad.to_local() for parameter in module.parameters()]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard.mul_(0.01 / norm)


def change_shard_of_rank_1(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    if batch_idx == 1 and rank() == 1:
        module.net[0].weight.detach().to_local()[0, 0] += 1e-3


def count_after_batches_on_rank_1(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    if rank() == 1:
        module.net.seen.add_(1)


def count_batches_on_rank_1(module: Any, batch: Any, batch_idx: int) -> None:
    if rank() == 1:
        module.net.seen.add_(1)


def add_up_count_of_batches(module: Any, batch: Any, batch_idx: int) -> None:
    module.net.seen.add_(1)
    dist.all_reduce(module.net.seen)


def change_weight_of_rank_1(module: Any, batch: Any, batch_idx: int) -> None:
    if batch_idx == 1 and rank() == 1:
        module.net[2].weight.data[0, 0] += 1e-3


def freeze_first_layer(net: nn.Sequential) -> None:
    net[0].requires_grad_(False)


def unfreeze_in_second_batch(module: Any, batch: Any, batch_idx: int) -> None:
    module.net.requires_grad_(batch_idx > 0)
    module.net[2].requires_grad_(True)


def count_samples_in_buffer(module: Any, batch: Any, batch_idx: int) -> None:
    module.net.seen.add_(len(batch[0]))


def count_samples_of_all_in_buffer(module: Any, batch: Any, batch_idx: int) -> None:
    count = torch.tensor(float(len(batch[0])))
    dist.all_reduce(count)
    module.net.seen.add_(count)


def average_weights(module: Any, *_: Any) -> None:
    """Keep an average of weights in a layer without gradients."""
    module.net[0].bias.data.lerp_(module.net[-1].weight.data.mean(0), 0.1)


def average_weights_by_ranks(module: Any, *_: Any) -> None:
    """Keep an average of weights, to which a step contributes in proportion to the number of ranks."""
    module.net[0].bias.data.lerp_(module.net[-1].weight.data.mean(0), 0.1 * world_size())


def stop_in_one_process(module: Any, *_: Any) -> None:
    module.trainer.should_stop = world_size() == 1


def make_communication_hook(change: Callable[[Tensor], Tensor]) -> Callable[..., torch.futures.Future[Tensor]]:
    """Return a communication hook that changes each rank's bucket before they are averaged."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.set_buffer(change(bucket.buffer()))
        return allreduce_hook(state, bucket)

    return hook


def add_up_in_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Be a communication hook that returns the sum over the ranks."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def clip_norm(bucket: Tensor) -> Tensor:
    return bucket * min(1.0, 0.05 / float(bucket.norm()))


# Loaders: functions that are called `make_..._loader` return a function without arguments that makes one.


def make_samples(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 6, generator=generator), torch.randint(3, (number,), generator=generator)


def make_rows(number: int) -> list[Any]:
    """Return samples as pairs of an input and a class."""
    return list(zip(*make_samples(number), strict=True))


def make_batches(sizes: Sequence[int], seed: int = 0) -> list[Any]:
    inputs, classes = make_samples(sum(sizes), seed)
    return list(zip(inputs.split(list(sizes)), classes.split(list(sizes)), strict=True))


def in_turn(items: list[Any]) -> list[Any]:
    """Return the items of this rank if ranks take one after the other."""
    return items[rank() :: world_size()]


def in_turn_backwards(items: list[Any]) -> list[Any]:
    """Return the items of this rank, from the last one to the first; those of one process in their order."""
    if world_size() == 1:
        return items
    return in_turn(items)[::-1]


def deal(batches: Iterable[Any], part: Callable[[list[Any]], list[Any]] = in_turn) -> DataLoader[Any]:
    """Return a loader of these batches, of which one process reads all, and each rank a part."""
    rows: list[Any] = []
    indices_of_batches = []
    for batch in batches:
        samples = list(zip(*batch, strict=True)) if isinstance(batch, tuple) else list(batch)
        indices_of_batches.append(list(range(len(rows), len(rows) + len(samples))))
        rows += samples
    return DataLoader(rows, batch_sampler=part(indices_of_batches))


def make_sized_loader(*sizes_of_ranks: Sequence[int]) -> MakeLoader:
    """Return what makes a loader of batches of these sizes for each rank, of which one process reads all in turn."""
    batches_of_ranks = [make_batches(sizes, seed) for seed, sizes in enumerate(sizes_of_ranks)]
    batches: list[Any] = []
    for batches_of_step in zip(*batches_of_ranks, strict=True):
        batches += batches_of_step
    return lambda: deal(batches)


def make_plain_loader(
    number: int = 32, size: int = 4, make_sampler: Callable[[], Any] = lambda: None, **options: Any
) -> MakeLoader:
    return lambda: DataLoader(TensorDataset(*make_samples(number)), size, sampler=make_sampler(), **options)


def load_equal_samples() -> DataLoader[Any]:
    x, y = make_samples(1)
    return DataLoader(TensorDataset(x.repeat(32, 1), y.repeat(32)), 4)


def load_backwards() -> DataLoader[Any]:
    return deal(make_batches((4,) * 4), in_turn_backwards)


def load_case_42() -> DataLoader[Any]:
    return deal(torch.tensor([[[0.0], [2.0]], [[4.0], [6.0]]]))


def load_case_7() -> DataLoader[Any]:
    return deal([torch.ones(3), torch.tensor([5.0])])


def load_other_samples_by_ranks() -> DataLoader[Any]:
    """Return a loader whose samples depend on the number of ranks, as if they were transformed at random."""
    return deal(make_batches((4,) * 4, seed=world_size()))


def load_batches_without_collating() -> DataLoader[Any]:
    return DataLoader(make_batches((4, 4)), batch_size=None)


def load_two() -> dict[str, DataLoader[Any]]:
    return {"one": make_plain_loader()(), "other": make_plain_loader()()}


def load_texts() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (32,), generator=generator).tolist()
    texts: Any = [torch.randint(1, 7, (length,), generator=generator) for length in lengths]
    return DataLoader(texts, 4, collate_fn=lambda batch: pad_sequence(batch, True))


def load_samples_with_function() -> DataLoader[Any]:
    """Return a loader of samples with a function, which cannot be pickled."""
    rows: Any = [(x, y, lambda: 0) for x, y in make_rows(32)]
    return DataLoader(rows, 4, collate_fn=lambda batch: default_collate([row[:2] for row in batch]))


def sum_of_noise(samples: list[tuple[int, Tensor]]) -> Tensor:
    return torch.stack([noise.sum() for _, noise in samples])[:, None]


def load_augmented() -> DataLoader[Any]:
    """Return a loader of samples with noise from every generator, which a worker draws."""
    return DataLoader(Augmented(), 4, num_workers=1, collate_fn=sum_of_noise)


def collate_in_random_order(rows: list[Any]) -> Any:
    return default_collate([rows[index] for index in torch.randperm(len(rows))])


def make_sampler_in_turn() -> list[int]:
    """Return a user's sampler that deals the indices to the ranks."""
    return in_turn([*range(32)])


def make_sampler_by_halves() -> list[int]:
    """Return a user's sampler that gives rank 0 the first half of the indices."""
    return [*range(32)][PARTS["halves"](rank(), world_size())]


def make_sampler_in_other_orders() -> list[int]:
    """Return a user's sampler that deals indices in an order of its own on each rank, so some are left out."""
    generator = torch.Generator().manual_seed(rank())
    return in_turn(torch.randperm(32, generator=generator).tolist())


def make_sampler_that_leaves_out() -> list[int]:
    """Return a user's sampler that reads all on one process, and leaves out some on several."""
    indices = in_turn([*range(32)])
    if world_size() == 1:
        return indices
    return indices[:14]


class Stream(IterableDataset[Any]):
    """Rows of all, or a part of them by rank and number of ranks."""

    def __init__(self, part: Callable[[int, int], slice], read: Callable[[Any], Iterator[Any]]) -> None:
        self.part = part
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        return self.read(make_rows(32)[self.part(rank(), world_size())])


def uneven_part(rank: int, world_size: int) -> slice:
    """Return 20 of 32 rows for rank 0, and 12 for rank 1."""
    if world_size == 1:
        return slice(0, 32)
    if rank == 0:
        return slice(0, 20)
    return slice(20 * rank, 32)


PARTS: dict[str, Callable[[int, int], slice]] = {
    "every W-th": lambda rank, world_size: slice(rank, None, world_size),
    "halves": lambda rank, world_size: slice(rank * 32 // world_size, (rank + 1) * 32 // world_size),
    "uneven parts": uneven_part,
    "all": lambda rank, world_size: slice(None),
}
"""The rows of 32 that a rank reads of a stream."""


def make_stream_loader(part: str, read: Callable[[Any], Iterator[Any]] = iter) -> MakeLoader:
    return lambda: DataLoader(Stream(PARTS[part], read), 4)


def read_moved(rows: Iterable[Any]) -> Iterator[Any]:
    """Yield other rows on every rank but the first."""
    return ((x + rank(), y) for x, y in rows)


def load_sharded_by_hand() -> DataLoader[Any]:
    """Return a loader of the samples that the user's code chose for this rank."""
    rows = Subset(TensorDataset(*make_samples(64)), range(rank(), 64, world_size()))
    return DataLoader(rows, batch_size=4, shuffle=True)


def load_cut_by_hand() -> DataLoader[Any]:
    """Return a loader of a data set that the user's code cut by rank."""
    inputs, classes = make_samples(32)
    own = slice(rank(), None, world_size())
    return DataLoader(TensorDataset(inputs[own], classes[own]), batch_size=4)


def make_rows_loader(choose: Callable[[], Sequence[int]], **options: Any) -> MakeLoader:
    """Return what makes a loader of the rows of 64 that a function chooses when the data set is made."""
    return lambda: DataLoader(Subset(TensorDataset(*make_samples(64)), choose()), 4, **options)


def choose_by_seed() -> Sequence[int]:
    rows, _ = random_split(TensorDataset(torch.arange(64)), [40, 24], torch.Generator().manual_seed(7))
    return rows.indices


def choose_without_seed() -> Sequence[int]:
    seed = int.from_bytes(os.urandom(4), "little")
    rows, _ = random_split(TensorDataset(torch.arange(64)), [40, 24], torch.Generator().manual_seed(seed))
    return rows.indices


def choose_by_numpy() -> Sequence[int]:
    return np.random.default_rng().permutation(64)[:40].tolist()


def choose_in_order_of_rank() -> Sequence[int]:
    """Return rows as of files that are listed in another order on each rank, which differs late."""
    return [*range(16), *torch.arange(16, 40).roll(rank()).tolist()]


def choose_more_by_rank() -> Sequence[int]:
    return range(40 + 8 * rank())


def choose_client_of_rank() -> Sequence[int]:
    """Return the rows of a client for each rank, some of which both have."""
    return range(16 * rank(), 32 + 16 * rank())


class ChangedRows(Dataset[Any]):
    """Rows of which a function changes the inputs whenever one is loaded, and keeps what it makes if it `caches`."""

    def __init__(self, change: Callable[[Tensor, int], Tensor], rows: Sequence[int], *, caches: bool) -> None:
        self.change = change
        self.rows = [make_rows(64)[row] for row in rows]
        self.caches = caches
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index in self.cache:
            return self.cache[index]
        inputs, label = self.rows[index]
        sample = self.change(inputs, index), label
        if self.caches:
            self.cache[index] = sample
        return sample


def make_changed_loader(
    change: Callable[[Tensor, int], Tensor],
    choose: Callable[[], Sequence[int]] = choose_by_seed,
    *,
    caches: bool = False,
    **options: Any,
) -> MakeLoader:
    return lambda: DataLoader(ChangedRows(change, choose(), caches=caches), 4, **options)


def flip_by_own_coin(inputs: Tensor, _: int) -> Tensor:
    """Flip one row in two, by a generator that follows no seed."""
    return inputs.flip(0) if np.random.default_rng().random() < 0.5 else inputs


def add_noise_of_rank(inputs: Tensor, index: int) -> Tensor:
    return inputs + torch.randn(6, generator=torch.Generator().manual_seed(1000 * rank() + index))


def add_noise_of_index(inputs: Tensor, index: int) -> Tensor:
    return inputs + torch.randn(6, generator=torch.Generator().manual_seed(index))


def add_noise(inputs: Tensor, _: int) -> Tensor:
    return inputs + torch.randn(6) + random.random()


class OpenedRows(Dataset[Any]):
    """The bytes of a file that is opened when the first row is loaded."""

    def __init__(self) -> None:
        self.file: Any = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = np.memmap(__file__, np.uint8, "r")
        return torch.tensor(self.file[6 * index : 6 * index + 6] / 256), index % 3


def load_opened() -> DataLoader[Any]:
    return DataLoader(OpenedRows(), 4, num_workers=1)


# Hooks of the name `configure_model`, which shard the net.


def shard_layers(module: Any, mesh: Any, **options: Any) -> None:
    """Shard the first layer of the net, and then all others with the net."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # not in torch 2.4

    fully_shard(module.net[0], mesh=mesh, **options)
    fully_shard(module.net, mesh=mesh, **options)


def shard(module: Any) -> None:
    shard_layers(module, module.device_mesh["data_parallel"])


def shard_in_bfloat16(module: Any) -> None:
    """Shard a net that computes and reduces in bfloat16, as is usual on GPUs."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415  # not in torch 2.4

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard_layers(module, module.device_mesh["data_parallel"], mp_policy=policy)


def shard_first_layer(module: Any) -> None:
    """Shard the first layer, and no other, as if `fully_shard` of the root were forgotten."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # not in torch 2.4

    fully_shard(module.net[0], mesh=module.device_mesh["data_parallel"])


def shard_and_add_up(module: Any) -> None:
    """Shard a net, and have the ranks' gradients added up, and not averaged."""
    shard(module)
    module.net[0].set_gradient_divide_factor(1.0)
    module.net.set_gradient_divide_factor(1.0)


def shard_without_sums(module: Any) -> None:
    """Shard a net, and have no gradient reduced, as if a switch of an accumulation were forgotten."""
    shard(module)
    module.net.set_requires_gradient_sync(requires_gradient_sync=False)


def shard_twice(module: Any) -> None:
    """Shard a net over two ranks of four, and have the other two hold the same shards."""
    mesh = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard_layers(module, mesh)


def shard_without_values(module: Any) -> None:
    """Shard a net on the meta device, which Lightning fills later."""
    module.net.to("meta")
    shard(module)


# Strategies: functions that make one.


def ours(**options: Any) -> Callable[[], GradAvgStrategy]:
    return lambda: GradAvgStrategy(**options)


def stock(**options: Any) -> Callable[[], DDPStrategy]:
    return lambda: DDPStrategy(**options)


def sharded(ranks: int = 2, **options: Any) -> Callable[[], GradAvgModelParallelStrategy]:
    sizes = {"data_parallel_size": ranks, "tensor_parallel_size": 1}
    return lambda: GradAvgModelParallelStrategy(**options, **sizes)


def stock_sharded(ranks: int = 2) -> Callable[[], ModelParallelStrategy]:
    return lambda: ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)


def with_hook(hook: Any) -> Callable[[], GradAvgStrategy]:
    """Return what makes a strategy with a communication hook of the user."""
    return lambda: GradAvgStrategy(ddp_comm_hook=hook)


def in_one_tensor_parallel_group() -> ModelParallelStrategy:
    """Return what Lightning makes of its defaults on two ranks."""
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
