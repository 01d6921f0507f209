"""Built wheels, kept by everything that decides whether they load: one folder each, safe for concurrent builds."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.prerequisites import Toolchain
from hvdtrain.horovod_build.source import HOROVOD_VERSION
from hvdtrain.horovod_build.torch_facts import TorchFacts

# Raised when a change of the recipe makes wheels that must not be mixed with those of before.
_RECIPE = 3


def default_cache(environ: Mapping[str, str]) -> Path:
    """HVDTRAIN_CACHE, else hvdtrain/ in XDG_CACHE_HOME, else ~/.cache/hvdtrain."""
    if environ.get("HVDTRAIN_CACHE"):
        return Path(environ["HVDTRAIN_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"], "hvdtrain")
    return Path.home() / ".cache" / "hvdtrain"


@dataclasses.dataclass(frozen=True)
class WheelKey:
    """All that decides whether a wheel fits: the torch, the Python, the C library, the transports, gloo's fp16 sums."""

    torch: str
    cxx11_abi: bool
    cxx_standard: int
    python: str
    machine: str
    libc: str
    mpi: str | None
    nccl: str | None
    fast_fp16: bool = False

    @classmethod
    def of(cls, facts: TorchFacts, toolchain: Toolchain, *, fast_fp16: bool = False) -> WheelKey:
        """The key of the wheel that would be built here."""
        return cls(
            torch=facts.version,
            cxx11_abi=facts.cxx11_abi,
            cxx_standard=facts.cxx_standard,
            # Has the version, the debug and the free-threading mark: cpython-311-x86_64-linux-gnu.
            python=str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
            machine=platform.machine(),
            libc=" ".join(platform.libc_ver()),
            mpi=toolchain.mpi,
            nccl=facts.cuda if toolchain.cuda_home else None,
            fast_fp16=fast_fp16,
        )

    @property
    def transports(self) -> tuple[str, ...]:
        """What the wheel can communicate over: `gloo` always, `mpi`, `nccl`."""
        return ("gloo", *(["mpi"] if self.mpi else []), *(["nccl"] if self.nccl else []))

    @property
    def name(self) -> str:
        """The wheel's folder in the cache: readable, and unique through the digest at its end."""
        values = {"recipe": _RECIPE, "horovod": HOROVOD_VERSION, **dataclasses.asdict(self)}
        # Stands in the readable part.
        del values["fast_fp16"]
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        python = self.python.split("-")[1] if "-" in self.python else self.python
        readable = f"torch-{self.torch}-py{python}-{'-'.join(self.transports)}{'-fast_fp16' if self.fast_fp16 else ''}"
        return f"{re.sub(r'[^A-Za-z0-9.+-]', '_', readable)}-{digest}"


class WheelCache:
    """The folder `wheels/` of the cache: `<key>/horovod-....whl` with `build.json` beside it."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "wheels"

    def find(self, key: WheelKey) -> Path | None:
        """The wheel kept under this key, or None."""
        wheels = sorted((self.folder / key.name).glob("horovod-*.whl"))
        return wheels[0] if wheels else None

    def store(self, key: WheelKey, wheel: Path) -> Path:
        """Keep a wheel; it appears whole or not at all, and replaces the one before. Call with the lock held."""
        target = self.folder / key.name
        target.mkdir(parents=True, exist_ok=True)
        part = target / f".{wheel.name}.{os.getpid()}.part"
        try:
            shutil.copyfile(wheel, part)
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            (target / "build.json").write_text(json.dumps(dataclasses.asdict(key), indent=2) + "\n", encoding="utf-8")
            part.replace(target / wheel.name)
        finally:
            part.unlink(missing_ok=True)
        return target / wheel.name

    @contextlib.contextmanager
    def lock(self, key: WheelKey, limit_s: float, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold the only right to build this wheel; another process that wants the same one waits and then finds it.

        Args:
            key: which wheel.
            limit_s: how long to wait for another builder.
            on_wait: called once with a message when there is another builder.

        Raises:
            UserError: the other builder was not done within the limit.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key.name}.lock"
        with path.open("a+", encoding="utf-8") as stream:
            deadline = time.monotonic() + limit_s
            told = False
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    stream.seek(0)
                    holder = stream.read().strip() or "another process"
                    if not told:
                        on_wait(f"{holder} is building the same wheel; waiting for it (at most {limit_s / 60:.0f} min)")
                        told = True
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"{holder} has held {path} for {limit_s / 60:.0f} min: end it if it hangs, then try again"
                        ) from None
                    time.sleep(0.5)
            # The lock goes with the process, whatever its end; the text is only for the one who waits.
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {platform.node()}")
            stream.flush()
            yield
