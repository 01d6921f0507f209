"""One rank of a job that fails in the way that its first argument names. Run by test_failure.py."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from hvdtrain.errors import ConfigError
from hvdtrain.failure import Failure, Guard
from hvdtrain.launch.world import World

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, SIZE, BLAMED = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "BLAMED"))


class FolderStore:
    """The rendezvous as files, so that most cases need not import torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        path = self._folder / key.replace("/", ".")
        new = path.with_suffix(".new")
        new.write_text(value)
        new.rename(path)

    def get(self, key: str) -> bytes:
        path = self._folder / key.replace("/", ".")
        for _ in range(3000):
            if path.exists():
                return path.read_bytes()
            time.sleep(0.01)
        raise TimeoutError(key)


def note(name: str, value: object) -> None:
    (FOLDER / f"{name}-{RANK}").write_text(str(value))


def record(failure: Failure) -> None:
    note("summary", failure.kind)


def make_guard(**limits: float) -> Guard:
    world = World(RANK, SIZE, RANK, SIZE)
    return Guard(world, FolderStore(FOLDER), "127.0.0.1", "here", on_failure=record, **limits)


def wait_in_collective(guard: Guard) -> None:
    """What the other ranks do: they wait for the blamed one and would do so for ever."""
    if "torch" not in sys.modules:
        with guard.operation("all_reduce 'loss'"):
            time.sleep(100)
    import torch

    with guard.operation("all_reduce 'loss'"):
        torch.distributed.all_reduce(torch.ones(4))
        torch.distributed.all_reduce(torch.ones(4))


def connect_gloo() -> None:
    import torch

    store = torch.distributed.FileStore(str(FOLDER / "gloo"), SIZE)
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)
    torch.distributed.all_reduce(torch.ones(4))


def stuck_in_user_code() -> None:
    time.sleep(100)


def await_all_ready() -> None:
    """A barrier after the start: this is about ranks that fail, not about ranks that never came."""
    note("ready", "")
    while len(list(FOLDER.glob("ready-*"))) < SIZE:
        time.sleep(0.02)


def await_stuck_worker() -> None:
    while not (FOLDER / f"worker-{BLAMED}").exists():
        time.sleep(0.05)


def wait_for_data() -> None:
    from torch.utils.data import DataLoader

    from hvdtrain.failure.workers import init_worker

    loader = DataLoader(StuckDataset(), num_workers=1, worker_init_fn=init_worker)
    next(iter(loader))


class StuckDataset:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        note("worker", os.getpid())
        stuck_in_user_code()
        return index


def fail(guard: Guard) -> None:
    if CASE == "raise":
        raise ValueError("bad batch")
    if CASE == "raise in operation":
        with guard.operation("broadcast 'model'"):
            raise ValueError("bad shape")
    if CASE == "wrong input":
        raise ConfigError("job.yaml, line 3: no such key")
    if CASE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "kill with child":
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        note("child", pid)
        os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "segfault":
        ctypes.string_at(0)
    if CASE == "abort":
        os.abort()
    if CASE == "exit":
        sys.exit(0)
    if CASE == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if CASE == "busy":
        # Nothing else of Python runs meanwhile: what a big pickle or a tokenizer does.
        ctypes.PyDLL(None).sleep(5)
    if CASE == "stuck":
        stuck_in_user_code()
    if CASE == "stuck worker":
        wait_for_data()
    if CASE == "raise with stuck worker":
        import threading

        threading.Thread(target=wait_for_data, daemon=True).start()
        await_stuck_worker()
        raise ValueError("bad batch")
    if CASE == "two signals":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGTERM)
        # A C call, in which no Python signal handler runs.
        ctypes.CDLL(None).pause()
        ctypes.CDLL(None).pause()
        time.sleep(100)


def main() -> None:
    if CASE == "clean":
        for run in range(20):
            folder = FOLDER / str(run)
            folder.mkdir(exist_ok=True)
            with Guard(World(RANK, SIZE), FolderStore(folder), "127.0.0.1", "here", on_failure=record) as guard:
                with guard.operation("all_reduce 'loss'"):
                    pass
                # The ranks leave at different times, in another order each time.
                time.sleep(0.02 * ((RANK + run) % SIZE))
        note("clean", "done")
        return
    if CASE == "busy":
        with make_guard(silent_limit_s=1.0) as guard:
            await_all_ready()
            if RANK == BLAMED:
                fail(guard)
            note("done", "")
            while len(list(FOLDER.glob("done-*"))) < SIZE:
                time.sleep(0.02)
        return
    limits = {"stopped": {"silent_limit_s": 2.0}, "stuck": {"stall_warning_s": 0.5, "stall_abort_s": 1.5}}
    limits["stuck worker"] = {"stall_warning_s": 0.5, "stall_abort_s": 3.0}
    if CASE == "no block":  # neither a with block nor finish()
        guard = make_guard()
        guard.start()
        await_all_ready()
        if RANK == BLAMED:
            raise ValueError("uncaught")
        wait_in_collective(guard)
    with make_guard(**limits.get(CASE, {})) as guard:
        if os.environ.get("GLOO"):
            connect_gloo()
        await_all_ready()
        if RANK == BLAMED:
            time.sleep(0.2)  # the others are in the collective by now
            fail(guard)
        else:
            if CASE == "stuck worker":
                await_stuck_worker()
            wait_in_collective(guard)


if __name__ == "__main__":
    main()
