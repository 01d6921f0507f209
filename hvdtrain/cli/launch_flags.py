"""The flags of a process that was started by hand, shared by the subcommands that join a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from hvdtrain.launch.detect import ManualFlags

Function = TypeVar("Function", bound=Callable[..., Any])


def with_launch_flags(function: Function) -> Function:
    """Add --init-method, --rank, --world-size and --local-rank to a click command."""
    for option in (
        click.option(
            "--local-rank", "--local_rank", type=click.IntRange(min=0), help="Rank on this host; found if absent."
        ),
        click.option("--world-size", type=click.IntRange(min=1), help="Number of ranks of the job started by hand."),
        click.option("--rank", type=click.IntRange(min=0), help="Rank of this process in a job started by hand."),
        click.option(
            "--init-method",
            metavar="URL",
            help="Where the ranks meet: tcp://HOST:PORT of rank 0, file:///PATH on a shared disk, or env://.",
        ),
    ):
        function = option(function)
    return function


def manual_flags(ctx: click.Context, flags: Mapping[str, Any]) -> ManualFlags:
    """The flags as one value. A --local-rank before the subcommand (torch.distributed.launch puts it there) counts."""
    local_rank = flags["local_rank"]
    if local_rank is None and ctx.obj:
        local_rank = ctx.obj.get("local_rank")
    return ManualFlags(flags["init_method"], flags["rank"], flags["world_size"], local_rank)
