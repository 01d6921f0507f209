"""tqdm's bar without its thread and without its lock between processes."""

from __future__ import annotations

import threading

from tqdm import tqdm


class OneLineBar(tqdm):  # type: ignore[type-arg]
    """A bar that is safe beside forked data-loader workers.

    tqdm's watcher thread would be lost in them, and a worker that is killed while it holds the lock between
    processes would stop rank 0 at its next redraw.
    """

    monitor_interval = 0


OneLineBar.set_lock(threading.RLock())
