"""MPI: the launcher and the library, which come in different packages and go missing one at a time."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping

from hvdtrain.doctor.finding import Finding, absent, fault, ok, warn
from hvdtrain.horovod_build.run import run

_LIMIT_S = 30.0

# Names under which programs ask for it: Open MPI 4 and 5, MPICH and its kin (two spellings), the development link.
_LIBRARIES = ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so")
_LOAD = """
import ctypes, sys
said = []
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        said.append(str(error))
    else:
        print(name)
        break
else:
    sys.exit(said[0])
"""


@dataclasses.dataclass(frozen=True)
class MpiSeen:
    """`mpirun`: the first line of its --version; `library`: the libmpi that loads, or None; `error`: why not."""

    mpirun: str | None = None
    library: str | None = None
    error: str = ""


def probe_mpi(environ: Mapping[str, str], python: str = sys.executable) -> MpiSeen:
    """Ask mpirun for its version and load libmpi, each in a process of its own."""
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    version = None
    if mpirun:
        asked = run([mpirun, "--version"], limit_s=_LIMIT_S, environ=environ)
        lines = [line.strip() for line in (asked.stdout + asked.stderr).splitlines() if line.strip()]
        version = lines[0] if asked.ok and lines else f"does not run: {asked.reason(_LIMIT_S)}"
    loaded = run([python, "-c", _LOAD, *_LIBRARIES], limit_s=_LIMIT_S, environ=environ, cwd="/")
    if loaded.ok:
        return MpiSeen(version, loaded.stdout.strip())
    return MpiSeen(version, None, loaded.reason(_LIMIT_S))


def check_mpi(seen: MpiSeen, *, needed: bool) -> list[Finding]:
    """mpirun and libmpi together.

    Args:
        seen: what the probe saw.
        needed: the installed Horovod was built with MPI, or asks for libmpi.
    """
    cure = "apt-get install -y openmpi-bin"
    if seen.mpirun is None and seen.library is None:
        if needed:
            return [fault("mpi", "no libmpi, and the installed Horovod was built with MPI", cure)]
        return [absent("mpi", "neither mpirun nor libmpi; torchrun and horovodrun --gloo do without")]
    if seen.library is None:
        return [fault("mpi", f"{seen.mpirun}, but libmpi does not load: {seen.error}", cure)]
    if seen.mpirun is None:
        return [absent("mpi", f"{seen.library} loads; no mpirun to start ranks with", cure)]
    if seen.mpirun.startswith("does not run"):
        return [fault("mpi", f"mpirun {seen.mpirun}", cure + " --reinstall")]
    if re.search(r"\b5\.0\.0\b", seen.mpirun):
        return [warn("mpi", f"{seen.mpirun}: horovodrun -p fails on 5.0.0", "use another release of Open MPI")]
    return [ok("mpi", f"{seen.mpirun}, {seen.library} loads")]
