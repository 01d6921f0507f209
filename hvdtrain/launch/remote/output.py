"""What the ranks write: with `[rank]` in front to the caller's own streams, or as it is into files."""

from __future__ import annotations

import collections
import os
import queue
import select
import threading
from pathlib import Path

from hvdtrain.errors import LaunchError

# How much of the first failure is shown again at the end.
_LAST_LINES = 30
# Lines that wait to be written: with more, the ranks wait too.
_MOST_BYTES = 4 << 20

# The caller's stream by its descriptor, or a file by rank and name.
_Target = int | tuple[int, str]


class Output:
    """Takes the lines of all ranks, and our own messages; a thread of its own writes them.

    Whoever hands them in never waits: a terminal that stands still (Ctrl-S, `| less`) or a slow disk must not keep the
    launcher from its agents, who take its silence for its end.

    Args:
        folder: rank N's lines also go to FOLDER/rank.N/stdout and stderr, N padded with zeros (as horovodrun does).
        size: the number of ranks.

    Raises:
        LaunchError: the folder cannot be made, or nothing can be written there.
    """

    def __init__(self, folder: str | None, size: int) -> None:
        self._digits = len(str(size - 1))
        self._folder = Path(folder) if folder is not None else None
        if self._folder is not None:
            _make(self._folder)
        self._files: dict[tuple[int, str], int] = {}
        self._last: dict[int, collections.deque[bytes]] = {}
        self._latest = -1
        self._waiting: queue.SimpleQueue[tuple[_Target, bytes] | None] = queue.SimpleQueue()
        # Each is written by one thread alone.
        self._taken_bytes = 0
        self._written_bytes = 0
        self._broken: dict[_Target, str] = {}
        # A thread that a standing terminal holds must not keep the process from ending.
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much waits to be written that no more should be taken in."""
        return self._taken_bytes - self._written_bytes > _MOST_BYTES

    @property
    def error(self) -> str | None:
        """Why something could not be written, the first reason; the rest still is."""
        return next(iter(self._broken.values()), None)

    def line(self, rank: int, kind: str, text: bytes) -> None:
        """A line of a rank; `kind` is `o` for stdout, `e` for stderr."""
        self._put(1 if kind == "o" else 2, b"[%d] %s\n" % (rank, text))
        self._latest = rank
        if kind == "e":
            self._last.setdefault(rank, collections.deque(maxlen=_LAST_LINES)).append(text)
        if self._folder is not None:
            self._put((rank, "stdout" if kind == "o" else "stderr"), text + b"\n")

    def say(self, message: str) -> None:
        """A message of ours, to stderr."""
        self._put(2, message_line(message))

    def repeat_stderr(self, rank: int) -> None:
        """Show a rank's last lines of stderr again, where other ranks' lines have come after them."""
        if self._latest == rank:
            return
        for text in self._last.get(rank, ()):
            self._put(2, b"[%d] %s\n" % (rank, text))

    def close(self) -> None:
        """Wait until all is written, close the files."""
        self._waiting.put(None)
        self._thread.join()
        for file in self._files.values():
            os.close(file)

    def _put(self, target: _Target, data: bytes) -> None:
        self._taken_bytes += len(data)
        self._waiting.put((target, data))

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            target, data = item
            if target not in self._broken:
                try:
                    _write(target if isinstance(target, int) else self._file(*target), data)
                except OSError as error:
                    self._broken[target] = f"{self._name(target)}: {error.strerror or error}"
            self._written_bytes += len(data)

    def _name(self, target: _Target) -> str:
        if isinstance(target, int):
            return "stdout" if target == 1 else "stderr"
        return str(self._path(*target))

    def _path(self, rank: int, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"rank.{rank:0{self._digits}d}" / name

    def _file(self, rank: int, name: str) -> int:
        if (rank, name) not in self._files:
            path = self._path(rank, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[rank, name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return self._files[rank, name]


def message_line(message: str) -> bytes:
    """A message of ours as it is shown: told apart from the ranks' lines."""
    return f"hvdtrain launch: {message}\n".encode(errors="replace")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"--output-filename {folder}: cannot be made: {error.strerror}; name another folder"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LaunchError(f"--output-filename {folder}: you may not write there; name another folder")


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Whoever shares the terminal with us may have made it so.
            select.select([], [descriptor], [])
