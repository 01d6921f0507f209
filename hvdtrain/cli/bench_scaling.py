"""`hvdtrain bench scaling`."""

from __future__ import annotations

from typing import Any

import click

from hvdtrain.cli.bench_place import job_of, place_of, with_job_options, with_place_options
from hvdtrain.cli.bench_results import backends_or_all, publish, results_folder, show


@click.command("scaling", short_help="Throughput and efficiency on 1, 2, 4, ... ranks and hosts.")
@with_job_options
@with_place_options
@click.option("--ranks", "counts", multiple=True, type=click.IntRange(min=1), help="Default: 1, 2, 4, ... all.")
@click.option("--bandwidth", metavar="RATE", help="Limit the links of --namespaces to 1gbit, ...; default: no limit.")
@click.option("--backend", "backends", multiple=True, type=click.Choice(["ddp", "horovod"]), help="Default: both.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Medians of so many.")
@click.option(
    "--block-seconds", "block_s", default=2.0, show_default=True, type=click.FloatRange(min=0), help="Of one round."
)
@click.option("--output", default="runs/bench-scaling", show_default=True, metavar="DIR", help="Folder of the results.")
@click.option("--no-plots", is_flag=True, help="No picture; it needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def scaling(
    file: str | None,
    overrides: tuple[str, ...],
    counts: tuple[int, ...],
    bandwidth: str | None,
    backends: tuple[str, ...],
    rounds: int,
    block_s: float,
    output: str,
    no_plots: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Train the same job on more and more ranks; each keeps its batch.

    FILE is a job file; without it, a multi-layer perceptron with 10 million parameters. The ranks fill one host after
    the other: this machine, network namespaces of it, or the hosts named with -H. The results go into the output
    folder: scaling.md, scaling.json and scaling.png.
    """
    from hvdtrain.bench.hosts import parse_rate
    from hvdtrain.bench.jobs import LARGE_MLP
    from hvdtrain.bench.placed import NamespacePlace
    from hvdtrain.bench.plots import require_matplotlib
    from hvdtrain.bench.scaling.measure import measure, spreads_of
    from hvdtrain.bench.scaling.table import document
    from hvdtrain.errors import LaunchError

    job = job_of(file, overrides, LARGE_MLP)
    if not no_plots:
        require_matplotlib()
    folder = results_folder(output)
    chosen = backends_or_all(backends)
    with place_of(**where, local=True) as place:
        if isinstance(place, NamespacePlace):
            place.hosts.shape(None if bandwidth is None else parse_rate(bandwidth))
        elif bandwidth is not None:
            raise LaunchError("--bandwidth is for --namespaces; other hosts are measured over their network as it is")
        spreads = spreads_of(place, counts)
        result = measure(place, job, spreads, chosen, rounds=rounds, block_s=block_s)
    result["bandwidth"] = bandwidth
    pictures: list[str] = []
    if not no_plots:
        from hvdtrain.bench.scaling.plots import curve

        pictures = [curve(result, folder / "scaling.png").name]
    text = document(result, pictures)
    publish(result, text, folder, "scaling")
    show(result, text, folder, as_json=as_json)
