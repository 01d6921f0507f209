"""Checking in: every rank claims its place in the store, rank 0 checks the whole and tells everybody the result."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import Detected
from hvdtrain.launch.host import host_identity, host_name, machine_identity, usable_cpus
from hvdtrain.launch.store import Backoff, Deadline
from hvdtrain.launch.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("hvdtrain.launch")

# How much longer the others wait than rank 0, whose report is the better one.
GRACE_S = 3.0


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a rank tells about itself. Before the roster is complete, places may be None."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None
    num_nodes: int | None
    host: str
    host_id: str
    pid: int
    address: str  # of its host, as seen on the way to the store
    cpus: tuple[int, ...]
    hvdtrain: str
    torch: str
    machine: str = ""  # equal for containers of one machine

    @property
    def world(self) -> World:
        """Its place, once the roster is complete."""
        places = [getattr(self, field.name) for field in dataclasses.fields(World)]
        assert None not in places
        return World(*places)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


def own_version() -> str:
    """The installed release of hvdtrain."""
    try:
        return importlib.metadata.version("hvdtrain")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def this_process(detected: Detected, address: str) -> Peer:
    """This rank's own entry."""
    import torch

    return Peer(
        **detected.fields(),  # type: ignore[arg-type]
        host=host_name(),
        host_id=host_identity(),
        pid=os.getpid(),
        address=address,
        cpus=tuple(sorted(usable_cpus())),
        hvdtrain=own_version(),
        torch=str(torch.__version__),
        machine=machine_identity(),
    )


def check_in(
    store: Store, me: Peer, deadline: Deadline, where: str, watch: Callable[[], str | None] = lambda: None
) -> list[Peer]:
    """Meet all ranks; return their entries in rank order, with complete places. Collective.

    Args:
        store: fresh or prefixed for this meeting alone.
        where: the address of the store, for messages.
        watch: asked by rank 0 while it waits; a text ends the meeting with that error.

    Raises:
        LaunchError: a rank is missing, claimed twice, or of another size or version; the same on every rank.
    """
    try:
        return _check_in(store, me, deadline, where, watch)
    except LaunchError:
        raise
    except RuntimeError as error:  # torch's store errors: the connection to the server broke
        raise LaunchError(
            f"rank {me.rank} on host {me.host}: the store on {where} went away while the ranks were meeting, so rank "
            f"0 or its launcher ended: see its own message ({str(error).splitlines()[0]})"
        ) from None


def _check_in(store: Store, me: Peer, deadline: Deadline, where: str, watch: Callable[[], str | None]) -> list[Peer]:
    claim = store.add(f"claim/{me.rank}", 1)
    store.set(f"hello/{me.rank}/{claim}", json.dumps(dataclasses.asdict(me)))
    if claim > 1:
        _fail(store, me, _claimed_twice(store, me, where, deadline))
    store.add("arrived", 1)
    if me.rank == 0:
        store.set("size", str(me.size))
        return _gather(store, me, deadline, where, watch)

    patience, backoff, compared = Deadline(deadline.left_s + GRACE_S), Backoff(), False
    while not store.check(["roster"]):
        if not compared and store.check(["size"]):
            compared = True
            root_size = int(store.get("size"))
            if root_size != me.size:
                text = f"rank {me.rank} on host {me.host} was started for {me.size} ranks, but rank 0 for {root_size}"
                _fail(store, me, f"{text} (they met on {where}). Give all of them the same number")
        if patience.over:
            raise LaunchError(_missing(store, me, deadline, where))
        backoff.sleep(patience)
    return _read_roster(store)


def _gather(store: Store, me: Peer, deadline: Deadline, where: str, watch: Callable[[], str | None]) -> list[Peer]:
    backoff = Backoff()
    while store.add("arrived", 0) < me.size:
        if store.check(["roster"]):  # somebody else found an error
            return _read_roster(store, root=True)
        problem = watch()
        if problem is not None:
            _fail(store, me, problem)
        if deadline.over:
            _fail(store, me, _missing(store, me, deadline, where))
        backoff.sleep(deadline)
    peers = [_peer(store.get(f"hello/{rank}/1")) for rank in range(me.size)]
    try:
        check_versions(peers)
        peers = complete_places(peers)
    except LaunchError as error:
        _fail(store, me, str(error))
    verdict = json.dumps({"peers": [dataclasses.asdict(peer) for peer in peers]})
    store.compare_set("roster", "", verdict)
    return _read_roster(store, root=True)


def _fail(store: Store, me: Peer, message: str) -> None:
    store.compare_set("roster", "", json.dumps({"error": message}))
    if me.rank == 0:
        _wait_for_readers(store)
    raise LaunchError(message)


def _read_roster(store: Store, *, root: bool = False) -> list[Peer]:
    verdict: dict[str, Any] = json.loads(store.get("roster"))
    store.add("read", 1)
    if "error" in verdict:
        if root:
            _wait_for_readers(store)
        raise LaunchError(verdict["error"])
    return [_peer(entry) for entry in verdict["peers"]]


