"""Meeting: from what one process detects to a store that all ranks share and a complete, checked world.

Independent of the backend: DDP and Horovod both start from here, under every launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import LaunchError
from hvdtrain.launch.address import RootAddress, own_addresses, reach_root, serve_anywhere
from hvdtrain.launch.address_file import (
    private_path,
    reach_through_file,
    remove_address,
    replaced_by,
    write_address,
)
from hvdtrain.launch.detect import LAUNCHERS, Detected, Meeting
from hvdtrain.launch.horovodrun_server import HorovodrunServer
from hvdtrain.launch.host import launcher_environment
from hvdtrain.launch.network import check_interface, interface_of, interface_towards, loopback_interface
from hvdtrain.launch.roster import Peer, check_in, complete_places, this_process
from hvdtrain.launch.store import Backoff, Deadline, check_own_address, reach, resolve, serve
from hvdtrain.launch.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

# Gives rank 0's bytes to every rank: rank 0 passes them, the others pass None, all get rank 0's.
Exchange = Callable[[bytes | None], bytes]

# How often this process has met its peers: every meeting gets keys of its own, or old ones would answer for new ones.
_meetings = 0
# Stores on a port that the user fixed stay until the process ends: the others may come to the next meeting before rank
# 0 has left the last one.
_servers: dict[int, TCPStore] = {}


@dataclasses.dataclass
class Rendezvous:
    """The result of a meeting.

    store: shared by all ranks, its keys belong to this meeting alone; wait limit `timeout_s`.
    address, port: where rank 0's store (or torchrun's) listens.
    interface: the interface of this host that reaches the other ranks; loopback where all are on one host.
    peers: every rank's entry, in rank order.
    """

    store: Store
    world: World
    launcher: str
    address: str
    port: int
    interface: str
    peers: list[Peer]
    timeout_s: float
    _server: Store | None = None
    _closed: bool = False
    _exchanges: int = 0

    @property
    def hosts(self) -> list[str]:
        """The host name of every rank, in rank order."""
        return [peer.host for peer in self.peers]

    @property
    def local_peers(self) -> list[Peer]:
        """The ranks on this host, by identity of the host: this one included."""
        own = self.peers[self.world.rank].host_id
        return [peer for peer in self.peers if peer.host_id == own]

    @property
    def local_cpus(self) -> list[frozenset[int]]:
        """The CPUs that each rank of this host may use."""
        return [frozenset(peer.cpus) for peer in self.local_peers]

    @property
    def machine_cpus(self) -> list[frozenset[int]]:
        """The CPUs that each rank of this machine may use: those of other containers on it, too."""
        return [frozenset(peer.cpus) for peer in self._machine_peers]

    @property
    def machine_rank(self) -> int:
        """This rank's place in `machine_cpus`."""
        return [peer.rank for peer in self._machine_peers].index(self.world.rank)

    @property
    def _machine_peers(self) -> list[Peer]:
        machine = self.peers[self.world.rank].machine
        return [peer for peer in self.peers if peer.machine == machine] if machine else self.local_peers

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len({peer.host_id for peer in self.peers}) == 1

    def prefix(self, name: str) -> Store:
        """The same store with keys of its own, such as one per process group and per generation of it."""

        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(name, self.store)

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order. Collective; for small things before a backend exists.

        Raises:
            LaunchError: a rank gave none within `timeout_s`.
        """
        self._exchanges += 1
        base = f"text/{self._exchanges}"
        self.store.set(f"{base}/{self.world.rank}", text)
        deadline, backoff = Deadline(self.timeout_s), Backoff()
        for rank in range(self.world.size):
            while not self.store.check([f"{base}/{rank}"]):
                if deadline.over:
                    raise LaunchError(f"rank {self.world.rank}: {self.peers[rank]} did not answer in time")
                backoff.sleep(deadline)
        return [self.store.get(f"{base}/{rank}").decode() for rank in range(self.world.size)]

    def close(self, *, failed: bool = False) -> None:
        """Leave. Rank 0, whose process serves the store, waits up to 5 s for the others unless something failed."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the store may be gone with its process
            left = self.store.add("left", 1)
            if self._server is not None and not failed:
                limit, backoff = Deadline(5.0), Backoff()
                while left < self.world.size and not limit.over:
                    backoff.sleep(limit)
                    left = self.store.add("left", 0)
        self._server = None


@dataclasses.dataclass
class _Met:
    """A store, before checking in."""

    store: Store
    host: str
    port: int
    source: str
    server: Store | None = None
    watch: Callable[[], str | None] = lambda: None
    done: Callable[[], None] = lambda: None


