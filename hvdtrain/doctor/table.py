"""The findings as a table that fits 100 columns, and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from hvdtrain.doctor.finding import Finding, Status

MAX_WIDTH = 100
_MARKS = {Status.OK: "ok", Status.WARN: "warn", Status.FAULT: "FAULT", Status.ABSENT: "\N{EN DASH}"}
_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAULT: "red", Status.ABSENT: None}
_SUBJECT_COLUMN = 7
_TEXT_COLUMN = 25


def render_row(finding: Finding, *, width: int = MAX_WIDTH, colour: bool = False) -> str:
    """One finding: its mark, its subject, what was found, and below it the cure. No line is longer than `width`."""
    mark = f"{_MARKS[finding.status]:<{_SUBJECT_COLUMN}}"
    if colour:
        mark = click.style(mark, fg=_COLOURS[finding.status], bold=finding.status is Status.FAULT)
    gap = " " * (_TEXT_COLUMN - _SUBJECT_COLUMN)
    lines = _wrap(finding.found, width)
    if finding.cure:
        lines += _wrap(f"-> {finding.cure}", width)
    rows = [f"{mark}{finding.subject:<{len(gap)}}{lines[0]}"]
    rows += [" " * _TEXT_COLUMN + line for line in lines[1:]]
    return "\n".join(row.rstrip() for row in rows)


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many faults and warnings."""
    faults = [finding.subject for finding in findings if finding.status is Status.FAULT]
    warnings = [finding.subject for finding in findings if finding.status is Status.WARN]
    text = "no faults" if not faults else f"{len(faults)} fault{'s' * (len(faults) > 1)}: {', '.join(faults)}"
    if warnings:
        text += f"; {len(warnings)} warning{'s' * (len(warnings) > 1)}: {', '.join(warnings)}"
    return textwrap.fill(text, MAX_WIDTH)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """`{"ok": no faults, "findings": [{status, subject, found, cure}]}`."""
    rows = [{**dataclasses.asdict(finding), "status": finding.status.value} for finding in findings]
    return {"ok": all(finding.status is not Status.FAULT for finding in findings), "findings": rows}


def _wrap(text: str, width: int) -> list[str]:
    # Long paths and symbols are cut rather than let run over the edge; hyphens in them are no places to break.
    return textwrap.wrap(text, width - _TEXT_COLUMN, break_on_hyphens=False) or [""]
