"""TensorBoard event files, written and cut by ourselves.

torch's SummaryWriter takes one call, one record and one queue entry per value, and keeps a thread that does not
survive the fork of data-loader workers. One record with all values of a step needs none of it.

A file is a sequence of records (TensorFlow's TFRecord format): uint64 length, uint32 masked CRC-32C of the length,
the bytes, uint32 masked CRC-32C of the bytes; all little-endian. The bytes are an `Event` protocol buffer.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from hvdtrain.checkpoint.atomic import atomic_write

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
# DataType.DT_STRING of TensorFlow's types.proto.
_DT_STRING = 7


class EventFile:
    """A new event file in `folder`, which sorts after those that are there (readers take files in this order)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
        stamps = [int(match[1]) for match in names if match]
        # Clocks of two hosts differ, and a second may not have passed.
        stamp = max([int(time.time()), *(last + 1 for last in stamps)])
        self.path = folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.hvdtrain"
        self._file = self.path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.flush()

    def add(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """All values of a step; NaN and the infinities stay what they are."""
        event = Event(wall_time=wall_time_s, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._write(event)

    def add_text(self, step: int, wall_time_s: float, tag: str, markdown: str) -> None:
        """A text that TensorBoard renders."""
        event = Event(wall_time=wall_time_s, step=step)
        value = event.summary.value.add(tag=tag)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = _DT_STRING
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.string_val.append(markdown.encode())
        self._write(event)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def drop_later_events(folder: Path, last_step: int) -> None:
    """Remove every event after `last_step` from the event files in `folder`, and a torn record at the end of a file.

    A file of which no value is left is deleted; a file with nothing to drop is not touched.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        content = path.read_bytes()
        kept: list[memoryview] = []
        values = 0
        for record, event in _records(content):
            if event.step <= last_step and not event.HasField("session_log"):
                kept.append(record)
                values += event.HasField("summary")
        if not values:
            path.unlink()
        elif sum(map(len, kept)) != len(content):
            with atomic_write(path) as file:
                file.writelines(kept)


def _records(content: bytes) -> Iterator[tuple[memoryview, Event]]:
    """Each complete record with its event. Ends at the first one that is torn or no event."""
    view = memoryview(content)
    start = 0
    while start + _HEADER.size <= len(view):
        (length, _) = _HEADER.unpack_from(view, start)
        end = start + _HEADER.size + length + _FOOTER_BYTES
        if end > len(view):
            return
        try:
            event = Event.FromString(bytes(view[start + _HEADER.size : end - _FOOTER_BYTES]))
        except Exception:  # protobuf's DecodeError differs between its implementations
            return
        yield view[start:end], event
        start = end
