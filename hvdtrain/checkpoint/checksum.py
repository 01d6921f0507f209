"""A SHA-256 of the whole file, kept in the file.

torch.save writes a ZIP archive. A ZIP archive may end in a comment, which readers (torch.load too) pass over. Ours is

    hvdtrain-sha256:<64 hex digits>

over every byte before the comment. One file stays one file, and one flipped bit anywhere is found. Files without the
comment (saved again by hand with torch.save) are checked by the CRC-32 that ZIP keeps for each member.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

_MARK = b"hvdtrain-sha256:"
_COMMENT_BYTES = len(_MARK) + 64
# ZIP's "end of central directory" record: 22 bytes, the last two of which are the length of the comment
# (APPNOTE.TXT 6.3.10, section 4.3.16).
_END_BYTES, _END_SIGNATURE = 22, b"PK\x05\x06"
_CHUNK_BYTES = 1 << 20


def save_with_checksum(state: Any, file: BinaryIO) -> None:
    """torch.save to `file`, then the comment.

    Raises:
        OSError: a write failed.
    """
    writer = _HashingWriter(file)
    torch.save(state, writer)  # type: ignore[arg-type]
    writer.finish()


def damage(path: Path) -> str | None:
    """What is wrong with the bytes of the file, or None.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if size == 0:
        return "the file is empty"
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return "this is not a file of torch.save (or its first bytes are damaged)"
        file.seek(max(0, size - _COMMENT_BYTES))
        comment = file.read()
        if not comment.startswith(_MARK):
            return _damage_by_crc(path, size)
        file.seek(0)
        digest = hashlib.sha256()
        left = size - _COMMENT_BYTES
        while left:
            chunk = file.read(min(_CHUNK_BYTES, left))
            if not chunk:
                return "the file got shorter while it was read"
            digest.update(chunk)
            left -= len(chunk)
    if digest.hexdigest().encode() != comment[len(_MARK) :]:
        return "its checksum does not match: bytes have changed since it was written"
    return None


def _damage_by_crc(path: Path, size: int) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
    except Exception as error:  # zipfile raises many kinds on damaged headers
        return f"the file is cut off or damaged ({size:,} bytes; {error})"
    return f"the checksum of its part {member!r} does not match" if member else None


class _HashingWriter:
    """Hashes what passes through, holding back the last record, whose comment length is known only at the end.

    torch's C++ writer does not survive an exception from `write` (its destructor writes on), so the first OSError is
    kept, the rest of the data dropped, and the error raised by `finish`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._held = b""
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if len(data) >= _END_BYTES:
            self._emit(self._held)
            self._emit(data[:-_END_BYTES])
            self._held = bytes(data[-_END_BYTES:])
        else:
            joined = self._held + bytes(data)
            cut = max(0, len(joined) - _END_BYTES)
            self._emit(joined[:cut])
            self._held = joined[cut:]
        return len(data)

    def flush(self) -> None:
        """torch.save calls it; the file is flushed when it is complete."""

    def finish(self) -> None:
        if self._held[:4] != _END_SIGNATURE or self._held[-2:] != b"\0\0":
            raise RuntimeError("torch.save did not end in a ZIP end record: hvdtrain does not know this torch's format")
        self._emit(self._held[:-2] + _COMMENT_BYTES.to_bytes(2, "little"))
        comment = _MARK + self._digest.hexdigest().encode()
        self._emit(comment)
        if self._error is not None:
            raise self._error

    def _emit(self, data: bytes | memoryview) -> None:
        if self._error is not None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._error = error
        self._digest.update(data)
