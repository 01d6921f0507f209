"""What the kernel still knows about a process on this host that has just died."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path

from hvdtrain.failure.record import SIGNAL, Failure, describe_signal


@dataclasses.dataclass(frozen=True)
class Identity:
    """One process, told apart from a later one with the same pid by its start time (clock ticks since boot)."""

    rank: int
    host: str
    pid: int
    started: int


def start_ticks(pid: int) -> int:
    """When ``pid`` was started, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)); 0 if unknown."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


def wait_status(pid: int, started: int) -> int | None:
    """The status that its parent will get from waitpid(2): known from the moment a process ends until it is reaped.

    None where it cannot be known: reaped already, another process, no permission, or not ended.
    """
    fields = _stat_fields(pid)
    if not fields or int(fields[19]) != started or len(fields) < 50:
        return None
    # Field 52, exit_code. Without permission the kernel prints 0, so 0 says nothing.
    return int(fields[49]) or None


def count_oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended: this control group, else this machine."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            continue
    return 0


def kill(process: Identity) -> None:
    """End ``process`` of this host at once, if it is still the same one (a stopped process heeds nothing milder)."""
    if process.started and start_ticks(process.pid) == process.started:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def explain_death(process: Identity, fault_text: str, *, same_host: bool, oom_kills_before: int) -> Failure:
    """The failure of ``process``, whose connection ended without last words."""
    if fault_text:
        return Failure.from_fault(fault_text, process.rank, process.host, process.pid)
    status = wait_status(process.pid, process.started) if same_host else None
    return Failure(
        process.rank,
        process.host,
        process.pid,
        SIGNAL,
        _words(status, process.host, oom=same_host and count_oom_kills() > oom_kills_before),
    )


def _words(status: int | None, host: str, *, oom: bool) -> str:
    if status is not None and os.WIFEXITED(status):
        return f"died without a word: os._exit({os.WEXITSTATUS(status)}) in some library or in the task"
    number = os.WTERMSIG(status) if status is not None else None
    if number is not None and number != signal.SIGKILL:
        return f"was killed: {describe_signal(number)}"
    killed = "was killed: SIGKILL (signal 9)" if number else "was killed, most likely by SIGKILL (signal 9)"
    if oom:
        return f"{killed}; the kernel's out-of-memory killer struck on {host}: use less memory (see dmesg there)"
    words = f"{killed}; it left no last words: kill -9, or the kernel's out-of-memory killer (see dmesg on {host})"
    return words if number else f"{words}, or os._exit() in some library"


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one on (the second may contain spaces and brackets)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()
