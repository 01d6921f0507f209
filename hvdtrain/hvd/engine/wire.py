"""Messages of the control connections: a JSON document and a blob of raw bytes, each with its length in front.

JSON and not pickle: a stranger who reaches the port must not be able to run code here.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!II")
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
_CHUNK_BYTES = 1 << 16


def encode(document: Any, blob: bytes = b"") -> bytes:
    """One message: header, JSON document, blob."""
    text = _ENCODER.encode(document).encode()
    return _HEADER.pack(len(text), len(blob)) + text + blob


class Connection:
    """One end of a control connection; messages arrive whole, whatever pieces the network delivers."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._buffer = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, document: Any, blob: bytes = b"") -> None:
        """Send one message; blocks while the peer's buffers are full.

        Raises:
            OSError: the peer has gone.
        """
        self.sock.sendall(encode(document, blob))

    def receive(self) -> list[tuple[Any, bytes]]:
        """Read what is there (blocks when nothing is) and return the messages completed by it.

        Sets `closed` when the peer has closed the connection.
        """
        try:
            chunk = self.sock.recv(_CHUNK_BYTES)
        except (ConnectionError, TimeoutError):
            chunk = b""
        if not chunk:
            self.closed = True
            return []
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= _HEADER.size:
            text_length, blob_length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + text_length + blob_length
            if len(self._buffer) < end:
                break
            text = bytes(self._buffer[_HEADER.size : _HEADER.size + text_length])
            blob = bytes(self._buffer[_HEADER.size + text_length : end])
            del self._buffer[:end]
            messages.append((json.loads(text), blob))
        return messages

    def receive_one(self, timeout_s: float) -> tuple[Any, bytes]:
        """Wait for one message (only while connecting, when the peer sends one at a time).

        Raises:
            ConnectionError: the peer closed the connection.
            TimeoutError: nothing came in time.
        """
        self.sock.settimeout(timeout_s)
        try:
            while True:
                try:
                    chunk = self.sock.recv(_CHUNK_BYTES)
                except TimeoutError:
                    raise TimeoutError(f"no message within {timeout_s:g} s") from None
                if not chunk:
                    raise ConnectionError("the peer closed the connection")
                self._buffer += chunk
                if len(self._buffer) >= _HEADER.size:
                    text_length, blob_length = _HEADER.unpack_from(self._buffer)
                    end = _HEADER.size + text_length + blob_length
                    if len(self._buffer) >= end:
                        text = bytes(self._buffer[_HEADER.size : _HEADER.size + text_length])
                        blob = bytes(self._buffer[_HEADER.size + text_length : end])
                        del self._buffer[:end]
                        return json.loads(text), blob
        finally:
            self.sock.settimeout(None)

    def close(self) -> None:
        self.closed = True
        self.sock.close()
