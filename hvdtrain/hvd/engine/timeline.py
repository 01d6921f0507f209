"""A Chrome trace (chrome://tracing, Perfetto) of negotiations and operations, written by rank 0.

Format: the JSON array of the Trace Event Format; one row (pid) per tensor, times in microseconds.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO


class Timeline:
    """Collects events while active; a file is valid JSON after `stop`, and readable by the viewers before."""

    def __init__(self) -> None:
        self.active = False
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._started = 0.0
        self._mark_cycles = False
        self._negotiating: dict[str, float] = {}

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a new file; one that is being written is finished first."""
        self.stop()
        with self._lock:
            # Kept open for as long as the timeline runs.
            self._file = Path(path).open("w")  # noqa: SIM115
            self._rows = {}
            self._started = time.perf_counter()
            self._mark_cycles = mark_cycles
            self._file.write("[\n")
            start = int(time.time() * 1e6)
            self._file.write(
                json.dumps(
                    {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": start}}
                )
            )
            self._file.flush()
            self.active = True

    def stop(self) -> None:
        """Finish the file; nothing happens where none is open."""
        with self._lock:
            self.active = False
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def negotiation_starts(self, kind: str, name: str, rank: int) -> None:
        """The first rank has announced the name."""
        if self.active:
            with self._lock:
                self._event({"name": f"NEGOTIATE_{kind.upper()}", "ph": "B", "args": {"first_rank": rank}}, name)

    def negotiation_ends(self, name: str) -> None:
        """All ranks have announced the name."""
        if self.active:
            with self._lock:
                self._event({"ph": "E"}, name)

    def agreed(self, kind: str, names: list[str]) -> None:
        """A batch of names is done together now."""
        with self._lock:
            if self._mark_cycles:
                self._event({"name": "CYCLE_START", "ph": "i", "s": "g"}, "cycles")
            for name in names:
                self._event({"name": kind.upper(), "ph": "i", "s": "p"}, name)

    def executed(self, kind: str, names: list[str], started: float) -> None:
        """The names' collective has run, since `started` (time.perf_counter)."""
        duration = time.perf_counter() - started
        with self._lock:
            for name in names:
                event = {"name": kind.upper(), "ph": "X", "dur": duration * 1e6}
                self._event(event, name, started)
            self._flush()

    def _event(self, event: dict[str, Any], row: str, at: float | None = None) -> None:
        if self._file is None:
            return
        pid = self._rows.get(row)
        if pid is None:
            pid = self._rows[row] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": row}})
        now = time.perf_counter() if at is None else at
        self._write({**event, "ts": (now - self._started) * 1e6, "pid": pid, "tid": 0})
        self._flush()

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(",\n" + json.dumps(event))

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
