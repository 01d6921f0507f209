"""What a link that nobody shaped can do: every host sends to the next one, all at once, as the ring of a reduction."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from hvdtrain.launch.detect import ManualFlags

_CHUNK = bytes(1 << 20)
_WAIT_S = 30.0


def rank(flags: ManualFlags | None, seconds: float, network_interface: str = "auto") -> dict[str, Any]:
    """Send to the next host for so many seconds, over plain TCP, and count what arrives meanwhile. Collective.

    Returns:
        {"node_rank", "received_bits_per_s"}; the rate is None on ranks that are not the first of their host.
    """
    import hvdtrain
    from hvdtrain.launch.network import interfaces

    with hvdtrain.connect("ddp", device="cpu", transport="gloo", network_interface=network_interface, flags=flags) as c:
        takes_part = c.world.local_rank == 0
        address = interfaces()[c.interface][0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as server:
            place = (address, server.getsockname()[1]) if takes_part else None
            places = [place for place in c.all_gather_object(place) if place is not None]
            rate = _stream(server, places[(c.world.node_rank + 1) % len(places)], seconds) if takes_part else None
            c.barrier()
        return {"node_rank": c.world.node_rank, "received_bits_per_s": rate}


def _stream(server: socket.socket, target: tuple[str, int], seconds: float) -> float:
    """Send to `target`, receive from whoever connects; the rate of what was received, bits per second."""
    server.settimeout(_WAIT_S)
    sender = threading.Thread(target=_send, args=(target, seconds), name="hvdtrain-link", daemon=True)
    sender.start()
    connection, _ = server.accept()
    with connection:
        connection.settimeout(_WAIT_S)
        total, start_s = 0, time.perf_counter()
        while data := connection.recv(len(_CHUNK)):
            total += len(data)
        elapsed_s = time.perf_counter() - start_s
    sender.join()
    return total * 8 / elapsed_s


def _send(target: tuple[str, int], seconds: float) -> None:
    with socket.create_connection(target, timeout=_WAIT_S) as connection:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            connection.sendall(_CHUNK)
