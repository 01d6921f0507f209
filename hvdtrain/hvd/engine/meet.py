"""Where the ranks meet: one rendezvous for the life of the process, keys of their own for each `init`."""

from __future__ import annotations

import atexit
import dataclasses
import os

from torch._C._distributed_c10d import Store

from hvdtrain.launch.detect import Detected, detect
from hvdtrain.launch.rendezvous import Rendezvous, open_rendezvous
from hvdtrain.launch.world import World


@dataclasses.dataclass(frozen=True)
class Meeting:
    """This process's place, and a store that all ranks share, for one generation.

    Attributes:
        address: under which the other ranks reach this host.
    """

    world: World
    store: Store
    address: str


# Set by `hvdtrain exec` before it exports variables of Horovod's that would change what is detected.
detected: Detected | None = None

_rendezvous: Rendezvous | None = None
_generation = 0


def meet_through(rendezvous: Rendezvous) -> None:
    """Let the next `init` use a meeting that the caller has opened, and will close, instead of opening one.

    Args:
        rendezvous: of the same ranks on every rank.
    """
    global _rendezvous
    _rendezvous = rendezvous


def meet(timeout_s: float) -> Meeting:
    """Find the other ranks, under whatever launcher started this process. Collective.

    Raises:
        LaunchError: names the variable, host, port or rank that is wrong or missing.
    """
    global _rendezvous, _generation
    if _rendezvous is None:
        _rendezvous = open_rendezvous(detected or detect(os.environ), timeout_s=timeout_s)
        # `close` waits for the others, because rank 0's process may be serving the store.
        atexit.register(_rendezvous.close)
    _generation += 1
    store = _rendezvous.prefix(f"hvd/{_generation}")
    own = _rendezvous.peers[_rendezvous.world.rank]
    address = "127.0.0.1" if _rendezvous.one_host else own.address
    return Meeting(_rendezvous.world, store, address)
