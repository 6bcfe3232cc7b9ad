"""The comparison of a recorded run with its reference: stages, causes, report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_gradavg.verification.causes import CAUSES
from lightning_gradavg.verification.data import Stream, compare_samples
from lightning_gradavg.verification.diagnose import diagnose
from lightning_gradavg.verification.measure import Difference
from lightning_gradavg.verification.records import Run
from lightning_gradavg.verification.report import STAGES, Finding, Report, Stage
from lightning_gradavg.verification.stages import (
    Comparison,
    across_ranks,
    global_loss,
    is_random,
    outputs_of,
    stage_of,
    update_of,
)

__all__ = ["compare", "default_tolerance"]


def default_tolerance(run: Run) -> float:
    """Return what rounding stays below: 1e-5 in float32, 1e-10 in float64, 2e-2 where anything is in half precision."""
    types = {tensor.dtype for tensor in run.initial.values() if tensor.dtype.is_floating_point}
    if types & {torch.float16, torch.bfloat16} or "16" in run.facts.precision:
        return 2e-2
    return 1e-10 if types == {torch.float64} else 1e-5


def compare(runs: Sequence[Run], reference: Run, *, stream: Stream | None = None, tolerance: float | None = None) -> Report:
    """Return how a run on several processes differs from its reference, and why.

    Args:
        runs: What the ranks recorded, in rank order.
        reference: What one process recorded on the same global batches, see `record_reference`.
        stream: What one process with the same configuration reads, to compare the order of samples.
        tolerance: The largest relative difference that counts as equal; default: `default_tolerance`.

    Raises:
        ValueError: If the runs are not all ranks of one world, or `tolerance` is not positive.
    """
    world = [(run.rank, run.world_size) for run in runs]
    if world != [(rank, len(runs)) for rank in range(len(runs))]:
        raise ValueError(f"runs must be those of all ranks in rank order, got (rank, world size) {world}")
    tolerance = default_tolerance(runs[0]) if tolerance is None else tolerance
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance is a relative difference > 0, got {tolerance}")
    comparison = Comparison(runs, reference, tolerance)
    stages: dict[str, Stage] = {}
    findings: list[Finding] = []
    for stage, found in (
        _initial(comparison),
        compare_samples(runs, stream),
        (_outputs(comparison), []),
        (_loss(comparison), []),
        (_local(comparison), []),
        _reduced(comparison),
        _clipped(comparison),
        _update(comparison),
        _buffers(comparison),
        _random(comparison),
    ):
        stages[stage.name] = stage
        findings += found
    return Report(
        strategy=comparison.facts.strategy,
        reduction=comparison.facts.reduction,
        world_size=len(runs),
        steps=len(comparison.steps),
        reference=_reference_text(comparison),
        tolerance=tolerance,
        stages=[stages[name] for name in STAGES],
        findings=_merged(findings),
        gradients=_gradients(comparison),
        remarks=list(dict.fromkeys([*(text for run in runs for text in run.remarks), *reference.remarks])),
    )


def _reference_text(comparison: Comparison) -> str:
    replicas = comparison.facts.replicas
    if replicas is None:
        return "one process on the global batches of the run, each step from the run's own state"
    return f"DataParallel over {replicas} replicas, on one process, each step from the run's own state"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Keep the first finding of every cause, in the order of stages and then of causes, and add the advice."""
    kept: dict[str, Finding] = {}
    for finding in findings:
        kept.setdefault(finding.cause, replace(finding, advice=CAUSES[finding.cause].advice))
    order = list(CAUSES)
    return sorted(
        kept.values(), key=lambda each: (not each.is_difference, STAGES.index(each.stage), order.index(each.cause))
    )


def _initial(comparison: Comparison) -> tuple[Stage, list[Finding]]:
    name = "initial weights"
    trained = set(comparison.runs[0].steps[0].weights_before)
    apart = across_ranks(comparison.runs, lambda run: {key: value for key, value in run.initial.items() if key in trained})
    if apart is not None:
        detail = f"{apart.name} is not the same on all ranks when training begins"
        return Stage(name, "differs", 0, apart, detail), [Finding("unsynchronised replicas", name, detail, 0, apart)]
    measured = comparison.measure(comparison.runs[0].initial, comparison.reference.initial)
    stage = stage_of(name, comparison, [measured])
    if stage.status != "differs" or stage.difference is None:
        return stage, []
    detail = f"{stage.difference.name} begins with other values than on one process; the reference took the run's"
    return stage, [Finding(name, name, detail, 0, stage.difference)]


