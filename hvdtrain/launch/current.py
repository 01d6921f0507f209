"""The place of this process, for whoever asks without having the connection at hand (an iterable dataset, say)."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping

from hvdtrain.launch.detect import detect
from hvdtrain.launch.world import World

# In the environment, so that data-loader workers know it however they are started (fork, spawn, forkserver).
PLACE_VARIABLE = "HVDTRAIN_WORLD"


def remember(world: World, environ: MutableMapping[str, str]) -> None:
    """Note the complete place once the ranks have met; `exported.give_back` forgets it."""
    environ[PLACE_VARIABLE] = json.dumps(
        [world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes]
    )


def world(environ: Mapping[str, str]) -> World:
    """The remembered place, or what the launcher's variables tell."""
    if PLACE_VARIABLE in environ:
        return World(*json.loads(environ[PLACE_VARIABLE]))
    detected = detect(environ)
    if detected.world is not None:
        return detected.world
    local_rank = detected.rank if detected.local_rank is None else detected.local_rank
    local_size = detected.size if detected.local_size is None else detected.local_size
    return World(detected.rank, detected.size, local_rank, local_size)
