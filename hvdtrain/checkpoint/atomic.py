"""Files that are either the old one or the complete new one, whenever the process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hvdtrain.errors import TrainingFailed

# Where a file system has no locks, a temporary file this old has no writer any more.
_ABANDONED_AFTER_S = 3600.0


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; when the block ends well, it becomes `path`, safe against power loss.

    The temporary file is locked while it is written, so that `remove_leftovers` can tell a dead writer from a slow
    one. On any exception the old `path` is as it was and the temporary file is gone.

    Raises:
        TrainingFailed: the file cannot be written (full disk, permissions); the message has path and free bytes.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            # Renamed while the lock is held: a cleaner never sees an unlocked temporary file of a live writer.
            temporary.replace(path)
        _fsync_folder(path.parent)
    except OSError as error:
        _discard(temporary)
        raise cannot_write(path, error) from error
    except BaseException:
        _discard(temporary)
        raise


def remove_leftovers(folder: Path) -> list[str]:
    """Delete temporary files of `atomic_write` whose writer is dead; returns their names."""
    removed = []
    for temporary in folder.glob(".*.tmp"):
        try:
            with temporary.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                except OSError:
                    if time.time() - temporary.stat().st_mtime < _ABANDONED_AFTER_S:
                        continue
                temporary.unlink()
                removed.append(temporary.name)
        except OSError:
            continue
    return removed


def cannot_write(path: Path, error: OSError) -> TrainingFailed:
    """The error to raise when a write failed; its message has path, reason and free bytes."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = f"{path.parent} cannot be used"
    return TrainingFailed(
        f"cannot write {path}: {error.strerror or error}; {free}. What was complete before is still there. Make room, "
        f"then start again with --resume auto"
    )


def _discard(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems refuse to fsync a folder; they have nothing to make durable there.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
