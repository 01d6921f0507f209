"""The control connections: every rank has one to rank 0. Found through the store, secured by a token from the store."""

from __future__ import annotations

import json
import secrets
import socket
import time

from torch._C._distributed_c10d import Store

from hvdtrain.hvd.common.exceptions import HorovodInternalError
from hvdtrain.hvd.engine.wire import Connection
from hvdtrain.launch.world import World


class Star:
    """This rank's control connections.

    Attributes:
        connections: on rank 0 one per other rank, elsewhere one, to rank 0.
        address: this host's address as the others reach it, for data connections.
        places: (node_rank, local_size) of every rank, in rank order.
    """

    def __init__(self, connections: dict[int, Connection], address: str, places: list[tuple[int, int]]) -> None:
        self.connections = connections
        self.address = address
        self.places = places

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def connect_star(world: World, store: Store, root_address: str, timeout_s: float) -> Star:
    """Connect all ranks to rank 0. Collective.

    Args:
        root_address: on rank 0, the address under which it publishes itself.

    Raises:
        HorovodInternalError: ranks did not come in time; the message names them.
    """
    if world.size == 1:
        return Star({}, "127.0.0.1", [(world.node_rank, world.local_size)])
    if world.is_root:
        return _accept_all(world, store, root_address, timeout_s)
    return _connect_to_root(world, store, timeout_s)


def _accept_all(world: World, store: Store, address: str, timeout_s: float) -> Star:
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, 0), family=family, backlog=world.size)
    token = secrets.token_hex(16)
    port = listener.getsockname()[1]
    store.set("control", json.dumps([address, port, token]))
    connections: dict[int, Connection] = {}
    places = {0: (world.node_rank, world.local_size)}
    deadline = time.monotonic() + timeout_s
    own_address = address
    while len(connections) < world.size - 1:
        remaining = deadline - time.monotonic()
        listener.settimeout(max(remaining, 0.01))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            missing = [r for r in range(1, world.size) if r not in connections]
            raise HorovodInternalError(
                f"init: ranks {missing} did not connect to rank 0 at {address}:{port} within {timeout_s:g} s; "
                "look for their errors above, or raise HOROVOD_START_TIMEOUT"
            ) from None
        connection = Connection(sock)
        try:
            hello, _ = connection.receive_one(min(remaining, 30.0))
            their_token, rank, node_rank, local_size = hello
        except (OSError, TimeoutError, ValueError, TypeError):
            connection.close()
            continue
        if their_token != token or rank in connections:
            connection.close()
            continue
        connections[rank] = connection
        places[rank] = (node_rank, local_size)
        # Where another host reaches us: that address serves for data too.
        here = sock.getsockname()[0]
        if own_address.startswith("127.") or own_address == "::1" or not here.startswith("127."):
            own_address = here
    listener.close()
    everybody = [places[r] for r in range(world.size)]
    for connection in connections.values():
        connection.send(everybody)
    return Star(connections, own_address, everybody)


def _connect_to_root(world: World, store: Store, timeout_s: float) -> Star:
    address, port, token = json.loads(store.get("control").decode())
    try:
        sock = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise HorovodInternalError(
            f"init: rank {world.rank} cannot connect to rank 0 at {address}:{port}: {error}; is that address reachable "
            "from this host (firewall, wrong network interface)?"
        ) from error
    sock.settimeout(None)
    connection = Connection(sock)
    connection.send([token, world.rank, world.node_rank, world.local_size])
    try:
        everybody, _ = connection.receive_one(timeout_s)
    except (OSError, TimeoutError) as error:
        raise HorovodInternalError(
            f"init: rank {world.rank} is connected to rank 0 at {address}:{port}, which did not answer: {error}; "
            "another rank is missing, or rank 0 failed: look for its error"
        ) from error
    return Star({0: connection}, sock.getsockname()[0], [(node, size) for node, size in everybody])
