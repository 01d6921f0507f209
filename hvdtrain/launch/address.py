"""Rank 0's address as a small message, for the meetings where rank 0 chooses the port and tells the others."""

from __future__ import annotations

import dataclasses
import json
import secrets
import socket
from typing import TYPE_CHECKING

from hvdtrain.errors import LaunchError
from hvdtrain.launch.host import host_identity
from hvdtrain.launch.network import interfaces, is_loopback, source_address
from hvdtrain.launch.store import Backoff, Deadline, connect, probe, serve

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

NONCE_KEY = "hvdtrain/nonce"
# Shorter than for an address that is sure: behind an old message a foreign server is likely.
STALE_HANDSHAKE_S = 5.0


@dataclasses.dataclass(frozen=True)
class RootAddress:
    """Where rank 0 listens. `nonce` is random and also in the store: an old message can never pass for a new one.

    meeting: how often rank 0's process has met its peers, so that a second meeting never takes the first one's
    address.
    """

    addresses: tuple[str, ...]
    port: int
    nonce: str
    host: str
    host_id: str
    meeting: int

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps({"hvdtrain": "rank 0", **dataclasses.asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RootAddress | None:
        """Read what `to_bytes` wrote; None for anything else."""
        try:
            fields = json.loads(data)
            if fields.pop("hvdtrain") != "rank 0":
                return None
            return cls(**{**fields, "addresses": tuple(fields["addresses"]), "port": int(fields["port"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def serve_anywhere(addresses: list[str], meeting: int, deadline: Deadline) -> tuple[TCPStore, RootAddress]:
    """Start rank 0's store on a free port; loopback alone where that is the only address wanted."""
    only_loopback = all(is_loopback(address) for address in addresses)
    store, port = serve(0, addresses[0] if only_loopback else "", deadline=deadline)
    nonce = secrets.token_hex(16)
    store.set(NONCE_KEY, nonce)
    return store, RootAddress(tuple(addresses), port, nonce, socket.gethostname(), host_identity(), meeting)


def reach_root(root: RootAddress, deadline: Deadline, who: str, *, tries: int = 3) -> tuple[TCPStore, str] | None:
    """Connect to the rank 0 of this message; None where it is not (or no longer) there.

    Returns:
        the store, and the address of this host from which it was reached.
    """
    same_host = root.host_id == host_identity()
    # On rank 0's host loopback is the sure way, for everybody else it leads to themselves.
    candidates = [address for address in root.addresses if is_loopback(address) == same_host]
    backoff = Backoff(0.05)
    for _ in range(tries):
        for address in candidates:
            try:
                source = probe(address, root.port, min(2.0, deadline.left_s))
            except OSError:
                continue
            # A port that answers may belong to another job or host by now: the nonce tells.
            try:
                store = connect(address, root.port, deadline, who, STALE_HANDSHAKE_S)
            except LaunchError:
                continue
            if store.check([NONCE_KEY]) and store.get(NONCE_KEY) == root.nonce.encode():
                return store, source
        backoff.sleep(deadline)
    return None


def own_addresses(*, one_host: bool, interface: str, towards: str | None = None) -> list[str]:
    """Addresses of this host at which the other ranks may find it, the likeliest first.

    Args:
        one_host: every rank is on this host.
        interface: the user's choice, or "auto".
        towards: an address that lies in the network of the job, such as the driver's.
    """
    if one_host:
        return ["127.0.0.1"]
    present = interfaces()
    if interface != "auto":
        return [*present[interface], "127.0.0.1"]
    first: list[str] = []
    # Without a better clue, the interface of the default route; nothing is sent to this address.
    for target in (towards, "8.8.8.8"):
        source = source_address(target) if target else None
        if source and not is_loopback(source):
            first.append(source)
    rest = [address for addresses in present.values() for address in addresses]
    return [*dict.fromkeys([*first, *(a for a in rest if not is_loopback(a))]), "127.0.0.1"]