def open_rendezvous(
    detected: Detected,
    *,
    interface: str = "auto",
    timeout_s: float = 300.0,
    backend_exchange: Exchange | None = None,
) -> Rendezvous:
    """Meet the other ranks. Collective: all ranks call it equally often.

    Args:
        detected: from `detect`.
        interface: the network interface to use on this host, or "auto" to ask the kernel.
        timeout_s: limit for the whole meeting, and later for each wait on the store.
        backend_exchange: a broadcast from rank 0 that is already connected (Horovod over MPI); used under MPI on
            several hosts, where nothing else hands rank 0's address over.

    Raises:
        LaunchError: names what is wrong: the host and port, the missing ranks, a rank claimed twice, a busy port, an
            address that is not rank 0's, a name that does not resolve.
    """
    global _meetings

    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    deadline = Deadline(timeout_s)
    if interface != "auto":
        check_interface(interface)
    if detected.size == 1:
        peers = complete_places([this_process(detected, "127.0.0.1")])
        name = loopback_interface() if interface == "auto" else interface
        alone = HashStore()
        alone.set_timeout(timedelta(seconds=timeout_s))
        return Rendezvous(alone, peers[0].world, detected.launcher, "127.0.0.1", 0, name, peers, timeout_s)

    _meetings += 1
    who = f"rank {detected.rank} of {detected.size}"
    met = _meet(detected, interface, deadline, who, backend_exchange)
    store = PrefixStore(f"hvdtrain/{detected.job}/{_meetings}", met.store)
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        me = this_process(detected, met.source)
        peers = check_in(store, me, deadline, f"{met.host}:{met.port}", met.watch)
    finally:
        met.done()
    chosen = _choose_interface(peers, detected.rank) if interface == "auto" else interface
    world = peers[detected.rank].world
    return Rendezvous(store, world, detected.launcher, met.host, met.port, chosen, peers, timeout_s, met.server)


def _meet(detected: Detected, interface: str, deadline: Deadline, who: str, backend_exchange: Exchange | None) -> _Met:
    meeting = detected.meeting
    one_host = detected.local_size == detected.size
    if meeting.kind == "agent":
        assert meeting.host is not None
        assert meeting.port is not None
        store, source = reach(meeting.host, meeting.port, deadline, who, "torchrun's store")
        return _Met(store, meeting.host, meeting.port, source)
    if meeting.kind == "tcp":
        return _meet_at_port(detected, deadline, who)
    if meeting.kind == "file":
        assert meeting.path is not None
        return _meet_through_file(Path(meeting.path), detected, False, interface, deadline, who)
    if meeting.kind == "horovodrun":
        assert meeting.host is not None
        assert meeting.port is not None
        server, key = HorovodrunServer(meeting.host, meeting.port, who), f"root-{_meetings}"
        if detected.rank == 0:
            addresses = own_addresses(one_host=one_host, interface=interface, towards=_first_address(meeting.host))
            store, root = serve_anywhere(addresses, _meetings, deadline)
            server.put(key, root.to_bytes(), deadline)
            return _served(store, root)
        return _reached(RootAddress.from_bytes(server.get(key, deadline)), deadline, who)
    assert meeting.kind == "mpi"
    if one_host:
        path = private_path(detected.job or _launcher_process(detected))
        return _meet_through_file(path, detected, True, interface, deadline, who)
    exchange = backend_exchange or _mpi4py_exchange(detected)
    if detected.rank == 0:
        store, root = serve_anywhere(own_addresses(one_host=False, interface=interface), _meetings, deadline)
        exchange(root.to_bytes())
        return _served(store, root)
    return _reached(RootAddress.from_bytes(exchange(None)), deadline, who)


def _served(store: TCPStore, root: RootAddress) -> _Met:
    return _Met(store, root.addresses[0], root.port, root.addresses[0], server=store)


def _reached(root: RootAddress | None, deadline: Deadline, who: str) -> _Met:
    if root is None:
        raise LaunchError(f"{who} on host {socket.gethostname()}: what rank 0 sent is not its address")
    reached = None
    while reached is None and not deadline.over:
        reached = reach_root(root, deadline, who)
    if reached is None:
        raise LaunchError(
            f"{who} on host {socket.gethostname()}: rank 0 on host {root.host} does not answer on port {root.port} of "
            f"{', '.join(root.addresses)} within {deadline.seconds:g} s. Missing: rank 0. Check for a firewall, or "
            "name the interface that joins the hosts (network_interface)"
        )
    return _Met(reached[0], root.addresses[0], root.port, reached[1])


