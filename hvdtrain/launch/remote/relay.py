"""Passes on what the ranks of a host write and how they end, the moment it happens."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.launch.remote.protocol import report

# A line longer than this is passed on in parts.
_LONGEST_LINE_BYTES = 1 << 16


class Relay:
    """One thread over the pipes and processes of all ranks of a host.

    The pipes are named ones that the ranks open themselves (worker.py), because torchrun's agent, their parent, can
    give its children files only. A rank's first line on its output is its process id.

    Args:
        folder: where the pipes are made.
        first_rank, num_ranks: the ranks of this host.
        send: takes a report, whole lines.
    """

    def __init__(self, folder: Path, first_rank: int, num_ranks: int, send: Callable[[bytes], None]) -> None:
        self._first_rank = first_rank
        self._send = send
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, _Stream] = {}
        self._pids: dict[int, int] = {}
        # Ranks whose end has been reported, and those that ended but were reaped before we could read how.
        self._ended: set[int] = set()
        self._unknown: set[int] = set()
        self._changed = threading.Condition()
        # A signal for ranks that have not started yet.
        self._signal: int | None = None
        self._finish_by: float | None = None
        for local_rank in range(num_ranks):
            for name, kind in (("out", "o"), ("err", "e")):
                path = folder / f"{name}.{local_rank}"
                os.mkfifo(path, 0o600)
                pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._streams[pipe] = _Stream(kind, local_rank)
                self._selector.register(pipe, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Begin; never blocks."""
        self._thread.start()

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that run, and to any other the moment it starts.

        To the ranks alone: what they started gets it from them, or not, as they see fit.
        """
        with self._changed:
            self._signal = number
            for pid in self._pids.values():
                _send_signal(pid, number)

    def wait_for_ends(self, limit_s: float) -> bool:
        """Wait until no rank runs; False when the limit came first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pids, timeout=limit_s)

    def resolve(self, failures: dict[int, int], otherwise: int) -> None:
        """Report the ends that only torchrun's agent saw.

        Args:
            failures: exit status by local rank.
            otherwise: status of the ranks that have ended without being among the failures.
        """
        with self._changed:
            unknown, self._unknown = self._unknown, set()
        for local_rank in sorted(unknown | (failures.keys() - self._ended)):
            self._report_end(local_rank, failures.get(local_rank, otherwise))

    def finish(self, limit_s: float) -> None:
        """Pass on what is still in the pipes and stop; a process that keeps one open is waited for until the limit."""
        self._finish_by = time.monotonic() + limit_s
        self._thread.join(limit_s + 1.0)

    def _run(self) -> None:
        while True:
            finish_by = self._finish_by
            for key, _ in self._selector.select(timeout=0.1 if finish_by is None else 0.02):
                if key.data is None:
                    self._read(key.fd)
                else:
                    self._note_end(key.fd, key.data)
            if finish_by is not None:
                waiting = self._pids or any(stream.begun for stream in self._streams.values())
                if not waiting or time.monotonic() > finish_by:
                    for stream in self._streams.values():
                        self._flush(stream)
                    return

    def _read(self, pipe: int) -> None:
        stream = self._streams[pipe]
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return
        if not data:
            # The last writer has closed it.
            self._flush(stream)
            self._selector.unregister(pipe)
            os.close(pipe)
            del self._streams[pipe]
            return
        stream.begun = True
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        for line in lines:
            if stream.kind == "o" and not stream.named:
                stream.named = True
                self._note_start(stream.local_rank, int(line))
            else:
                self._report(stream, line)
        if len(stream.rest) > _LONGEST_LINE_BYTES:
            self._flush(stream)

    def _flush(self, stream: _Stream) -> None:
        if stream.rest:
            self._report(stream, stream.rest)
            stream.rest = b""

    def _report(self, stream: _Stream, line: bytes) -> None:
        self._send(report(stream.kind, self._first_rank + stream.local_rank, line))

    def _note_start(self, local_rank: int, pid: int) -> None:
        with self._changed:
            self._pids[local_rank] = pid
            if self._signal is not None:
                _send_signal(pid, self._signal)
        self._send(report("s", self._first_rank + local_rank, str(pid).encode()))
        try:
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=local_rank)
        except ProcessLookupError:
            self._note_unknown(local_rank)

    def _note_end(self, pidfd: int, local_rank: int) -> None:
        """A rank is a zombie now: read its status without taking it away from torchrun's agent, whose child it is."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid = self._pids[local_rank]
        # What it wrote before it ended comes first.
        for pipe in [p for p, stream in self._streams.items() if stream.local_rank == local_rank]:
            self._read(pipe)
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            # Torchrun's agent was faster; it will tell (resolve).
            self._note_unknown(local_rank)
            return
        assert ended is not None
        self._report_end(local_rank, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        self._forget(local_rank)

    def _note_unknown(self, local_rank: int) -> None:
        with self._changed:
            self._unknown.add(local_rank)
        self._forget(local_rank)

    def _forget(self, local_rank: int) -> None:
        with self._changed:
            del self._pids[local_rank]
            self._changed.notify_all()

    def _report_end(self, local_rank: int, status: int) -> None:
        with self._changed:
            if local_rank in self._ended:
                return
            self._ended.add(local_rank)
        self._send(report("x", self._first_rank + local_rank, str(status).encode()))


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class _Stream:
    """One pipe of one rank: `begun` once something came, `named` once the process id did, `rest` an unfinished line."""

    def __init__(self, kind: str, local_rank: int) -> None:
        self.kind = kind
        self.local_rank = local_rank
        self.begun = False
        self.named = False
        self.rest = b""
