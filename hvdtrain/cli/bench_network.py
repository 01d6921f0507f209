"""`hvdtrain bench network`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.cli.bench_place import job_of, place_of, with_job_options, with_place_options
from hvdtrain.cli.bench_results import backends_or_all, publish, results_folder, show
from hvdtrain.errors import LaunchError

if TYPE_CHECKING:
    from hvdtrain.bench.network.measure import Link
    from hvdtrain.bench.placed import Place

_BANDWIDTHS = ("1gbit", "10gbit")


@click.command(
    "network", short_help="Time per step and bytes over a network: no_sync, compression, backend, bandwidth."
)
@with_job_options
@with_place_options
@click.option(
    "--bandwidth",
    "bandwidths",
    multiple=True,
    metavar="RATE",
    help="Limit the links to this. Default: 1gbit, 10gbit.",
)
@click.option(
    "--shape-shared-interface",
    "shared_interface",
    metavar="NAME",
    help="With -H: limit this interface of every host to --bandwidth while measuring, for everything that uses it.",
)
@click.option("--link", metavar="RATE", help="With -H: what the network has; default: measured with plain TCP.")
@click.option("--backend", "backends", multiple=True, type=click.Choice(["ddp", "horovod"]), help="Default: both.")
@click.option(
    "--compression",
    "compressions",
    multiple=True,
    type=click.Choice(["none", "fp16", "bf16", "powersgd"]),
    help="Default: none and fp16.",
)
@click.option("--accumulate", "accumulates", multiple=True, type=click.IntRange(min=1), help="Default: 4.")
@click.option("--all", "everything", is_flag=True, help="All compressions, and accumulate 1 and 4.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Medians of so many.")
@click.option(
    "--block-seconds", "block_s", default=2.0, show_default=True, type=click.FloatRange(min=0), help="Of one round."
)
@click.option(
    "--starts",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of the runs that others are compared with.",
)
@click.option("--output", default="runs/bench-network", show_default=True, metavar="DIR", help="Folder of the results.")
@click.option("--no-plots", is_flag=True, help="No pictures; they need matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def network(
    file: str | None,
    overrides: tuple[str, ...],
    bandwidths: tuple[str, ...],
    shared_interface: str | None,
    link: str | None,
    backends: tuple[str, ...],
    compressions: tuple[str, ...],
    accumulates: tuple[int, ...],
    everything: bool,
    rounds: int,
    block_s: float,
    starts: int,
    output: str,
    no_plots: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Train over links of several bandwidths, with and without no_sync and compression, and count the bytes.

    FILE is a job file; without it, a multi-layer perceptron with 10 million parameters. The hosts are two network
    namespaces of this machine, or those named with -H. The results go into the output folder: network.md, network.json
    and pictures.
    """
    from hvdtrain.bench.jobs import LARGE_MLP
    from hvdtrain.bench.network.measure import Effort, Grid, measure
    from hvdtrain.bench.network.table import cuts, document
    from hvdtrain.bench.plots import require_matplotlib

    job = job_of(file, overrides, LARGE_MLP)
    if not no_plots:
        require_matplotlib()
    folder = results_folder(output)
    chosen = backends_or_all(backends)
    with place_of(**where) as place:
        if place.full.num_hosts < 2:
            raise LaunchError(f"a network has two hosts at least, and there is {place.full}; name more with -H")
        grid = Grid(
            links=links_of(place, bandwidths, shared_interface, link),
            backends=chosen,
            compressions=compressions or (("none", "fp16", "bf16", "powersgd") if everything else ("none", "fp16")),
            accumulates=accumulates or ((1, 4) if everything else (4,)),
        )
        effort = Effort(rounds, block_s, trace_s=0.0 if no_plots else Effort.trace_s, starts=starts)

        def keep(result: dict[str, Any]) -> None:
            publish(result, document(result), folder, "network")

        result = measure(place, job, grid, effort, keep)
    result["cuts"] = cuts(result)
    pictures: list[Path] = []
    if not no_plots:
        from hvdtrain.bench.network.plots import draw

        pictures = draw(result, folder)
    text = document(result, [picture.name for picture in pictures])
    publish(result, text, folder, "network")
    show(result, text, folder, as_json=as_json)


def links_of(place: Place, bandwidths: tuple[str, ...], shared_interface: str | None, link: str | None) -> list[Link]:
    """The networks to measure over.

    Raises:
        LaunchError: a limit for real hosts without the flag that allows it, or options that contradict each other.
    """
    from hvdtrain.bench.hosts import parse_rate
    from hvdtrain.bench.network.measure import Link
    from hvdtrain.bench.placed import NamespacePlace

    rates = [parse_rate(text) for text in bandwidths]
    if isinstance(place, NamespacePlace):
        if link is not None or shared_interface is not None:
            raise LaunchError("--link and --shape-shared-interface are for real hosts (-H); use --bandwidth here")
        return [Link(rate, "hosts") for rate in rates or map(parse_rate, _BANDWIDTHS)]
    if shared_interface is not None:
        if link is not None or not rates:
            raise LaunchError("--shape-shared-interface limits to --bandwidth RATE; give that, and no --link")
        return [Link(rate, shared_interface) for rate in rates]
    if rates:
        raise LaunchError(
            "--bandwidth would limit an interface of real hosts for everybody; name it with --shape-shared-interface "
            "if nobody else needs it, or leave --bandwidth out to measure over the network as it is"
        )
    return [Link(None if link is None else parse_rate(link))]