def _outputs(comparison: Comparison) -> Stage:
    measured: list[Sequence[Difference] | None] = []
    for position in comparison.steps:
        found = None if is_random(comparison, position) else outputs_of(comparison, position)
        measured.append(None if found is None else comparison.measure(*found))
    return stage_of("outputs", comparison, measured)


def _loss(comparison: Comparison) -> Stage:
    measured: list[Sequence[Difference] | None] = []
    for position in comparison.steps:
        parts = comparison.reference.steps[position].parts
        found = None if is_random(comparison, position) or len(parts) != 1 else global_loss(comparison, position)
        if found is None:
            measured.append(None)
            continue
        # In the type that the losses were computed in, so that ulps are those of that type.
        dtype = next(iter(comparison.runs[0].steps[position].weights_before.values())).dtype
        both = ({"loss": torch.tensor(value, dtype=dtype)} for value in (found, parts[0].loss))
        measured.append(comparison.measure(*both))
    return stage_of("loss", comparison, measured)


def _local(comparison: Comparison) -> Stage:
    if comparison.facts.crosses_ranks:
        return Stage("local gradients", "not compared", note="gradients cross ranks within the backward")
    measured: list[Sequence[Difference] | None] = []
    for position in comparison.steps:
        replay = comparison.reference.replays.get(position, {}).get("plain")
        pairs = comparison.pairs(position)
        if replay is None or any(part is None for _, _, part in pairs):
            measured.append(None)
            continue
        found = [
            replace(difference, name=f"{difference.name} (rank {rank})")
            for (rank, _, part), (_, alone) in zip(pairs, replay.parts, strict=True)
            if part is not None
            for difference in comparison.measure(part.gradient, alone)
        ]
        measured.append(found)
    return stage_of("local gradients", comparison, measured)


def _reduced(comparison: Comparison) -> tuple[Stage, list[Finding]]:
    name = "reduced gradient"
    findings: list[Finding] = []
    measured: list[Sequence[Difference] | None] = []
    by_chance = False
    for position in comparison.steps:
        drifted = across_ranks(comparison.runs, lambda run: run.steps[position].weights_before)  # noqa: B023  # called at once
        if drifted is not None:
            detail = f"{drifted.name} is not the same on all ranks before the step"
            findings.append(Finding("unsynchronised replicas", name, detail, position, drifted))
            measured.append([drifted])
            continue
        apart = across_ranks(comparison.runs, lambda run: run.steps[position].gradient)  # noqa: B023  # likewise
        if apart is not None:
            detail = f"the gradient of {apart.name} is not the same on all ranks: it was not reduced"
            findings.append(Finding("unsynchronised replicas", name, detail, position, apart))
            measured.append([apart])
            continue
        found = comparison.measure(
            comparison.runs[0].steps[position].gradient, comparison.reference.steps[position].gradient
        )
        beyond = comparison.beyond(found)
        causes = diagnose(comparison, position) if beyond else []
        if beyond and not causes:
            by_chance = True
            measured.append(None)
            continue
        measured.append(found)
        worst = _with_common_factor(beyond)
        findings += [Finding(cause.cause, name, cause.detail, position, worst) for cause in causes]
    stage = stage_of(name, comparison, measured)
    if by_chance and stage.status == "not compared":
        stage = Stage(name, "equal", note="the ranks' gradients, as chance made them, are combined as is right")
    return stage, findings


def _with_common_factor(beyond: Sequence[Difference]) -> Difference | None:
    """Return the first difference, with a factor only if all that differ have the same."""
    if not beyond:
        return None
    factors = [difference.factor for difference in beyond]
    known = [factor for factor in factors if factor is not None]
    same = len(known) == len(factors) and max(known) - min(known) <= 1e-3 * abs(known[0])
    return beyond[0] if same else replace(beyond[0], factor=None)


