"""A profile as tables, as JSON and as a picture."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.profiling.summary import Profile, RankSummary, Summary, advice_of, notes_of
from lightning_gradavg.profiling.timeline import Backward, Step, Times, times_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SCHEMA", "can_draw", "draw", "print_report", "to_json"]

SCHEMA = 1
"""Version of profile.json; raised when a field changes its name or its meaning, not when one is added."""

_RANKS_SHOWN = 8
_BUCKETS_NAMED = 6
_COLORS = ("#0b4f94", "#c8500a", "#2f8f4e", "#8a3fa0", "#b8860b", "#3a9fb5", "#a83250", "#6b6b6b")
_DURATIONS = ("step", "forward", "backward", "tail", "other", "communication", "overlap", "exposed", "copied_back")


def print_report(profile: Profile, summary: Summary, console: Console) -> None:
    """Print the tables of ranks and buckets, the bounds and the advice."""
    steps = len(profile.ranks[0].steps)
    console.print(
        f"{profile.strategy} on {len(profile.ranks)} rank(s), {profile.device}, {profile.backend}: medians of"
        f" {steps} step(s) after the first {profile.first_step}.",
        markup=False,
    )
    console.print(_rank_table(summary))
    if summary.buckets:
        console.print(_bucket_table(summary))
    bounds = summary.bounds
    ratio = f", {bounds.step / summary.best:.2f} times that" if summary.best else ""
    console.print(
        f"Bounds of a step: compute {_ms(bounds.compute)} ms, communication without waiting {_ms(bounds.transfer)} ms,"
        f" the larger {_ms(summary.best)} ms, the sum {_ms(summary.total)} ms. Taken: {_ms(bounds.step)} ms{ratio}.",
        markup=False,
    )
    for line in [*advice_of(profile, summary), *notes_of(profile, summary)]:
        console.print(f"- {line}", markup=False)


def _rank_table(summary: Summary) -> Table:
    table = _table("One optimizer step, in ms")
    durations = ("step", "forward", "backward", "tail", "other", "comm.", "overlap", "exposed", "waiting", "copies")
    for heading in ("rank", *durations):
        table.add_column(heading, justify="right")
    shown = summary.ranks[:_RANKS_SHOWN]
    for rank in shown:
        table.add_row(*_rank_cells(rank))
    if len(summary.ranks) > len(shown):
        table.caption = f"{len(summary.ranks) - len(shown)} more ranks are in profile.json"
    return table


def _rank_cells(rank: RankSummary) -> list[str]:
    times = rank.times
    parts = (times.step, times.forward, times.backward, times.tail, rank.other)
    communication = (times.communication, times.overlap, times.exposed, rank.waiting, times.copied_back)
    return [str(rank.rank), *map(_ms, (*parts, *communication))]


def _bucket_table(summary: Summary) -> Table:
    table = _table("Buckets, in ms after the start of the backward")
    for heading in ("bucket", "MiB", "dtype", "parameters", "ready", "started", "finished", "GB/s"):
        table.add_column(heading, justify="right")
    for index, bucket in enumerate(summary.buckets):
        layout = bucket.layout
        table.add_row(
            str(index),
            f"{layout.num_bytes / 2**20:.3g}",
            layout.dtype,
            str(len(layout.parameters)),
            *(_ms(moment) for moment in (bucket.ready, bucket.start, bucket.end)),
            "-" if bucket.bandwidth is None else f"{bucket.bandwidth:.3g}",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, caption_justify="left")


def _ms(nanoseconds: float | None) -> str:
    return "-" if nanoseconds is None else f"{nanoseconds / 1e6:.2f}"


def to_json(profile: Profile, summary: Summary) -> str:
    """Return everything as JSON: durations in ms, moments in ms after the start of the first profiled step."""
    origin = min(rank.steps[0].interval.start for rank in profile.ranks)
    document = {
        "schema": SCHEMA,
        "run": {
            "strategy": profile.strategy,
            "world_size": len(profile.ranks),
            "device": profile.device,
            "backend": profile.backend,
            "first_step": profile.first_step,
            "steps": len(profile.ranks[0].steps),
            "bucket_cap_mb": profile.bucket_cap_mb,
            "gradient_as_bucket_view": profile.gradient_as_bucket_view,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "bounds": {
            **{f"{name}_ms": value / 1e6 for name, value in summary.bounds._asdict().items()},
            "best_ms": summary.best / 1e6,
            "sum_ms": summary.total / 1e6,
        },
        "advice": advice_of(profile, summary),
        "notes": notes_of(profile, summary),
        "buckets": [
            {
                "index": index,
                "bytes": bucket.layout.num_bytes,
                "wire_bytes": bucket.wire_bytes,
                "dtype": bucket.layout.dtype,
                "parameters": [profile.names[position] for position in bucket.layout.parameters],
                "ready_ms": _relative(bucket.ready, 0),
                "start_ms": _relative(bucket.start, 0),
                "end_ms": _relative(bucket.end, 0),
                "bandwidth_gb_per_s": bucket.bandwidth,
            }
            for index, bucket in enumerate(summary.buckets)
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "host": rank.host,
                "clock_offset_ms": rank.clock.value / 1e6,
                "clock_uncertainty_ms": rank.clock.uncertainty / 1e6,
                "median": {
                    **_durations(medians.times),
                    "other_ms": medians.other / 1e6,
                    "waiting_ms": medians.waiting / 1e6,
                },
                "steps": [_step(step, origin) for step in rank.steps],
            }
            for rank, medians in zip(profile.ranks, summary.ranks, strict=True)
        ],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _durations(times: Times) -> dict[str, float]:
    return {f"{name}_ms": getattr(times, name) / 1e6 for name in _DURATIONS}


def _relative(moment: float | None, origin: int) -> float | None:
    return None if moment is None else (moment - origin) / 1e6


def _span(interval: tuple[int, int] | None, origin: int) -> dict[str, float | None]:
    start, end = interval or (None, None)
    return {"start_ms": _relative(start, origin), "end_ms": _relative(end, origin)}


def _step(step: Step, origin: int) -> dict[str, Any]:
    return {
        **_span(step.interval, origin),
        **_durations(times_of(step)),
        "backwards": [_backward(backward, origin) for backward in step.backwards],
    }


def _backward(backward: Backward, origin: int) -> dict[str, Any]:
    return {
        **_span(backward.interval, origin),
        "last_gradient_ms": _relative(backward.last_gradient, origin),
        "buckets": [
            {"index": bucket.index, "ready_ms": _relative(bucket.ready, origin), **_span(bucket.reduction, origin)}
            for bucket in backward.buckets
        ],
        "reductions": [_span(interval, origin) for interval in backward.reductions],
        "other_collectives": [_span(interval, origin) for interval in backward.others],
    }


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, profile: Profile) -> None:
    """Draw the step whose duration is the median, with two lanes per rank: what it computed, and what it reduced."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # optional; `can_draw` says whether it is there

    steps = sorted(profile.steps, key=lambda step: max(one.interval.end - one.interval.start for one in step))
    step = steps[(len(steps) - 1) // 2][:_RANKS_SHOWN]
    origin = min(of_rank.interval.start for of_rank in step)
    figure = Figure(figsize=(11, 1.6 + 0.9 * len(step)), layout="constrained")
    axes = figure.subplots()
    for row, of_rank in enumerate(step):
        _draw_rank(axes, of_rank, 2 * row, origin)
    lanes = [f"rank {rank.rank}: {lane}" for rank in profile.ranks[: len(step)] for lane in ("compute", "reduce")]
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("ms after the start of the step. Triangle: last gradient of a bucket; dashed line: of the rank")
    axes.set_title(f"{profile.strategy}, {profile.backend}: the step of median duration", loc="left")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_rank(axes: Axes, step: Step, lane: int, origin: int) -> None:
    def bar(row: int, start: int, end: int, color: str, label: str, height: float = 0.7) -> None:
        spans: Sequence[tuple[float, float]] = [((start - origin) / 1e6, (end - start) / 1e6)]
        axes.broken_barh(spans, (row - height / 2, height), facecolors=color, edgecolor="white", label=label)

    bar(lane, *step.interval, "#dddddd", "forward, optimizer, other")
    for backward in step.backwards:
        bar(lane, backward.interval.start, backward.last_gradient, "#9fc5e8", "backward")
        bar(lane, backward.last_gradient, backward.interval.end, "#f6c6a0", "until reduced")
        for index, reduction in enumerate(backward.reductions):
            bar(lane + 1, *reduction, _COLORS[index % len(_COLORS)], f"bucket {index}" if index < _BUCKETS_NAMED else "")
        for bucket in backward.buckets:
            if bucket.ready is not None:
                moment = (bucket.ready - origin) / 1e6
                axes.plot([moment], [lane + 0.45], "^", color=_COLORS[bucket.index % len(_COLORS)], markersize=5)
        if backward.reductions:
            moment = (backward.last_gradient - origin) / 1e6
            axes.plot([moment, moment], [lane - 0.4, lane + 1.4], "--", color="black", linewidth=0.8)
