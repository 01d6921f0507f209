"""All hosts of one job: streams, the first failure, signals, the exit status."""

from __future__ import annotations

import dataclasses
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from hvdtrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from hvdtrain.launch.remote.connection import Connection, drop
from hvdtrain.launch.remote.output import Output, message_line
from hvdtrain.launch.remote.protocol import GRACE_S, PING_S, order, read_report

# After a request to stop, ranks may finish a step and save; then they are ended.
STOP_LIMIT_S = 300.0
# Between the order to end and giving up on an agent: its own grace, its last output, a slow line.
END_LIMIT_S = GRACE_S + 5.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """What ended the job: a rank with its status, or a host without one (`rank` None)."""

    host: str
    rank: int | None
    status: int
    text: str


class RunningJob:
    """The agents of a job, from started to all ended.

    Args:
        connections: one per host.
        output: takes the ranks' lines and our own messages.
    """

    def __init__(self, connections: Sequence[Connection], output: Output) -> None:
        self._connections = list(connections)
        self._output = output
        self._say = output.say
        self._failure: Failure | None = None
        self._statuses: dict[int, int] = {}
        self._size = sum(connection.share.num_ranks for connection in connections)
        self._end_by: float | None = None
        self._gave_up = False
        self._begun = False
        self._signals: list[int] = []
        self._requests = 0

    def run(self) -> int:
        """Pass everything on until all agents have ended; the exit status of the job. Signals are taken over."""
        selector = selectors.DefaultSelector()
        for connection in self._connections:
            selector.register(connection.stdout, selectors.EVENT_READ, connection)
            selector.register(connection.stderr, selectors.EVENT_READ, connection)
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        selector.register(wake, selectors.EVENT_READ, None)
        before = {number: signal.signal(number, self._note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        before_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            self._loop(selector, wake)
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            selector.close()
            # Agents that were given up have had their time.
            drop(self._connections, 0.0 if self._gave_up else END_LIMIT_S)
            wake.close()
            waker.close()
        return self._conclude()

    def _loop(self, selector: selectors.BaseSelector, wake: socket.socket) -> None:
        last_ping = time.monotonic()
        while any(connection.open for connection in self._connections):
            for connection, stream in self._ready(selector, wake):
                self._take(connection, stream)
                if stream not in connection.open:
                    selector.unregister(stream)
                    if not connection.open:
                        self._note_closed(connection)
            while self._signals:
                self._take_request(self._signals.pop(0))
            # With a stop under way it ends no ranks that save: Ctrl-C also ends the `tee` that we write to.
            if self._output.error is not None and not self._requests:
                self._fail(Failure("", None, EXIT_FAILED, f"{self._output.error}; the job was ended"))
            now = time.monotonic()
            if now - last_ping >= PING_S:
                last_ping = now
                self._order_all(order("ping"))
            if self._end_by is not None and now > self._end_by:
                self._give_up(selector)

    def _ready(self, selector: selectors.BaseSelector, wake: socket.socket) -> Iterator[tuple[Connection, int]]:
        """The streams that have something; none while too much waits to be written, so that the ranks wait as well.

        Once the ranks are to stop or to end, all is taken in: they must not wait for a terminal then.
        """
        if self._output.full and self._end_by is None:
            if select.select([wake], [], [], 0.1)[0]:
                wake.recv(64)
            return
        for key, _ in selector.select(timeout=0.5):
            if key.data is None:
                wake.recv(64)
            else:
                yield key.data, key.fd

    def _take(self, connection: Connection, stream: int) -> None:
        for line in connection.read(stream):
            found = read_report(line) if stream == connection.stdout else None
            if found is None:
                text = line.decode(errors="replace")
                connection.stderr_tail = [*connection.stderr_tail, text][-20:]
                continue
            kind, rank, text_bytes = found
            if kind == "s":
                self._begun = True
            elif kind in "oe":
                self._output.line(rank, kind, text_bytes)
            elif kind == "x":
                self._note_end(connection, rank, int(text_bytes))
            elif kind == "f":
                self._fail(Failure(connection.share.host.name, None, EXIT_FAILED, text_bytes.decode(errors="replace")))

    def _note_end(self, connection: Connection, rank: int, status: int) -> None:
        self._statuses[rank] = status
        if status == -signal.SIGTERM and self._requests:
            self._fail(Failure("", None, EXIT_FAILED, f"rank {rank} was ended by the request to stop; so was the job"))
        elif status != 0:
            self._fail(Failure(connection.share.host.name, rank, status, describe_status(status)))

    def _note_closed(self, connection: Connection) -> None:
        """An agent's streams have ended. Without the ends of all its ranks, the connection broke."""
        share = connection.share
        ranks = range(share.first_rank, share.first_rank + share.num_ranks)
        if self._failure is None and any(rank not in self._statuses for rank in ranks):
            said = next((line for line in reversed(connection.stderr_tail) if line.strip()), "no reason was given")
            text = f"the connection to its agent broke ({said.strip()})"
            self._fail(Failure(share.host.name, None, EXIT_FAILED, text))

    def _fail(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        # A rank that stopped on request means that all of them do; they are left to end by themselves.
        if failure.status == EXIT_STOPPED and failure.rank is not None:
            self._end_by = self._end_by or time.monotonic() + STOP_LIMIT_S
        else:
            self._end_all()

    def _take_request(self, number: int) -> None:
        """Ctrl-C or SIGTERM: the first asks the ranks to stop, the second ends them (the first, where none runs)."""
        self._requests += 1
        if not self._begun:
            text = f"{signal.Signals(number).name} before a rank had started; the job was ended"
            self._fail(Failure("", None, EXIT_FAILED, text))
        elif self._requests == 1:
            self._say(f"{signal.Signals(number).name}: the ranks were asked to stop; once more ends them at once")
            self._order_all(order("signal", signal=int(signal.SIGTERM)))
            self._end_by = time.monotonic() + STOP_LIMIT_S
        else:
            if self._failure is None:
                self._failure = Failure("", None, EXIT_FAILED, f"ended by {signal.Signals(number).name}")
            self._end_all()

    def _end_all(self) -> None:
        self._end_by = time.monotonic() + END_LIMIT_S
        self._order_all(order("end"))

    def _give_up(self, selector: selectors.BaseSelector) -> None:
        """The time to end is over: what has not ended does not answer."""
        if self._failure is None or self._failure.status == EXIT_STOPPED:
            missing = sorted(set(range(self._size)) - self._statuses.keys())
            text = f"ranks {missing} did not stop within {STOP_LIMIT_S:.0f} s and were ended"
            self._failure = Failure("", None, EXIT_FAILED, text)
            self._end_all()
            return
        self._gave_up = True
        for connection in self._connections:
            if connection.open:
                self._say(f"{connection.share.host.name} does not answer; its agent ends its ranks when it notices")
                for stream in connection.open:
                    selector.unregister(stream)
                connection.open.clear()

    def _order_all(self, line: bytes) -> None:
        for connection in self._connections:
            if connection.open:
                connection.order(line)

    def _note_signal(self, number: int, frame: FrameType | None) -> Any:
        self._signals.append(number)

    def _conclude(self) -> int:
        """Say what the job ended with, last of all; the exit status."""
        failure = self._failure
        if failure is None:
            return EXIT_DONE
        if failure.status == EXIT_STOPPED:
            self._say("stopped on request; start it again with --resume auto")
            return EXIT_STOPPED
        if failure.rank is not None:
            self._output.repeat_stderr(failure.rank)
            self._say(f"rank {failure.rank} on {failure.host} failed first: {failure.text}; the job was ended")
        elif failure.host:
            self._say(f"{failure.host} failed first: {failure.text}; the job was ended")
        else:
            self._say(failure.text)
        return EXIT_USER_ERROR if failure.status == EXIT_USER_ERROR else EXIT_FAILED


def describe_status(status: int) -> str:
    """An exit status in words; negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def to_stderr(message: str) -> None:
    """Our own messages where no Output is, told apart from the ranks'."""
    sys.stdout.flush()
    os.write(2, message_line(message))
