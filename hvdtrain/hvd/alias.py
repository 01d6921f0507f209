"""Makes `import horovod.torch` find this package, whether or not the real Horovod is installed.

An import hook, and not files named `horovod`: it must go before an installed Horovod, in one process, only when asked.
Subprocesses of the script (workers started by `spawn`, `python other.py`) get the hook through a small folder on
PYTHONPATH whose only content is a package `horovod` that installs the hook and steps aside.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_PACKAGE = "hvdtrain.hvd"

# Names below `horovod`, and where they are found here.
ALIASES: dict[str, str] = {
    "horovod": f"{_PACKAGE}.top",
    "horovod.torch": _PACKAGE,
    "horovod.torch.mpi_ops": f"{_PACKAGE}.mpi_ops",
    "horovod.torch.compression": f"{_PACKAGE}.compression",
    "horovod.torch.functions": f"{_PACKAGE}.functions",
    "horovod.torch.optimizer": f"{_PACKAGE}.optimizer",
    "horovod.torch.sync_batch_norm": f"{_PACKAGE}.sync_batch_norm",
    "horovod.torch.elastic": f"{_PACKAGE}.elastic",
    "horovod.torch.elastic.sampler": f"{_PACKAGE}.elastic.sampler",
    "horovod.torch.elastic.state": f"{_PACKAGE}.elastic.state",
    "horovod.common": f"{_PACKAGE}.common",
    "horovod.common.basics": f"{_PACKAGE}.basics",
    "horovod.common.elastic": f"{_PACKAGE}.common.elastic",
    "horovod.common.exceptions": f"{_PACKAGE}.common.exceptions",
    "horovod.common.process_sets": f"{_PACKAGE}.common.process_sets",
    "horovod.common.util": f"{_PACKAGE}.common.util",
    "horovod.runner": f"{_PACKAGE}.runner",
    "horovod.runner.util": f"{_PACKAGE}.runner.util",
    "horovod.runner.util.threads": f"{_PACKAGE}.runner.util.threads",
}


class _Loader(importlib.abc.Loader):
    """Puts our module into sys.modules under Horovod's name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._target)


class HorovodFinder(importlib.abc.MetaPathFinder):
    """Finds `horovod` and everything below it, and nothing else.

    Raises:
        ModuleNotFoundError: a part of Horovod that is not provided; the message says what to do.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "horovod" and not fullname.startswith("horovod."):
            return None
        found = ALIASES.get(fullname)
        if found is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: hvdtrain provides horovod.torch and what goes with it, and not this "
                "part. Run the script on the real Horovod (hvdtrain exec --backend horovod), or do without it",
                name=fullname,
            )
        is_package = any(name.startswith(f"{fullname}.") for name in ALIASES)
        return importlib.machinery.ModuleSpec(fullname, _Loader(found), is_package=is_package)


def install() -> None:
    """Let `horovod` mean this package from now on, in this process. Calling it again changes nothing.

    Raises:
        RuntimeError: the real Horovod was imported before.
    """
    if any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]:
        if hasattr(sys.modules[name], "MARK_OF_THE_SHIM"):
            del sys.modules[name]
        else:
            raise RuntimeError(f"{name} was imported before hvdtrain could take its place; start with `hvdtrain exec`")
    sys.meta_path.insert(0, HorovodFinder())


def uninstall() -> None:
    """Undo `install`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, HorovodFinder)]
    for name in [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]:
        del sys.modules[name]


def export_to_children() -> None:
    """Let Python processes started from here find the same `horovod`."""
    shim = str(Path(__file__).parent / "shim")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if shim not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([shim, *filter(None, paths)])
