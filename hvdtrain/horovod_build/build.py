"""pip wheel over the patched source: progress while it runs, the whole output in a log, its end when it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import psutil

from hvdtrain.errors import TrainingFailed, UserError
from hvdtrain.horovod_build.patch import patch_source
from hvdtrain.horovod_build.prerequisites import Toolchain
from hvdtrain.horovod_build.run import kill_group
from hvdtrain.horovod_build.source import free_bytes, unpack
from hvdtrain.horovod_build.torch_facts import TorchFacts

# A build takes about 4 min on two cores and has been seen at 20 min on a busy one.
BUILD_LIMIT_S = 3600.0
# One compiler process over torch's headers takes up to 1.4 GB.
_BYTES_PER_JOB = 1_500_000_000
# Objects and wheel together take about 350 MB.
_BUILD_DISK_BYTES = 1_000_000_000
_PROGRESS_EVERY_S = 15.0


class BuildFailed(TrainingFailed):
    """The compilation failed; the message has the end of the log and where the whole of it is."""


def default_jobs() -> int:
    """Compiler processes at once: a core each, as far as the free memory goes."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, psutil.virtual_memory().available // _BYTES_PER_JOB))


def build_environ(
    base: Mapping[str, str], facts: TorchFacts, toolchain: Toolchain, jobs: int, scratch: Path
) -> dict[str, str]:
    """The environment that makes Horovod's setup.py build what was decided, whatever the caller had exported."""
    # An exported HOROVOD_WITHOUT_GLOO or HOROVOD_GPU_* of some earlier attempt would contradict the cache's key.
    kept = ("HOROVOD_CMAKE", "HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB",
            "HOROVOD_NCCL_LINK", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_BUILD_ARCH_FLAGS")  # fmt: skip
    environ = {name: value for name, value in base.items() if not name.startswith("HOROVOD_") or name in kept}
    environ.update(
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        MAKEFLAGS=f"-j{jobs}",
        # cmake 4 refuses what third_party/gloo asks for (cmake 2.8) unless it is told the oldest policy to keep.
        CMAKE_POLICY_VERSION_MINIMUM="3.5",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
    )
    environ["HOROVOD_WITH_MPI" if toolchain.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    if toolchain.cuda_home:
        environ.update(HOROVOD_GPU_OPERATIONS="NCCL", CUDA_HOME=toolchain.cuda_home)
        environ.setdefault("HOROVOD_CUDA_HOME", toolchain.cuda_home)
        if facts.nccl_folder and not any(name.startswith("HOROVOD_NCCL_") for name in environ):
            environ.update(_nccl_of_torch(Path(facts.nccl_folder), scratch))
    else:
        # torch's extension builder, which Horovod asks, finds a toolkit in these; then it would build for CUDA.
        for name in ("CUDA_HOME", "CUDA_PATH", "HOROVOD_CUDA_HOME"):
            environ.pop(name, None)
    return environ


def _nccl_of_torch(folder: Path, scratch: Path) -> dict[str, str]:
    """Build against the NCCL that torch itself loads, so that one process never holds two of them."""
    library = next(iter(sorted((folder / "lib").glob("libnccl.so*"))), None)
    if library is None:
        return {}
    # The package has libnccl.so.2 alone; linkers, and Horovod's FindNCCL, look for libnccl.so.
    links = scratch / "nccl"
    links.mkdir(exist_ok=True)
    (links / "libnccl.so").symlink_to(library)
    return {
        "HOROVOD_NCCL_INCLUDE": str(folder / "include"),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def build_wheel(
    sdist: Path,
    target: Path,
    facts: TorchFacts,
    toolchain: Toolchain,
    *,
    environ: Mapping[str, str],
    jobs: int,
    log: Path,
    out: TextIO,
    fast_fp16: bool = False,
) -> Path:
    """Unpack, patch, compile; about 4 minutes on two cores.

    Args:
        sdist: the checked source archive.
        target: an existing folder for the wheel.
        facts: the torch to build for.
        toolchain: what to build with.
        environ: environment with setuptools importable.
        jobs: compiler processes at once.
        log: file for the whole output.
        out: where progress goes: one line that changes on a terminal, else a line every 15 s.
        fast_fp16: as in `patch_source`.

    Raises:
        UserError: not enough disk space for the build.
        BuildFailed: the compilation failed.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as name:
        scratch = Path(name)
        if free_bytes(scratch) < _BUILD_DISK_BYTES:
            raise UserError(
                f"{scratch.parent} has {free_bytes(scratch) / 1e9:.1f} GB free, the build needs "
                f"{_BUILD_DISK_BYTES / 1e9:.0f} GB: make room there, or point TMPDIR to a larger disk"
            )
        source = unpack(sdist, scratch)
        changes = patch_source(source, facts.cxx_standard, fast_fp16=fast_fp16)
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation",
                   "--no-cache-dir", "--wheel-dir", str(target), str(source)]  # fmt: skip
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as stream:
            stream.write(f"torch {facts.version}, C++{facts.cxx_standard}, {toolchain}\n")
            stream.writelines(f"patched {change}\n" for change in changes)
            stream.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=build_environ(environ, facts, toolchain, jobs, scratch),
                cwd=scratch,
                text=True,
                start_new_session=True,
            )
            try:
                in_time = _watch(process, log, out)
            finally:
                if process.poll() is None:
                    kill_group(process)
                    process.wait()
    wheels = sorted(target.glob("horovod-*.whl"))
    if process.returncode != 0 or not wheels:
        ending = "" if in_time else f" within {BUILD_LIMIT_S / 60:.0f} min"
        raise BuildFailed(
            f"building Horovod failed{ending} (exit status {process.returncode}). The log's decisive lines:\n"
            f"{decisive_lines(log.read_text(encoding='utf-8', errors='replace'))}\nThe whole log: {log}"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[str], log: Path, out: TextIO) -> bool:
    """Show progress until the process ends; False when it ran past the limit."""
    start = time.monotonic()
    terminal = out.isatty()
    shown_at = start - _PROGRESS_EVERY_S
    try:
        while process.poll() is None:
            elapsed = time.monotonic() - start
            if elapsed > BUILD_LIMIT_S:
                return False
            if terminal or time.monotonic() - shown_at >= _PROGRESS_EVERY_S:
                shown_at = time.monotonic()
                line = f"  building {progress(log)}, {int(elapsed) // 60}:{int(elapsed) % 60:02d} elapsed"
                out.write(f"\r{line:<100}" if terminal else f"{line}\n")
                out.flush()
            try:
                process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                continue
        return True
    finally:
        if terminal:
            out.write("\n")


def progress(log: Path) -> str:
    """How far make says it is: its last `[ 42%] Building ...` line, from the end of the log."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 65536))
        text = stream.read().decode(errors="replace")
    steps = re.findall(r"\[\s*(\d+)%\] (?:Building \w+ object (\S+)|Linking|Built)", text)
    if not steps:
        return "(configuring)"
    percent, target = steps[-1]
    return f"{percent:>3} %" + (f" {Path(target).name.removesuffix('.o')}" if target else "")


def decisive_lines(text: str, num_lines: int = 15) -> str:
    """The first errors of a failed build with what follows them, else its last lines: make goes on for a while."""
    lines = [line.rstrip() for line in text.splitlines()]
    errors = [
        number
        for number, line in enumerate(lines)
        if re.search(r"\berror\b:|CMake Error|fatal error|No space left", line)
    ]
    start = errors[0] if errors else max(0, len(lines) - num_lines)
    return "\n".join("    " + line[:300] for line in lines[start : start + num_lines])
