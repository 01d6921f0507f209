"""Real processes that fail in every way; what is on the screen, who is left, with which status they ended."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK_SCRIPT = Path(__file__).with_name("failure_rank.py")
# Against hangs only: every case is over within seconds.
LIMIT_S = 120


@dataclasses.dataclass
class Job:
    folder: Path
    pids: list[int]
    statuses: list[int]
    errors: list[str]

    def last_line(self, rank: int = 0) -> str:
        """The last line on that rank's stderr, with the pid of each rank replaced by ``PID``."""
        return self.plain(rank).rstrip("\n").rpartition("\n")[2]

    def plain(self, rank: int = 0) -> str:
        return re.sub(r"pid \d+", "pid PID", self.errors[rank])

    def summaries(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("summary-*")}


def run_job(case: str, folder: Path, *, size: int = 2, blamed: int = 1, gloo: bool = False) -> Job:
    environ = {**os.environ, "WORLD_SIZE": str(size), "BLAMED": str(blamed), "OMP_NUM_THREADS": "1"}
    if gloo:
        environ["GLOO"] = "1"
    processes = []
    for rank in range(size):
        with (folder / f"stderr-{rank}").open("w") as stderr:
            command = [sys.executable, str(RANK_SCRIPT), case, str(folder)]
            processes.append(subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stderr=stderr))
    try:
        statuses = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    errors = [(folder / f"stderr-{rank}").read_text() for rank in range(size)]
    return Job(folder, [process.pid for process in processes], statuses, errors)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pid: int) -> None:
    for _ in range(100):
        if not is_alive(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} was left behind")


@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize("blamed", [0, 1])
def test_an_exception_ends_all_with_its_traceback_last(tmp_path: Path, blamed: int, gloo: bool) -> None:
    job = run_job("raise", tmp_path, blamed=blamed, gloo=gloo)
    assert job.statuses == [1, 1]
    assert job.last_line() == f"hvdtrain: rank {blamed} (here, pid PID) failed: ValueError: bad batch"
    assert f"pid {job.pids[blamed]}" in job.errors[0]
    lines = job.plain().splitlines()
    assert lines[-2] == "ValueError: bad batch"
    assert 'raise ValueError("bad batch")' in job.errors[0]
    assert f"hvdtrain: rank {blamed} (here, pid PID):" in lines
    assert job.errors[1] == ""  # reported once
    assert job.summaries() == {"summary-0": "exception"}


def test_the_operation_is_named(tmp_path: Path) -> None:
    job = run_job("raise in operation", tmp_path)
    assert job.last_line() == ("hvdtrain: rank 1 (here, pid PID) failed: ValueError: bad shape [in broadcast 'model']")


def test_wrong_input_found_by_one_rank_ends_all_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    job = run_job("wrong input", tmp_path)
    assert job.statuses == [2, 2]
    assert job.plain() == ("hvdtrain: rank 1 (here, pid PID) failed: ConfigError: job.yaml, line 3: no such key\n")


@pytest.mark.parametrize("gloo", [False, True])
def test_a_killed_rank_is_named(tmp_path: Path, gloo: bool) -> None:
    job = run_job("kill", tmp_path, size=3, blamed=1, gloo=gloo)
    assert job.statuses == [1, -9, 1]
    assert re.match(r"hvdtrain: rank 1 \(here, pid PID\) was killed.* SIGKILL \(signal 9\)", job.last_line())
    assert "out-of-memory killer" in job.last_line()
    assert job.errors[2] == ""
    assert job.summaries() == {"summary-0": "signal"}


@pytest.mark.parametrize("gloo", [False, True])
def test_a_killed_rank_0_is_named_by_the_lowest_survivor(tmp_path: Path, gloo: bool) -> None:
    job = run_job("kill", tmp_path, size=3, blamed=0, gloo=gloo)
    assert job.statuses == [-9, 1, 1]
    assert re.match(r"hvdtrain: rank 0 \(here, pid PID\) was killed.* SIGKILL \(signal 9\)", job.last_line(1))
    assert job.errors[2] == ""
    assert job.summaries() == {"summary-1": "signal"}


def test_a_forked_child_does_not_hide_the_death_of_its_parent(tmp_path: Path) -> None:
    job = run_job("kill with child", tmp_path)
    os.kill(int((tmp_path / "child-1").read_text()), signal.SIGKILL)
    assert job.statuses == [1, -9]
    assert "rank 1 (here, pid PID) was killed" in job.last_line()


@pytest.mark.parametrize(("blamed", "reporter"), [(0, 1), (1, 0)])
def test_a_crash_is_named_with_signal_and_place(tmp_path: Path, blamed: int, reporter: int) -> None:
    job = run_job("segfault", tmp_path, blamed=blamed)
    assert sorted(job.statuses) == [-11, 1]
    last = job.last_line(reporter)
    assert last.startswith(f"hvdtrain: rank {blamed} (here, pid PID) died: SIGSEGV (signal 11) in string_at (")
    assert 'failure_rank.py", line' in job.errors[reporter]
    assert "monitor.py" not in job.errors[reporter]  # our own threads explain nothing


