"""Signs of life that neither the interpreter nor a busy machine holds up: they come from a process beside each rank.

A thread of the rank would not do. It needs the interpreter, which the task's own code may keep for minutes (a big
pickle, JSON, a tokenizer) while the rank is well, and a job must not be ended for that. What silence is to find is what
nobody else would tell: a host that stands still (a paused container, a hung kernel), a process that was stopped, a cut
network. So the process beside the rank sends pulses as long as the rank is there and not stopped (see
`pulse_process`). A rank that is busy, or hangs, is the affair of the stall watch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

from hvdtrain.failure.wire import Channel

# Ranks give rank 0 longer than it gives them: of two explanations that of the hub, which sees all, is the better one.
ROOT_PATIENCE = 1.2
_PROGRAM = Path(__file__).with_name("pulse_process.py")
_END_LIMIT_S = 1.0


class Pulse:
    """The process beside this rank. `channel` brings ``silent`` messages with the rank that was not heard.

    Attributes:
        limit_s: the silence after which it calls a rank silent, in seconds.
        port: where the one beside rank 0 listens.
    """

    def __init__(self, limit_s: float, settings: dict[str, object], listener: socket.socket | None = None) -> None:
        self.limit_s = limit_s
        self.port = 0
        inherited: list[int] = []
        if listener is not None:
            self.port = listener.getsockname()[1]
            inherited.append(listener.fileno())
            settings = {**settings, "listener": listener.fileno()}
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # -I and -S: nothing of the user's environment is imported there.
                self._process = subprocess.Popen(
                    [sys.executable or "", "-I", "-S", str(_PROGRAM)],
                    stdin=theirs.fileno(),
                    # Launchers wait for whoever holds a rank's output.
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=inherited,
                )
            except OSError:
                ours.close()
                raise
        ours.sendall(json.dumps({"limit_s": limit_s, **settings}).encode() + b"\n")
        self.channel = Channel(ours)

    @classmethod
    def serve(cls, address: str, backlog: int, token: str, limit_s: float) -> Pulse | None:
        """The one beside rank 0; ``address``: where to listen, ``""`` for every interface. None where it cannot start:
        then nobody is called silent."""
        with contextlib.suppress(OSError), listen(address, backlog) as listener:
            return cls(limit_s, {"token": token}, listener)
        return None

    @classmethod
    def follow(cls, address: str, port: int, token: str, rank: int, limit_s: float) -> Pulse | None:
        """The one beside another rank, connected to rank 0's at ``address`` and ``port``. None: it cannot start."""
        settings: dict[str, object] = {"token": token, "address": address, "port": port, "rank": rank}
        with contextlib.suppress(OSError):
            return cls(limit_s * ROOT_PATIENCE, settings)
        return None

    def silent_ranks(self) -> list[int]:
        """The ranks that have fallen silent since the last call; to be called when `channel` is readable."""
        return [int(message["rank"]) for message in self.channel.receive() if message["kind"] == "silent"]

    def close(self) -> None:
        """End it. Bounded; harmless when repeated."""
        self.channel.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def listen(address: str, backlog: int) -> socket.socket:
    """A listening TCP socket on a free port of ``address``; ``""``: of every interface, over IPv6 and IPv4."""
    if not address and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)
