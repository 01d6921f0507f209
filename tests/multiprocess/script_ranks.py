"""Ranks that run a script of their own and end, started by hand: for what a long-lived rank cannot show.

The script finds `options(**more)`: the ConnectOptions that join this run, and `rank`, `size`.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

PREAMBLE = """\
import sys
import hvdtrain
from hvdtrain.launch import ManualFlags
rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def options(**more):
    flags = ManualFlags(f"file://{meeting}", rank, size) if size > 1 else None
    return {"device": "cpu", "flags": flags, "start_timeout_s": 60, "stall_abort_s": 60, **more}
"""


@dataclasses.dataclass
class Ended:
    """How one rank ended."""

    status: int
    out: str
    err: str


def run_script(
    body: str, folder: Path, *, size: int = 2, environ: Mapping[str, str] | None = None, limit_s: float = 120
) -> list[Ended]:
    """Run the script as every rank; how each ended, in rank order."""
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    commands = [[sys.executable, str(script), str(rank), str(size), str(folder / "meeting")] for rank in range(size)]
    return run_commands(commands, folder, environs=[environ or {}] * size, limit_s=limit_s)


def run_train(arguments: Sequence[str], folder: Path, *, size: int = 2, limit_s: float = 120) -> list[Ended]:
    """Run `hvdtrain train` with these arguments as every rank."""
    by_hand = ["--init-method", f"file://{folder / 'meeting'}", "--world-size", str(size), "--rank"]
    train = [sys.executable, "-m", "hvdtrain", "train", *arguments]
    commands = [train + (by_hand + [str(rank)] if size > 1 else []) for rank in range(size)]
    return run_commands(commands, folder, environs=[{}] * size, limit_s=limit_s)


def run_commands(
    commands: Sequence[Sequence[str]], folder: Path, *, environs: Sequence[Mapping[str, str]], limit_s: float
) -> list[Ended]:
    """Run the commands side by side; all must end within the limit."""
    processes = []
    for rank, (command, environ) in enumerate(zip(commands, environs, strict=True)):
        with (folder / f"out-{rank}").open("w") as out, (folder / f"err-{rank}").open("w") as err:
            processes.append(subprocess.Popen(command, env={**os.environ, **environ}, stdout=out, stderr=err))
    try:
        statuses = [process.wait(limit_s) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    texts = [
        ((folder / f"out-{rank}").read_text(), (folder / f"err-{rank}").read_text()) for rank in range(len(commands))
    ]
    return [Ended(status, *text) for status, text in zip(statuses, texts, strict=True)]