def test_an_abort_in_a_library_is_named(tmp_path: Path) -> None:
    job = run_job("abort", tmp_path)
    assert job.statuses == [1, -6]
    assert "rank 1 (here, pid PID) died: SIGABRT (signal 6) in fail (" in job.last_line()


@pytest.mark.parametrize("blamed", [0, 1])
def test_an_early_exit_with_status_0_is_a_failure(tmp_path: Path, blamed: int) -> None:
    job = run_job("exit", tmp_path, blamed=blamed, gloo=True)
    assert job.statuses == [1, 1]
    assert job.last_line() == (f"hvdtrain: rank {blamed} (here, pid PID) exited early, before the job's end: exit(0)")


def test_without_a_with_block_an_uncaught_exception_is_reported_too(tmp_path: Path) -> None:
    job = run_job("no block", tmp_path)
    assert job.statuses == [1, 1]
    assert job.last_line() == "hvdtrain: rank 1 (here, pid PID) failed: ValueError: uncaught"


@pytest.mark.parametrize(("blamed", "reporter", "limit"), [(0, 1, 2.4), (1, 0, 2)])
def test_a_stopped_process_is_lost_and_ended(tmp_path: Path, blamed: int, reporter: int, limit: float) -> None:
    job = run_job("stopped", tmp_path, blamed=blamed)
    assert sorted(job.statuses) == [-9, 1]
    assert job.last_line(reporter) == (
        f"hvdtrain: rank {blamed} (here, pid PID) is lost: nothing was heard from it for {limit:g} s "
        "(a stopped process or container, or a cut network)"
    )


@pytest.mark.parametrize("blamed", [0, 1])
def test_a_rank_that_keeps_the_interpreter_to_itself_is_not_lost(tmp_path: Path, blamed: int) -> None:
    job = run_job("busy", tmp_path, blamed=blamed)
    assert (job.statuses, job.errors) == ([0, 0], ["", ""])


def test_a_stall_is_reported_with_both_stacks_and_then_ends_the_job(tmp_path: Path) -> None:
    job = run_job("stuck", tmp_path, size=3, blamed=2, gloo=True)
    assert job.statuses == [1, 1, 1]
    text = job.plain()
    warning = re.search(r"hvdtrain: warning: rank [01] has waited \d s in all_reduce 'loss'; rank 2 is not there", text)
    assert warning, text
    before_the_end = text[warning.start() : text.index("hvdtrain: where the ranks are:")]
    assert "rank 2 (here, pid PID) is in no operation" in before_the_end
    assert "in stuck_in_user_code" in before_the_end
    assert "in wait_in_collective" in before_the_end
    assert re.match(
        r"hvdtrain: rank 2 \(here, pid PID\) did not come to all_reduce 'loss', in which rank [01] waited \d s; "
        r"it is in stuck_in_user_code \(.*failure_rank.py:\d+\)$",
        job.last_line(),
    )
    assert job.summaries() == {"summary-0": "stall"}


def test_a_stuck_data_loader_worker_is_shown_and_ended(tmp_path: Path) -> None:
    job = run_job("stuck worker", tmp_path)
    assert job.statuses == [1, 1]
    assert "data-loader worker, pid PID (most recent call first):" in job.plain()
    assert "in stuck_in_user_code" in job.errors[0]
    assert_gone(int((tmp_path / "worker-1").read_text()))


def test_a_failed_rank_leaves_no_stuck_worker(tmp_path: Path) -> None:
    job = run_job("raise with stuck worker", tmp_path)
    assert job.statuses == [1, 1]
    assert job.last_line() == "hvdtrain: rank 1 (here, pid PID) failed: ValueError: bad batch"
    assert_gone(int((tmp_path / "worker-1").read_text()))


def test_a_second_signal_ends_at_once_even_inside_a_native_call(tmp_path: Path) -> None:
    job = run_job("two signals", tmp_path)
    assert job.statuses == [1, 1]
    assert job.plain(1).splitlines()[0] == (
        "hvdtrain: rank 1 got SIGTERM: stopping at the next step boundary, then saving a checkpoint; "
        "a second signal ends at once"
    )
    assert job.last_line() == (
        "hvdtrain: rank 1 (here, pid PID) got a second signal, SIGTERM, and ended at once; "
        "no checkpoint was saved for it"
    )


def test_twenty_clean_jobs_raise_no_alarm(tmp_path: Path) -> None:
    job = run_job("clean", tmp_path, size=3)
    assert job.statuses == [0, 0, 0]
    assert job.errors == ["", "", ""]
    assert sorted(path.name for path in tmp_path.glob("clean-*")) == ["clean-0", "clean-1", "clean-2"]
    assert job.summaries() == {}
