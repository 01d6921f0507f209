"""How a process ends: what has to happen before torch.distributed is torn down, and how a failed process leaves."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

from hvdtrain.failure.record import Failure

# gloo's worker thread frees its last work item after the collective has returned; in a process that is shutting down
# it then aborts. Measured: with this pause, or with the wrapped module collected first, none of 130 ends aborted.
SETTLE_S = 0.05
# No end takes longer than this, whatever blocks: a full pipe, a callback, a dead file system.
LAST_RESORT_S = 8.0


def settle_before_destroy() -> None:
    """Call after dropping the wrapped module, right before ``destroy_process_group()``: nothing aborts at exit then."""
    gc.collect()
    time.sleep(SETTLE_S)


def flush_output(limit_s: float = 0.5) -> None:
    """Flush stdout and stderr, without waiting for a lock that a stuck thread holds."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    run_bounded(flush, limit_s)


def write_error(text: str) -> None:
    """Write to descriptor 2 itself: whole at once, and without the lock of ``sys.stderr``."""
    data = text.encode("utf-8", "replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def run_bounded(call: Callable[[], None], limit_s: float) -> threading.Thread:
    """Run ``call`` in a daemon thread and wait at most ``limit_s`` seconds; the thread may still run afterwards."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    return thread


def arm_last_resort(status: int, limit_s: float = LAST_RESORT_S) -> None:
    """End this process with ``status`` after ``limit_s`` seconds at the latest."""

    def leave() -> None:
        time.sleep(limit_s)
        os._exit(status)

    threading.Thread(target=leave, name="hvdtrain-last-resort", daemon=True).start()


def kill_descendants() -> None:
    """End every process below this one at once, stuck data-loader workers too.

    Launchers such as horovodrun wait until nobody holds their pipes any more, and a worker holds them. Python's
    resource tracker and torch's shared-memory manager are left: they clean up and then leave by themselves.
    """
    tracker = getattr(getattr(multiprocessing, "resource_tracker", None), "_resource_tracker", None)
    spared = {getattr(tracker, "_pid", None), os.getpid()}
    try:
        descendants = psutil.Process().children(recursive=True)
    except psutil.Error:
        return
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            if process.pid not in spared and process.name() != "torch_shm_manager":
                process.kill()


def kill_daemonic_children() -> None:
    """End the daemonic `multiprocessing` children that are left (data-loader workers), stuck ones too.

    At a normal exit Python would wait for them without a limit.
    """
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def report_failure(failure: Failure, on_failure: Callable[[Failure], None] | None) -> None:
    """Run the callback (it writes ``summary.json``), then print the report: it is the last on the screen. Bounded."""
    callback: threading.Thread | None = None
    if on_failure is not None:
        # Open MPI kills the survivors one second after a death, so a slow callback does not hold up the report.
        callback = run_bounded(lambda: _call(on_failure, failure), limit_s=0.3)
    flush_output(0.2)
    # A progress bar leaves its line unfinished.
    write_error(("\n" if os.isatty(2) else "") + failure.report())
    if callback is not None:
        callback.join(3.0)


def _call(on_failure: Callable[[Failure], None], failure: Failure) -> None:
    try:
        on_failure(failure)
    except Exception as error:
        write_error(f"hvdtrain: the failure could not be recorded: {type(error).__name__}: {error}\n")


def leave(status: int) -> NoReturn:
    """End this process and everything below it now, whatever its threads are doing."""
    flush_output(0.2)
    kill_descendants()
    os._exit(status)
