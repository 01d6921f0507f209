"""What the ranks write: with `[rank]` in front to the caller's own streams, or as it is into files."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import BinaryIO

# How much of the first failure is shown again at the end.
_LAST_LINES = 30


class Output:
    """Takes the lines of all ranks.

    Args:
        folder: rank N's lines also go to FOLDER/rank.N/stdout and stderr, N padded with zeros (as horovodrun does).
        size: the number of ranks.
    """

    def __init__(self, folder: str | None, size: int) -> None:
        self._digits = len(str(size - 1))
        self._folder = Path(folder) if folder is not None else None
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._last: dict[int, collections.deque[bytes]] = {}
        self._latest = -1

    def line(self, rank: int, kind: str, text: bytes) -> None:
        """A line of a rank; `kind` is `o` for stdout, `e` for stderr."""
        stream = sys.stdout if kind == "o" else sys.stderr
        stream.buffer.write(b"[%d] %s\n" % (rank, text))
        stream.buffer.flush()
        self._latest = rank
        if kind == "e":
            self._last.setdefault(rank, collections.deque(maxlen=_LAST_LINES)).append(text)
        if self._folder is not None:
            file = self._file(rank, "stdout" if kind == "o" else "stderr")
            file.write(text + b"\n")
            file.flush()

    def repeat_stderr(self, rank: int) -> None:
        """Show a rank's last lines of stderr again, where other ranks' lines have come after them."""
        if self._latest == rank:
            return
        for text in self._last.get(rank, ()):
            sys.stderr.buffer.write(b"[%d] %s\n" % (rank, text))
        sys.stderr.buffer.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _file(self, rank: int, name: str) -> BinaryIO:
        if (rank, name) not in self._files:
            assert self._folder is not None
            folder = self._folder / f"rank.{rank:0{self._digits}d}"
            folder.mkdir(parents=True, exist_ok=True)
            self._files[rank, name] = (folder / name).open("wb")
        return self._files[rank, name]
