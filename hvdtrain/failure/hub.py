"""The centre of the star: one thread on rank 0 that keeps a connection to every rank and decides what failed first."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import selectors
import socket
import threading
import time
import traceback
from typing import Any

from hvdtrain.failure import crash, ending
from hvdtrain.failure.postmortem import Identity, count_oom_kills, explain_death, kill
from hvdtrain.failure.pulse import Pulse, listen
from hvdtrain.failure.record import SILENT, Failure
from hvdtrain.failure.stall import Whereabouts, stall_failure, stall_warning
from hvdtrain.failure.verdict import Verdict
from hvdtrain.failure.wire import Channel, Message, ProtocolError

# How long the ranks have to answer where they are.
GATHER_S = 2.0
# How often the hub looks around.
TICK_S = 1.0
# How long a stranger may stay connected without the job's token.
HELLO_LIMIT_S = 10.0


@dataclasses.dataclass
class _Peer:
    channel: Channel
    strange_s: float = 0.0
    process: Identity | None = None
    finished: bool = False
    spoke: bool = False


@dataclasses.dataclass
class _Stall:
    """A question to all ranks that is under way."""

    name: str
    age_s: float
    by_rank: int
    final: bool
    until: float
    answers: dict[int, Message] = dataclasses.field(default_factory=dict)


class Hub:
    """Listens, watches, decides, tells everyone.

    Args:
        size: number of ranks.
        host: name of this host, as the ranks report theirs.
        token: what a rank has to show.
        address: where to listen; ``""`` is every interface.
        pulse: tells which ranks have fallen silent; None: nobody does.
        stall_abort_s: quoted in warnings.
    """

    def __init__(
        self,
        size: int,
        host: str,
        token: str,
        *,
        address: str = "",
        pulse: Pulse | None,
        stall_abort_s: float,
    ) -> None:
        self.size = size
        self._host = host
        self._token = token
        self._pulse = pulse
        self._stall_abort_s = stall_abort_s
        self._listener = listen(address, backlog=size + 8)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._wakened = socket.socketpair()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        if pulse is not None:
            self._selector.register(pulse.channel, selectors.EVENT_READ)
        self._strangers: dict[Channel, _Peer] = {}
        self._peers: dict[int, _Peer] = {}
        self._verdict = Verdict()
        self._decided: Failure | None = None
        self._stall: _Stall | None = None
        self._warned_at: dict[str, float] = {}
        self._oom_kills = count_oom_kills()
        self._closing = threading.Event()
        self._others_finished = threading.Event()
        self._others_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-hub", daemon=True)

    def start(self) -> None:
        """Start to listen."""
        self._thread.start()

    def await_goodbyes(self, limit_s: float) -> None:
        """Wait until every rank but rank 0 has come and said goodbye, at most ``limit_s`` seconds."""
        self._others_finished.wait(limit_s)

    def await_others(self, limit_s: float) -> None:
        """After a verdict: wait until every rank but rank 0 has left, at most ``limit_s`` seconds; then end those of
        this host that cannot leave by themselves (stopped, or stuck in native code that holds the interpreter)."""
        self._others_left.wait(limit_s)
        for rank in self._present():
            process = self._peers[rank].process
            if rank != 0 and process is not None and process.host == self._host:
                kill(process)

    def close(self) -> None:
        """The job is over: tell the ranks that the end of this connection means nothing, and stop. Bounded."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(timeout=3.0)

    # The loop

    def _run(self) -> None:
        try:
            self._loop()
            self._farewell()
        except Exception:
            # Without its hub a job is only slower to notice a failure, so this is no reason to end it.
            ending.write_error("hvdtrain: the failure hub broke, please report this:\n" + traceback.format_exc())
        finally:
            for peer in [*self._peers.values(), *self._strangers.values()]:
                peer.channel.close()
            for each in (self._listener, self._waker, self._wakened, self._selector):
                each.close()
            self._others_finished.set()
            self._others_left.set()

    def _loop(self) -> None:
        before = time.monotonic()
        while not self._closing.is_set():
            for key, _ in self._selector.select(self._timeout()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)
                elif self._pulse is not None and key.fileobj is self._pulse.channel:
                    self._feel(self._pulse)
            now = time.monotonic()
            # Counted in our own running time: while this process was stopped, nobody could say hello.
            self._drop_strangers(min(now - before, 2 * TICK_S))
            before = now
            self._finish_gathering(now)
            self._decide(now)
            if sum(1 for rank, peer in self._peers.items() if rank and peer.finished) == self.size - 1:
                self._others_finished.set()
            if self._decided and not any(self._present()):
                self._others_left.set()

    def _timeout(self) -> float:
        moments = [self._verdict.deadline()] if not self._decided else []
        moments.append(self._stall.until if self._stall else None)
        waits = [moment - time.monotonic() for moment in moments if moment is not None]
        return max(0.0, min([TICK_S, *waits]))

    def _present(self) -> list[int]:
        return sorted(rank for rank, peer in self._peers.items() if not peer.channel.ended)

    def _tell(self, kind: str, **values: Any) -> None:
        for peer in self._peers.values():
            if not peer.channel.ended:
                peer.channel.send(kind, **values)

    # Connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        peer = _Peer(Channel(sock))
        self._strangers[peer.channel] = peer
        self._selector.register(peer.channel, selectors.EVENT_READ, peer)

    def _drop(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(peer.channel)
        self._strangers.pop(peer.channel, None)
        peer.channel.close()

    def _read(self, peer: _Peer) -> None:
        try:
            for message in peer.channel.receive():
                if peer.process is None:
                    self._welcome(peer, message)
                else:
                    self._hear(peer, peer.process, message)
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            if peer.process is not None:
                rank = peer.process.rank
                ending.write_error(f"hvdtrain: rank {rank} sent the failure hub something unreadable: {error!r}\n")
            self._drop(peer)
            return
        if peer.channel.ended:
            self._drop(peer)
            self._choose_heir()
            if peer.process is not None:
                self._mourn(peer, peer.process)

    def _welcome(self, peer: _Peer, message: Message) -> None:
        token = str(message.get("token", ""))
        if message["kind"] != "hello" or not hmac.compare_digest(token.encode(), self._token.encode()):
            raise ProtocolError("no token")
        process = Identity(int(message["rank"]), str(message["host"]), int(message["pid"]), int(message["started"]))
        reason = self._refuse(process)
        if reason:
            peer.channel.send("refused", reason=reason)
            raise ProtocolError(reason)
        peer.process = process
        self._strangers.pop(peer.channel, None)
        self._peers[process.rank] = peer
        peer.channel.send("welcome")
        self._choose_heir()

    def _refuse(self, process: Identity) -> str:
        if self._decided:
            return f"the job has failed already: {self._decided.sentence()}"
        if not 0 <= process.rank < self.size:
            return f"it counts {self.size} ranks, so the ranks were started with different sizes"
        known = self._peers.get(process.rank)
        if known is None or known.process is None or known.channel.ended:
            return ""
        other = f"{known.process.host} (pid {known.process.pid})"
        return f"{other} has this rank already: two processes were started with one rank, or an earlier job still runs"

    def _choose_heir(self) -> None:
        """If this process crashes, its last words go to the lowest other rank, which then makes the report."""
        heir = next((self._peers[rank] for rank in self._present() if rank != 0), None)
        if heir is not None:
            crash.send_crashes_to(heir.channel.fileno())
        else:
            crash.send_crashes_to_stderr()

    def _mourn(self, peer: _Peer, process: Identity) -> None:
        if peer.finished or peer.spoke or self._decided or self._closing.is_set():
            return
        peer.spoke = True
        failure = explain_death(
            process,
            peer.channel.fault_text,
            same_host=process.host == self._host,
            oom_kills_before=self._oom_kills,
        )
        self._verdict.add(failure, time.monotonic())

    def _drop_strangers(self, passed_s: float) -> None:
        for peer in list(self._strangers.values()):
            peer.strange_s += passed_s
            if peer.strange_s > HELLO_LIMIT_S:
                self._drop(peer)

    def _feel(self, pulse: Pulse) -> None:
        for rank in pulse.silent_ranks():
            peer = self._peers.get(rank)
            if peer is None or peer.process is None or peer.finished or peer.spoke or peer.channel.ended:
                continue
            peer.spoke = True
            self._verdict.add(silent_failure(peer.process, pulse.limit_s), time.monotonic())
        if pulse.channel.ended:
            self._selector.unregister(pulse.channel)
            self._pulse = None

    # Messages

    def _hear(self, peer: _Peer, process: Identity, message: Message) -> None:
        kind = message["kind"]
        if kind == "last_words":
            peer.spoke = True
            self._verdict.add(Failure.from_dict(message["failure"]), time.monotonic())
        elif kind == "goodbye":
            peer.finished = True
            peer.channel.send("farewell")
        elif kind == "stalled":
            self._start_gathering(process.rank, message)
        elif kind == "here":
            if self._stall is not None:
                self._stall.answers[process.rank] = message
        elif kind == "reported":
            self._tell("leave")

    def _start_gathering(self, by_rank: int, message: Message) -> None:
        final = bool(message["final"])
        name, now = str(message["name"]), time.monotonic()
        if self._decided or (self._stall is not None and (self._stall.final or not final)):
            return
        # Every waiting rank complains at about the same time: one answer is enough.
        if not final and now - self._warned_at.get(name, -1e9) < message["age_s"] / 4:
            return
        self._stall = _Stall(name, float(message["age_s"]), by_rank, final, now + GATHER_S)
        self._tell("where")

    def _finish_gathering(self, now: float) -> None:
        stall = self._stall
        if stall is None or (now < stall.until and len(stall.answers) < len(self._present())):
            return
        self._stall = None
        everyone = [self._whereabouts(rank, stall.answers.get(rank)) for rank in range(self.size)]
        waiting = everyone[stall.by_rank]
        if waiting.state == "here" and not waiting.is_in(stall.name):
            return  # it went on while we asked
        if stall.final:
            self._verdict.add(stall_failure(stall.name, stall.age_s, stall.by_rank, everyone), now)
        else:
            self._warned_at[stall.name] = now
            ending.write_error(stall_warning(stall.name, stall.age_s, stall.by_rank, everyone, self._stall_abort_s))

    def _whereabouts(self, rank: int, answer: Message | None) -> Whereabouts:
        peer = self._peers.get(rank)
        if peer is None or peer.process is None:
            return Whereabouts(rank, "", 0, "absent")
        process = peer.process
        if answer is not None:
            return Whereabouts(
                rank,
                process.host,
                process.pid,
                "here",
                answer["operations"],
                str(answer["stack"]),
                str(answer.get("workers", "")),
            )
        return Whereabouts(rank, process.host, process.pid, "finished" if peer.finished else "mute")

    # The end

    def _decide(self, now: float) -> None:
        if self._decided:
            return
        mute = sum(1 for peer in self._peers.values() if not peer.channel.ended and not peer.spoke)
        failure = self._verdict.decide(now, num_alive=mute)
        if failure is not None:
            self._decided = failure
            blamed = self._peers[failure.rank].process if failure.rank in self._peers else None
            started = blamed.started if blamed else 0
            self._tell("verdict", failure=failure.to_dict(), started=started, reporter=self._reporter())

    def _reporter(self) -> int:
        return min(self._present(), default=0)

    def _farewell(self) -> None:
        self._selector.unregister(self._wakened)
        crash.send_crashes_to_stderr()
        self._tell("closing")
        for peer in self._peers.values():
            peer.channel.finish_sending()
        until = time.monotonic() + 0.5
        while self._present() and time.monotonic() < until:
            for key, _ in self._selector.select(0.1):
                if key.data is not None:
                    with contextlib.suppress(ProtocolError):
                        key.data.channel.receive()
                    if key.data.channel.ended:
                        self._drop(key.data)


def silent_failure(process: Identity, limit_s: float) -> Failure:
    """The failure of a process that is still connected but has sent nothing for ``limit_s`` seconds."""
    return Failure(
        process.rank,
        process.host,
        process.pid,
        SILENT,
        f"is lost: nothing was heard from it for {limit_s:g} s (a stopped process or container, or a cut network)",
    )
