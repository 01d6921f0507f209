"""The log: rank 0 tells what happens, the others speak only when something is wrong."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from hvdtrain.launch.world import World
from hvdtrain.metrics.bar import OneLineBar

_NAME = "hvdtrain"
# Rank 0, which shares the terminal, may have its bar on this line; it draws it again below ours.
_CLEAR_LINE = "\r\x1b[K"


def set_up_logging(
    world: World, *, host: str | None = None, stream: TextIO | None = None, level: int = logging.INFO
) -> logging.Logger:
    """Show what the loggers below `hvdtrain` say on `stream` (standard error), one line each, rank in front.

    Rank 0 shows `level` and above, the others warnings and above. The root logger and loggers of other packages stay
    as the user has them. A second call replaces the first.

    Args:
        host: shown beside the rank where there is more than one node.
    """
    logger = logging.getLogger(_NAME)
    for handler in [*logger.handlers]:
        if isinstance(handler, _LineHandler):
            logger.removeHandler(handler)
    handler = _LineHandler(stream, over_bar=not world.is_root)
    handler.setFormatter(_LineFormatter(_prefix(world, host)))
    logger.addHandler(handler)
    logger.setLevel(level if world.is_root else max(level, logging.WARNING))
    # A root logger that the user has set up would print each line again.
    logger.propagate = not logging.getLogger().handlers
    return logger


def _prefix(world: World, host: str | None) -> str:
    if world.size == 1:
        return "hvdtrain: "
    return f"[rank {world.rank} on {host}] " if host and world.num_nodes > 1 else f"[rank {world.rank}] "


class _LineFormatter(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{self._prefix}{level}" + text.replace("\n", f"\n{self._prefix}")


class _LineHandler(logging.Handler):
    """Writes above the progress bar, if there is one, and in one call, so that lines of ranks do not mix."""

    def __init__(self, stream: TextIO | None, *, over_bar: bool) -> None:
        super().__init__()
        self._stream = stream
        self._over_bar = over_bar

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Looked up now: whoever redirects standard error later gets what is said later.
            stream = self._stream or sys.stderr
            line = self.format(record) + "\n"
            if self._over_bar and stream.isatty():
                line = _CLEAR_LINE + line
            with OneLineBar.external_write_mode(file=stream):
                stream.write(line)
                stream.flush()
        except Exception:
            self.handleError(record)
