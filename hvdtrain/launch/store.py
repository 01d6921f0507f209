"""Rank 0's store: serving it, and reaching it, with errors that a person can act on.

torch's own TCPStore constructor reports a wrong host, a busy port, an unknown name and a foreign server in one way: it
waits for its whole timeout, or forever. So the checks are made here with plain sockets, before it is called.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from hvdtrain.errors import LaunchError
from hvdtrain.launch.network import interfaces, is_loopback, listening_socket, user_of_port

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

log = logging.getLogger("hvdtrain.launch")

# A store that has accepted our connection answers in milliseconds; a foreign server may never answer.
HANDSHAKE_S = 30.0
# The rank 0 of a job that is just ending may hold the port a little longer.
BUSY_PORT_S = 5.0
# A name that is not known at all is most likely a typing error, but a cluster's names may come up late.
UNKNOWN_NAME_S = 20.0


class Deadline:
    """A point in time until which to try, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.left_s == 0.0


@dataclasses.dataclass
class Backoff:
    """Pauses between tries, growing from 5 ms to a quarter of a second."""

    pause_s: float = 0.005

    def sleep(self, deadline: Deadline) -> None:
        """Wait a little, not beyond the deadline."""
        time.sleep(min(self.pause_s, deadline.left_s))
        self.pause_s = min(self.pause_s * 1.5, 0.25)


def resolve(host: str, deadline: Deadline, who: str) -> list[str]:
    """The IP addresses of a host name, each once, IPv4 first.

    Raises:
        LaunchError: the name does not resolve.
    """
    backoff, started, noted = Backoff(0.1), time.monotonic(), False
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
            return sorted(addresses, key=lambda address: ":" in address)
        except (OSError, UnicodeError) as error:
            unknown = not isinstance(error, socket.gaierror) or error.errno != socket.EAI_AGAIN
            reason = getattr(error, "strerror", None) or str(error)
            if deadline.over or (unknown and time.monotonic() - started > UNKNOWN_NAME_S):
                raise LaunchError(
                    f"{who} on host {socket.gethostname()}: the name {host} of rank 0's host does not resolve "
                    f"({reason}). Check the spelling, or use the IP address"
                ) from None
            if not noted:
                log.warning("%s: the name %s does not resolve yet; trying again", who, host)
                noted = True
            backoff.sleep(deadline)


def check_own_address(host: str, addresses: Sequence[str]) -> None:
    """Raise LaunchError where none of the addresses belongs to this host, so that rank 0 cannot listen on them."""
    for address in addresses:
        try:
            listening_socket(0, address).close()
            return
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return
    shown = host if host in addresses else f"{host} ({', '.join(addresses)})"
    own = ", ".join(f"{found[0]} ({name})" for name, found in interfaces().items())
    raise LaunchError(
        f"rank 0 runs on host {socket.gethostname()}, which does not have the address {shown} where the ranks are to "
        f"meet; it has {own}. Start rank 0 on {host}, or give the address of the host where rank 0 runs"
    )


def serve(port: int, address: str = "", *, deadline: Deadline) -> tuple[TCPStore, int]:
    """Start the store that rank 0 serves; return it and its port.

    Args:
        port: 0 for any free port.
        address: one address of this host to listen on; empty for all.

    Raises:
        LaunchError: the port is in use (names the process that has it) or not allowed.
    """

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    patience, backoff = Deadline(min(BUSY_PORT_S, deadline.left_s)), Backoff(0.1)
    while True:
        try:
            listener = listening_socket(port, address)
            break
        except OSError as error:
            where = f"rank 0 on host {socket.gethostname()} cannot listen on {address or 'port'}:{port}".replace(
                "port:", "port "
            )
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(f"{where}: {error.strerror}") from None
            if patience.over:
                raise LaunchError(
                    f"{where}: it is in use by {user_of_port(port)}. Was rank 0 started twice? Otherwise choose "
                    "another port"
                ) from None
            backoff.sleep(patience)
    number = int(listener.getsockname()[1])
    # The store takes the listening socket over, so nobody can take the port in between.
    store = TCPStore(
        address or "127.0.0.1",
        number,
        None,
        True,
        timedelta(seconds=deadline.seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, number


def probe(address: str, port: int, limit_s: float) -> str:
    """Connect and hang up; return the address of this host that the connection came from. Raises OSError."""
    with socket.create_connection((address, port), timeout=max(0.05, limit_s)) as connection:
        return str(connection.getsockname()[0]).split("%")[0].removeprefix("::ffff:")


def connect(address: str, port: int, deadline: Deadline, who: str, handshake_s: float = HANDSHAKE_S) -> TCPStore:
    """A client of the store on address:port, where something is known to accept connections.

    Raises:
        LaunchError: what answers there is not a store of torch.
    """

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The constructor waits without limit for a server that accepts and then stays silent: give it a thread.
    answer: queue.Queue[TCPStore | Exception] = queue.Queue()
    limit_s = min(handshake_s, max(1.0, deadline.left_s))

    def construct() -> None:
        try:
            timeout = timedelta(seconds=deadline.seconds)
            answer.put(TCPStore(address, port, None, False, timeout, wait_for_workers=False))
        except Exception as error:
            answer.put(error)

    threading.Thread(target=construct, name="hvdtrain-store-connect", daemon=True).start()
    reason = f"it gave no answer in {limit_s:.0f} s"
    try:
        result = answer.get(timeout=limit_s)
        if not isinstance(result, Exception):
            return result
        reason = str(result).splitlines()[0]
    except queue.Empty:
        pass
    raise LaunchError(
        f"{who} on host {socket.gethostname()}: what listens on {address}:{port} is not the store of rank 0 "
        f"({reason}). Choose another port"
    )


def reach(host: str, port: int, deadline: Deadline, who: str, server: str) -> tuple[TCPStore, str]:
    """Connect to the store on host:port, waiting until it is there; return it and this host's address towards it.

    Args:
        server: who serves it, for the message, such as "rank 0".

    Raises:
        LaunchError: the name does not resolve, nobody listens there in time, or a foreign server does.
    """
    addresses = resolve(host, deadline, who)
    backoff, reason = Backoff(), "no answer"
    while True:
        for address in addresses:
            try:
                source = probe(address, port, min(5.0, deadline.left_s))
            except OSError as error:
                reason = error.strerror or str(error) or type(error).__name__
                continue
            return connect(address, port, deadline, who), source
        if deadline.over:
            hint = ""
            if all(is_loopback(address) for address in addresses):
                hint = f" {host} means this same host on every host: over several hosts give rank 0's own address."
            raise LaunchError(
                f"{who} on host {socket.gethostname()}: {server} does not answer on {host}:{port} within "
                f"{deadline.seconds:g} s ({reason}). Missing: rank 0. Check that it was started, that this is the "
                f"address of its host, and that no firewall is in between.{hint}"
            )
        backoff.sleep(deadline)
