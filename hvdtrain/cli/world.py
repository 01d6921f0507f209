"""`hvdtrain world`: what this process detects, without starting anything."""

from __future__ import annotations

import json
import os

import click

from hvdtrain.cli.launch_flags import manual_flags, with_launch_flags
from hvdtrain.launch.detect import Meeting, detect


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@with_launch_flags
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **flags: str | int | None) -> None:
    """Show the launcher, rank and size that this process detects.

    Under a launcher every rank prints its own. A field that only a meeting of the ranks can tell is "unknown" here
    (null in JSON); `train` works it out.
    """
    detected = detect(os.environ, manual_flags(ctx, flags))
    place = detected.fields()
    if as_json:
        click.echo(json.dumps({"launcher": detected.launcher, "world": place}))
        return
    text = {name: "unknown before the ranks meet" if value is None else str(value) for name, value in place.items()}
    lines = [
        f"launcher    {detected.launcher}",
        f"rank        {text['rank']} of {text['size']}",
        f"local rank  {text['local_rank']}" + ("" if place["local_size"] is None else f" of {text['local_size']}"),
        f"node rank   {text['node_rank']}" + ("" if place["num_nodes"] is None else f" of {text['num_nodes']}"),
        f"meeting     {_describe(detected.meeting)}",
    ]
    # One write, so that the blocks of several ranks do not interleave.
    click.echo("\n".join(lines) + "\n", nl=False)


def _describe(meeting: Meeting) -> str:
    where = f"{meeting.host}:{meeting.port}"
    return {
        "single": "one rank, nobody to meet",
        "tcp": f"rank 0 listens on {where}",
        "agent": f"torchrun's store on {where}",
        "file": f"through the file {meeting.path}",
        "horovodrun": f"through horovodrun's server on {where}",
        "mpi": "through MPI, or a local file where all ranks are on one host",
    }[meeting.kind]
