"""Case H: the process dies while it writes, or cannot write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from hvdtrain.checkpoint import CheckpointStore, load
from hvdtrain.checkpoint.atomic import atomic_write, remove_leftovers

LIMIT_S = 120.0

SAVER = """
import itertools, resource, sys
from pathlib import Path
import torch
from hvdtrain.checkpoint import CheckpointStore
from hvdtrain.errors import TrainingFailed

folder, numbers, first, last, limit_bytes = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = CheckpointStore(folder, keep=2)
weight = torch.empty(numbers)
for step in range(first, last):
    if step == last - 1 and limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    progress = {"epoch": 0, "step": step, "samples_in_epoch": 0}
    state = {"format": 1, "model": {"w": weight.fill_(step)}, "progress": progress}
    state |= dict.fromkeys(("optimizer", "scheduler", "scaler", "rng", "config"), {})
    try:
        store.save(state, step=step)
    except TrainingFailed as error:
        print(error)
"""


def saver(folder: Path, numbers: int, first: int, last: int, limit_bytes: int = 0) -> subprocess.Popen[str]:
    arguments = map(str, (folder, numbers, first, last, limit_bytes))
    return subprocess.Popen([sys.executable, "-c", SAVER, *arguments], stdout=subprocess.PIPE, text=True)


def kill_while_it_writes(process: subprocess.Popen[str], folder: Path, after_step: int) -> list[Path]:
    """SIGKILL while a temporary file has grown beyond 10 MB, `after_step` being complete; returns what was left."""
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline_s and process.poll() is None:
            time.sleep(0.005)
            sizes = []
            for path in folder.glob(".*.tmp"):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            if (folder / f"step-{after_step:08d}.pt").exists() and any(size > 10_000_000 for size in sizes):
                process.send_signal(signal.SIGKILL)
                process.wait(LIMIT_S)
                return list(folder.glob(".*.tmp"))
        raise AssertionError("no write was seen")
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_killed_while_writing_100_mb_then_truncated_by_hand(tmp_path, caplog):
    left: list[Path] = []
    first = 1
    for _ in range(5):  # the kill may come after the last byte; then once more
        process = saver(tmp_path, 25_000_000, first, first + 1000)
        left = kill_while_it_writes(process, tmp_path, first)
        first = CheckpointStore(tmp_path).steps()[-1] + 1
        if left:
            break
    assert process.returncode == -signal.SIGKILL
    assert left
    store = CheckpointStore(tmp_path, keep=2)  # the next start
    assert list(tmp_path.glob(".*.tmp")) == []
    last = store.steps()[-1]
    found = store.find("auto")
    assert found.step == last
    assert found.skipped == ()
    assert torch.equal(found.state["model"]["w"], torch.full((25_000_000,), float(last)))

    # The disk lost the end of the newest.
    newest = store.save(
        {**found.state, "progress": {"epoch": 0, "step": last + 1, "samples_in_epoch": 0}}, step=last + 1
    )
    os.truncate(newest, newest.stat().st_size - 1_000_000)
    found = store.find("auto")
    assert found.step == last
    assert f"{newest} cannot be used: the file is cut off or damaged" in caplog.text
    assert float(found.state["model"]["w"][-1]) == last


def test_a_write_that_fails_names_path_and_free_bytes_and_leaves_the_old_ones(tmp_path):
    process = saver(tmp_path, 100_000, 1, 4, limit_bytes=300_000)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert f"cannot write {tmp_path / 'step-00000003.pt'}: File too large; " in output
    assert "bytes are free there" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.pt", "step-00000002.pt"]
    assert float(load(tmp_path / "step-00000002.pt")["model"]["w"][0]) == 2


def test_temporary_files_of_live_writers_stay(tmp_path):
    (tmp_path / ".step-00000001.pt.dead.tmp").touch()
    with atomic_write(tmp_path / "x") as file:
        file.write(b"half")
        assert remove_leftovers(tmp_path) == [".step-00000001.pt.dead.tmp"]
        assert len(list(tmp_path.glob(".x.*.tmp"))) == 1
    assert (tmp_path / "x").read_bytes() == b"half"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_exception_leaves_the_old_file(tmp_path):
    (tmp_path / "x").write_text("old")
    try:
        with atomic_write(tmp_path / "x") as file:
            file.write(b"new")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
