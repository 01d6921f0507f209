"""`hvdtrain bench`: measurements that start their own ranks."""

from __future__ import annotations

import json

import click


@click.group()
def command() -> None:
    """Measure on this machine: each benchmark starts its own ranks, and prints a table, or with --json JSON alone."""


@command.command()
@click.option("--backend", "backends", multiple=True, type=click.Choice(["ddp", "horovod"]), help="Default: both.")
@click.option("--model", "models", multiple=True, type=click.Choice(["small", "large"]), help="Default: both.")
@click.option(
    "--rounds", default=30, show_default=True, type=click.IntRange(min=1), help="Pairs to take the median of."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def overhead(backends: tuple[str, ...], models: tuple[str, ...], rounds: int, as_json: bool) -> None:
    """The trainer against loops written by hand for DDP and for Horovod, side by side."""
    from hvdtrain.bench import overhead as benchmark

    result = benchmark.measure(backends or ("ddp", "horovod"), models or ("small", "large"), rounds)
    click.echo(json.dumps(result) if as_json else benchmark.table(result))
