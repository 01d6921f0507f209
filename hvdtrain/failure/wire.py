"""Messages over one TCP connection: a four-byte big-endian length, then JSON.

One thing may follow that is not framed: the text that `faulthandler` writes straight into the socket in the last
moment of a process (``Fatal Python error: ...``). Its first four bytes, read as a length, are far above the limit, so
it cannot be taken for a message, and a crash can tell its signal and Python stack to another host.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import weakref
from typing import Any

Message = dict[str, Any]

MESSAGE_LIMIT_BYTES = 1 << 20
FAULT_LIMIT_BYTES = 1 << 16
SEND_LIMIT_S = 2.0
_HEADER = struct.Struct(">I")
_FAULT_START = b"Fata"

_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class ProtocolError(Exception):
    """The other end does not speak this protocol."""


class Channel:
    """One connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SEND_LIMIT_S)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._fault: bytearray | None = None
        self.ended = False
        _open_channels.add(self)

    def fileno(self) -> int:
        """The descriptor, for selectors and for `faulthandler`; -1 once closed."""
        return self._sock.fileno()

    @property
    def fault_text(self) -> str:
        """What `faulthandler` wrote at the other end; empty unless that process crashed."""
        return bytes(self._fault or b"").decode("utf-8", "replace")

    def send(self, kind: str, **values: Any) -> bool:
        """Send one message; False where the connection is gone (the reader learns why)."""
        body = json.dumps({"kind": kind, **values}).encode()
        if len(body) > MESSAGE_LIMIT_BYTES:
            raise ProtocolError(f"a message of {len(body)} bytes ({kind}); the limit is {MESSAGE_LIMIT_BYTES}")
        try:
            with self._lock:
                self._sock.sendall(_HEADER.pack(len(body)) + body)
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """The messages that have arrived, after a selector called this channel readable. Sets `ended` at the end.

        Raises:
            ProtocolError: what arrived is no message of this protocol.
        """
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
        if self._fault is not None:
            self._fault += data[: FAULT_LIMIT_BYTES - len(self._fault)]
            return []
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _HEADER.size:
            if self._buffer.startswith(_FAULT_START):
                self._fault = self._buffer[:FAULT_LIMIT_BYTES]
                self._buffer = bytearray()
                break
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MESSAGE_LIMIT_BYTES:
                raise ProtocolError(f"a message of {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
        return messages

    def finish_sending(self) -> None:
        """Tell the other end that nothing more will come; reading goes on."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; harmless when repeated."""
        self.ended = True
        with contextlib.suppress(OSError):
            self._sock.close()


def _decode(body: bytearray) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("a message without a kind")
    return message


def _close_in_child() -> None:
    # A forked child that kept these descriptors would hold the connection open after this process has died, and nobody
    # would notice its death.
    for channel in list(_open_channels):
        channel.close()


os.register_at_fork(after_in_child=_close_in_child)