def _clipped(comparison: Comparison) -> tuple[Stage, list[Finding]]:
    name = "clipped gradient"
    measured = [
        comparison.measure(comparison.runs[0].steps[position].clipped, comparison.reference.steps[position].clipped)
        for position in comparison.steps
    ]
    stage = stage_of(name, comparison, measured)
    if stage.status != "differs" or stage.step is None:
        return stage, []
    detail = "the same reduced gradient is clipped to another one than on one process"
    return stage, [Finding("unexplained", name, detail, stage.step, stage.difference)]


def _update(comparison: Comparison) -> tuple[Stage, list[Finding]]:
    name = "optimizer update"
    findings: list[Finding] = []
    measured = []
    for position in comparison.steps:
        mine, other = comparison.runs[0].steps[position], comparison.reference.steps[position]
        apart = across_ranks(comparison.runs, lambda run: run.steps[position].weights_after)  # noqa: B023  # likewise
        if apart is not None:
            detail = f"{apart.name} is not the same on all ranks after the step"
            findings.append(Finding("unsynchronised replicas", name, detail, position, apart))
            measured.append([apart])
            continue
        found = comparison.measure(update_of(mine), update_of(other), slack=mine.weights_before)
        measured.append(found)
        beyond = comparison.beyond(found)
        if beyond:
            rates = [(a.get("lr"), b.get("lr")) for a, b in zip(mine.groups, other.groups, strict=True)]
            scaled = [(float(a), float(b)) for a, b in rates if a is not None and b is not None and float(a) != float(b)]
            if scaled and scaled[0][1] != 0:
                (a, b), *_ = scaled
                detail = f"the learning rate is {a:.6g}, on one process {b:.6g}: {a / b:.4g} x"
                findings.append(Finding("learning-rate scale", name, detail, position, _with_common_factor(beyond)))
            else:
                detail = "the optimizer makes another update of the same gradient"
                findings.append(Finding("unexplained", name, detail, position, beyond[0]))
    return stage_of(name, comparison, measured), findings


def _buffers(comparison: Comparison) -> tuple[Stage, list[Finding]]:
    name = "buffers"
    measured: list[Sequence[Difference] | None] = []
    for position in comparison.steps:
        mine, other = comparison.runs[0].steps[position], comparison.reference.steps[position]
        random = is_random(comparison, position)
        measured.append(None if random else comparison.measure(mine.buffers_after, other.buffers_after))
    stage = stage_of(name, comparison, measured)
    if stage.status != "differs" or stage.step is None or stage.difference is None:
        return stage, []
    owner = stage.difference.name.rpartition(".")[0]
    if owner in comparison.reference.norms:
        detail = f"batch norm not synchronised: {stage.difference.name} follows the batches of one rank"
        return stage, [Finding("batch norm", name, detail, stage.step, stage.difference)]
    detail = f"the buffer {stage.difference.name} is not what one process makes of the global batch"
    return stage, [Finding("unexplained", name, detail, stage.step, stage.difference)]


def _random(comparison: Comparison) -> tuple[Stage, list[Finding]]:
    name = "random state"
    if not any(is_random(comparison, position) for position in comparison.steps):
        return Stage(name, "equal", note="no random numbers were drawn"), []
    layers = comparison.reference.draws_in
    where = ", ".join(layers) if layers else "training_step itself"
    first = comparison.pairs(0)
    states = {bytes(micro_batch.random["torch"].numpy().tobytes()) for _, micro_batch, _ in first}
    same = len(states) == 1 and len(comparison.runs) > 1
    noise = "; all ranks begin from the same random state, so their noise is the same" if same else ""
    detail = f"random numbers are drawn in {where}: compared with these layers off, and their gradients as drawn{noise}"
    return Stage(name, "differs", note=detail), [Finding("stochastic", name, detail)]


def _gradients(comparison: Comparison) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for position in comparison.steps:
        measured = comparison.measure(
            comparison.runs[0].steps[position].gradient, comparison.reference.steps[position].gradient
        )
        for difference in measured:
            found.setdefault(difference.name, [0.0] * position).append(difference.relative)
    return found
