"""Every launcher, for real: the command line that starts `hvdtrain` as two ranks on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
HVDTRAIN = str(_BIN / "hvdtrain")
_MODULE = ["-m", "hvdtrain"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
_LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2"]
_MPIRUN = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "-np", "2"]

# One process of these starts all ranks.
LAUNCHERS: dict[str, list[str]] = {
    "torchrun": [*_TORCHRUN, *_MODULE],
    "torch.distributed.launch": [*_LAUNCH, *_MODULE],
    "horovodrun-gloo": [str(_BIN / "horovodrun"), "-np", "2", "--gloo", HVDTRAIN],
    "horovodrun-mpi": [str(_BIN / "horovodrun"), "-np", "2", "--mpi", HVDTRAIN],
    "mpirun": [*_MPIRUN, HVDTRAIN],
}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with the tools of its Python on PATH, and what mpirun needs as root."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "HVDTRAIN_"))}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {**inherited, **as_root, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}", **extra}


def start(launcher: str, arguments: Sequence[str], **extra: str) -> subprocess.Popen[str]:
    """Start `hvdtrain ARGUMENTS` under a launcher, in the repository, in a process group of its own."""
    return start_command([*LAUNCHERS[launcher], *arguments], **extra)


def start_command(command: Sequence[str], **extra: str) -> subprocess.Popen[str]:
    """Start a command likewise; its output, both streams, is read from `stdout`."""
    return subprocess.Popen(
        list(command),
        cwd=REPOSITORY,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_by_hand(arguments: Sequence[str], init_method: str, size: int = 2) -> list[subprocess.Popen[str]]:
    """Start each rank with --init-method, --rank and --world-size."""
    return [
        start_command(
            [HVDTRAIN, *arguments, "--init-method", init_method, "--rank", str(rank), "--world-size", str(size)]
        )
        for rank in range(size)
    ]
