"""What a training step costs under each way of reducing gradients: `python -m benchmarks.step`.

One command starts the ranks on this machine, measures, prints one table per model and saves it as JSON. Started by
`torchrun`, it is a rank; so it runs on several nodes, and `benchmarks.nodes` makes nodes out of network namespaces.
The device is chosen automatically: CPUs with gloo, or GPUs with NCCL.

Machines are busy with other things, too. All variants live in the same processes; a round runs each once, in an order
drawn anew, a few steps that do not count and then the timed ones. The slower rank counts. A variant's time is compared
with that of DDP in the same round, and what is reported are the median over the rounds and its quartiles; the first
round is dropped. `benchmarks/README.md` says what the columns mean.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.block import Setting, Variant, measure
from benchmarks.models import MODELS, Measured
from benchmarks.plain import plain_variants
from benchmarks.report import Measurements, print_report, save_report
from benchmarks.trained import trained_variants
from benchmarks.world import World, is_rank, joined, sent_by, slowest, start

__all__ = ["main", "setting_of"]

SEED = 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, by default that of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description="Measure what a training step costs under each reduction."
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="models to measure (default: all)")
    add("--only", nargs="+", default=["*"], metavar="NAME", help="variants to measure, with wildcards (default: all)")
    add("--without", nargs="+", default=[], metavar="NAME", help="variants to leave out, with wildcards")
    add("--rounds", type=int, default=12, help="rounds that count; one more is dropped (default: 12)")
    add("--steps", type=int, default=None, help="timed steps of a round (default: the model's)")
    add("--ranks", type=int, default=2, help="ranks on this machine, where torchrun did not start them (default: 2)")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    add("--interface", default=interface, help=f"network interface whose bytes are counted (default: {interface})")
    add("--output", type=Path, default=Path("benchmarks/results/step.json"), help="file to write")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1 or (parsed.steps is not None and parsed.steps < 1) or parsed.ranks < 1:
        parser.error(
            f"--rounds, --steps and --ranks are 1 or more; got {parsed.rounds}, {parsed.steps} and {parsed.ranks}"
        )
    return parsed


def setting_of(model: str, world: World, steps: int | None) -> Setting:
    """Return a model and this rank's batch, on its device; `steps` of a round, or by default the model's."""
    torch.manual_seed(SEED)
    network: nn.Module = MODELS[model].model()
    torch.manual_seed(SEED + 1 + dist.get_rank())
    inputs, target = MODELS[model].batch()
    batch: tuple[Tensor, Tensor] = inputs.to(world.device), target.to(world.device)
    module = Measured(network).to(world.device)
    return Setting(module, batch, world.device, steps or MODELS[model].steps, world.nodes)


def _measure(model: str, variants: Sequence[Variant], world: World, arguments: argparse.Namespace) -> Measurements:
    """Measure all rounds of a model."""
    setting = setting_of(model, world, arguments.steps)
    sent = sent_by(arguments.interface)
    parameters = list(setting.module.parameters())
    measurements = Measurements(
        model=model,
        title=MODELS[model].title,
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        world_size=dist.get_world_size(),
        nodes=world.nodes,
        device=str(world.device.type),
        steps=setting.steps,
        order=[variant.name for variant in variants],
        in_lightning=[variant.name for variant in variants if variant.in_lightning],
    )
    # With the same seed, all ranks draw the same order.
    generator = random.Random(SEED)
    for number in range(arguments.rounds + 1):
        for variant in generator.sample(variants, len(variants)):
            block = measure(variant, setting, sent)
            # The counter is the node's, and each of its ranks reads the same.
            seconds, processor, bytes_sent = slowest([block.seconds, block.processor, block.sent], world.device)
            # The first round is dropped.
            if number > 0:
                measurements.add(variant.name, seconds, processor, bytes_sent)
        if dist.get_rank() == 0:
            sys.stderr.write(f"{model}: round {number} of {arguments.rounds}\n")
    return measurements


def _choose(variants: Sequence[Variant], only: Sequence[str], without: Sequence[str]) -> list[Variant]:
    """Return the variants that some patterns name, in their order.

    Raises:
        ValueError: If that leaves none.
    """

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    chosen = []
    for variant in variants:
        if matches(variant.name, only) and not matches(variant.name, without):
            chosen.append(variant)
    if not chosen:
        names = [variant.name for variant in variants]
        raise ValueError(f"--only={only} and --without={without} leave none of {names}")
    return chosen


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure all models; on rank 0, print a table for each, and save them."""
    # Between any two blocks there is a collection, which need not go through what imports have made.
    gc.freeze()
    with joined() as world:
        # Hooks that sum node by node differ from others where several nodes have several ranks each.
        by_node = world.nodes > 1 and world.ranks_on_node > 1
        variants = [*plain_variants(), *trained_variants(several_on_nodes=by_node)]
        chosen = _choose(variants, arguments.only, arguments.without)
        results = []
        for model in arguments.models:
            measurements = _measure(model, chosen, world, arguments)
            results.append(measurements)
            if dist.get_rank() == 0:
                print_report(measurements)
                # After each model, so that an interrupt loses no more than one.
                save_report(results, arguments.output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank, or start the ranks."""
    parsed = _parse(arguments)
    if is_rank():
        _run_rank(parsed)
        return
    if arguments is None:
        arguments = sys.argv[1:]
    start("benchmarks.step", parsed.ranks, arguments)


if __name__ == "__main__":
    main()
