"""The command line: one small file per subcommand, imported only when it is called.

`hvdtrain --help` and `hvdtrain world` must answer at once, so nothing here imports torch; the table below holds the
one-line help that click would otherwise have to import every subcommand for.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import click

from hvdtrain.errors import HvdtrainError

# name: (module, one line of help). A subcommand's module has one click command called `command`.
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "train": ("hvdtrain.cli.train", "Train the task that a YAML file describes."),
    "exec": ("hvdtrain.cli.exec", "Run an unchanged Horovod script on native torch.distributed."),
    "world": ("hvdtrain.cli.world", "Show the launcher, rank and size that this process detects."),
    "launch": ("hvdtrain.cli.launch", "Start a command on every host of a cluster, over ssh."),
    "doctor": ("hvdtrain.cli.doctor", "Show what works on this machine, and the cure for what does not."),
    "build-horovod": ("hvdtrain.cli.build_horovod", "Build Horovod for the installed torch, install and prove it."),
    "parity": ("hvdtrain.cli.parity", "Certify that a job trains to the same weights under both backends."),
    "bench": ("hvdtrain.cli.bench", "Measure on this machine: each benchmark starts its own ranks."),
    "report": ("hvdtrain.cli.report", "Make one HTML page of runs and results."),
}


class LazyGroup(click.Group):
    """A click group that imports a subcommand when it is called, and not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        command = importlib.import_module(SUBCOMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hvdtrain")
@click.option("--local-rank", "--local_rank", type=int, default=None, hidden=True)
@click.pass_context
def cli(ctx: click.Context, local_rank: int | None) -> None:
    """One PyTorch trainer, two backends: native DistributedDataParallel and Horovod."""
    # torch.distributed.launch puts --local-rank=N before the subcommand; the subcommand reads it from ctx.obj.
    ctx.obj = {"local_rank": local_rank}


def main() -> NoReturn:
    """Run the command line; errors of ours become one message and an exit status, never a traceback."""
    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.Exit as exit_request:
        status = exit_request.exit_code
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except click.Abort:
        click.echo("hvdtrain: interrupted", err=True)
        status = 1
    except HvdtrainError as error:
        click.echo(f"hvdtrain: error: {error}", err=True)
        status = error.exit_status
    sys.exit(status if isinstance(status, int) else 0)
