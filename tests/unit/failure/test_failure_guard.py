"""A guard that is alone: no sockets, the error goes on to the caller."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time

import pytest

from hvdtrain.errors import LaunchError, StopRequested
from hvdtrain.failure import Failure, Guard
from hvdtrain.failure import guard as guard_module
from hvdtrain.failure.hub import Hub
from hvdtrain.launch.world import World


def test_an_error_is_recorded_and_goes_on() -> None:
    seen: list[Failure] = []
    error = ValueError("bad batch")
    guard = Guard(World(), None, "", "h", on_failure=seen.append)
    with pytest.raises(ValueError) as caught, guard, guard.operation("all_reduce 'loss'"):
        raise error
    assert caught.value is error
    assert [(each.kind, each.message, each.operation) for each in seen] == [
        ("exception", "ValueError: bad batch", "all_reduce 'loss'")
    ]


def test_nothing_is_left_after_a_normal_end() -> None:
    threads, hook, handler = threading.active_count(), sys.excepthook, signal.getsignal(signal.SIGTERM)
    guard = Guard(World(), None, "", "h", on_failure=lambda failure: pytest.fail(str(failure)))
    guard.start()
    assert signal.getsignal(signal.SIGTERM) != handler
    guard.finish()
    guard.finish()
    assert (threading.active_count(), sys.excepthook, signal.getsignal(signal.SIGTERM)) == (threads, hook, handler)


def test_a_stop_is_no_failure() -> None:
    seen: list[Failure] = []
    guard = Guard(World(), None, "", "h", on_failure=seen.append)
    guard.request_stop("time limit")
    assert (guard.stop_requested, guard.stop_reason) == (True, "time limit")
    with pytest.raises(StopRequested), guard:
        raise StopRequested("stopped")
    assert seen == []


def test_a_signal_asks_for_a_stop() -> None:
    with Guard(World(), None, "", "h") as guard:
        assert not guard.stop_requested
        signal.raise_signal(signal.SIGUSR1)
        assert guard.stop_requested
        assert guard.stop_reason == "SIGUSR1"


def test_a_stall_is_told_without_a_hub(capfd: pytest.CaptureFixture[str]) -> None:
    guard = Guard(World(), None, "", "h", stall_warning_s=0.1, stall_abort_s=0)
    text = ""
    with guard, guard.operation("all_reduce 'loss'"):
        for _ in range(200):
            time.sleep(0.05)
            text += capfd.readouterr().err
            if text:
                break
    assert text.startswith("hvdtrain: warning: rank 0 has waited 0 s in all_reduce 'loss'; nothing is known of other")
    assert "test_a_stall_is_told_without_a_hub" in text


def test_a_rank_0_that_has_gone_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    class Store:
        def set(self, key: str, value: str) -> None: ...

        def get(self, key: str) -> bytes:
            return json.dumps({"port": port, "token": "t", "host": "node-1", "pid": 7, "started": 1}).encode()

    monkeypatch.setattr(guard_module, "REFUSED_LIMIT_S", 0.1)
    guard = Guard(World(1, 2, 1, 2), Store(), "127.0.0.1", "node-2")
    with pytest.raises(LaunchError) as caught:
        guard.start()
    assert str(caught.value) == (
        f"rank 1 on node-2 reaches 127.0.0.1, but nothing listens at port {port} any more: rank 0 (pid 7 on node-1) "
        "has died or ended early; see its output"
    )


def test_a_rank_that_is_there_twice_is_refused() -> None:
    hub = Hub(2, "node-1", "t", address="127.0.0.1", pulse=None, stall_abort_s=0.0)
    hub.start()

    class Store:
        def set(self, key: str, value: str) -> None: ...

        def get(self, key: str) -> bytes:
            return json.dumps({"port": hub.port, "token": "t", "host": "node-1", "pid": 7, "started": 1}).encode()

    first, second = (Guard(World(1, 2, 1, 2), Store(), "127.0.0.1", "h", handle_signals=False) for _ in range(2))
    first.start()
    with pytest.raises(LaunchError, match=r"was refused by rank 0: h \(pid \d+\) has this rank already"):
        second.start()
    first.finish()
    hub.close()
