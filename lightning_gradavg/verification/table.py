"""A report for people: tables in a terminal."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.verification.causes import CAUSES
from lightning_gradavg.verification.measure import Difference
from lightning_gradavg.verification.report import Finding, Report, Stage

__all__ = ["print_report"]


def print_report(report: Report, console: Console) -> None:
    """Print a report: the verdict, the stages, the findings."""
    console.print(
        f"{report.strategy}, reduction {report.reduction!r}, {report.world_size} ranks, {report.steps} optimizer steps"
        f" against {report.reference}. Equal means a relative difference of at most {report.tolerance:g}.",
        markup=False,
    )
    console.print(_stages(report))
    for finding in report.findings:
        _print_finding(finding, console)
    for remark in report.remarks:
        console.print(f"- not compared: {remark}", markup=False)
    console.print(_verdict(report), markup=False)


def _verdict(report: Report) -> str:
    first = report.first
    if first is None:
        notes = " apart from chance" if report.findings else ""
        return f"EQUAL: every step is that of the reference{notes}."
    where = "" if first.step is None else f" in step {first.step}"
    return f"DIFFERENT: the run parts from the reference at {first.stage!r}{where}: {first.cause}."


def _stages(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("stage", "", "step", "first or largest difference", "relative", "ulps", "factor"):
        table.add_column(heading, overflow="fold")
    for stage in report.stages:
        table.add_row(stage.name, stage.status, *_cells(stage))
    return table


def _cells(stage: Stage) -> tuple[str, str, str, str, str]:
    difference = stage.difference
    step = "" if stage.step is None else str(stage.step)
    if difference is None:
        return step, stage.note, "", "", ""
    if difference.relative == 0:
        return step, stage.note or "the same bits", "", "", ""
    factor = "" if difference.factor is None else f"{difference.factor:.6g}"
    return step, difference.name, f"{difference.relative:.1e}", _ulps(difference), factor


def _ulps(difference: Difference) -> str:
    return f"{difference.ulps:.3g}" if math.isfinite(difference.ulps) else "-"


def _print_finding(finding: Finding, console: Console) -> None:
    kind = "difference" if finding.is_difference else "note"
    step = "" if finding.step is None else f", step {finding.step}"
    console.print(f"{finding.cause} ({kind}; {finding.stage}{step})", style="bold", markup=False)
    difference = finding.difference
    lines = [finding.detail]
    if difference is not None:
        lines.append(
            f"{difference.name}: {difference.found:.9g}, reference {difference.expected:.9g};"
            f" relative {difference.relative:.2e}, {_ulps(difference)} ulps"
        )
    lines += [f"Do: {finding.advice}", f"See: {CAUSES[finding.cause].page}"]
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)
