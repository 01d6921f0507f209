"""The processes that give signs of life for the ranks: this test stands for two ranks of different hosts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hvdtrain.failure.pulse import ROOT_PATIENCE, Pulse

TOKEN = "0123456789abcdef" * 2
LIMIT_S = 1.0


@pytest.fixture
def pair() -> Iterator[tuple[Pulse, Pulse]]:
    """The processes beside rank 0 and beside rank 3."""
    root = Pulse.serve("127.0.0.1", 8, TOKEN, LIMIT_S)
    assert root is not None
    other = Pulse.follow("127.0.0.1", root.port, TOKEN, 3, LIMIT_S)
    assert other is not None
    time.sleep(0.4)  # they have met
    yield root, other
    for pulse in (root, other):
        pulse._process.send_signal(signal.SIGCONT)
        pulse.close()
        pulse.close()
        assert pulse._process.returncode == 0


def said(pulse: Pulse, within_s: float) -> list[int]:
    """The ranks that it calls silent; empty if it says nothing in time."""
    return pulse.silent_ranks() if select.select([pulse.channel], [], [], within_s)[0] else []


def test_a_host_that_stands_still_is_called_silent_once(pair: tuple[Pulse, Pulse]) -> None:
    root, other = pair
    other._process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert said(root, 5) == [3]
    assert time.monotonic() - begin > 0.8 * LIMIT_S
    assert said(root, 2 * LIMIT_S) == []


def test_the_host_of_rank_0_is_called_silent_a_little_later(pair: tuple[Pulse, Pulse]) -> None:
    root, other = pair
    assert other.limit_s == ROOT_PATIENCE * LIMIT_S
    root._process.send_signal(signal.SIGSTOP)
    assert said(other, 5) == [0]


def test_nobody_is_silent_on_a_machine_with_far_too_much_to_do(pair: tuple[Pulse, Pulse]) -> None:
    number = 8 * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(min(number, 32))]
    try:
        assert said(pair[0], 4 * LIMIT_S) + said(pair[1], 0) == []
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_process_that_was_stopped_itself_blames_nobody(pair: tuple[Pulse, Pulse]) -> None:
    root, other = pair
    for pulse in pair:
        pulse._process.send_signal(signal.SIGSTOP)
    time.sleep(2 * LIMIT_S)
    for pulse in pair:
        pulse._process.send_signal(signal.SIGCONT)
    assert said(root, LIMIT_S) + said(other, 0) == []


def test_a_stranger_is_not_listened_to(pair: tuple[Pulse, Pulse]) -> None:
    stranger = Pulse.follow("127.0.0.1", pair[0].port, "f" * 32, 5, LIMIT_S)
    assert stranger is not None
    # It ends by itself when its connection does.
    assert stranger._process.wait(5) == 0
    stranger.close()


def test_it_ends_with_its_rank() -> None:
    script = (
        "import os, signal\n"
        "from hvdtrain.failure.pulse import Pulse\n"
        f"print(Pulse.serve('127.0.0.1', 8, {TOKEN!r}, 20.0)._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(50):
        try:
            state = open(f"/proc/{pid}/stat").read().rpartition(") ")[2][0]  # noqa: SIM115, PTH123
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("left behind")


def test_where_it_cannot_start_nobody_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert Pulse.serve("127.0.0.1", 8, TOKEN, LIMIT_S) is None
    assert Pulse.follow("127.0.0.1", 1, TOKEN, 3, LIMIT_S) is None
