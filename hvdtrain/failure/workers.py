"""What a data-loader worker needs, so that it neither outlives its trainer nor dies before it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil

from hvdtrain.launch import cores

# prctl(2): the signal that this process gets when its parent's thread ends.
_PR_SET_PDEATHSIG = 1
# A file in memory, found by this name among a worker's descriptors, into which it writes its stack on SIGUSR2.
_STACK_FILE = "hvdtrain-worker-stack"
_STACK_WAIT_S = 0.2


def init_worker(worker_id: int = 0) -> None:
    """For ``DataLoader(worker_init_fn=...)``, alone or called by another one; works with fork, spawn and forkserver.

    The worker is killed when its parent dies, however it dies. Stop signals that reach the whole process group (Ctrl-C,
    ``scancel --signal``) are ignored: the trainer still needs data for the steps up to the boundary where it stops.
    The trainer ends its workers explicitly (`ending`), also stuck ones. Where a rank stays on one core, its workers
    may use the others too.
    """
    cores.roam_again(os.environ)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    _offer_stack()


def die_with_parent() -> None:
    """Have the kernel kill this process (SIGKILL) when the one that asked for it dies, whatever either is doing. Linux
    only; elsewhere torch's own check for the parent remains."""
    parent = multiprocessing.parent_process()
    try:
        if parent is None or parent.pid == os.getppid():
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        else:
            _die_at_end_of(parent.sentinel)
    except (AttributeError, OSError):
        return
    # It may have died before the calls above: then no signal will come any more.
    if parent is not None and not parent.is_alive():
        os._exit(1)


def _die_at_end_of(pipe: int) -> None:
    """Under forkserver the parent is the fork server, which lives on with its children. But each child has a pipe from
    the process that asked for it, and the kernel can signal the closing of its other end (fcntl(2), F_SETSIG)."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def worker_stacks() -> str:
    """The Python stacks of this process's data-loader workers (those that ran `init_worker`), innermost call first."""
    files: dict[int, Path] = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            path = _stack_file(process.pid)
            if path is not None:
                files[process.pid] = path
    for pid in files:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
    if files:
        time.sleep(_STACK_WAIT_S)
    parts = []
    for pid, path in files.items():
        with contextlib.suppress(OSError):
            stack = path.read_text(errors="replace").rpartition("(most recent call first):")[2].strip("\n")
            parts.append(f"  data-loader worker, pid {pid} (most recent call first):\n{stack}")
    return "\n".join(parts)


def _offer_stack() -> None:
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        faulthandler.register(signal.SIGUSR2, file=os.memfd_create(_STACK_FILE), all_threads=False, chain=False)


def _stack_file(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if str(path.readlink()).startswith(f"/memfd:{_STACK_FILE}"):
                return path
    return None
