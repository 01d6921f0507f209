"""The same job as a horovodrun or mpirun command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.launch.remote.hosts import Host
from hvdtrain.launch.remote.ssh import SshOptions


def horovodrun(
    hosts: Sequence[Host],
    num_ranks: int,
    ssh: SshOptions,
    command: Sequence[str],
    *,
    start_timeout_s: float,
    nics: str | None = None,
    output: str | None = None,
    verbose: bool = False,
    controller: str | None = None,
    names: Mapping[str, str] | None = None,
) -> list[str]:
    """horovodrun's line. `controller`: gloo or mpi; None leaves the choice to it. `names`: variables set by -x."""
    line = ["horovodrun", "-np", str(num_ranks), "-H", ",".join(map(str, hosts))]
    if ssh.port is not None:
        line += ["-p", str(ssh.port)]
    if ssh.identity_file is not None:
        line += ["-i", ssh.identity_file]
    line += ["--start-timeout", f"{start_timeout_s:.0f}"]
    if nics:
        line += ["--network-interfaces", nics]
    if output is not None:
        line += ["--output-filename", output]
    if verbose:
        line.append("--verbose")
    if controller is not None:
        line.append(f"--{controller}")
    # horovodrun passes on its own environment.
    return [*(["env", *(f"{name}={value}" for name, value in names.items())] if names else []), *line, *command]


def mpirun(
    hosts: Sequence[Host],
    num_ranks: int,
    ssh: SshOptions,
    command: Sequence[str],
    *,
    root: bool,
    nics: str | None = None,
    output: str | None = None,
    names: Sequence[str] = (),
) -> list[str]:
    """Open MPI's line. `root`: run by root, which it refuses unasked; `names`: variables that travel."""
    line = ["mpirun", *(["--allow-run-as-root"] if root else []), "--tag-output", "-np", str(num_ranks)]
    line += ["-H", ",".join(map(str, hosts)), "-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1"]
    line += ["-mca", "btl", "^openib"]
    options = [*(["-p", str(ssh.port)] if ssh.port is not None else [])]
    if ssh.identity_file is not None:
        options += ["-i", ssh.identity_file]
    if options:
        line += ["-mca", "plm_rsh_args", " ".join(options)]
    if nics:
        line += ["-mca", "btl_tcp_if_include", nics, "-mca", "oob_tcp_if_include", nics]
    if output is not None:
        line += ["--output-filename", output]
    for name in names:
        line += ["-x", name]
    return [*line, *command]
