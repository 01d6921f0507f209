"""`hvdtrain doctor`."""

from __future__ import annotations

import json
import shutil
import sys

import click

from hvdtrain.doctor.examine import examine
from hvdtrain.doctor.finding import Status
from hvdtrain.doctor.table import MAX_WIDTH, as_json, render_row, summary
from hvdtrain.errors import EXIT_DONE, EXIT_FAILED


@click.command()
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--quick", is_flag=True, help="Only look; start no all-reduce.")
@click.pass_context
def command(ctx: click.Context, json_wanted: bool, quick: bool) -> None:
    """Show what works on this machine, and the cure for what does not.

    Ends with a real all-reduce between two processes over each backend and transport that is here. Exit status 1 if
    there is a fault; what is optional and not here is none.
    """
    terminal = sys.stdout.isatty()
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH) if terminal else MAX_WIDTH
    findings = []
    for finding in examine(quick=quick):
        findings.append(finding)
        if not json_wanted:
            # Row by row: a check that takes seconds shows where it is.
            click.echo(render_row(finding, width=max(width, 60), colour=terminal))
            sys.stdout.flush()
    click.echo(json.dumps(as_json(findings)) if json_wanted else f"\n{summary(findings)}")
    ctx.exit(EXIT_FAILED if any(finding.status is Status.FAULT for finding in findings) else EXIT_DONE)
