"""Processes of a benchmark end together, whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hvdtrain.bench.placed.processes import wait_for_all
from hvdtrain.bench.stop_signals import stop_signals_raise
from hvdtrain.errors import TrainingFailed

_SLEEP = "import time; time.sleep(60)"
# Does not end on SIGTERM.
_STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


def python(line: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", line], stdout=subprocess.PIPE)


def test_all_that_end_well_are_waited_for() -> None:
    wait_for_all([python("pass"), python("pass")], 30.0)


def test_one_that_fails_ends_the_others() -> None:
    other = python(_SLEEP)
    with pytest.raises(TrainingFailed, match=r"statuses \[3, None\]"):
        wait_for_all([python("raise SystemExit(3)"), other], 30.0, grace_s=0.2)
    assert other.returncode == -signal.SIGTERM


def test_the_limit_ends_all_of_them_even_those_that_ignore_it() -> None:
    stubborn = python(_STUBBORN)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    with pytest.raises(TrainingFailed, match="longer than its limit of 0 s"):
        wait_for_all([stubborn], 0.0, grace_s=0.2)
    assert stubborn.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_us_ends_them(number: signal.Signals) -> None:
    # A shell starts what it runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = python(_SLEEP)
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        start_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt), stop_signals_raise():
            wait_for_all([process], 30.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start_s < 20
    assert process.returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
