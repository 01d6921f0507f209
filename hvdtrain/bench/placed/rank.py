"""The process of one rank: `python -m hvdtrain.bench.placed.rank SPECIFICATION`, the specification being JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from hvdtrain.bench.placed.specification import MARK, decode
from hvdtrain.launch.detect import ManualFlags, detect
from hvdtrain.launch.threads import choose_threads


def main() -> None:
    """Run the function and hand over its result."""
    specification = decode(sys.argv[1])
    if specification.get("cpus"):
        # Before torch is imported: its thread pools look at this.
        os.sched_setaffinity(0, specification["cpus"])
    flags = ManualFlags(*specification["flags"]) if specification.get("flags") else None
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        if specification.get("apart"):
            flags = _alone(folder)
        module, _, name = specification["target"].partition(":")
        result = json.dumps(getattr(importlib.import_module(module), name)(flags, **specification["arguments"]))
    if specification.get("result"):
        Path(specification["result"]).write_text(result)
    else:
        print(f"{MARK}{result}", flush=True)


def _alone(folder: str) -> ManualFlags:
    """A world of its own, with the threads that this rank would have among the others."""
    place = detect(os.environ).world
    if place is not None:
        os.environ["OMP_NUM_THREADS"] = str(choose_threads(place, os.environ))
    return ManualFlags(f"file://{folder}/meeting", 0, 1)


if __name__ == "__main__":
    main()
