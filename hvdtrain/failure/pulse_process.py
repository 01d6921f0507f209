"""The program of the processes that `pulse` starts: one beside every rank, in a star around the one beside rank 0.

It is run by its path, with the standard library alone, so that it starts in some 30 ms and takes few megabytes. Its
standard input is a socket to its rank: one line of JSON with what it has to know comes first, the end of it is the end
of this process, and what it finds out goes back in the frames of `wire`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import time
from pathlib import Path

# What a rank shows first, before its pulses: the token and its number.
HELLO = struct.Struct(">32sI")
PULSE = b"."
CONNECT_LIMIT_S = 10.0
HELLO_LIMIT_S = 10.0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z). One that a debugger holds is not: a person looks after it."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False


class Peer:
    """A connection to the process beside another rank. `rank` is -1 until it has said which one."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.sock = sock
        self.rank = rank
        self.silence_s = 0.0
        self.received = b""
        self.told = False


class Process:
    """See the module."""

    def __init__(self, rank_socket: socket.socket) -> None:
        self.parent = os.getppid()
        self.rank_socket = rank_socket
        settings = json.loads(rank_socket.makefile("rb").readline())
        self.token = settings["token"].encode()
        self.limit_s = settings["limit_s"]
        self.tick_s = min(1.0, self.limit_s / 8)
        self.selector = selectors.DefaultSelector()
        self.selector.register(rank_socket, selectors.EVENT_READ)
        self.peers: list[Peer] = []
        self.listener: socket.socket | None = None
        if "listener" in settings:
            self.listener = socket.socket(fileno=settings["listener"])
            self.listener.setblocking(False)
            self.selector.register(self.listener, selectors.EVENT_READ)
        else:
            sock = socket.create_connection((settings["address"], settings["port"]), CONNECT_LIMIT_S)
            sock.sendall(HELLO.pack(self.token, settings["rank"]))
            self.take(Peer(sock, 0))

    def run(self) -> None:
        """Until the rank ends, or until nobody is left to listen to."""
        before = time.monotonic()
        next_beat = 0.0
        while os.getppid() == self.parent and (self.listener is not None or self.peers):
            for key, _ in self.selector.select(max(0.0, min(self.tick_s, next_beat - time.monotonic()))):
                if key.fileobj is self.rank_socket:
                    return
                if key.data is None:
                    self.accept()
                else:
                    self.read(key.data)
            now = time.monotonic()
            # Counted in our own running time: while this host stood still, nobody else is to blame.
            self.count_silence(min(now - before, 2 * self.tick_s))
            before = now
            if now >= next_beat:
                next_beat = now + self.tick_s
                if not is_stopped(self.parent):
                    self.beat()

    def accept(self) -> None:
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.take(Peer(self.listener.accept()[0], -1))

    def take(self, peer: Peer) -> None:
        peer.sock.setblocking(False)
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.selector.register(peer.sock, selectors.EVENT_READ, peer)
        self.peers.append(peer)

    def drop(self, peer: Peer) -> None:
        self.selector.unregister(peer.sock)
        peer.sock.close()
        self.peers.remove(peer)

    def read(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # Why it ended is for the ranks' own connection to tell.
            self.drop(peer)
            return
        peer.silence_s = 0.0
        if peer.rank < 0:
            peer.received += data
            if len(peer.received) >= HELLO.size:
                token, rank = HELLO.unpack(peer.received[: HELLO.size])
                if token != self.token:
                    self.drop(peer)
                    return
                peer.rank = rank

    def count_silence(self, passed_s: float) -> None:
        for peer in list(self.peers):
            peer.silence_s += passed_s
            if peer.rank < 0 and peer.silence_s > HELLO_LIMIT_S:
                self.drop(peer)
            elif peer.silence_s > self.limit_s and not peer.told:
                peer.told = True
                message = json.dumps({"kind": "silent", "rank": peer.rank}).encode()
                self.rank_socket.sendall(struct.pack(">I", len(message)) + message)

    def beat(self) -> None:
        for peer in self.peers:
            # A peer that takes nothing any more is found by its silence.
            with contextlib.suppress(OSError):
                peer.sock.send(PULSE)


def main() -> None:
    # Signals to the whole process group are for the rank; with it this process ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        Process(socket.socket(fileno=0)).run()


if __name__ == "__main__":
    main()
