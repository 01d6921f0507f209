"""What the build needs from the system: compilers, cmake, headers; and which transports it can have here."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.run import run
from hvdtrain.horovod_build.torch_facts import TorchFacts

# cmake_minimum_required of the release.
_OLDEST_CMAKE = Version("3.13")
_COMPILE_LIMIT_S = 60.0
# Where NVIDIA's packages put the toolkit.
USUAL_CUDA_HOME = "/usr/local/cuda"


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something that the build cannot do without: what it is, and the Debian or Ubuntu packages that bring it."""

    what: str
    packages: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What was found.

    Attributes:
        cxx: the C++ compiler's command.
        cmake_version: for the log and the cache.
        mpi: the MPI library that the wheel will be built with ("Open MPI 4.1.4"), or None for a wheel without MPI.
        cuda_home: the CUDA toolkit if the wheel will have NCCL, else None.
        notes: what the wheel will lack, and how to get it; to be shown before the build.
    """

    cxx: str
    cmake_version: str
    mpi: str | None
    cuda_home: str | None
    notes: tuple[str, ...] = ()


def find_toolchain(
    facts: TorchFacts, *, with_mpi: bool, with_nccl: bool, environ: Mapping[str, str] | None = None
) -> Toolchain:
    """Look for all that the build needs, before it starts.

    Args:
        facts: the torch to build for.
        with_mpi: whether MPI is wanted; without its headers the wheel is built without it, with a note.
        with_nccl: whether NCCL is wanted where torch has CUDA.
        environ: the variables to look at (PATH, CXX, HOROVOD_CMAKE, CUDA_HOME); the process's own by default.

    Raises:
        UserError: names all that is missing at once, with the exact apt line.
    """
    environ = os.environ if environ is None else environ
    path = environ.get("PATH", os.defpath)
    missing: list[Missing] = []
    notes: list[str] = []

    cmake_version = _find_cmake(environ, path, missing)
    cxx = _find_compiler(facts.cxx_standard, environ, path, missing)
    if not shutil.which("make", path=path):
        missing.append(Missing("make (what cmake builds with)", ("make",)))
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        missing.append(Missing(f"Python's headers ({headers})", (package,)))

    mpi = find_mpi(environ) if with_mpi else None
    if with_mpi and mpi is None:
        notes.append(
            "no MPI compiler with headers (mpicxx, mpi.h): the wheel will have gloo and no MPI. "
            "For MPI: apt-get install -y libopenmpi-dev openmpi-bin"
        )
    cuda_home = None
    if facts.cuda and with_nccl:
        cuda_home = find_cuda_home(environ)
        if cuda_home is None:
            missing.append(
                Missing(
                    f"the CUDA toolkit with nvcc (torch {facts.version} has CUDA {facts.cuda}; --without-nccl builds "
                    "without it)",
                    (f"cuda-toolkit-{facts.cuda.replace('.', '-')}",),
                )
            )
        if facts.nccl_folder is None and not _nccl_header(environ, cuda_home):
            missing.append(Missing("NCCL's headers (nccl.h; --without-nccl builds without it)", ("libnccl-dev",)))
    if missing:
        raise UserError(missing_message(missing))
    return Toolchain(cxx=cxx, cmake_version=cmake_version, mpi=mpi, cuda_home=cuda_home, notes=tuple(notes))


def missing_message(missing: Sequence[Missing]) -> str:
    """What is missing, one per line, and the one apt line that brings all of it."""
    packages = sorted({package for item in missing for package in item.packages})
    sudo = "" if os.geteuid() == 0 else "sudo "
    return "\n".join(
        ["Horovod cannot be built here; missing:"]
        + [f"  - {item.what}" for item in missing]
        + [
            "On Debian or Ubuntu this brings it; then run this again:",
            f"  {sudo}apt-get update && {sudo}apt-get install -y {' '.join(packages)}",
        ]
    )


def find_mpi(environ: Mapping[str, str]) -> str | None:
    """The MPI library with headers here, as "Open MPI 4.1.4", or None. Tried with the compiler, not guessed."""
    path = environ.get("PATH", os.defpath)
    mpicxx = shutil.which("mpicxx", path=path) or shutil.which("mpic++", path=path)
    if mpicxx is None:
        return None
    # Each library says what it is in macros of its mpi.h; the preprocessor fills them in.
    program = (
        "#include <mpi.h>\n"
        "#if defined(OMPI_MAJOR_VERSION)\n"
        "MPI= Open MPI OMPI_MAJOR_VERSION OMPI_MINOR_VERSION OMPI_RELEASE_VERSION\n"
        "#elif defined(MPICH_VERSION)\n"
        "MPI= MPICH MPICH_VERSION\n"
        "#else\n"
        "MPI= MPI MPI_VERSION MPI_SUBVERSION\n"
        "#endif\n"
    )
    tried = run([mpicxx, "-E", "-x", "c++", "-"], limit_s=_COMPILE_LIMIT_S, environ=environ, stdin=program)
    said = re.findall(r"^MPI= (.*)$", tried.stdout, re.MULTILINE)
    if not tried.ok or not said:
        return None
    # "Open MPI 4 1 4", or "MPICH" and its version in quotes.
    numbers = re.findall(r"[\d.]+", said[-1])
    return f"{re.split(r'[^A-Za-z ]', said[-1])[0].strip()} {'.'.join(numbers)}"


def find_cuda_home(environ: Mapping[str, str]) -> str | None:
    """The CUDA toolkit that has nvcc, found as torch's own extension builder finds it, or None."""
    candidates = [environ.get("HOROVOD_CUDA_HOME"), environ.get("CUDA_HOME"), environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if nvcc:
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    candidates.append(USUAL_CUDA_HOME)
    for candidate in candidates:
        if candidate and Path(candidate, "bin", "nvcc").is_file():
            return candidate
    return None


def _nccl_header(environ: Mapping[str, str], cuda_home: str | None) -> bool:
    folders = [environ.get("HOROVOD_NCCL_INCLUDE"), "/usr/include", "/usr/local/include"]
    if environ.get("HOROVOD_NCCL_HOME"):
        folders.append(f"{environ['HOROVOD_NCCL_HOME']}/include")
    if cuda_home:
        folders.append(f"{cuda_home}/include")
    return any(folder and Path(folder, "nccl.h").is_file() for folder in folders)


def _find_cmake(environ: Mapping[str, str], path: str, missing: list[Missing]) -> str:
    command = environ.get("HOROVOD_CMAKE") or shutil.which("cmake", path=path)
    if command is None:
        missing.append(Missing("cmake", ("cmake",)))
        return ""
    asked = run([command, "--version"], limit_s=_COMPILE_LIMIT_S, environ=environ)
    found = re.search(r"version\s+(\d+(?:\.\d+)+)", asked.stdout)
    if found is None:
        missing.append(Missing(f"a working cmake ({command} --version: {asked.reason(_COMPILE_LIMIT_S)})", ("cmake",)))
        return ""
    if Version(found.group(1)) < _OLDEST_CMAKE:
        missing.append(Missing(f"cmake {_OLDEST_CMAKE} or newer ({command} is {found.group(1)})", ("cmake",)))
    return found.group(1)


def _find_compiler(standard: int, environ: Mapping[str, str], path: str, missing: list[Missing]) -> str:
    command = environ.get("CXX") or shutil.which("c++", path=path) or shutil.which("g++", path=path)
    if not command:
        missing.append(Missing("a C++ compiler (g++)", ("g++",)))
        return ""
    tried = run(
        [*command.split(), f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"],
        limit_s=_COMPILE_LIMIT_S,
        environ=environ,
        stdin="#include <vector>\nint main() { return std::vector<int>{}.size(); }\n",
    )
    if not tried.ok:
        what = (
            f"a C++{standard} compiler, as the installed torch asks for ({command}: {tried.reason(_COMPILE_LIMIT_S)})"
        )
        missing.append(Missing(what, ("g++",)))
    return command