def _meet_through_file(
    path: Path, detected: Detected, one_host: bool, interface: str, deadline: Deadline, who: str
) -> _Met:
    if detected.rank != 0:
        store, source, root = reach_through_file(path, _meetings, deadline, who)
        return _Met(store, root.addresses[0], root.port, source)
    store, root = serve_anywhere(own_addresses(one_host=one_host, interface=interface), _meetings, deadline)
    write_address(path, root, deadline)

    def watch() -> str | None:
        other = replaced_by(path, root)
        if other is None:
            return None
        return (
            f"rank 0 is claimed twice through {path}: by process {os.getpid()} on host {root.host} and by a process on "
            f"host {other.host}. Start rank 0 once, and give each job a file of its own"
        )

    met = _served(store, root)
    return dataclasses.replace(met, watch=watch, done=lambda: remove_address(path, root))


def _meet_at_port(detected: Detected, deadline: Deadline, who: str) -> _Met:
    meeting: Meeting = detected.meeting
    host = meeting.host or _jsrun_host(meeting.path)
    port = meeting.port
    assert port is not None
    if detected.rank != 0:
        store, source = reach(host, port, deadline, who, "rank 0")
        _check_server(store, detected, f"{host}:{port}", deadline)
        return _Met(store, host, port, source)
    addresses = resolve(host, deadline, who)
    check_own_address(host, addresses)
    if port not in _servers:
        _servers[port], _ = serve(port, deadline=deadline)
        _servers[port].set("hvdtrain/server", f"{detected.size}\n{detected.job}")
    return _Met(_servers[port], host, port, addresses[0], server=_servers[port])


def _check_server(store: TCPStore, detected: Detected, where: str, deadline: Deadline) -> None:
    """Find out at once where the port belongs to another job, rather than wait for ranks that never come."""
    backoff, limit = Backoff(), Deadline(min(5.0, deadline.left_s))
    while not store.check(["hvdtrain/server"]) and not limit.over:
        backoff.sleep(limit)
    if not store.check(["hvdtrain/server"]):
        raise LaunchError(
            f"rank {detected.rank} on host {socket.gethostname()}: the store on {where} is not hvdtrain's: "
            "another job has this port. Choose another"
        )
    job = store.get("hvdtrain/server").decode().partition("\n")[2]
    if job != detected.job:
        by_hand = "started by hand"
        raise LaunchError(
            f"rank {detected.rank} on host {socket.gethostname()}: {where} serves another job ({job or by_hand}, this "
            f"one is {detected.job or by_hand}). Choose another port"
        )


def _first_address(host: str) -> str | None:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return None


def _jsrun_host(rank_file: str | None) -> str:
    """The first compute host of LSF's rank file, whose first line is the host of the batch script."""
    try:
        hosts = list(dict.fromkeys(Path(rank_file or "").read_text().split()))
    except OSError:
        hosts = []
    if len(hosts) < 2:
        raise LaunchError(
            "jsrun: the host of rank 0 is unknown, because LSB_DJOB_RANKFILE does not name a file that lists it: set "
            "MASTER_ADDR and MASTER_PORT"
        )
    return hosts[1]


def _launcher_process(detected: Detected) -> str:
    """A key for the job where the launcher gives none: its process on this host, an ancestor of all ranks."""
    row = next(row for row in LAUNCHERS if row.name == detected.launcher)
    found = launcher_environment(row.rank[0])
    if found is None:
        raise LaunchError(
            f"{detected.launcher} tells nothing that names this job: set MASTER_ADDR=127.0.0.1 and MASTER_PORT to "
            "a free port"
        )
    return f"{detected.launcher}/{found[0]}"


def _mpi4py_exchange(detected: Detected) -> Exchange:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{detected.launcher} over several hosts (rank {detected.rank} of {detected.size} on host "
            f"{socket.gethostname()}) does not tell where rank 0 is. Pass its host and a free port there "
            "(mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT ..., or --init-method tcp://HOST:PORT), or install mpi4py "
            f"(pip install 'hvdtrain[mpi]'), which is not usable here: {error}"
        ) from None
    communicator = MPI.COMM_WORLD
    if communicator.Get_size() != detected.size:
        raise LaunchError(
            f"mpi4py sees {communicator.Get_size()} ranks, {detected.launcher} {detected.size}: mpi4py was built for "
            "another MPI. Rebuild it, or pass MASTER_ADDR and MASTER_PORT"
        )

    def exchange(value: bytes | None) -> bytes:
        return bytes(communicator.bcast(value, root=0))

    return exchange


def _choose_interface(peers: list[Peer], rank: int) -> str:
    me, root = peers[rank], peers[0]
    if len({peer.host_id for peer in peers}) == 1:
        return loopback_interface()
    if me.host_id != root.host_id:
        found = interface_of(me.address)
    else:
        # The way to rank 0 is loopback here, so look the other way.
        target = next(peer.address for peer in peers if peer.host_id != root.host_id)
        found = interface_towards(target)
    if found is None:
        raise LaunchError(f"{me} finds no network interface towards the other hosts: name one (network_interface)")
    return found
