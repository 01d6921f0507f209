"""Proof that an installed Horovod works: a real all-reduce between two processes, bounded in time.

The processes run programs of their own, so that Horovod is imported nowhere in this package.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence

from hvdtrain.horovod_build.run import Finished, run

PROOF_LIMIT_S = 120.0

# What a launcher exports; a proof that inherits it would join, or wait for, somebody else's job.
_LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "HYDRA_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR",
                   "MASTER_PORT", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")  # fmt: skip

# Each rank: sum of (1, 2) and of (2, 4) is (3, 6).
_RANK = """
import torch
import horovod.torch as hvd
hvd.init()
assert hvd.size() == 2, f"hvd.size() is {hvd.size()}, expected 2"
total = hvd.allreduce(torch.tensor([1.0, 2.0]) * (hvd.rank() + 1), op=hvd.Sum, name="proof")
assert total.tolist() == [3.0, 6.0], f"the sum over two ranks is {total.tolist()}, expected [3.0, 6.0]"
hvd.shutdown()
"""

# The parent of the two ranks under gloo: Horovod's own rendezvous server, on the loopback interface, and no
# horovodrun, whose search for common network interfaces needs name resolution and a network.
_GLOO_PARENT = """
import os, subprocess, sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
server = RendezvousServer()
port = server.start()
server.init(get_host_assignments(parse_hosts("localhost:2"), 2))
ranks = []
for rank in range(2):
    environ = dict(
        os.environ, HOROVOD_RANK=str(rank), HOROVOD_SIZE="2", HOROVOD_LOCAL_RANK=str(rank), HOROVOD_LOCAL_SIZE="2",
        HOROVOD_CROSS_RANK="0", HOROVOD_CROSS_SIZE="1", HOROVOD_HOSTNAME="localhost", HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port), HOROVOD_GLOO_IFACE=sys.argv[2], HOROVOD_GLOO_TIMEOUT_SECONDS="60",
    )
    ranks.append(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environ))
statuses = [rank.wait() for rank in ranks]
if any(statuses):
    print(f"the two ranks ended with the statuses {statuses}", file=sys.stderr, flush=True)
sys.stdout.flush()
os._exit(0 if statuses == [0, 0] else 1)
"""


@dataclasses.dataclass(frozen=True)
class Proof:
    """Whether the all-reduce gave the right sum on both ranks; `detail` says what went wrong."""

    transport: str
    ok: bool
    detail: str = ""


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without any launcher's variables, and with one thread a process."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    kept["OMP_NUM_THREADS"] = "1"
    return kept


def prove_gloo(environ: Mapping[str, str], loopback: str = "lo", limit_s: float = PROOF_LIMIT_S) -> Proof:
    """Two processes of Horovod over gloo and the loopback interface."""
    return _prove("gloo", [sys.executable, "-c", _GLOO_PARENT, _RANK, loopback], clean_environ(environ), limit_s)


def prove_mpi(environ: Mapping[str, str], limit_s: float = PROOF_LIMIT_S) -> Proof:
    """Two processes of Horovod over MPI, started by mpirun on this host."""
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    if mpirun is None:
        return Proof("mpi", False, "mpirun is not on the PATH: apt-get install -y openmpi-bin")
    return _prove(
        "mpi", [*mpirun_command(mpirun, environ), sys.executable, "-c", _RANK], clean_environ(environ), limit_s
    )


def mpirun_command(mpirun: str, environ: Mapping[str, str]) -> list[str]:
    """mpirun with two processes on this host, whichever MPI it belongs to."""
    version = run([mpirun, "--version"], limit_s=30.0, environ=environ)
    command = [mpirun, "-np", "2"]
    if "open mpi" in (version.stdout + version.stderr).lower() or "open-mpi" in version.stdout.lower():
        # A container has root alone, and often one core.
        command += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        command += ["--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]
        command += ["--mca", "btl_vader_single_copy_mechanism", "none"]
    return command


def _prove(transport: str, command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Proof:
    # A folder of its own: `python -c` puts the current one first on the path, and it may hold a horovod/ of sources.
    with tempfile.TemporaryDirectory(prefix="hvdtrain-proof-") as folder:
        done = run(command, limit_s=limit_s, environ=environ, cwd=folder)
    if done.ok:
        return Proof(transport, True)
    return Proof(transport, False, what_failed(done, limit_s))


def what_failed(done: Finished, limit_s: float) -> str:
    """The line that says why the ranks failed: the first error of Python or C++, else the first words of a launcher."""
    if done.status is None:
        return done.reason(limit_s)
    lines = [line.strip() for line in done.stderr.splitlines() if re.search(r"[A-Za-z]{2}", line)]
    for line in lines:
        # Python's last line of a traceback; what a C++ exception says as it ends the process.
        if re.match(r"([\w.]+(Error|Exception)|what\(\)):", line):
            return line.removeprefix("what():").strip()
    return lines[0] if lines else done.reason(limit_s)
