"""Where am I: the launcher, the place among the ranks, the way to rank 0, the network interface, device and threads.

`detect` reads variables alone; `open_rendezvous` meets the other ranks. Names that need torch are imported on demand.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain.launch.detect import Detected, ManualFlags, Meeting, detect
from hvdtrain.launch.memory import keep_freed_memory
from hvdtrain.launch.network import check_interface, export_interface, free_port
from hvdtrain.launch.threads import choose_threads, set_threads
from hvdtrain.launch.world import World

if TYPE_CHECKING:
    from hvdtrain.launch.devices import choose_device
    from hvdtrain.launch.rendezvous import Rendezvous, open_rendezvous
    from hvdtrain.launch.roster import Peer

_ON_DEMAND = {
    "Peer": "hvdtrain.launch.roster",
    "Rendezvous": "hvdtrain.launch.rendezvous",
    "choose_device": "hvdtrain.launch.devices",
    "open_rendezvous": "hvdtrain.launch.rendezvous",
}

__all__ = [
    "Detected",
    "ManualFlags",
    "Meeting",
    "Peer",
    "Rendezvous",
    "World",
    "check_interface",
    "choose_device",
    "choose_threads",
    "detect",
    "export_interface",
    "free_port",
    "keep_freed_memory",
    "open_rendezvous",
    "set_threads",
]


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
