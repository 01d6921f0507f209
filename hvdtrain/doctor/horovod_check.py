"""Horovod: whether it is there, loads, fits the installed torch, and what it was built with."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping

from hvdtrain.doctor.finding import Finding, absent, fault, ok
from hvdtrain.horovod_build.explain import essence, explain_import_failure
from hvdtrain.horovod_build.installed import FAST_FP16_MARK
from hvdtrain.horovod_build.run import run

_PROBE_LIMIT_S = 180.0

# Where it lies and what its build recorded is read from its files: they can be read where it does not load.
_PROBE = """
import json, sys, traceback
from importlib.util import find_spec
from pathlib import Path
seen = {"folder": None, "built_for": None, "error": "", "transports": [], "fast_fp16": False}
spec = find_spec("horovod")
if spec is not None and spec.origin:
    folder = Path(spec.origin).parent
    seen["folder"] = str(folder)
    try:
        seen["built_for"] = json.loads((folder / "metadata.json").read_text()).get("pytorch")
    except (OSError, ValueError):
        pass
    seen["fast_fp16"] = (folder.parent / sys.argv[1]).is_file()
    try:
        import horovod
        import horovod.torch as hvd
        seen["version"] = horovod.__version__
        seen["transports"] = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
    except BaseException as error:
        # Horovod's own version check hides what the loader said.
        said = []
        while error is not None:
            said.append(f"{type(error).__name__}: {error}")
            error = error.__cause__
        seen["error"] = "\\n".join(said)
print(json.dumps(seen))
"""


@dataclasses.dataclass(frozen=True)
class HorovodSeen:
    """What the probe saw.

    `folder` is None where Horovod is not installed; `built_for` is the torch that its build recorded; `error` is what
    the import said; `transports` is what it was built with, `fast_fp16` whether `--fast-fp16` was among it.
    """

    folder: str | None = None
    version: str = ""
    built_for: str | None = None
    error: str = ""
    transports: tuple[str, ...] = ()
    fast_fp16: bool = False

    @property
    def loads(self) -> bool:
        return self.folder is not None and not self.error


def probe_horovod(environ: Mapping[str, str], python: str = sys.executable) -> HorovodSeen:
    """Import Horovod in a process of its own and ask."""
    done = run([python, "-c", _PROBE, FAST_FP16_MARK], limit_s=_PROBE_LIMIT_S, environ=environ, cwd="/")
    if not done.ok:
        # Not even an exception: the extension brought the process down.
        return HorovodSeen(folder="?", error=done.reason(_PROBE_LIMIT_S))
    seen = json.loads(done.stdout.splitlines()[-1])
    return HorovodSeen(
        folder=seen["folder"],
        version=seen.get("version", ""),
        built_for=seen["built_for"],
        error=seen["error"],
        transports=tuple(seen["transports"]),
        fast_fp16=seen["fast_fp16"],
    )


def check_horovod(seen: HorovodSeen, torch: str | None) -> list[Finding]:
    """Horovod against the installed torch.

    Args:
        seen: what the probe saw.
        torch: version of the installed torch, None if it does not import.
    """
    if seen.folder is None:
        return [absent("horovod", "not installed", "for --backend horovod: hvdtrain build-horovod (about 4 minutes)")]
    built = f"built for torch {seen.built_for}" if seen.built_for else "built for an unknown torch"
    if not seen.loads:
        return [fault("horovod", f"{built}; does not load: {essence(seen.error)}", explain_import_failure(seen.error))]
    found = f"{seen.version}, {built}, with {', '.join(seen.transports) or 'no transport'}"
    if seen.fast_fp16:
        found += ", fast fp16 sums"
    if seen.built_for is not None and torch is not None and seen.built_for != torch:
        cure = "hvdtrain build-horovod --force (it loads by luck: C++ layouts may differ without an error)"
        return [fault("horovod", f"{found}; the installed torch is {torch}", cure)]
    if "gloo" not in seen.transports:
        return [fault("horovod", f"{found}: it has no gloo", "hvdtrain build-horovod --force")]
    return [ok("horovod", found)]
