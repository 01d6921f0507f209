"""Whole jobs that go wrong, under real launchers and both backends: over in seconds, the culprit named."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import launchers
import psutil
import pytest

LAUNCHERS = ["torchrun", "horovodrun-gloo", "mpirun"]
BACKENDS = ["ddp", "horovod"]
START_LIMIT_S = 150.0
# The promise: from the fault to the end of the launcher.
END_LIMIT_S = 15.0
SAID = {
    "raise": r"rank 1 \(\S+, pid \d+\) failed: ValueError: a bad batch",
    "kill": r"rank 1 \(\S+, pid \d+\) was killed.*SIGKILL \(signal 9\)",
    "exit": r"rank 1 \(\S+, pid \d+\) exited early, before the job's end: exit\(0\)",
    "segfault": r"rank 1 \(\S+, pid \d+\).*SIGSEGV",
    "sleep": r"rank 1 \(\S+, pid \d+\).*",
}
KINDS = {"raise": "exception", "kill": "signal", "exit": "early_exit", "segfault": "signal", "sleep": "stall"}


def arguments(backend: str, output: Path, *settings: str, resume: str = "none") -> list[str]:
    options = [f"--set={setting}" for setting in settings]
    file = "tests/multiprocess/jobs/faulty.yaml"
    return ["train", file, "--backend", backend, "--output", str(output), "--resume", resume, *options]


def summary(output: Path) -> dict:
    return json.loads((output / "summary.json").read_text())


def left_behind(output: Path) -> list[str]:
    """Processes of the job (ranks, data-loader workers) that still run: their command line names its output."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(output) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.cmdline()}")
        except psutil.Error:
            continue
    return found


def run_faulty(launcher: str, backend: str, fault: str, output: Path, *settings: str) -> tuple[str, int, float]:
    """Run the job; (its output, exit status, seconds from the fault to the end)."""
    note = output / "fault"
    output.mkdir(exist_ok=True)
    options = (f"task_options.fault={fault}", f"task_options.note={note}", *settings)
    process = launchers.start(launcher, arguments(backend, output, *options))
    text, _ = process.communicate(timeout=START_LIMIT_S)
    return text, process.returncode, time.time() - float(note.read_text())


def our_last_line(text: str) -> str:
    """The last line that hvdtrain itself printed; launchers print after it, and put their prefixes before it."""
    lines = [line[line.index("hvdtrain: ") :] for line in text.splitlines() if "hvdtrain: " in line]
    return lines[-1] if lines else ""


