"""How the contestants of `hvdtrain bench hvd` are started: one script under three Horovods, and DDP beside them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.bench.contest import Command
from hvdtrain.bench.turns import JOB, SOCKET
from hvdtrain.launch.network import free_port


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        command: makes of a command one that runs there.
        address: at which the others reach it.
        interface: that carries the traffic; None where it is this machine's own loopback.
    """

    command: Callable[[Sequence[str]], list[str]] = list
    address: str = "127.0.0.1"
    interface: str | None = None


# name: what it is, in the table's head
CONTESTANTS = {
    "ours": "hvdtrain.hvd",
    "gloo": "Horovod, gloo",
    "mpi": "Horovod, MPI",
    "ddp": "DDP",
}
# Variables of launchers, which would answer for the ranks that are started here.
_LAUNCHERS_OWN = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "TORCHELASTIC_", "SLURM_", "MV2_", "MPI_", "JSM_", "GLOO_")
_LAUNCHERS_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HERE = Path(__file__).parent
_LIBRARY_QUESTION = "import horovod.torch as hvd; print(int(hvd.gloo_built()), int(hvd.mpi_built()))"


def missing() -> dict[str, str]:
    """The contestants that cannot be started here, and why."""
    if importlib.util.find_spec("horovod") is None:
        reason = "Horovod is not installed (`hvdtrain build-horovod` builds it)"
        return {"gloo": reason, "mpi": reason}
    asked = subprocess.run([sys.executable, "-c", _LIBRARY_QUESTION], check=False, capture_output=True, text=True)
    if asked.returncode != 0:
        reason = f"Horovod does not load: {asked.stderr.strip().splitlines()[-1:]}"
        return {"gloo": reason, "mpi": reason}
    gloo, mpi = (word == "1" for word in asked.stdout.split()[-2:])
    reasons = {}
    if not gloo:
        reasons["gloo"] = "this Horovod was built without gloo"
    if not mpi:
        reasons["mpi"] = "this Horovod was built without MPI"
    elif shutil.which("mpirun") is None:
        reasons["mpi"] = "mpirun is not installed"
    return reasons


def commands(name: str, work: str, compression: str, places: Sequence[Place], folder: Path) -> list[Command]:
    """What starts a contestant.

    Args:
        name: of CONTESTANTS.
        work, compression: see `hvd_work.arguments`.
        places: one per rank.
        folder: for files that the launcher needs.
    """
    words = [work, "--compression", compression]
    if name == "ddp":
        return by_hand([sys.executable, str(_HERE / "hvd_ddp_script.py"), *words], places)
    backend = "ddp" if name == "ours" else "horovod"
    script = [sys.executable, "-m", "hvdtrain", "exec", "--backend", backend, str(_HERE / "hvd_script.py"), *words]
    return [_mpirun(script, places, folder)] if name == "mpi" else by_hand(script, places)


def _environ(**more: str) -> dict[str, str]:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_LAUNCHERS_OWN) and key not in _LAUNCHERS_PLACES
    }
    # One thread per rank; and a Horovod that was held for the others' turns must not take that for a silent peer.
    return {**inherited, "OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", **more}


def by_hand(argv: Sequence[str], places: Sequence[Place]) -> list[Command]:
    """One command per rank, as a person starts ranks by hand."""
    meeting = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": places[0].address, "MASTER_PORT": str(free_port())}
    started = []
    for rank, place in enumerate(places):
        environ = _environ(**meeting, RANK=str(rank))
        if place.interface is not None:
            # torch's gloo would look for an address under the name of the machine.
            environ["GLOO_SOCKET_IFNAME"] = place.interface
        started.append(Command(place.command(argv), environ))
    return started


def _mpirun(argv: Sequence[str], places: Sequence[Place], folder: Path) -> Command:
    """As `horovodrun --mpi` calls it."""
    words = ["mpirun", "--allow-run-as-root", "-np", str(len(places)), "-bind-to", "none", "-map-by", "slot"]
    words += ["-mca", "pml", "ob1"]
    for variable in (SOCKET, JOB, "OMP_NUM_THREADS", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        words += ["-x", variable]
    interface = places[0].interface
    if interface is None:
        words += ["-mca", "btl", "^openib", "-H", f"localhost:{len(places)}"]
    else:
        # Namespaces share the memory of their machine, which two hosts do not.
        words += ["-mca", "btl", "tcp,self", "-mca", "btl_tcp_if_include", interface]
        words += ["-mca", "oob_tcp_if_include", interface, "-H", ",".join(f"{place.address}:1" for place in places)]
        words += ["-mca", "plm_rsh_agent", str(_remote_shell(places, folder))]
    environ = _environ(HOROVOD_CONTROLLER="mpi", HOROVOD_CPU_OPERATIONS="mpi")
    return Command(places[0].command([*words, *argv]), environ)


def _remote_shell(places: Sequence[Place], folder: Path) -> Path:
    """A stand-in for ssh: called as `agent HOST WORDS...`, it runs the words where that host's rank is to run."""
    path = folder / "agent"
    cases = "\n".join(f'{place.address}) exec {shlex.join(place.command(["sh", "-c"]))} "$*" ;;' for place in places)
    path.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{cases}\nesac\nexit 1\n')
    path.chmod(0o700)
    return path
