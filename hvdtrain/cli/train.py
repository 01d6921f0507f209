"""`hvdtrain train`: the trainer from the command line."""

from __future__ import annotations

import os

import click

from hvdtrain.cli.launch_flags import manual_flags, with_launch_flags


@click.command()
@click.argument("file", type=click.Path())
@click.option("--backend", metavar="ddp|horovod", help="In place of the file's backend.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: --set optimizer.lr=0.1")
@click.option("--output", metavar="DIR", help="In place of the file's output folder.")
@click.option(
    "--resume",
    default="none",
    show_default=True,
    metavar="auto|PATH|none",
    help="Continue from the newest checkpoint of the output folder, or from PATH.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Tell where the time of a step goes, and leave a trace of some steps for each rank in the output folder.",
)
@with_launch_flags
@click.pass_context
def command(
    ctx: click.Context,
    /,
    file: str,
    backend: str | None,
    overrides: tuple[str, ...],
    output: str | None,
    resume: str,
    profile: bool,
    **flags: str | int | None,
) -> int:
    """Train the task that FILE describes, together with the launcher's other ranks.

    Exit status: 0 done; 1 training failed; 2 the input is wrong; 75 stopped on request with a checkpoint saved.
    """
    from hvdtrain.config import load_config

    config = load_config(file, overrides, backend=backend or os.environ.get("HVDTRAIN_BACKEND"), output=output)
    if profile:
        # torch's profiler announces its beginning and its end on standard error. Read when torch is loaded.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Late: torch takes seconds to import, and a wrong file should say so at once.
    from hvdtrain.trainer import train

    return train(config, resume=resume, flags=manual_flags(ctx, flags), profile=profile)
