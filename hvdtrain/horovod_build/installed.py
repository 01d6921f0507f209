"""The Horovod that is installed: what it was built with, and against which torch; without importing it."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import sys
from collections.abc import Sequence
from pathlib import Path

# A file that the patch adds to the package, so that an installed one can be told from the release as it is.
FAST_FP16_MARK = "horovod/fast_fp16.py"


@dataclasses.dataclass(frozen=True)
class InstalledHorovod:
    """What lies in the environment.

    Attributes:
        folder: the package's folder.
        torch: version of the torch that it was built for, as Horovod's build recorded it; None if it did not.
        extension: the compiled extension for torch and this Python; None if there is none.
        fast_fp16: whether gloo sums float16 in vector instructions.
    """

    folder: Path
    torch: str | None
    extension: Path | None
    fast_fp16: bool = False


def find_installed(path: Sequence[str] | None = None) -> InstalledHorovod | None:
    """Look for the package on a module search path (the process's own by default)."""
    for place in sys.path if path is None else path:
        folder = Path(place or ".", "horovod")
        if not (folder / "torch" / "__init__.py").is_file():
            continue
        try:
            metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            metadata = {}
        suffixes = importlib.machinery.EXTENSION_SUFFIXES
        candidates = (folder / "torch" / f"mpi_lib_v2{suffix}" for suffix in suffixes)
        extension = next((file for file in candidates if file.is_file()), None)
        fast_fp16 = (folder.parent / FAST_FP16_MARK).is_file()
        return InstalledHorovod(folder, metadata.get("pytorch"), extension, fast_fp16)
    return None
