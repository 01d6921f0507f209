"""The front of failure handling: one guard per process, for its whole life."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from hvdtrain.errors import LaunchError, StopRequested
from hvdtrain.failure import crash, ending
from hvdtrain.failure.hub import Hub
from hvdtrain.failure.monitor import VERDICT_LIMIT_S, Limits, Monitor, my_identity
from hvdtrain.failure.postmortem import Identity
from hvdtrain.failure.pulse import Pulse
from hvdtrain.failure.record import Failure
from hvdtrain.failure.stall import Operation, OperationWatch
from hvdtrain.failure.stop import StopSignals
from hvdtrain.failure.wire import Channel, ProtocolError
from hvdtrain.launch.world import World

# How long rank 0 waits for the others' goodbyes when its own work is done.
LAST_OUT_LIMIT_S = 5.0
# How long a port may refuse: rank 0 listens before it tells its address, so this only covers what an earlier job left
# in the store.
REFUSED_LIMIT_S = 10.0
HUB_KEY = "hvdtrain/failure/hub"
LOOPBACK = ("localhost", "127.", "::1")


class Store(Protocol):
    """The two calls of ``torch.distributed.Store`` that are needed; ``get`` waits until the key is there."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...


class Guard:
    """Ends the whole job when one rank fails, says which and why, and notices stop signals and stalls.

        with Guard(world, store, root_address, host) as guard:
            with guard.operation("all_reduce 'loss'"):
                ...

    Leaving the block normally is `finish`; an exception is `fail`, which does not return unless this process is alone.
    Enclose everything in it, closing the process group too: peers must not see broken connections before they hear the
    reason.

    Args:
        world: the place of this process.
        store: a rendezvous that all ranks share; None: every rank looks after itself.
        root_address: where the others reach rank 0.
        host: name of this host, for messages, and to know which ranks share a kernel.
        stall_warning_s: an operation that takes longer is reported, again at twice the age, and so on; 0: never.
        stall_abort_s: an operation that takes longer ends the job; 0: never.
        silent_limit_s: a rank whose host stands still or is cut off, or that was stopped, for so long is lost (a death
            is noticed at once anyway, a rank that is merely busy is no concern of this); 0: never.
        connect_limit_s: how long to try to reach rank 0.
        on_failure: called once, in a background thread of the rank that reports, before the report is printed.
        exit_alone: whether `fail` ends a process that is alone in its job; if not, it raises the error again.
        handle_signals: whether to turn SIGTERM, SIGINT and SIGUSR1 into `stop_requested` (main thread only).
    """

    def __init__(
        self,
        world: World,
        store: Store | None,
        root_address: str,
        host: str,
        *,
        stall_warning_s: float = 60.0,
        stall_abort_s: float = 600.0,
        silent_limit_s: float = 20.0,
        connect_limit_s: float = 60.0,
        on_failure: Callable[[Failure], None] | None = None,
        exit_alone: bool = False,
        handle_signals: bool = True,
    ) -> None:
        self.world = world
        self.host = host
        self._store = store if world.size > 1 else None
        self._root_address = root_address
        self._limits = Limits(stall_warning_s, stall_abort_s)
        self._silent_limit_s = silent_limit_s
        self._connect_limit_s = connect_limit_s
        self._on_failure = on_failure
        self._exit_hard = exit_alone or world.size > 1
        self._handle_signals = handle_signals
        self._watch = OperationWatch()
        self._stop = StopSignals(f"rank {world.rank}" if world.size > 1 else "")
        self._hub: Hub | None = None
        self._pulse: Pulse | None = None
        self._monitor: Monitor | None = None
        self._running = False
        self._pid = os.getpid()
        self._excepthook_before: Callable[..., Any] | None = None

    # What the trainer uses

    def operation(self, name: str) -> Operation:
        """A context manager around a call that waits for other ranks, named as in ``all_reduce 'loss'``. Cheap."""
        return self._watch.operation(name)

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop. The ranks have to agree before they act on it."""
        return self._stop.requested

    @property
    def stop_reason(self) -> str:
        """The signal's name, or what `request_stop` was given."""
        return self._stop.reason

    def request_stop(self, reason: str) -> None:
        """Behave as if a stop signal had come, without a message."""
        self._stop.request(reason)

    def start(self) -> None:
        """Connect and start to watch. Collective when there is a store: returns when this rank is connected.

        Raises:
            LaunchError: rank 0 cannot be reached, or refuses this rank.
        """
        me = my_identity(self.world.rank, self.host)
        self._pid = me.pid
        root: Identity | None = None
        channel: Channel | None = None
        if self._store is not None:
            root, channel = self._connect(self._store, me)
        if channel is not None and not self.world.is_root:
            crash.send_crashes_to(channel.fileno())
        elif channel is None:
            crash.send_crashes_to_stderr()
        if self._handle_signals:
            self._stop.install()
        self._monitor = Monitor(
            me,
            root,
            channel,
            self._hub,
            self._pulse if self._hub is None else None,
            self._watch,
            self._stop,
            self._limits,
            reports_for_root=self.world.rank == 1 or self.world.local_rank == 0,
            on_failure=self._on_failure,
        )
        self._monitor.start()
        self._running = True
        self._excepthook_before = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._at_exit)

    def finish(self) -> None:
        """The work of this rank is done and it may end: from now on its end is no failure. Not collective, but the
        ranks should have agreed (a barrier) that all are done. Bounded; harmless when repeated."""
        if not self._running or os.getpid() != self._pid:
            return
        if self._hub is not None:
            # Rank 0 is the last to leave, so that it can still tell of the others.
            self._hub.await_goodbyes(LAST_OUT_LIMIT_S)
        self._running = False
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._uncaught and self._excepthook_before is not None:
            sys.excepthook = self._excepthook_before
        crash.send_crashes_to_stderr()
        if self._monitor is not None:
            self._monitor.close()
        if self._hub is not None:
            self._hub.close()
        if self._pulse is not None:
            self._pulse.close()
        crash.restore()
        self._stop.close()
        ending.kill_daemonic_children()

    def fail(self, error: BaseException) -> NoReturn:
        """This rank failed: the job learns why, the report is printed once, and every process ends with status 1 (2 for
        a `UserError`). An error that looks like an echo of another rank's failure waits for a better explanation.

        Raises:
            BaseException: ``error`` itself, in a process that is alone in its job, unless ``exit_alone``.
        """
        operation = self._watch.operation_of(error)
        failure = Failure.from_exception(error, self.world.rank, self.host, operation)
        if not self._exit_hard:
            self._finish_alone(failure)
            raise error
        self._end(failure)

    def _end(self, failure: Failure) -> NoReturn:
        if self._running and self._monitor is not None and self._monitor.submit(failure):
            # The monitor ends this process. Should it break, this thread does.
            time.sleep(VERDICT_LIMIT_S + ending.LAST_RESORT_S)
        ending.arm_last_resort(failure.exit_status)
        ending.report_failure(failure, self._on_failure)
        ending.leave(failure.exit_status)

    def _finish_alone(self, failure: Failure) -> None:
        if self._on_failure is not None:
            self._on_failure(failure)
        self.finish()

    def __enter__(self) -> Guard:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StopRequested) or os.getpid() != self._pid:
            self.finish()
        elif self._exit_hard:
            self.fail(error)
        else:
            # The error goes on to whoever called: a notebook, a test.
            operation = self._watch.operation_of(error)
            self._finish_alone(Failure.from_exception(error, self.world.rank, self.host, operation))

    # Ends that nobody announced

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._running and os.getpid() == self._pid and self._exit_hard:
            self._end(
                Failure.from_exception(error, self.world.rank, self.host, operation=self._watch.operation_of(error))
            )
        if self._excepthook_before is not None:
            self._excepthook_before(kind, error, trace)

    def _at_exit(self) -> None:
        if not self._running or os.getpid() != self._pid:
            return
        if not self._exit_hard:
            self.finish()
            return
        message = "exited early, before the job's end: exit() or sys.exit() was called, or the script ended"
        self._end(Failure(self.world.rank, self.host, self._pid, "early_exit", message))

    # The connection

    def _connect(self, store: Store, me: Identity) -> tuple[Identity | None, Channel]:
        loopback = self._root_address.startswith(LOOPBACK)
        if self.world.is_root:
            token = secrets.token_hex(16)
            address = self._root_address if loopback else ""
            if self._silent_limit_s:
                self._pulse = Pulse.serve(address, self.world.size + 8, token, self._silent_limit_s)
            self._hub = Hub(
                self.world.size,
                self.host,
                token,
                address=address,
                pulse=self._pulse,
                stall_abort_s=self._limits.stall_abort_s,
            )
            self._hub.start()
            contact: dict[str, Any] = {
                "port": self._hub.port,
                "pulse_port": self._pulse.port if self._pulse is not None else 0,
                "token": token,
                "host": me.host,
                "pid": me.pid,
                "started": me.started,
            }
            store.set(HUB_KEY, json.dumps(contact))
            return None, self._greet(self._root_address if loopback else "127.0.0.1", lambda: contact, me)[1]
        return self._greet(self._root_address, lambda: self._read_contact(store), me)

    def _read_contact(self, store: Store) -> dict[str, Any]:
        try:
            return dict(json.loads(store.get(HUB_KEY)))
        except Exception as error:
            raise LaunchError(
                f"rank {self.world.rank} on {self.host} found no failure hub of rank 0 in the store "
                f"({type(error).__name__}: {error}). Rank 0 has not started or has died: see its output"
            ) from error

    def _greet(
        self, address: str, read_contact: Callable[[], dict[str, Any]], me: Identity
    ) -> tuple[Identity, Channel]:
        until = time.monotonic() + self._connect_limit_s
        refused_until = time.monotonic() + REFUSED_LIMIT_S
        while True:
            # Read again each time: the store may still hold what an earlier job or guard wrote.
            contact = read_contact()
            port = int(contact["port"])
            try:
                channel = self._try_greet(address, port, str(contact["token"]), me, until)
                pulse_port = int(contact.get("pulse_port", 0))
                if self._silent_limit_s and pulse_port and not self.world.is_root:
                    token = str(contact["token"])
                    self._pulse = Pulse.follow(address, pulse_port, token, me.rank, self._silent_limit_s)
                return Identity(0, str(contact["host"]), int(contact["pid"]), int(contact["started"])), channel
            except ConnectionRefusedError as error:
                if time.monotonic() > min(refused_until, until):
                    raise LaunchError(
                        f"rank {me.rank} on {me.host} reaches {address}, but nothing listens at port {port} any more: "
                        f"rank 0 (pid {contact['pid']} on {contact['host']}) has died or ended early; see its output"
                    ) from error
                time.sleep(0.2)
            except (OSError, ProtocolError) as error:
                if time.monotonic() > until:
                    raise LaunchError(
                        f"rank {me.rank} on {me.host} cannot reach rank 0's failure hub at {address} port {port} "
                        f"within {self._connect_limit_s:g} s ({error}). Check that this host reaches that address and "
                        "that no firewall blocks ports between the hosts"
                    ) from error
                time.sleep(0.2)

    def _try_greet(self, address: str, port: int, token: str, me: Identity, until: float) -> Channel:
        sock = socket.create_connection((address, port), timeout=max(1.0, min(10.0, until - time.monotonic())))
        channel = Channel(sock)
        try:
            channel.send("hello", token=token, rank=me.rank, host=me.host, pid=me.pid, started=me.started)
            waited_until = time.monotonic() + 10.0
            while time.monotonic() < waited_until and not channel.ended:
                for message in channel.receive():
                    if message["kind"] == "refused":
                        who = f"rank {me.rank} on {me.host} (pid {me.pid})"
                        raise LaunchError(f"{who} was refused by rank 0: {message['reason']}")
                    if message["kind"] == "welcome":
                        return channel
            raise ProtocolError("connected, but got no welcome: another program may listen there")
        except BaseException:
            channel.close()
            raise
