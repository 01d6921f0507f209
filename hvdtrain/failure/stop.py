"""SIGTERM, SIGINT and SIGUSR1: the first asks for a stop at the next step boundary, a second ends at once.

Python runs a signal handler only between two bytecodes of the main thread, so a process that is stuck in a collective
would never see one. The interpreter's wake-up descriptor is written by the C handler at once; a thread reads it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

from hvdtrain.failure import ending

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Ctrl-C reaches a rank from the terminal and once more from its launcher, which may pass it on as SIGTERM. Those are
# one request: the same signal counts again after the first time, another one after the second.
ECHO_S = 0.5
OTHER_SIGNAL_ECHO_S = 2.0
# Launchers send SIGTERM to the survivors of a crash too, at about the moment when the ranks learn of it. The promise to
# save a checkpoint would then be false, so it waits a moment.
ANNOUNCE_DELAY_S = 0.5


class StopSignals:
    """Turns the stop signals into a flag. One per process; only the main thread can install handlers.

    Attributes:
        requested: whether a stop was asked for.
        reason: the signal's name (``SIGTERM``); empty before.
    """

    def __init__(self, name: str = "") -> None:
        self._prefix = f"{name} " if name else ""
        self.requested = False
        self.reason = ""
        self._count = itertools.count()
        self._requested_at = 0.0
        self._announced = True
        self._hushed = False
        self._first: tuple[int, float] | None = None
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._pid = os.getpid()
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None

    def install(self) -> bool:
        """Install the handlers; False, and nothing changed, outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        _installed.append(self)
        return True

    def close(self) -> None:
        """Put back the handlers that were there before; harmless when repeated or never installed."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.announce(delay_s=0.0)
        if self._writer is not None:
            self._restore()
        for sock in (self._reader, self._writer):
            if sock is not None:
                sock.close()
        self._reader = self._writer = None
        with contextlib.suppress(ValueError):
            _installed.remove(self)

    def fileno(self) -> int:
        """Readable when a signal has come; -1 when not installed."""
        return self._reader.fileno() if self._reader is not None else -1

    def read(self) -> str:
        """Take what has come; returns the name of the signal that asks to end at once, or an empty text."""
        if self._reader is None:
            return ""
        try:
            numbers = self._reader.recv(256)
        except OSError:
            return ""
        for number in numbers:
            if number not in STOP_SIGNALS:
                continue  # SIGCHLD and others reach this descriptor too
            now = time.monotonic()
            self._request(number)
            if self._first is None:
                self._first = (number, now)
            elif now - self._first[1] > (ECHO_S if number == self._first[0] else OTHER_SIGNAL_ECHO_S):
                return signal.Signals(number).name
        return ""

    def announce(self, delay_s: float = ANNOUNCE_DELAY_S) -> bool:
        """Print once what was asked for, if that was ``delay_s`` seconds ago; returns whether this is still to come."""
        if self._announced:
            return False
        if time.monotonic() - self._requested_at < delay_s:
            return True
        self._announced = True
        ending.write_error(
            f"hvdtrain: {self._prefix}got {self.reason}: stopping at the next step boundary, then saving a checkpoint; "
            "a second signal ends at once\n"
        )
        return False

    def hush(self) -> None:
        """Nothing will be saved any more: say nothing about it."""
        self._hushed = self._announced = True

    def request(self, reason: str) -> None:
        """Ask for a stop without a signal, quietly (a peer was asked, a time limit is near)."""
        if next(self._count) == 0:
            self.reason = reason
            self.requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Also here: another library may have taken the wake-up descriptor away.
        self._request(number)

    def _request(self, number: int) -> None:
        # The main thread's handler and the thread that reads the descriptor both come here: the first one counts.
        if next(self._count) == 0:
            self.reason = signal.Signals(number).name
            self._requested_at = time.monotonic()
            self._announced = self._hushed
            self.requested = True

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            # None: the previous handler was not installed from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _forget_in_child(self) -> None:
        # A forked child that kept the descriptor would hand its own signals to this process.
        with contextlib.suppress(ValueError, OSError):
            self._restore()
        for sock in (self._reader, self._writer):
            if sock is not None:
                sock.close()


_installed: list[StopSignals] = []


def _forget_all_in_child() -> None:
    for each in _installed:
        each._forget_in_child()
    _installed.clear()


os.register_at_fork(after_in_child=_forget_all_in_child)
