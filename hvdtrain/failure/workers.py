"""What a data-loader worker needs, so that it neither outlives its trainer nor dies before it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

# prctl(2): the signal that this process gets when its parent's thread ends.
_PR_SET_PDEATHSIG = 1


def init_worker(worker_id: int = 0) -> None:
    """For ``DataLoader(worker_init_fn=...)``, alone or called by another one; works with fork, spawn and forkserver.

    The worker is killed when its parent dies, however it dies. Stop signals that reach the whole process group (Ctrl-C,
    ``scancel --signal``) are ignored: the trainer still needs data for the steps up to the boundary where it stops.
    The trainer ends its workers explicitly (`ending`), also stuck ones.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def die_with_parent() -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies. Under forkserver the parent is the fork server,
    which ends with the trainer. Linux only; elsewhere torch's own check for the parent remains."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        return
    parent = multiprocessing.parent_process()
    # It may have died before the call above: then no signal will come any more.
    if parent is not None and not parent.is_alive():
        os._exit(1)
