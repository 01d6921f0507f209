"""Sums of small buffers by recursive doubling, over connections that the waiting thread reads itself.

gloo gives every reduction to a thread of its pool, which another thread tells of arriving data. Each of these wake-ups
costs little while the cores are idle and up to a millisecond after they have computed, and a small model's whole step
takes no longer. Here nobody is woken: what is sent goes into the kernel's buffer at once, and the thread that needs the
result reads the connection.

In round r every rank exchanges its partial sum with the rank whose number differs in bit r (recursive doubling: R.
Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4.5).
All ranks add the same pairs, and a + b = b + a, so the sum has the same bits everywhere. It sends log2(N) times the
buffer, a ring 2 (N - 1) / N times: small buffers only.
"""

from __future__ import annotations

import collections
import ctypes
import select
import socket
import threading
import time
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from hvdtrain.hvd.engine.partners import connect_partners

# A rank sends at most so many bytes per sum; larger buffers are gloo's, whose ring sends fewer and adds in pieces.
LIMIT_BYTES = 1 << 20
# How long a rank that has a core of its own looks for data before it sleeps until some comes.
_SPIN_S = 0.002
# How long it sleeps at most before it looks at the clock, and at what another thread has done.
_SLEEP_MS = 50
# Sums of which nobody waits for the end are moved on this often.
_HELP_S = 0.005


def serves(size: int) -> bool:
    """Whether so many ranks can meet pairwise: a power of two."""
    return size > 1 and size & (size - 1) == 0


class SmallSums:
    """All small sums of this process that are under way; may be used from any thread.

    Whoever waits for one moves all of them on, and a thread does while nobody waits: the other ranks may wait for this
    one's part while it waits for something else.

    Args:
        limit_s: how long to wait for a silent peer.
        spin: whether this rank has a core to itself.
    """

    def __init__(self, limit_s: float, spin: bool) -> None:
        self.limit_s = limit_s
        self._spin_s = _SPIN_S if spin else 0.0
        self._lock = threading.Lock()
        self._groups: list[DoublingGroup] = []
        self._under_way = threading.Event()
        self._closing = False
        self._helper = threading.Thread(target=self._help, name="hvd-small-sums", daemon=True)

    def add(self, group: DoublingGroup) -> None:
        """Look after the sums of this group too."""
        with self._lock:
            self._groups.append(group)
        if self._helper.ident is None:
            self._helper.start()

    def remove(self, group: DoublingGroup) -> None:
        """Forget the group, and close its connections; what this rank has sent still arrives."""
        with self._lock:
            self._groups.remove(group)
            group.close()

    def start(self, started: Sum) -> None:
        """Begin a sum."""
        with self._lock:
            started.group.under_way.append(started)
            started.group.advance()
        self._under_way.set()

    def finish(self, awaited: Sum) -> None:
        """Go on until the sum is there, or has failed."""
        begin = time.monotonic()
        while True:
            with self._lock:
                self._advance()
            if awaited.done:
                return
            waited_s = time.monotonic() - begin
            if waited_s > self.limit_s:
                raise RuntimeError(f"timed out after {waited_s:.0f} s: another rank does not take part")
            if waited_s >= self._spin_s:
                self._sleep()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._under_way.set()
        if self._helper.ident is not None:
            self._helper.join()

    def _advance(self) -> bool:
        """Move all sums on; returns whether some are left."""
        left = False
        for group in self._groups:
            left = group.advance() or left
        return left

    def _sleep(self) -> None:
        poll = select.poll()
        with self._lock:
            for group in self._groups:
                if group.under_way:
                    poll.register(*group.under_way[0].needs())
        poll.poll(_SLEEP_MS)

    def _help(self) -> None:
        while not self._closing:
            self._under_way.wait()
            time.sleep(_HELP_S)
            with self._lock:
                if not self._advance():
                    self._under_way.clear()


