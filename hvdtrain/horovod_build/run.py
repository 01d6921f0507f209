"""Running another program: a limit on its time, its whole output kept, nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a program ended.

    `status` is its exit status, negative for a signal, 127 when it is not there, and None when it ran past its limit.
    """

    status: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.status == 0

    def last_line(self) -> str:
        """The last line that says something, of stderr, or else of stdout; empty if there is none."""
        for text in (self.stderr, self.stdout):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return ""

    def reason(self, limit_s: float) -> str:
        """Why it did not succeed, in a few words."""
        if self.status is None:
            return f"no answer within {limit_s:.0f} s"
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return self.last_line() or f"exit status {self.status}"


def run(
    command: Sequence[str],
    *,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: str | None = None,
) -> Finished:
    """Run a program to its end, or to the limit, when it and its children are killed. Never raises for its failures."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environ is None else dict(environ),
            cwd=cwd,
            text=True,
            errors="replace",
            # A group of its own: a launcher's ranks die with it when the time is up.
            start_new_session=True,
        )
    except OSError as error:
        return Finished(127, "", f"{command[0]}: {error.strerror}")
    try:
        stdout, stderr = process.communicate(stdin, timeout=limit_s)
        return Finished(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        kill_group(process)
        stdout, stderr = process.communicate()
        return Finished(None, stdout, stderr)
    except BaseException:
        kill_group(process)
        process.wait()
        raise


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the process and to all that it started and that did not leave its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
