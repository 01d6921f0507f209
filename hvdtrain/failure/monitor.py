"""The background thread of every rank: its connection to the hub, its stall watch, its stop signals.

It is a thread, and it ends the process with ``os._exit``, because the main thread may be stuck in a collective that
will never return.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable

from hvdtrain.failure import crash, ending
from hvdtrain.failure.hub import Hub, silent_failure
from hvdtrain.failure.postmortem import Identity, count_oom_kills, explain_death, kill, start_ticks
from hvdtrain.failure.pulse import Pulse
from hvdtrain.failure.record import SIGNAL, SILENT, Failure
from hvdtrain.failure.stall import Operation, OperationWatch, Whereabouts, stall_failure, stall_warning
from hvdtrain.failure.stop import ANNOUNCE_DELAY_S, StopSignals
from hvdtrain.failure.wire import Channel, Message, ProtocolError
from hvdtrain.failure.workers import worker_stacks

# A failed rank waits so long for the hub to say who failed first, before it reports itself.
VERDICT_LIMIT_S = 5.0
# After the verdict, the others wait so long for the report to be on the screen.
REPORT_LIMIT_S = 3.0
GOODBYE_LIMIT_S = 2.0
# The hub may have good reason not to end the job yet: then it is asked again after this time.
REPEAT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """All in seconds; 0 switches a limit off."""

    stall_warning_s: float = 60.0
    stall_abort_s: float = 600.0

    @property
    def tick_s(self) -> float:
        """How often the thread looks around."""
        used = [value for value in (self.stall_warning_s / 4, self.stall_abort_s / 4) if value]
        return max(0.02, min([1.0, *used]))


class Monitor:
    """See the module. `submit` and `close` are for the main thread.

    Args:
        me: this process.
        root: rank 0's process, to be named if the connection to it ends.
        channel: the connection to the hub, greeted already; None where there is no hub.
        hub: the hub, on rank 0.
        pulse: tells when rank 0 has fallen silent; None on rank 0, and where nobody does.
        reports_for_root: whether this rank reports when rank 0 is lost (the lowest of each host).
        on_failure: called on the rank that reports, before the report is printed.
    """

    def __init__(
        self,
        me: Identity,
        root: Identity | None,
        channel: Channel | None,
        hub: Hub | None,
        pulse: Pulse | None,
        watch: OperationWatch,
        stop: StopSignals,
        limits: Limits,
        *,
        reports_for_root: bool,
        on_failure: Callable[[Failure], None] | None,
    ) -> None:
        self._me = me
        self._root = root
        self._channel = channel
        self._hub = hub
        self._pulse = pulse
        self._watch = watch
        self._stop = stop
        self._limits = limits
        self._reports_for_root = reports_for_root
        self._on_failure = on_failure
        self._own: tuple[Failure, float] | None = None
        self._oom_kills = count_oom_kills()
        self._closing = threading.Event()
        self._parting = threading.Event()
        self._ending = threading.Event()
        self._leave = threading.Event()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="hvdtrain-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, failure: Failure) -> bool:
        """Tell the job that this rank failed; soon after, the thread ends this process. False if the thread is gone."""
        if not self._thread.is_alive():
            return False
        if self._own is None:
            self._own = (failure, time.monotonic() + VERDICT_LIMIT_S)
            if self._channel is not None:
                self._channel.send("last_words", failure=failure.to_dict())
        self._wake()
        return True

    def close(self) -> None:
        """Say goodbye and stop the thread. Bounded."""
        if not self._thread.is_alive():
            return
        if self._channel is not None and self._channel.send("goodbye"):
            self._parting.wait(GOODBYE_LIMIT_S)
        self._closing.set()
        self._wake()
        self._thread.join(GOODBYE_LIMIT_S)
        if self._ending.is_set():
            # Another rank has failed while this one finished: the thread ends this process, with the job's status.
            self._thread.join()
        if self._channel is not None:
            self._channel.close()
        self._waker.close()
        self._wakened.close()

    # The loop

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            # Without this thread a failure is only noticed later, by a time-out, so it is no reason to end the job.
            ending.write_error("hvdtrain: the failure monitor broke, please report this:\n" + traceback.format_exc())

    def _loop(self) -> None:
        tick_s = self._limits.tick_s
        before = time.monotonic()
        while not self._closing.is_set():
            pending = self._stop.announce(ANNOUNCE_DELAY_S if self._channel is not None else 0.0)
            self._attend(min(tick_s, ANNOUNCE_DELAY_S / 2) if pending else tick_s)
            now = time.monotonic()
            passed_s = min(now - before, 2 * tick_s)
            before = now
            self._check_stall(passed_s)
            if self._own is not None and (now >= self._own[1] or self._channel is None):
                self._end(self._own[0], report=True)

    def _attend(self, limit_s: float) -> None:
        """Wait for whatever comes first, at most ``limit_s`` seconds, and handle it."""
        sources: list[socket.socket | Channel | StopSignals] = [self._wakened]
        pulse = self._pulse
        if pulse is not None:
            sources.append(pulse.channel)
        if self._channel is not None:
            sources.append(self._channel)
        if self._stop.fileno() >= 0:
            sources.append(self._stop)
        try:
            ready, _, _ = select.select(sources, [], [], limit_s)
        except (OSError, ValueError):
            # The main thread took its handlers back between the question and the call.
            return
        if self._wakened in ready:
            with contextlib.suppress(OSError):
                self._wakened.recv(256)
        if self._stop in ready:
            again = self._stop.read()
            if again:
                self._end_at_once(again)
        if self._channel is not None and self._channel in ready:
            self._listen(self._channel)
        if pulse is not None and pulse.channel in ready:
            self._feel(pulse)

    def _listen(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except ProtocolError as error:
            ending.write_error(f"hvdtrain: the failure hub sent something unreadable: {error}\n")
            channel.close()
            messages = []
        for message in messages:
            self._hear(channel, message)
        if channel.ended:
            self._channel = None
            crash.send_crashes_to_stderr()
            channel.close()
            if not self._parting.is_set() and not self._closing.is_set() and self._root is not None:
                failure = explain_death(
                    self._root,
                    channel.fault_text,
                    same_host=self._root.host == self._me.host,
                    oom_kills_before=self._oom_kills,
                )
                self._end(failure, report=self._reports_for_root)

    def _hear(self, channel: Channel, message: Message) -> None:
        kind = message["kind"]
        if kind == "verdict":
            failure = Failure.from_dict(message["failure"])
            if failure.kind == SILENT and failure.host == self._me.host and failure.rank != self._me.rank:
                kill(Identity(failure.rank, failure.host, failure.pid, int(message["started"])))
            self._end(failure, report=message["reporter"] == self._me.rank)
        elif kind == "where":
            place = self._watch.whereabouts()
            # Only a rank that waits for no other may be waiting for its data.
            channel.send("here", **place, workers="" if place["operations"] else worker_stacks())
        elif kind == "leave":
            self._leave.set()
        elif kind in ("farewell", "closing"):
            self._parting.set()

    # What the thread watches

    def _feel(self, pulse: Pulse) -> None:
        is_silent = bool(pulse.silent_ranks())
        if pulse.channel.ended:
            self._pulse = None
        if is_silent and self._channel is not None and self._root is not None and not self._parting.is_set():
            if self._root.host == self._me.host:
                kill(self._root)
            self._end(silent_failure(self._root, pulse.limit_s), report=self._reports_for_root)

    def _check_stall(self, passed_s: float) -> None:
        operation = self._watch.advance(passed_s)
        if operation is None or self._own is not None:
            return
        warning_s, abort_s = self._limits.stall_warning_s, self._limits.stall_abort_s
        if abort_s and operation.age_s >= (operation.abort_at_s or abort_s):
            operation.abort_at_s = operation.age_s + REPEAT_S
            self._complain(operation, operation.age_s, final=True)
        elif warning_s and operation.age_s >= (operation.warn_at_s or warning_s):
            operation.warn_at_s = 2 * operation.age_s
            self._complain(operation, operation.age_s, final=False)

    def _complain(self, operation: Operation, age_s: float, *, final: bool) -> None:
        if self._channel is not None:
            self._channel.send("stalled", name=operation.name, age_s=age_s, final=final)
            return
        place = self._watch.whereabouts()
        alone = [Whereabouts(self._me.rank, self._me.host, self._me.pid, "here", place["operations"], place["stack"])]
        if final:
            self._end(stall_failure(operation.name, age_s, self._me.rank, alone), report=True)
        else:
            text = stall_warning(operation.name, age_s, self._me.rank, alone, self._limits.stall_abort_s)
            ending.write_error(text)

    def _end_at_once(self, signal_name: str) -> None:
        message = f"got a second signal, {signal_name}, and ended at once; no checkpoint was saved for it"
        self.submit(Failure(self._me.rank, self._me.host, self._me.pid, SIGNAL, message))

    # The end

    def _end(self, failure: Failure, *, report: bool) -> None:
        """Report, or wait until it is reported, and leave: all ranks at about the same time, because many launchers
        kill the rest when the first process ends."""
        self._ending.set()
        self._stop.hush()
        ending.arm_last_resort(failure.exit_status)
        if report:
            ending.report_failure(failure, self._on_failure)
            if self._channel is not None:
                self._channel.send("reported")
            if self._hub is not None and self._channel is not None:
                self._await_others()
        else:
            self._await_report()
        ending.leave(failure.exit_status)

    def _await_report(self) -> None:
        until = time.monotonic() + REPORT_LIMIT_S
        while self._channel is not None and not self._leave.is_set() and time.monotonic() < until:
            if select.select([self._channel], [], [], 0.1)[0]:
                try:
                    for message in self._channel.receive():
                        if message["kind"] == "leave":
                            self._leave.set()
                except ProtocolError:
                    return
                if self._channel.ended:
                    return

    def _await_others(self) -> None:
        """On rank 0: give the hub time to send the others away before it dies with this process."""
        self._await_report()
        if self._hub is not None:
            self._hub.await_others(REPORT_LIMIT_S)


def my_identity(rank: int, host: str) -> Identity:
    """This process."""
    return Identity(rank, host, os.getpid(), start_ticks(os.getpid()))