class DoublingGroup:
    """Takes the small sums from a gloo group, and gives it everything else. Making one is collective over the group.

    Args:
        group: gloo's.
        sums: of this process.
        store: with a prefix of its own.
        rank, size: within the group; a size that `serves`.
        address: of this host, as the others reach it.

    Raises:
        OSError, RuntimeError: a peer could not be reached in time.
    """

    def __init__(self, group: Any, sums: SmallSums, store: Store, rank: int, size: int, address: str) -> None:
        self._group = group
        self._sums = sums
        self.partners = connect_partners(
            store, rank, [rank ^ 1 << bit for bit in range(size.bit_length() - 1)], address
        )
        self.under_way: collections.deque[Sum] = collections.deque()
        self._limit_bytes = LIMIT_BYTES // len(self.partners)
        self._scratch: dict[int, torch.Tensor] = {}
        sums.add(self)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """Start to sum a contiguous host tensor over the ranks, in place. All ranks start their sums in one order.

        Returns:
            An object whose `wait()` finishes it, and raises RuntimeError where a peer has gone or stays silent.
        """
        (tensor,) = tensors
        if not 0 < tensor.nbytes <= self._limit_bytes:
            return self._group.allreduce(tensors, options)
        scratch = self._scratch.get(tensor.data_ptr())
        if scratch is None or scratch.numel() != tensor.numel() or scratch.dtype != tensor.dtype:
            scratch = self._scratch[tensor.data_ptr()] = torch.empty_like(tensor)
        started = Sum(self, self._sums, tensor, scratch)
        self._sums.start(started)
        return started

    def advance(self) -> bool:
        """Move what the kernel takes and has, in the order of the sums' start; returns whether some are left."""
        while self.under_way and self.under_way[0].advance():
            self.under_way.popleft()
        for later in self.under_way:
            if not later.sends_first():
                break
        return bool(self.under_way)

    def close(self) -> None:
        """Close the connections. Called by `SmallSums.remove`."""
        self.under_way.clear()
        for partner in self.partners:
            partner.close()


class Sum:
    """One sum under way. `done`: the tensor holds it, or it has failed."""

    def __init__(self, group: DoublingGroup, sums: SmallSums, tensor: torch.Tensor, scratch: torch.Tensor) -> None:
        self.group = group
        self.done = False
        self._error: str | None = None
        self._sums = sums
        self._tensor, self._scratch = tensor, scratch
        self._outgoing, self._incoming = _memory(tensor), _memory(scratch)
        self._round = self._sent = self._received = 0

    def wait(self) -> bool:
        """Wait for the sum, as a Work of torch.distributed does.

        Raises:
            RuntimeError: a peer has gone, or stays silent beyond the limit.
        """
        self._sums.finish(self)
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def advance(self) -> bool:
        """Send and receive what is possible without waiting, round after round; returns `done`."""
        try:
            while not self.done:
                self._send()
                self._receive()
                if min(self._sent, self._received) < len(self._outgoing):
                    break
                self._tensor.add_(self._scratch)
                self._round, self._sent, self._received = self._round + 1, 0, 0
                self.done = self._round == len(self.group.partners)
        except OSError as error:
            self._error, self.done = f"the connection to another rank broke: {error}", True
        return self.done

    def sends_first(self) -> bool:
        """Send of the first round what is possible; returns whether that is all of it, and the next sum may follow."""
        if self._round > 0:
            return True
        try:
            self._send()
        except OSError:
            return False  # `advance` meets it too
        return self._sent == len(self._outgoing)

    def needs(self) -> tuple[socket.socket, int]:
        """The connection that it waits for, and for what, as select.poll takes them."""
        events = select.POLLIN if self._received < len(self._incoming) else 0
        if self._sent < len(self._outgoing):
            events |= select.POLLOUT
        return self.group.partners[self._round], events

    def _send(self) -> None:
        if self._sent < len(self._outgoing):
            try:
                self._sent += self.group.partners[self._round].send(self._outgoing[self._sent :])
            except BlockingIOError:
                return

    def _receive(self) -> None:
        if self._received < len(self._incoming):
            try:
                count = self.group.partners[self._round].recv_into(self._incoming[self._received :])
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionError("it was closed at the other end; that rank has failed or has left")
            self._received += count


def _memory(tensor: torch.Tensor) -> memoryview:
    """The tensor's own bytes; without numpy, which torch can do without."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
