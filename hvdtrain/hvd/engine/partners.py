"""Direct connections between pairs of ranks. Found through the store, secured by a token from the store."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

_LIMIT_S = 120.0
_TOKEN_BYTES = 16
_RANK_BYTES = 4


def connect_partners(store: Store, rank: int, partners: Sequence[int], address: str) -> list[socket.socket]:
    """Connect to these ranks, which do the same with this one among theirs. The lower rank of a pair listens.

    Args:
        store: with a prefix of its own.
        address: of this host, as the others reach it.

    Returns:
        A socket that does not block, for each of the partners in their order.

    Raises:
        OSError, RuntimeError: one of them did not come in time, or cannot be reached.
    """
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    token = secrets.token_bytes(_TOKEN_BYTES)
    until = time.monotonic() + _LIMIT_S
    found: dict[int, socket.socket] = {}
    with socket.create_server((address, 0), family=family, backlog=len(partners)) as listener:
        store.set(str(rank), json.dumps([address, listener.getsockname()[1], token.hex()]))
        for partner in (other for other in partners if other < rank):
            host, port, their_token = json.loads(store.get(str(partner)))
            found[partner] = socket.create_connection((host, port), timeout=_LIMIT_S)
            found[partner].sendall(bytes.fromhex(their_token) + rank.to_bytes(_RANK_BYTES, "big"))
        while len(found) < len(partners):
            listener.settimeout(max(0.01, until - time.monotonic()))
            caller, _ = listener.accept()
            caller.settimeout(max(0.01, until - time.monotonic()))
            hello = _read(caller, _TOKEN_BYTES + _RANK_BYTES)
            number = int.from_bytes(hello[_TOKEN_BYTES:], "big")
            if hello[:_TOKEN_BYTES] == token and number in partners and number not in found:
                found[number] = caller
            else:  # a stranger
                caller.close()
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return [found[partner] for partner in partners]


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes and no more, or fewer where the other end has closed."""
    data = b""
    while len(data) < count and (chunk := connection.recv(count - len(data))):
        data += chunk
    return data
