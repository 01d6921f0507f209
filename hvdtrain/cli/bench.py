"""`hvdtrain bench`: measurements that start their own ranks."""

from __future__ import annotations

import json

import click

from hvdtrain.bench.stop_signals import stop_signals_raise
from hvdtrain.cli.bench_collectives import collectives
from hvdtrain.cli.bench_network import network
from hvdtrain.cli.bench_scaling import scaling


@click.group()
@click.pass_context
def command(context: click.Context) -> None:
    """Measure on this machine: each benchmark starts its own ranks, and prints a table, or with --json JSON alone."""
    context.with_resource(stop_signals_raise())


command.add_command(collectives)
command.add_command(network)
command.add_command(scaling)


@command.command()
@click.option("--backend", "backends", multiple=True, type=click.Choice(["ddp", "horovod"]), help="Default: both.")
@click.option("--model", "models", multiple=True, type=click.Choice(["small", "large"]), help="Default: both.")
@click.option(
    "--rounds", default=60, show_default=True, type=click.IntRange(min=1), help="Pairs to take the median of."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def overhead(backends: tuple[str, ...], models: tuple[str, ...], rounds: int, as_json: bool) -> None:
    """The trainer against loops written by hand for DDP and for Horovod, side by side."""
    from hvdtrain.bench import overhead as benchmark

    result = benchmark.measure(backends or ("ddp", "horovod"), models or ("small", "large"), rounds)
    click.echo(json.dumps(result) if as_json else benchmark.table(result))


@command.command()
@click.option(
    "--work",
    "works",
    multiple=True,
    type=click.Choice(["small", "large", "resnet", "latency", "throughput"]),
    help="Two MLPs, a conv net, an allreduce of 4 bytes, one of 64 MB. Default: all.",
)
@click.option(
    "--compression", "compressions", multiple=True, type=click.Choice(["none", "fp16"]), help="Default: both."
)
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Turns of each contestant.")
@click.option(
    "--two-hosts",
    is_flag=True,
    help="Put the two ranks into network namespaces with a cable of 10 Gbit/s between them (needs root).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def hvd(works: tuple[str, ...], compressions: tuple[str, ...], rounds: int, two_hosts: bool, as_json: bool) -> None:
    """An unchanged Horovod script on native torch.distributed and on the real Horovod, side by side."""
    from hvdtrain.bench import hvd as benchmark

    result = benchmark.measure(
        works or (*benchmark.TRAININGS, *benchmark.REDUCTIONS),
        compressions or ("none", "fp16"),
        rounds,
        separate_hosts=two_hosts,
    )
    click.echo(json.dumps(result) if as_json else benchmark.table(result))
