"""The limit of a real interface, for the time of a block, taken away again whatever happens.

A process of its own sets it and takes it away when its standard input ends, which the kernel sees to when this process
ends in any way. It leaves our session and ignores what stops us, so that it is not stopped along with us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

from hvdtrain.bench.hosts.tbf import shape_line, unshape_line
from hvdtrain.errors import LaunchError

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_READY = "shaped"


@contextlib.contextmanager
def shaped(limit: tuple[str, float] | None) -> Iterator[None]:
    """Limit what leaves through an interface of this host: (its name, bits per second); None: do nothing.

    Everything else that uses the interface is slowed too. One process of a host may do this at a time.

    Raises:
        LaunchError: `tc` is missing or refuses, or the interface has a queue that somebody else has set up.
    """
    if limit is None:
        yield
        return
    interface, bits_per_s = limit
    keeper = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.bench.hosts.shaping", interface, str(bits_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        answer = keeper.stdout.readline().strip()
        if answer != _READY:
            raise LaunchError(answer or f"{interface} could not be limited")
        yield
    finally:
        keeper.stdin.close()
        keeper.wait()
        keeper.stdout.close()


def main() -> None:
    """The keeper: set the limit, say so, wait for the end of standard input, take it away."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    interface, bits_per_s = sys.argv[1], float(sys.argv[2])
    problem = _set(interface, bits_per_s)
    print(problem or _READY, flush=True)
    if problem:
        return
    sys.stdin.read()
    _tc(unshape_line(interface))


def _set(interface: str, bits_per_s: float) -> str | None:
    """Set the limit; a problem in words, or None."""
    if shutil.which("tc", path=_PATH) is None:
        return "tc is missing, which limits an interface; install iproute2"
    shown = _tc(["tc", "qdisc", "show", "dev", interface, "root"])
    if shown.returncode != 0:
        return f"{interface}: {shown.stderr.strip()}"
    # The kernel's own choice has the handle 0; whatever else is there, we could not put back.
    foreign = [line for line in shown.stdout.splitlines() if " 0: " not in line]
    if foreign:
        return (
            f"{interface} already has a queue that somebody has set up ({foreign[0].strip()}), which could not be put "
            f"back; remove it, or measure without a limit"
        )
    done = _tc(shape_line(interface, bits_per_s))
    return None if done.returncode == 0 else f"{interface} cannot be limited: {done.stderr.strip()}; this needs root"


def _tc(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _PATH})


if __name__ == "__main__":
    main()
