from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from hvdtrain.failure import stop as stop_module
from hvdtrain.failure.stop import STOP_SIGNALS, StopSignals


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    signals = StopSignals("rank 1")
    assert signals.install()
    yield signals
    signals.close()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_for_a_stop(stop: StopSignals, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert not stop.requested
    os.kill(os.getpid(), number)
    assert stop.requested
    assert stop.reason == signal.Signals(number).name
    assert stop.read() == ""
    assert stop.announce(delay_s=100.0) is True
    assert capfd.readouterr().err == ""
    assert stop.announce(delay_s=0.0) is False
    assert stop.announce(delay_s=0.0) is False
    assert capfd.readouterr().err == (
        f"hvdtrain: rank 1 got {signal.Signals(number).name}: stopping at the next step boundary, "
        "then saving a checkpoint; a second signal ends at once\n"
    )


def test_a_signal_and_its_echoes_are_one_request(stop: StopSignals, capfd: pytest.CaptureFixture[str]) -> None:
    # Ctrl-C: once from the terminal, once more from the launcher, which may turn it into SIGTERM.
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        assert stop.read() == ""
    assert stop.reason == "SIGINT"
    stop.close()
    assert capfd.readouterr().err.count("\n") == 1


def test_the_same_signal_later_ends_at_once(stop: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "ECHO_S", 0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.read() == ""
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)  # another signal: still within its own, longer limit
    assert stop.read() == ""
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.read() == "SIGUSR1"


def test_the_signal_of_a_launcher_after_a_crash_promises_nothing(
    stop: StopSignals, capfd: pytest.CaptureFixture[str]
) -> None:
    stop.hush()
    os.kill(os.getpid(), signal.SIGTERM)
    stop.announce(delay_s=0.0)
    assert stop.requested
    assert capfd.readouterr().err == ""


def test_the_handlers_before_come_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    signals = StopSignals()
    signals.install()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    signals.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    signals.close()


def test_outside_of_the_main_thread_nothing_is_installed() -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(StopSignals().install()))
    thread.start()
    thread.join()
    assert results == [False]


def test_a_forked_child_dies_by_a_signal_and_its_parent_does_not_hear_it(stop: StopSignals) -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    time.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert stop.read() == ""
    assert not stop.requested


def test_a_stop_can_be_asked_for_without_a_signal() -> None:
    signals = StopSignals()
    signals.request("time limit")
    signals.request("too late")
    assert (signals.requested, signals.reason) == (True, "time limit")