@pytest.mark.parametrize("fault", ["raise", "kill", "exit"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_ends_the_job_and_is_named(backend, launcher, fault, tmp_path):
    text, status, seconds = run_faulty(launcher, backend, fault, tmp_path)
    assert status != 0, text
    assert re.search(SAID[fault], our_last_line(text)), text
    failure = summary(tmp_path)["failure"]
    assert summary(tmp_path)["status"] == "failed"
    assert (failure["rank"], failure["kind"]) == (1, KINDS[fault])
    if fault == "raise":
        assert 'raise ValueError("a bad batch")' in failure["traceback"]
        assert 'raise ValueError("a bad batch")' in text
    assert not list(tmp_path.glob("checkpoints/*.pt")), "a crash must not save"
    assert left_behind(tmp_path) == []
    assert seconds < END_LIMIT_S, text


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_root_that_is_killed_is_named_by_another_rank(backend, tmp_path):
    text, status, seconds = run_faulty("mpirun", backend, "kill", tmp_path, "task_options.rank=0")
    assert status != 0
    assert re.search(r"rank 0 \(\S+, pid \d+\) was killed.*SIGKILL", our_last_line(text)), text
    assert (summary(tmp_path)["status"], summary(tmp_path)["failure"]["rank"]) == ("failed", 0)
    assert left_behind(tmp_path) == []
    assert seconds < END_LIMIT_S, text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_segmentation_fault_is_named_with_its_signal(backend, tmp_path):
    text, status, seconds = run_faulty("torchrun", backend, "segfault", tmp_path)
    assert status != 0
    assert re.search(SAID["segfault"], our_last_line(text)), text
    assert left_behind(tmp_path) == []
    assert seconds < END_LIMIT_S, text


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", "torchrun"])
def test_a_data_loader_worker_that_is_stuck_does_not_outlive_the_job(launcher, tmp_path):
    """Rank 1's workers hang in __getitem__, so no step comes; the stall limit ends the job, workers included."""
    settings = ("task_options.fault=stuck-worker", "num_workers=1", "stall_warning_s=2", "stall_abort_s=5")
    process = launchers.start(launcher, arguments("ddp", tmp_path, *settings))
    text, _ = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode != 0, text
    assert "rank 1" in our_last_line(text), text
    assert re.search(r'faulty.py", line \d+ in __getitem__', text), "the stuck worker's own stack is shown"
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stall_is_reported_with_rank_operation_and_stack_and_then_ends_the_job(backend, tmp_path):
    settings = ("stall_warning_s=2", "stall_abort_s=6")
    text, status, seconds = run_faulty("torchrun", backend, "sleep", tmp_path, *settings)
    assert status != 0
    assert re.search(r"warning: rank 0 has waited \d+ s in gradient reduction of step 5; rank 1 is not there", text), (
        text
    )
    assert "time.sleep(600)" in text, "the stack of the rank that is not there"
    failure = summary(tmp_path)["failure"]
    assert (failure["rank"], failure["kind"]) == (1, "stall")
    assert left_behind(tmp_path) == []
    assert 6 <= seconds < 6 + END_LIMIT_S, text


# One signal per pair: each launcher, each backend and each signal at least twice.
STOPS = [
    ("torchrun", "ddp", "SIGTERM"),
    ("torchrun", "horovod", "SIGUSR1"),
    ("horovodrun-gloo", "ddp", "SIGINT"),
    ("horovodrun-gloo", "horovod", "SIGTERM"),
    ("mpirun", "ddp", "SIGUSR1"),
    ("mpirun", "horovod", "SIGINT"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The hash of the job when nothing happens, on two ranks."""
    output = tmp_path_factory.mktemp("uninterrupted")
    process = launchers.start("torchrun", arguments("ddp", output))
    text, _ = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode == 0, text
    assert summary(output)["steps"] == 2000
    return summary(output)["parameters_sha256"]


@pytest.mark.parametrize(("launcher", "backend", "name"), STOPS)
def test_a_signal_to_one_rank_stops_all_with_one_checkpoint_and_the_run_goes_on_later(
    launcher, backend, name, uninterrupted, tmp_path
):
    text, status, _ = run_faulty(launcher, backend, name, tmp_path, "task_options.at=50")
    found = summary(tmp_path)
    assert found["status"] == "stopped", text
    assert 50 <= found["steps"] < 2000
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.pt")] == [f"step-{found['steps']:08d}.pt"]
    # mpirun passes the status on; torchrun and horovodrun turn it into 1.
    assert status == (75 if launcher == "mpirun" else 1)
    assert "Continue with --resume auto" in text
    assert left_behind(tmp_path) == []

    process = launchers.start(launcher, arguments(backend, tmp_path, resume="auto"))
    text, _ = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode == 0, text
    assert summary(tmp_path)["status"] == "done"
    assert summary(tmp_path)["parameters_sha256"] == uninterrupted


@pytest.mark.parametrize("whom", ["the script", "everybody, as Ctrl-C does"])
def test_a_request_to_the_script_that_starts_ranks_by_hand_is_for_its_ranks(whom, tmp_path):
    """examples/launch/run.sh passes it on and waits until they have saved."""
    command = ["bash", "examples/launch/run.sh", *arguments("ddp", tmp_path, "task_options.step_s=0.01")[1:]]
    process = launchers.start_command(command, num_procs="2")
    deadline = time.monotonic() + START_LIMIT_S
    while not (tmp_path / "metrics.jsonl").is_file() or not (tmp_path / "metrics.jsonl").stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=10)[0]  # noqa: PT018
        time.sleep(0.05)
    if whom == "the script":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode == 75, text
    found = summary(tmp_path)
    assert found["status"] == "stopped", text
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.pt")] == [f"step-{found['steps']:08d}.pt"]
    assert left_behind(tmp_path) == []


def test_a_folder_with_checkpoints_is_never_overwritten_by_a_run_without_resume(tmp_path):
    first = launchers.start("torchrun", arguments("ddp", tmp_path, "max_steps=3"))
    text, _ = first.communicate(timeout=START_LIMIT_S)
    assert first.returncode == 0, text
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pt")}
    again = launchers.start_by_hand(arguments("ddp", tmp_path), f"file://{tmp_path}/meeting")
    texts = [process.communicate(timeout=START_LIMIT_S)[0] for process in again]
    assert [process.returncode for process in again] == [2, 2], texts
    assert "the last of step 3" in "".join(texts)
    assert "--resume auto" in "".join(texts)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pt")} == before
