"""`hvdtrain build-horovod`: look, fetch, build or take from the cache, prove, install, prove again."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from hvdtrain.errors import TrainingFailed, UserError
from hvdtrain.horovod_build import install, proof
from hvdtrain.horovod_build.build import BUILD_LIMIT_S, build_wheel, default_jobs
from hvdtrain.horovod_build.cache import WheelCache, WheelKey, default_cache
from hvdtrain.horovod_build.installed import find_installed
from hvdtrain.horovod_build.prerequisites import Toolchain, find_toolchain
from hvdtrain.horovod_build.source import HOROVOD_VERSION, fetch_sdist
from hvdtrain.horovod_build.torch_facts import TorchFacts, read_torch_facts


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """What the user asked for.

    Attributes:
        wheel_only: copy the wheel into this folder and install nothing; None installs.
        force: build anew, though a cached wheel or a working installation is there.
        with_mpi, with_nccl: False leaves the transport out.
        cache: folder for sources, wheels and logs; None is the usual one.
        jobs: compiler processes at once; None: as many as cores and memory allow.
        fast_fp16: gloo sums float16 in vector instructions, which the release leaves out.
    """

    wheel_only: Path | None = None
    force: bool = False
    with_mpi: bool = True
    with_nccl: bool = True
    cache: Path | None = None
    jobs: int | None = None
    fast_fp16: bool = False


def build_horovod(options: BuildOptions, out: TextIO, environ: Mapping[str, str] | None = None) -> Path | None:
    """Do it all.

    Returns:
        The wheel, in the cache or in `wheel_only`; None if a working Horovod was installed already.

    Raises:
        UserError: something is missing or wrong here; nothing was changed.
        TrainingFailed: the compilation or the proof failed.
    """
    environ = dict(os.environ if environ is None else environ)
    install.check_pip()
    facts = read_torch_facts()
    if options.wheel_only is None and not options.force and _works_already(options, facts, environ, out):
        return None
    toolchain = find_toolchain(facts, with_mpi=options.with_mpi, with_nccl=options.with_nccl, environ=environ)
    key = WheelKey.of(facts, toolchain, fast_fp16=options.fast_fp16)
    for note in toolchain.notes:
        _say(out, f"note: {note}")
    with_mpi = f", MPI from {toolchain.mpi}" if toolchain.mpi else ""
    _say(out, f"Horovod {HOROVOD_VERSION} for torch {facts.version}: {', '.join(key.transports)}{with_mpi}")

    wheel = _cached_or_built(options, facts, toolchain, key, environ, out)
    if options.wheel_only is not None:
        options.wheel_only.mkdir(parents=True, exist_ok=True)
        target = options.wheel_only / wheel.name
        shutil.copyfile(wheel, target)
        _say(out, f"wheel: {target}")
        needs = " ".join(f"'{requirement}'" for requirement in install.RUNTIME_REQUIREMENTS)
        _say(out, f"it needs at run time: pip install {needs}" + (" and libmpi (openmpi-bin)" if key.mpi else ""))
        return target
    added = install.install_wheel(wheel, environ)
    _say(out, f"installed {wheel.name}" + (f", with {', '.join(added)}" if added else "") + f" into {sys.prefix}")
    _prove(key, environ, out, f"Horovod is installed, but does not work; the wheel is {wheel}")
    return wheel


def _works_already(options: BuildOptions, facts: TorchFacts, environ: Mapping[str, str], out: TextIO) -> bool:
    found = find_installed()
    if found is None:
        return False
    if found.torch != facts.version:
        _say(
            out,
            f"the installed Horovod was built for torch {found.torch}, here is torch {facts.version}: building anew",
        )
        return False
    if options.fast_fp16 and not found.fast_fp16:
        _say(out, "the installed Horovod was built without --fast-fp16: replacing it")
        return False
    proven = proof.prove_gloo(environ)
    if not proven.ok:
        _say(out, f"the installed Horovod does not work ({proven.detail}): replacing it")
        return False
    _say(
        out,
        f"Horovod for torch {facts.version} is installed in {found.folder.parent} and works "
        "(two-process all-reduce over gloo): nothing to do. --force builds it anew.",
    )
    return True


def _cached_or_built(
    options: BuildOptions,
    facts: TorchFacts,
    toolchain: Toolchain,
    key: WheelKey,
    environ: Mapping[str, str],
    out: TextIO,
) -> Path:
    cache_folder = options.cache or default_cache(environ)
    cache = WheelCache(cache_folder)
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {cache.folder}: {error.strerror}; choose one with --cache"
        ) from None
    asked_at = time.time()
    with cache.lock(key, BUILD_LIMIT_S, lambda message: _say(out, message)):
        wheel = cache.find(key)
        # --force means a wheel from now on: one that another process built while we waited for it is as good.
        if wheel is not None and (not options.force or wheel.stat().st_mtime >= asked_at):
            _say(out, f"from the cache: {wheel}")
            return wheel
        with tempfile.TemporaryDirectory(prefix="hvdtrain-build-") as name:
            scratch = Path(name)
            borrowed = install.borrow(
                scratch / "borrowed", (*install.BUILD_REQUIREMENTS, *install.RUNTIME_REQUIREMENTS), environ
            )
            sdist = fetch_sdist(cache_folder / "sources", borrowed)
            jobs = options.jobs or default_jobs()
            log = cache_folder / "logs" / f"{key.name}.log"
            _say(out, f"building with {jobs} jobs, C++{facts.cxx_standard}; about {8 / jobs:.0f} minutes; log: {log}")
            start = time.monotonic()
            target = scratch / "wheel"
            target.mkdir()
            built = build_wheel(
                sdist,
                target,
                facts,
                toolchain,
                environ=borrowed,
                jobs=jobs,
                log=log,
                out=out,
                fast_fp16=options.fast_fp16,
            )
            _say(out, f"built in {(time.monotonic() - start) / 60:.1f} min")
            # Proven before it is kept: a wheel that does not work never enters the cache.
            unpacked = scratch / "unpacked"
            with zipfile.ZipFile(built) as archive:
                archive.extractall(unpacked)
            tried = dict(borrowed)
            tried["PYTHONPATH"] = os.pathsep.join(filter(None, (str(unpacked), borrowed.get("PYTHONPATH"))))
            _prove(key, tried, out, f"Horovod was built, but does not work; the build's log is {log}")
            return cache.store(key, built)


def _prove(key: WheelKey, environ: Mapping[str, str], out: TextIO, failure: str) -> None:
    proofs = [proof.prove_gloo(environ)]
    if key.mpi and shutil.which("mpirun", path=environ.get("PATH", os.defpath)):
        proofs.append(proof.prove_mpi(environ))
    for result in proofs:
        if not result.ok:
            raise TrainingFailed(f"{failure}: two-process all-reduce over {result.transport}: {result.detail}")
    _say(out, f"two-process all-reduce: {', '.join(result.transport for result in proofs)} ok")


def _say(out: TextIO, message: str) -> None:
    out.write(f"{message}\n")
    out.flush()
