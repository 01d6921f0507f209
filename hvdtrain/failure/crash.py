"""Where the last words of a crash go (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL).

`faulthandler` writes the signal and the Python stack from within the signal handler. It is given the socket to the hub,
so the report names them whichever host crashed; without a hub they go to stderr as usual.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys

_enabled_before: bool | None = None


def send_crashes_to(descriptor: int) -> None:
    """Have a crash write into ``descriptor``, which has to stay open until `send_crashes_to_stderr` or `restore`."""
    _remember()
    faulthandler.enable(file=descriptor)


def send_crashes_to_stderr() -> None:
    """Have a crash write to stderr."""
    _remember()
    faulthandler.disable()
    with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
        faulthandler.enable(file=sys.__stderr__)  # type: ignore[arg-type]


def restore() -> None:
    """As it was before: off, or to stderr."""
    global _enabled_before
    if _enabled_before is None:
        return
    if _enabled_before:
        send_crashes_to_stderr()
    else:
        faulthandler.disable()
    _enabled_before = None


def _remember() -> None:
    global _enabled_before
    if _enabled_before is None:
        _enabled_before = faulthandler.is_enabled()


def _in_child() -> None:
    # The child's copy of the socket is closed; its number may be reused for anything.
    if _enabled_before is not None:
        send_crashes_to_stderr()


os.register_at_fork(after_in_child=_in_child)
