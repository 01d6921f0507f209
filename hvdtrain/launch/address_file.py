"""Handing rank 0's address over through a file: on a shared disk (file://) or between the ranks of one host (mpirun).

A file of an earlier run is harmless: the address in it must answer with the random number that is in the file, or the
reader waits on for the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import LaunchError
from hvdtrain.launch.address import RootAddress, reach_root
from hvdtrain.launch.store import Backoff, Deadline

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

log = logging.getLogger("hvdtrain.launch")


def write_address(path: Path, root: RootAddress, deadline: Deadline) -> None:
    """Put rank 0's address into the file at once and whole (rename); a file of an earlier run is replaced.

    Raises:
        LaunchError: the folder cannot be written, or a rank 0 that is alive uses the same file.
    """
    old = _read(path)
    if old is not None:
        earlier = RootAddress.from_bytes(old)
        if earlier is None and old.strip():
            # Not ours: perhaps somebody's data, so it is kept.
            kept = path.with_name(f"{path.name}.replaced-{time.time_ns()}")
            path.replace(kept)
            log.warning("%s held something else; it is now %s", path, kept)
        elif earlier is not None:
            alive = reach_root(earlier, Deadline(min(2.0, deadline.left_s)), "rank 0", tries=1)
            if alive is not None:
                raise LaunchError(
                    f"rank 0 on host {socket.gethostname()}: the file {path} is in use by a rank 0 that runs on host "
                    f"{earlier.host} and listens on port {earlier.port}. Was rank 0 started twice? Otherwise give each "
                    "job a file of its own"
                )
    temporary = path.with_name(f".{path.name}.{root.nonce[:8]}")
    try:
        with temporary.open("xb") as file:
            file.write(root.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise LaunchError(
            f"rank 0 on host {socket.gethostname()} cannot write its address to {path}: {error.strerror}"
        ) from None


def remove_address(path: Path, root: RootAddress) -> None:
    """Remove the file, if it still is this rank 0's."""
    data = _read(path)
    if data is not None and RootAddress.from_bytes(data) == root:
        path.unlink(missing_ok=True)


def replaced_by(path: Path, root: RootAddress) -> RootAddress | None:
    """Another rank 0 whose address has taken this one's place in the file, or None."""
    data = _read(path)
    other = RootAddress.from_bytes(data) if data else None
    return other if other is not None and other != root else None


def reach_through_file(path: Path, meeting: int, deadline: Deadline, who: str) -> tuple[TCPStore, str, RootAddress]:
    """Wait for rank 0's address in the file and connect to it: (store, this host's address towards it, the message).

    Raises:
        LaunchError: no living rank 0 is in the file in time.
    """
    backoff, seen = Backoff(), "no such file"
    tried: RootAddress | None = None
    while True:
        data = _read(path)
        root = RootAddress.from_bytes(data) if data is not None else None
        if data is not None and root is None:
            seen = "the file holds something else"
        if root is not None and root.meeting == meeting:
            # The address of a dead rank 0 is tried again now and then, because a network may be slow to come up.
            if root != tried:
                backoff = Backoff()
            tried = root
            reached = reach_root(root, deadline, who, tries=1)
            if reached is not None:
                return *reached, root
            seen = f"the rank 0 in it (host {root.host}, port {root.port}) does not answer, so it is of an earlier run"
        if deadline.over:
            raise LaunchError(
                f"{who} on host {socket.gethostname()}: rank 0 has not written its address to {path} within "
                f"{deadline.seconds:g} s ({seen}). Missing: rank 0. Check that it was started, with this same file, "
                "and that all hosts share its disk"
            )
        backoff.sleep(deadline)


def private_path(job: str) -> Path:
    """The file of a job among the processes of one host and user, in a folder that only this user may read or write.

    Raises:
        LaunchError: the folder is there and somebody else's.
    """
    folder = Path(tempfile.gettempdir()) / f"hvdtrain-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700: remove it, or set TMPDIR to another "
            "folder"
        )
    return folder / hashlib.sha256(job.encode()).hexdigest()[:24]


def _read(path: Path) -> bytes | None:
    # Listing the folder makes NFS look again; it may remember for a minute that a file was not there.
    with contextlib.suppress(OSError):
        list(path.parent.iterdir())
        return path.read_bytes()
    return None
