"""`hvdtrain build-horovod`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hvdtrain.horovod_build.recipe import BuildOptions, build_horovod


@click.command(name="build-horovod")
@click.option("--wheel-only", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Put the wheel into DIR and install nothing (for images).")  # fmt: skip
@click.option("--force", is_flag=True, help="Build anew, though a working one is installed or cached.")
@click.option("--without-mpi", is_flag=True, help="Leave MPI out, though its headers are here.")
@click.option("--without-nccl", is_flag=True, help="Leave NCCL out, though torch has CUDA.")
@click.option("--fast-fp16", is_flag=True,
              help="Let gloo sum float16 in AVX instructions, which the release leaves out.")  # fmt: skip
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Where sources, wheels and logs are kept [HVDTRAIN_CACHE, else ~/.cache/hvdtrain].")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiler processes at once [cores, memory].")
def command(
    wheel_only: Path | None,
    force: bool,
    without_mpi: bool,
    without_nccl: bool,
    fast_fp16: bool,
    cache: Path | None,
    jobs: int | None,
) -> None:
    """Build Horovod 0.28.1 for the installed torch, install it, prove it.

    Takes about 4 minutes on two cores; the wheel is kept, so the next installation for the same torch and Python takes
    seconds. Gloo is always in; MPI if mpicxx and mpi.h are here; NCCL if torch has CUDA.
    """
    options = BuildOptions(
        wheel_only=wheel_only,
        force=force,
        with_mpi=not without_mpi,
        with_nccl=not without_nccl,
        cache=cache,
        jobs=jobs,
        fast_fp16=fast_fp16,
    )
    build_horovod(options, sys.stdout)
