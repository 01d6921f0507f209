"""How fast training goes, and how much of the time it waits for data."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class _Mark(NamedTuple):
    active_s: float
    samples: float
    waited_s: float


class ThroughputMeter:
    """Samples per second over the last seconds, evaluation and checkpoints not counted.

    Per step it costs two additions; clocks are read at `mark` (a logged step) and around waits alone.

    Args:
        window_s: rates are over at least this much time, as long as there is that much.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self.start()

    def start(self) -> None:
        """Count from now on (the first step may be far from when this object was made)."""
        self._samples = 0.0
        self._waited_s = 0.0
        self._paused_s = 0.0
        self._start_s = time.perf_counter()
        self._marks: collections.deque[_Mark] = collections.deque([_Mark(0.0, 0.0, 0.0)])

    def add_samples(self, samples: float) -> None:
        """Samples of a step, over all ranks."""
        self._samples += samples

    def add_wait(self, seconds: float) -> None:
        """Time spent waiting for the next microbatch."""
        self._waited_s += seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in the block does not count: evaluation, checkpoints."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - begin_s

    def mark(self) -> None:
        """Note where we are; at each logged step, before the rates are read."""
        self._marks.append(self._now())
        # The oldest mark is the youngest one that still leaves a full window.
        while len(self._marks) > 2 and self._marks[-1].active_s - self._marks[1].active_s >= self._window_s:
            self._marks.popleft()

    @property
    def samples_per_second(self) -> float:
        """Over the window that ends at the last mark; 0.0 before the first."""
        first, last = self._marks[0], self._marks[-1]
        return (
            (last.samples - first.samples) / (last.active_s - first.active_s) if last.active_s > first.active_s else 0.0
        )

    @property
    def data_wait_share(self) -> float:
        """Part of the window's time, 0 to 1, that was spent waiting for data."""
        first, last = self._marks[0], self._marks[-1]
        if last.active_s <= first.active_s:
            return 0.0
        return min(1.0, (last.waited_s - first.waited_s) / (last.active_s - first.active_s))

    @property
    def active_s(self) -> float:
        """Seconds since `start`, pauses not counted."""
        return self._now().active_s

    @property
    def total_samples_per_second(self) -> float:
        """Over everything since `start`; for summary.json."""
        now = self._now()
        return now.samples / now.active_s if now.active_s > 0 else 0.0

    def _now(self) -> _Mark:
        return _Mark(time.perf_counter() - self._start_s - self._paused_s, self._samples, self._waited_s)
