"""What the kernel knows of a dead process, workers that die with their parent, and the end of a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.failure import Failure, ending
from hvdtrain.failure.postmortem import Identity, explain_death, kill, start_ticks, wait_status
from hvdtrain.failure.workers import init_worker, worker_stacks

LEFT_NO_WORDS = "it left no last words: kill -9, or the kernel's out-of-memory killer (see dmesg on h)"


def zombie(end: str) -> tuple[subprocess.Popen[bytes], Identity]:
    """A child that has ended and is not yet waited for."""
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os; {end}"])
    identity = Identity(2, "h", process.pid, start_ticks(process.pid))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process, identity


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("os._exit(3)", 3 << 8, "died without a word: os._exit(3) in some library or in the task"),
        (
            "os.kill(os.getpid(), 9)",
            9,
            "was killed: SIGKILL (signal 9); " + LEFT_NO_WORDS,
        ),
        ("os.kill(os.getpid(), 15)", 15, "was killed: SIGTERM (signal 15)"),
    ],
)
def test_a_dead_child_of_this_host_is_explained(end: str, status: int, message: str) -> None:
    process, identity = zombie(end)
    assert wait_status(identity.pid, identity.started) == status
    assert wait_status(identity.pid, identity.started + 1) is None  # another process with the same pid
    failure = explain_death(identity, "", same_host=True, oom_kills_before=10**9)
    process.wait()
    assert (failure.rank, failure.kind, failure.message) == (2, "signal", message)


def test_a_death_on_another_host_is_guessed_and_says_so() -> None:
    message = explain_death(Identity(2, "h", 1, 0), "", same_host=False, oom_kills_before=0).message
    assert message == (f"was killed, most likely by SIGKILL (signal 9); {LEFT_NO_WORDS}, or os._exit() in some library")


def test_only_the_same_process_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    started = start_ticks(process.pid)
    kill(Identity(1, "h", process.pid, started + 1))
    assert process.poll() is None
    kill(Identity(1, "h", process.pid, started))
    assert process.wait(10) == -signal.SIGKILL


def stuck_worker(pid_file: str) -> None:
    init_worker(0)
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(60)


def parent_of_stuck_worker(method: str, pid_file: str) -> None:
    worker = multiprocessing.get_context(method).Process(target=stuck_worker, args=(pid_file,), daemon=True)
    worker.start()
    worker.join()


def await_file(path: Path) -> str:
    for _ in range(300):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise TimeoutError(path)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_stuck_worker_dies_with_its_parent(tmp_path: Path, method: str) -> None:
    parent = multiprocessing.get_context("spawn").Process(
        target=parent_of_stuck_worker, args=(method, str(tmp_path / "pid"))
    )
    parent.start()
    pid = int(await_file(tmp_path / "pid"))
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        os.kill(pid, number)
    time.sleep(0.1)
    assert is_running(pid)
    parent.kill()
    parent.join()
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def test_the_stack_of_a_stuck_worker_is_known_and_it_is_ended(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("spawn").Process(
        target=stuck_worker, args=(str(tmp_path / "pid"),), daemon=True
    )
    worker.start()
    await_file(tmp_path / "pid")
    text = worker_stacks()
    assert text.startswith(f"  data-loader worker, pid {worker.pid} (most recent call first):\n")
    assert "in stuck_worker" in text.splitlines()[1]
    ending.kill_daemonic_children()
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL


def test_the_report_comes_after_the_callback_and_despite_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    failure = Failure(1, "h", 7, "exception", "ValueError: x", traceback="Traceback: ...")
    seen: list[Failure] = []
    ending.report_failure(failure, seen.append)
    assert seen == [failure]
    assert capfd.readouterr().err == failure.report()

    def broken(failure: Failure) -> None:
        raise OSError("disk full")

    ending.report_failure(failure, broken)
    assert capfd.readouterr().err == (
        "hvdtrain: the failure could not be recorded: OSError: disk full\n" + failure.report()
    )
