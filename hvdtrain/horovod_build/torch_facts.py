"""What a Horovod wheel must match in the installed torch."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

from packaging.version import Version

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.run import run

# The import of a large torch from a cold disk can take a minute.
_PROBE_LIMIT_S = 180.0

_PROBE = """
import json, pathlib, sys
import torch
nccl = None
for place in sys.path:
    header = pathlib.Path(place, "nvidia", "nccl", "include", "nccl.h")
    if header.is_file():
        nccl = str(header.parent.parent)
        break
print(json.dumps({
    "version": torch.__version__,
    "folder": str(pathlib.Path(torch.__file__).parent),
    "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "nccl_folder": nccl,
}))
"""


@dataclasses.dataclass(frozen=True)
class TorchFacts:
    """The installed torch, as far as it matters to an extension that is built for it.

    `cuda` is the CUDA version of torch or None; `nccl_folder` is where torch's own NCCL package has include/ and lib/;
    `cxx_standard` is 14, 17, 20, ...
    """

    version: str
    folder: str
    cxx11_abi: bool
    cuda: str | None
    hip: str | None
    nccl_folder: str | None
    cxx_standard: int


def read_torch_facts() -> TorchFacts:
    """Ask the running environment's torch, in a process of its own.

    Raises:
        UserError: torch is not installed or does not import.
    """
    probe = run([sys.executable, "-c", _PROBE], limit_s=_PROBE_LIMIT_S)
    if not probe.ok:
        raise UserError(
            f"torch does not import in {sys.executable}: {probe.reason(_PROBE_LIMIT_S)}. "
            "Install it first: https://pytorch.org/get-started/locally/ has the command for this machine."
        )
    values = json.loads(probe.stdout.splitlines()[-1])
    return TorchFacts(**values, cxx_standard=cxx_standard(Path(values["folder"]), values["version"]))


def cxx_standard(torch_folder: Path, version: str) -> int:
    """The C++ standard that extensions of this torch are to be built with.

    torch states it itself, twice: in TorchConfig.cmake, as a property of its cmake target, and in
    torch/utils/cpp_extension.py, as the flag that it passes for its users' extensions. The headers' own `#error` says
    only what they bear at the least. The version decides where neither file is there: torch's release notes ask for
    C++17 from 2.1 on, and C++14 before that.
    """
    sources = (
        ("share/cmake/Torch/TorchConfig.cmake", r"CXX_STANDARD\s+(\d+)"),
        ("utils/cpp_extension.py", r"['\"]-std=(?:c|gnu)\+\+(\d+)['\"]"),
    )
    for name, pattern in sources:
        file = torch_folder / name
        if file.is_file():
            stated = [int(number) for number in re.findall(pattern, file.read_text(encoding="utf-8", errors="replace"))]
            if stated:
                return max(stated)
    return 17 if Version(version).release >= (2, 1) else 14
