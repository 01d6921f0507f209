"""A real all-reduce between two processes, over each transport of each backend that is here."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping

from hvdtrain.doctor.finding import Finding, absent, fault, ok
from hvdtrain.doctor.horovod_check import HorovodSeen
from hvdtrain.doctor.torch_check import TorchSeen
from hvdtrain.horovod_build.proof import PROOF_LIMIT_S, Proof, clean_environ, prove_gloo, prove_mpi, what_failed
from hvdtrain.horovod_build.run import run
from hvdtrain.launch.network import loopback_interface

# A parent that starts two ranks of itself; they meet through a file, so that no port and no name is needed.
_DDP = """
import datetime, os, subprocess, sys
transport, path = sys.argv[1], sys.argv[2]
if len(sys.argv) == 3:
    ranks = [subprocess.Popen([sys.executable, "-c", os.environ["HVDTRAIN_PROOF"], transport, path, str(rank)])
             for rank in range(2)]
    sys.exit(0 if [rank.wait() for rank in ranks] == [0, 0] else 1)
import torch
import torch.distributed as dist
rank = int(sys.argv[3])
device = torch.device("cuda", rank) if transport == "nccl" else torch.device("cpu")
if transport == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(transport, init_method=f"file://{path}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
total = torch.tensor([1.0, 2.0], device=device) * (rank + 1)
dist.all_reduce(total)
assert total.tolist() == [3.0, 6.0], f"the sum over two ranks is {total.tolist()}, expected [3.0, 6.0]"
dist.destroy_process_group()
"""


def prove_ddp(transport: str, environ: Mapping[str, str], limit_s: float = PROOF_LIMIT_S) -> Proof:
    """Two processes of torch.distributed over `gloo` and the loopback interface, or over `nccl` and two devices."""
    environ = {**clean_environ(environ), "HVDTRAIN_PROOF": _DDP}
    if transport == "gloo":
        environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-proof-") as folder:
        command = [sys.executable, "-c", _DDP, transport, os.path.join(folder, "store")]  # noqa: PTH118
        done = run(command, limit_s=limit_s, environ=environ, cwd=folder)
    if done.ok:
        return Proof(transport, True)
    return Proof(transport, False, what_failed(done, limit_s))


def check_all_reduce(
    torch: TorchSeen, horovod: HorovodSeen, environ: Mapping[str, str], limit_s: float = PROOF_LIMIT_S
) -> Iterator[Finding]:
    """One finding per backend and transport; what cannot be tried is absent, with the reason.

    Args:
        torch: what of torch is here.
        horovod: what of Horovod is here.
        environ: environment for the processes.
        limit_s: how long each of them may take.
    """
    subject = "ddp {}".format
    if torch.torch is None:
        yield absent(subject("gloo"), "not tried: torch does not import")
    else:
        if "gloo" in torch.transports:
            cure = "every training needs this: see to the faults above first"
            yield _finding(subject("gloo"), prove_ddp("gloo", environ, limit_s), cure)
        if "nccl" in torch.transports and len(torch.devices) >= 2:
            cure = (
                "NCCL_DEBUG=INFO hvdtrain doctor shows why; often /dev/shm, or devices that may not talk to each other"
            )
            yield _finding(subject("nccl"), prove_ddp("nccl", environ, limit_s), cure)
        elif "nccl" in torch.transports:
            yield absent(subject("nccl"), f"not tried: two ranks need two devices, here are {len(torch.devices)}")

    if not horovod.loads:
        reason = "not installed" if horovod.folder is None else "does not load"
        yield absent("horovod gloo", f"not tried: Horovod {reason}")
        return
    again = "see to the faults above first, if any; else hvdtrain build-horovod --force"
    if "gloo" in horovod.transports:
        yield _finding("horovod gloo", prove_gloo(environ, loopback_interface(), limit_s), again)
    if "mpi" in horovod.transports:
        if shutil.which("mpirun", path=environ.get("PATH", os.defpath)):
            yield _finding("horovod mpi", prove_mpi(environ, limit_s), again)
        else:
            yield absent("horovod mpi", "not tried: no mpirun", "apt-get install -y openmpi-bin")


def _finding(subject: str, proof: Proof, cure: str) -> Finding:
    if proof.ok:
        return ok(subject, "two-process all-reduce: right sum on both")
    return fault(subject, f"two-process all-reduce failed: {proof.detail}", cure)
