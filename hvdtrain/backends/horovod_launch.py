"""Starting Horovod under launchers it does not know.

horovodrun gives its workers a key-value server and their places as variables; mpirun gives MPI. Under anything else
rank 0 starts the same server (Horovod's own `RendezvousServer`) and the variables are made here, the way
`horovod.runner.gloo_run` makes them.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch import Rendezvous

# How often Horovod was initialised in this process.
_num_inits = 0
_MPI_LAUNCHERS = ("mpirun", "horovodrun", "hydra", "mvapich2", "jsrun")


def connects_over_mpi(launcher: str, hvd: Any, transport: str) -> bool:
    """Whether hvd.init() will find its peers through MPI: an MPI launcher, an MPI build, and no wish for gloo."""
    if launcher not in _MPI_LAUNCHERS or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return False
    return bool(hvd.mpi_built()) and transport != "gloo"


def note_init() -> None:
    """Horovod is about to be initialised."""
    global _num_inits
    _num_inits += 1


def prepare(rendezvous: Rendezvous, hvd: Any, transport: str) -> Any:
    """Set the variables that hvd.init() reads. Collective. Returns rank 0's server, to be stopped, or None."""
    if connects_over_mpi(rendezvous.launcher, hvd, transport):
        if _num_inits:
            raise LaunchError(
                "Horovod over MPI connects once in a process (MPI cannot start again after it has ended): keep the "
                "first connection open, or set transport: gloo"
            )
        return None
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ and not _num_inits:
        # horovodrun's own server. It still holds the addresses of a first connection, so a second one gets its own.
        return None
    world = rendezvous.world
    os.environ.update(
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_RANK=str(world.rank),
        HOROVOD_SIZE=str(world.size),
        HOROVOD_LOCAL_RANK=str(world.local_rank),
        HOROVOD_LOCAL_SIZE=str(world.local_size),
        HOROVOD_CROSS_RANK=str(world.node_rank),
        HOROVOD_CROSS_SIZE=str(world.num_nodes),
    )
    if world.size == 1:
        return None
    store = rendezvous.prefix("horovod")
    # Two hosts may carry the same name; Horovod groups local ranks by it.
    host = f"{rendezvous.hosts[world.rank]}-{world.node_rank}"
    place = {"hostname": host, "rank": world.rank, "local_rank": world.local_rank, "local_size": world.local_size}
    store.set(f"place/{world.rank}", json.dumps({**place, "node_rank": world.node_rank}))
    server = None
    if world.is_root:
        places = [json.loads(store.get(f"place/{rank}")) for rank in range(world.size)]
        server, port = _serve(places)
        store.set("address", json.dumps({"address": rendezvous.address, "port": port, "cross": _cross_places(places)}))
    told = json.loads(store.get("address"))
    cross_rank, cross_size = told["cross"][world.rank]
    os.environ.update(
        HOROVOD_HOSTNAME=host,
        HOROVOD_CROSS_RANK=str(cross_rank),
        HOROVOD_CROSS_SIZE=str(cross_size),
        HOROVOD_GLOO_RENDEZVOUS_ADDR=told["address"],
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(told["port"]),
        HOROVOD_GLOO_IFACE=rendezvous.interface,
    )
    return server


def _cross_places(places: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(cross_rank, cross_size) of every rank: its place among the ranks with the same local_rank, by node."""
    answers = []
    for place in places:
        nodes = sorted(other["node_rank"] for other in places if other["local_rank"] == place["local_rank"])
        answers.append((nodes.index(place["node_rank"]), len(nodes)))
    return answers


def _serve(places: list[dict[str, Any]]) -> tuple[Any, int]:
    http_server = importlib.import_module("horovod.runner.http.http_server")
    # Every question of every rank is a connection of its own. Python lets five wait and the kernel drops the rest,
    # which try again a second later: 16 ranks took 17 s to meet.
    http_server.RendezvousHTTPServer.request_queue_size = max(128, 4 * len(places))
    slot_class = importlib.import_module("horovod.runner.common.util.hosts").SlotInfo
    slots = [
        slot_class(
            hostname=place["hostname"],
            rank=place["rank"],
            local_rank=place["local_rank"],
            cross_rank=cross_rank,
            size=len(places),
            local_size=place["local_size"],
            cross_size=cross_size,
        )
        for place, (cross_rank, cross_size) in zip(places, _cross_places(places), strict=True)
    ]
    server = http_server.RendezvousServer()
    port = server.start()
    server.init(slots)
    return server, port
