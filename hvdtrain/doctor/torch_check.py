"""torch, numpy, CUDA and NCCL: what a process of the running environment sees of them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.doctor.finding import Finding, absent, fault, ok, warn
from hvdtrain.horovod_build.run import run

_PROBE_LIMIT_S = 180.0

_PROBE = """
import json, platform, sys
seen = {"python": platform.python_version(), "numpy": None, "numpy_error": "", "torch": None, "torch_error": ""}
try:
    import numpy
    seen["numpy"] = numpy.__version__
except Exception as error:
    seen["numpy_error"] = f"{type(error).__name__}: {error}"
try:
    import torch
    import torch.distributed as dist
    seen["torch"] = torch.__version__
    seen["threads"] = torch.get_num_threads()
    seen["transports"] = [
        name for name in ("gloo", "nccl", "mpi")
        if dist.is_available() and getattr(dist, f"is_{name}_available")()
    ]
    seen["cuda"] = torch.version.cuda
    seen["hip"] = torch.version.hip
    if torch.version.cuda or torch.version.hip:
        seen["cuda_available"] = torch.cuda.is_available()
        seen["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if "nccl" in seen["transports"]:
            seen["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    seen["torch_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(seen))
"""


@dataclasses.dataclass(frozen=True)
class TorchSeen:
    """What the probe saw. `error` is why torch does not import; `said` is the last line of the probe's warnings."""

    python: str = ""
    numpy: str | None = None
    numpy_error: str = ""
    torch: str | None = None
    error: str = ""
    transports: tuple[str, ...] = ()
    cuda: str | None = None
    cuda_available: bool = False
    devices: tuple[str, ...] = ()
    nccl: str | None = None
    said: str = ""


def probe_torch(environ: Mapping[str, str], python: str = sys.executable) -> TorchSeen:
    """Import torch and numpy in a process of its own and ask."""
    done = run([python, "-c", _PROBE], limit_s=_PROBE_LIMIT_S, environ=environ, cwd="/")
    if not done.ok:
        return TorchSeen(error=done.reason(_PROBE_LIMIT_S))
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return TorchSeen(
        python=seen["python"],
        numpy=seen["numpy"],
        numpy_error=seen["numpy_error"],
        torch=seen["torch"],
        error=seen["torch_error"],
        transports=tuple(seen.get("transports", ())),
        cuda=seen.get("cuda"),
        cuda_available=seen.get("cuda_available", False),
        devices=tuple(seen.get("devices", ())),
        nccl=seen.get("nccl"),
        said=done.last_line() if done.stderr else "",
    )


def gpu_in_machine() -> bool:
    """Whether the kernel shows an NVIDIA device, whatever torch thinks."""
    return Path("/dev/nvidia0").exists() or any(Path("/proc/driver/nvidia/gpus").glob("*"))


def check_torch(seen: TorchSeen, *, gpu: bool) -> list[Finding]:
    """torch, numpy, CUDA, NCCL.

    Args:
        seen: what the probe saw.
        gpu: whether the machine has an NVIDIA device.
    """
    findings = []
    if seen.torch is None:
        cure = "install torch: https://pytorch.org/get-started/locally/ has the command for this machine"
        return [fault("torch", f"does not import: {seen.error}", cure)]
    carried = ", ".join(seen.transports) or "no transport"
    found = f"{seen.torch} on Python {seen.python}, carries {carried}"
    if "gloo" in seen.transports:
        findings.append(ok("torch", found))
    else:
        findings.append(fault("torch", found, "gloo is needed: install a torch that has it (the official ones have)"))

    if seen.numpy is None:
        reason = seen.numpy_error or "not installed"
        cure = "python -m pip install numpy (torch's data loader, TensorBoard and Horovod need it)"
        findings.append(fault("numpy", f"does not import: {reason}", cure))
    else:
        findings.append(ok("numpy", seen.numpy))

    if seen.cuda is None:
        if gpu:
            cure = "install a CUDA build: https://pytorch.org/get-started/locally/"
            findings.append(warn("cuda", "there is an NVIDIA device, but this torch is built without CUDA", cure))
        else:
            findings.append(absent("cuda", "torch is built without CUDA; training runs on the CPU"))
        return findings
    if seen.cuda_available:
        findings.append(ok("cuda", f"CUDA {seen.cuda}, {_count(seen.devices)}"))
    elif gpu:
        cure = "nvidia-smi shows the driver: it must be new enough for this CUDA, and the container have the device"
        said = f" ({seen.said})" if seen.said else ""
        findings.append(fault("cuda", f"torch has CUDA {seen.cuda}, but cannot use the NVIDIA device{said}", cure))
    else:
        findings.append(absent("cuda", f"torch has CUDA {seen.cuda}, but there is no NVIDIA device here"))
    if seen.nccl:
        findings.append(ok("nccl", f"NCCL {seen.nccl}"))
    elif len(seen.devices) > 0:
        findings.append(
            warn("nccl", "this torch has no NCCL: GPUs would talk over gloo", "install an official CUDA torch")
        )
    return findings


def _count(devices: tuple[str, ...]) -> str:
    names = sorted(set(devices))
    return ", ".join(f"{devices.count(name)} x {name}" for name in names) or "no device"
