"""`hvdtrain report`: runs and results as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The page. Default: report.html in the folder; of several RUNs, in the working directory.",
)
def command(paths: tuple[Path, ...], output: Path | None) -> None:
    """Make one HTML page, with all pictures in it, of runs and results.

    RUN is an output folder of `hvdtrain train`, a folder with results of `hvdtrain bench network`, `hvdtrain bench
    scaling` or `hvdtrain parity`, or one of their JSON files. Curves of several runs are drawn in the same pictures.
    """
    from hvdtrain.report import write_report

    click.echo(f"report: {write_report(paths, output)}")