def _wait_for_readers(store: Store) -> None:
    """Rank 0's store ends with its process: let the others read why, for a moment."""
    limit, backoff = Deadline(GRACE_S), Backoff()
    while store.add("read", 0) < store.add("arrived", 0) and not limit.over:
        backoff.sleep(limit)


def _peer(entry: bytes | dict[str, Any]) -> Peer:
    fields = dict(entry) if isinstance(entry, dict) else json.loads(entry)
    return Peer(**{**fields, "cpus": tuple(fields["cpus"])})


def _claimed_twice(store: Store, me: Peer, where: str, deadline: Deadline) -> str:
    first, backoff, limit = "another process", Backoff(), Deadline(min(2.0, deadline.left_s))
    while not limit.over:
        if store.check([f"hello/{me.rank}/1"]):
            peer = _peer(store.get(f"hello/{me.rank}/1"))
            first = f"process {peer.pid} on host {peer.host}"
            break
        backoff.sleep(limit)
    node = "" if me.node_rank is None or me.num_nodes == 1 else f" Was node_rank {me.node_rank} given to two hosts?"
    return (
        f"rank {me.rank} is claimed twice on {where}: by {first} and by process {me.pid} on host {me.host}.{node} "
        "Every process needs a rank of its own, and every job an address of its own"
    )


def _missing(store: Store, me: Peer, deadline: Deadline, where: str) -> str:
    missing = [rank for rank in range(me.size) if not store.check([f"claim/{rank}"])]
    known = {}
    with contextlib.suppress(RuntimeError, ValueError):
        for rank in range(me.size):
            if rank not in missing and store.check([f"hello/{rank}/1"]):
                known[rank] = _peer(store.get(f"hello/{rank}/1")).host
    hosts = "; ".join(
        f"{host}: {ranks_text(r for r, h in known.items() if h == host)}" for host in dict.fromkeys(known.values())
    )
    return (
        f"rank {me.rank} on host {socket.gethostname()}: only {me.size - len(missing)} of {me.size} ranks came to "
        f"{where} within {deadline.seconds:g} s. Missing: {ranks_text(missing)}. Came: {hosts}. Check that the missing "
        f"ones were started and can reach {where} (start_timeout_s is the limit)"
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, runs joined: `rank 3`, `ranks 1, 4-7`."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'' if len(numbers) == 1 else 's'} {text}"


def check_versions(peers: list[Peer]) -> None:
    """Raise LaunchError where ranks run different releases of hvdtrain or torch; builds of one release only warn."""
    for package in ("hvdtrain", "torch"):
        by_version: dict[str, list[Peer]] = collections.defaultdict(list)
        for peer in peers:
            by_version[getattr(peer, package)].append(peer)
        if len(by_version) == 1:
            continue
        text = "; ".join(
            f"{version}: {ranks_text(peer.rank for peer in group)} ({', '.join(dict.fromkeys(p.host for p in group))})"
            for version, group in by_version.items()
        )
        if len({version.split("+")[0] for version in by_version}) > 1:
            raise LaunchError(f"the ranks run different releases of {package}: {text}. Install the same one everywhere")
        log.warning("the ranks run different builds of %s: %s", package, text)


def complete_places(peers: list[Peer]) -> list[Peer]:
    """Fill in local_rank, local_size, node_rank and num_nodes where the launcher did not say.

    Ranks on one host (by identity) form a node, nodes are numbered in the order of their lowest rank. Where two ranks
    of one host have been given the same local rank, the launcher sees two nodes there, and so do we.

    Raises:
        LaunchError: a given local rank does not fit its host, or two ranks of the job contradict each other.
    """
    # 1. Local ranks that were given, then the lowest free ones, in rank order.
    nodes: dict[tuple[str, int], dict[int, Peer]] = collections.defaultdict(dict)
    for peer in peers:
        if peer.local_rank is not None:
            part = 0
            while peer.local_rank in nodes[peer.host_id, part]:
                part += 1
            nodes[peer.host_id, part][peer.local_rank] = peer
    for peer in peers:
        if peer.local_rank is None:
            node = nodes[peer.host_id, 0]
            node[next(place for place in range(len(peers)) if place not in node)] = peer
    # 2. Number the nodes, and let what the launcher said stand.
    ordered = sorted((node for node in nodes.values() if node), key=lambda node: min(p.rank for p in node.values()))
    placed: dict[int, Peer] = {}
    for node_rank, node in enumerate(ordered):
        for local_rank, peer in node.items():
            whole = dataclasses.replace(
                peer,
                local_rank=local_rank,
                local_size=len(node) if peer.local_size is None else peer.local_size,
                node_rank=node_rank if peer.node_rank is None else peer.node_rank,
                num_nodes=len(ordered) if peer.num_nodes is None else peer.num_nodes,
            )
            try:
                _ = whole.world
            except LaunchError as error:
                raise LaunchError(
                    f"{peer} has an impossible place: {error}. Leave --local-rank (LOCAL_RANK) out to have it "
                    "worked out"
                ) from None
            placed[peer.rank] = whole
    return [placed[rank] for rank in range(len(peers))]
