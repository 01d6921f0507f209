"""All checks, in the order in which one builds on the other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from hvdtrain.doctor.all_reduce_check import check_all_reduce
from hvdtrain.doctor.cpu_check import check_cpu, probe_cpu
from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.horovod_check import check_horovod, probe_horovod
from hvdtrain.doctor.limits_check import check_limits, probe_limits
from hvdtrain.doctor.mpi_check import check_mpi, probe_mpi
from hvdtrain.doctor.network_check import check_network, probe_network
from hvdtrain.doctor.ssh_check import check_ssh, probe_ssh
from hvdtrain.doctor.torch_check import check_torch, gpu_in_machine, probe_torch
from hvdtrain.horovod_build.explain import failure_kind


def examine(environ: Mapping[str, str] | None = None, *, quick: bool = False) -> Iterator[Finding]:
    """Look at this machine; each finding is given as soon as it is known. Takes about 15 s, each part has a limit.

    Args:
        environ: the environment to look at and to try things in; the process's own by default.
        quick: only look, and start no all-reduce.
    """
    environ = os.environ if environ is None else environ
    torch = probe_torch(environ)
    yield from check_torch(torch, gpu=gpu_in_machine())
    horovod = probe_horovod(environ)
    yield from check_horovod(horovod, torch.torch)
    needs_mpi = "mpi" in horovod.transports or failure_kind(horovod.error) == "no-libmpi"
    yield from check_mpi(probe_mpi(environ), needed=needs_mpi)
    yield from check_network(probe_network(), environ)
    yield from check_limits(probe_limits())
    yield from check_cpu(probe_cpu(), environ)
    yield from check_ssh(probe_ssh(environ))
    if not quick:
        yield from check_all_reduce(torch, horovod, environ)
