from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvdtrain.failure.wire import Channel, ProtocolError


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    sender = Channel(other)
    assert sender.send("hello", rank=1)
    assert sender.send("here", stack="x" * 100_000)
    received = []
    while len(received) < 2:
        received += channel.receive()
    assert received == [{"kind": "hello", "rank": 1}, {"kind": "here", "stack": "x" * 100_000}]
    assert not channel.ended


def test_half_a_message_waits_for_the_rest(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    body = b'{"kind":"goodbye"}'
    other.sendall(struct.pack(">I", len(body)) + body[:5])
    assert channel.receive() == []
    other.sendall(body[5:])
    assert channel.receive() == [{"kind": "goodbye"}]


def test_the_end_is_seen_after_the_last_message(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    body = b'{"kind":"goodbye"}'
    other.sendall(struct.pack(">I", len(body)) + body)
    other.close()
    assert channel.receive() == [{"kind": "goodbye"}]
    assert channel.receive() == []
    assert channel.ended
    assert channel.send("heartbeat") is False


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 3) + b"{}x", struct.pack(">I", 2) + b"[]", b"\xff" * 8]
)
def test_strangers_are_told_apart(ends: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, other = ends
    other.sendall(data)
    with pytest.raises(ProtocolError):
        channel.receive()


def test_a_crash_writes_its_last_words_into_the_connection(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    code = (
        "import faulthandler, socket, sys\n"
        "from hvdtrain.failure.wire import Channel\n"
        "channel = Channel(socket.socket(fileno=int(sys.argv[1])))\n"
        "faulthandler.enable(file=channel.fileno())\n"
        "channel.send('heartbeat')\n"
        "faulthandler._sigsegv()\n"
    )
    command = [sys.executable, "-c", code, str(other.fileno())]
    assert subprocess.run(command, pass_fds=[other.fileno()], timeout=30, check=False).returncode == -11
    other.close()
    received = []
    while not channel.ended:
        received += channel.receive()
    assert received == [{"kind": "heartbeat"}]
    assert channel.fault_text.startswith("Fatal Python error: Segmentation fault\n\n")
    assert 'File "<string>", line 6 in <module>' in channel.fault_text


def test_a_forked_child_lets_go_of_the_connection(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(channel.fileno()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"-1"
    assert channel.fileno() >= 0
    os.close(reader)
    os.close(writer)
