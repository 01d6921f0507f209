"""`hvdtrain exec`: run an unchanged Horovod script on native torch.distributed."""

from __future__ import annotations

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--backend",
    type=click.Choice(["ddp", "horovod"]),
    default="ddp",
    show_default=True,
    help="What `import horovod.torch` finds: hvdtrain's own, on torch.distributed, or the real Horovod.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(backend: str, module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT, which was written for Horovod, as `python SCRIPT ARGUMENTS` would.

    Under any launcher: horovodrun -np 4 hvdtrain exec train.py; torchrun --no-python ... hvdtrain exec train.py; alone.
    """
    from hvdtrain.hvd.script import run

    def prepare_real() -> None:
        from hvdtrain.backends.horovod_script import prepare

        prepare()

    run(backend, script, arguments, module, prepare_real)
