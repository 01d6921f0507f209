"""Starts the ranks of a benchmark on this machine, and brings back what rank 0 measured."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_USER_ERROR, HvdtrainError, TrainingFailed, UserError
from hvdtrain.launch.detect import ManualFlags


def run_ranks(target: str, arguments: dict[str, Any], *, num_ranks: int, limit_s: float) -> Any:
    """Run `function(flags, **arguments)` on each of `num_ranks` new processes.

    Args:
        target: "module:function"; the flags that it gets say how to connect.
        arguments: JSON values.
        limit_s: after so many seconds the ranks are ended.

    Returns:
        What the function returned on rank 0 (a JSON value).

    Raises:
        UserError: a rank found the input wrong.
        TrainingFailed: a rank ended with a status that is not 0, or the limit passed.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        specification = {"target": target, "arguments": arguments, "size": num_ranks, "folder": folder}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                line = [sys.executable, "-m", "hvdtrain.bench.ranks", json.dumps({**specification, "rank": rank})]
                processes.append(subprocess.Popen(line, stdout=sys.stderr))
            statuses = _wait(processes, time.monotonic() + limit_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if EXIT_USER_ERROR in statuses:
            raise UserError("the ranks refused the input; their message is above")
        if any(statuses):
            raise TrainingFailed(f"the ranks ended with the statuses {statuses}; their messages are above")
        return json.loads((Path(folder) / "result.json").read_text())


def _wait(processes: list[subprocess.Popen[bytes]], until: float) -> list[int]:
    statuses = []
    for process in processes:
        try:
            statuses.append(process.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            raise TrainingFailed("the ranks took longer than their limit and were ended") from None
    return statuses


def main() -> None:
    """One rank."""
    specification = json.loads(sys.argv[1])
    folder = Path(specification["folder"])
    flags = ManualFlags(f"file://{folder}/meeting", specification["rank"], specification["size"])
    module, _, name = specification["target"].partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(flags, **specification["arguments"])
    except HvdtrainError as error:
        print(f"hvdtrain: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    if specification["rank"] == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
