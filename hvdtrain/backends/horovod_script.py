"""A script that calls the real Horovod's `init()` itself, under launchers that Horovod does not know.

Without this each of its ranks would silently be a job of size 1.
"""

from __future__ import annotations

import atexit
import os

from hvdtrain.backends import horovod_launch
from hvdtrain.backends.horovod import import_horovod
from hvdtrain.launch import detect, open_rendezvous


def prepare() -> None:
    """Set the variables that the script's `hvd.init()` will read. Collective where Horovod cannot find them itself.

    Raises:
        UserError: Horovod does not load.
        LaunchError: the ranks cannot meet.
    """
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return  # horovodrun did it, elastic or not
    detected = detect(os.environ)
    if detected.size == 1:
        return
    hvd = import_horovod()
    transport = os.environ.get("HOROVOD_CONTROLLER", "auto")
    if horovod_launch.connects_over_mpi(detected.launcher, hvd, transport):
        return
    rendezvous = open_rendezvous(detected)
    server = horovod_launch.prepare(rendezvous, hvd, transport)
    if server is not None:
        atexit.register(server.stop)
    # Runs first: rank 0 waits for the others, which read from its server until they have connected.
    atexit.register(rendezvous.close)
