"""The processes of one measurement: waited for together, ended together."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence

from hvdtrain.errors import TrainingFailed

# How long a process may take over SIGTERM: `hvdtrain launch` ends the ranks of other hosts meanwhile.
_GRACE_S = 15.0


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]], limit_s: float, grace_s: float = _GRACE_S) -> None:
    """Wait until all have ended. Whatever happens, none is left: also on an error and on SIGINT or SIGTERM to us.

    Raises:
        TrainingFailed: one ended with a status that is not 0 (the others are ended then), or the limit passed.
    """
    until = time.monotonic() + limit_s
    try:
        while True:
            statuses = [process.poll() for process in processes]
            if any(statuses):
                # The others notice the loss themselves, and what they say belongs on the screen too.
                _wait_until_ended(processes, min(until, time.monotonic() + grace_s))
                statuses = [process.poll() for process in processes]
                raise TrainingFailed(
                    f"the benchmark's processes ended with the statuses {statuses} (None: had to be ended); their "
                    f"messages are above"
                )
            if all(status == 0 for status in statuses):
                return
            if time.monotonic() > until:
                raise TrainingFailed(
                    f"the benchmark took longer than its limit of {limit_s:.0f} s; its ranks were ended"
                )
            time.sleep(0.05)
    finally:
        end_all(processes, grace_s)


def end_all(processes: Sequence[subprocess.Popen[bytes]], grace_s: float = _GRACE_S) -> None:
    """Ask those that still run to end, and after `grace_s` make them."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _wait_until_ended(processes, time.monotonic() + grace_s)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_until_ended(processes: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
