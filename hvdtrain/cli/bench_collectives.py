"""`hvdtrain bench collectives`."""

from __future__ import annotations

from typing import Any

import click

from hvdtrain.cli.bench_place import place_of, with_place_options
from hvdtrain.cli.bench_results import backends_or_all, publish, results_folder, show

_MOST_HOSTS = 8


@click.command("collectives", short_help="All-reduce by parameter server and by ring against the backends' own.")
@with_place_options
@click.option("--ranks", "counts", multiple=True, type=click.IntRange(min=2), help="Default: 2, 4, 6, ... all hosts.")
@click.option(
    "--size", "sizes_mb", multiple=True, type=click.FloatRange(min=1e-5), help="Of the tensor, MB. Default: 1, 4, 16."
)
@click.option(
    "--bandwidth", default="1gbit", show_default=True, metavar="RATE|none", help="Of the links of the namespaces."
)
@click.option("--backend", "backends", multiple=True, type=click.Choice(["ddp", "horovod"]), help="Default: both.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Medians of so many.")
@click.option(
    "--limit", "limit_s", default=600.0, show_default=True, type=click.FloatRange(min=1), help="Of a job, seconds."
)
@click.option(
    "--output", default="runs/bench-collectives", show_default=True, metavar="DIR", help="Folder of the results."
)
@click.option("--no-plots", is_flag=True, help="No picture; it needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def collectives(
    counts: tuple[int, ...],
    sizes_mb: tuple[float, ...],
    bandwidth: str,
    backends: tuple[str, ...],
    rounds: int,
    limit_s: float,
    output: str,
    no_plots: bool,
    as_json: bool,
    namespaces: int | None,
    ranks_per_host: int,
    **where: Any,
) -> None:
    """Add a tensor over all ranks in several ways; time, and bytes of each host by the kernel's counters.

    The parameter server and the ring are the teaching code of examples/collectives. Each rank has a host of its own:
    by default eight network namespaces of this machine, or the hosts named with -H. The results go into the output
    folder: collectives.md, collectives.json and collectives.png.
    """
    from hvdtrain.bench.collectives.lessons import read_lessons
    from hvdtrain.bench.collectives.measure import measure
    from hvdtrain.bench.collectives.table import document
    from hvdtrain.bench.hosts import parse_rate
    from hvdtrain.bench.placed import NamespacePlace
    from hvdtrain.bench.plots import require_matplotlib
    from hvdtrain.errors import LaunchError

    if ranks_per_host != 1:
        raise LaunchError("--ranks-per-host: bytes per rank are counted at the rank's own host; leave it at 1")
    lessons = read_lessons()
    if not no_plots:
        require_matplotlib()
    bits_per_s = None if bandwidth == "none" else parse_rate(bandwidth)
    folder = results_folder(output)
    real = where["named"] is not None or where["hostfile"] is not None
    wanted = namespaces or (None if real else max(counts, default=_MOST_HOSTS))
    with place_of(**where, namespaces=wanted, ranks_per_host=1) as place:
        if isinstance(place, NamespacePlace):
            place.hosts.shape(bits_per_s)
        available = place.full.num_hosts
        if available < 2:
            raise LaunchError("one host has nobody to send to; give two or more")
        chosen = sorted(set(counts)) or [*range(2, available, 2), available]
        if chosen[-1] > available:
            raise LaunchError(f"--ranks {chosen[-1]}: there are {available} hosts, and each takes one rank")
        sizes = [max(4, round(size * 1e6 / 4) * 4) for size in sorted(set(sizes_mb)) or (1.0, 4.0, 16.0)]
        backends_here = backends_or_all(backends)
        result = measure(place, lessons, chosen, sizes, backends_here, rounds=rounds, limit_s=limit_s)
    result["bits_per_s"] = bits_per_s if result["sharing"] is not None else None
    pictures: list[str] = []
    if not no_plots:
        from hvdtrain.bench.collectives.plots import draw

        pictures = [draw(result, folder / "collectives.png").name]
    text = document(result, pictures)
    publish(result, text, folder, "collectives")
    show(result, text, folder, as_json=as_json)
