"""The options that say on which hosts a benchmark runs, and which job; of `bench network` and `bench scaling`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hvdtrain.errors import LaunchError

if TYPE_CHECKING:
    from hvdtrain.bench.placed import Place

Function = TypeVar("Function", bound=Callable[..., Any])


def with_place_options(function: Function) -> Function:
    """Add what `place_of` takes."""
    for option in (
        click.option("--python", default=sys.executable, metavar="PATH", help="With -H: the interpreter on the hosts."),
        click.option(
            "--network-interfaces",
            metavar="NAME,...",
            help="With -H: of the ranks' traffic; default: found.",
        ),
        click.option("-i", "--ssh-identity-file", "identity_file", metavar="FILE", help="With -H: private key."),
        click.option("-p", "--ssh-port", "port", type=click.IntRange(1, 65535), help="With -H: ssh port."),
        click.option("--hostfile", metavar="FILE", help="Real hosts, one a line: host1 slots=4."),
        click.option("-H", "--hosts", "named", metavar="HOST:SLOTS,...", help="Real hosts, as for `hvdtrain launch`."),
        click.option(
            "--ranks-per-host", default=1, show_default=True, type=click.IntRange(min=1), help="Of each namespace."
        ),
        click.option(
            "--namespaces",
            type=click.IntRange(1, 250),
            metavar="N",
            help="Hosts in small: N network namespaces of this machine (needs root).",
        ),
    ):
        function = option(function)
    return function


def with_job_options(function: Function) -> Function:
    """Add what `job_of` takes."""
    function = click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job: --set batch_size=8"
    )(function)
    return click.argument("file", required=False, type=click.Path())(function)


@contextlib.contextmanager
def place_of(
    namespaces: int | None,
    ranks_per_host: int,
    named: str | None,
    hostfile: str | None,
    port: int | None,
    identity_file: str | None,
    network_interfaces: str | None,
    python: str,
    local: bool = False,
) -> Iterator[Place]:
    """The hosts for the time of the block: real ones where they are named, else namespaces of this machine.

    Args:
        local: where neither are asked for, this machine itself, with a rank per core or GPU.

    Raises:
        LaunchError: both kinds are asked for, or the hosts cannot be used or made.
    """
    from hvdtrain.bench.hosts import namespace_hosts
    from hvdtrain.bench.placed import ClusterPlace, LocalPlace, NamespacePlace
    from hvdtrain.launch.remote.hosts import parse_hosts, read_hostfile

    if named is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile: both name the hosts; give one of them")
    if named is None and hostfile is None and namespaces is None and local:
        yield LocalPlace(_ranks_here())
        return
    if named is None and hostfile is None:
        with namespace_hosts(namespaces or 2) as made:
            yield NamespacePlace(made, ranks_per_host)
        return
    if namespaces is not None:
        raise LaunchError("--namespaces makes hosts here, -H and --hostfile name real ones; give one of them")
    given = (("-p", port), ("-i", identity_file), ("--network-interfaces", network_interfaces))
    options = [word for name, value in given if value is not None for word in (name, str(value))]
    hosts = parse_hosts(named) if named is not None else read_hostfile(str(hostfile))
    yield ClusterPlace(hosts, options, python)


def _ranks_here() -> int:
    import torch

    from hvdtrain.launch.host import usable_cpus

    return torch.cuda.device_count() or len(usable_cpus())


def job_of(file: str | None, overrides: Sequence[str], default: dict[str, Any]) -> dict[str, Any]:
    """The keys of the job: of the file if there is one, else the benchmark's own; the task's file as a full path.

    Raises:
        ConfigError: the file or an override is wrong.
    """
    import yaml

    from hvdtrain.config import load_config

    if file is not None:
        config = load_config(file, overrides)
    else:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
            own = Path(folder) / "job.yaml"
            own.write_text(yaml.safe_dump(default))
            config = load_config(own, overrides)
    job = config.to_dict()
    found = config.task_file()
    if found is not None:
        job["task"] = f"{found.resolve()}:{config.task_name}"
    return job
