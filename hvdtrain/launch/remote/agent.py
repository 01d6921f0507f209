"""Runs on a host, started over ssh: torchrun's agent for the ranks of this host, and a clean end whatever happens.

The main thread runs torchrun's elastic agent (one attempt, static rendezvous); a second one takes orders from the
launcher, a third passes on what the ranks write and how they end. The agent ends its ranks, and whatever they started,
when it is told to, when the launcher's stream ends, and when the launcher has been silent for SILENCE_S.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.launch.remote.protocol import GRACE_S, SILENCE_S, Job
from hvdtrain.launch.remote.relay import Relay

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


class Agent:
    """The ranks of one host.

    Args:
        job: what to run.
        orders: file descriptor of the launcher's stream.
        out: file descriptor that the reports go to.
    """

    def __init__(self, job: Job, orders: int, out: int) -> None:
        self._job = job
        self._orders = orders
        self._out = out
        self._write_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._pipes = tempfile.TemporaryDirectory(prefix="hvdtrain-launch-")
        self._relay = Relay(Path(self._pipes.name), job.first_rank, job.num_ranks, self._send)

    def run(self) -> int:
        """Start the ranks and wait for them. The exit status: 0 when all ended with 0."""
        _become_subreaper()
        # Orders come first: an end may be asked for while torch is still being imported.
        threading.Thread(target=self._take_orders, name="orders", daemon=True).start()
        self._relay.start()
        status = 1
        try:
            self._run_torchrun_agent()
            self._relay.resolve({}, otherwise=0)
            status = 0
        except BaseException as error:
            self._explain(error)
        self._end(grace_s=0.0 if status == 0 else GRACE_S)
        return status

    def _run_torchrun_agent(self) -> None:
        # Torchrun's own grace between SIGTERM and SIGKILL is 30 s: too long for a job that has failed.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(GRACE_S)))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from torch.distributed.launcher.api import launch_agent

        Path(self._pipes.name, "command").write_text(json.dumps(self._job.command))
        worker = str(Path(__file__).with_name("worker.py"))
        launch_agent(self._configuration(), sys.executable, ["-I", "-S", worker, self._pipes.name])

    def _configuration(self) -> LaunchConfig:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        job = self._job
        return LaunchConfig(
            min_nodes=job.num_nodes,
            max_nodes=job.num_nodes,
            nproc_per_node=job.num_ranks,
            run_id=job.run_id,
            rdzv_backend="static",
            rdzv_endpoint=f"{job.root_address}:{job.root_port}",
            rdzv_configs={"rank": job.node_rank, "timeout": max(1, int(job.start_timeout_s))},
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=self._pipes.name),
        )

    def _explain(self, error: BaseException) -> None:
        """Report what went wrong: how ranks ended, as far as the relay has not, or what kept them from starting."""
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if isinstance(error, ChildFailedError):
            failures = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
            self._relay.resolve(failures, otherwise=-signal.SIGTERM)
        elif not isinstance(error, SignalException):
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            self._send(b"f " + text.encode(errors="replace") + b"\n")

    def _take_orders(self) -> None:
        heard = time.monotonic()
        rest = b""
        while True:
            ready, _, _ = select.select([self._orders], [], [], 1.0)
            if ready:
                data = os.read(self._orders, 65536)
                heard = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                if not data or any(self._obey(json.loads(line)) for line in lines if line):
                    break
            elif time.monotonic() - heard > SILENCE_S:
                self._send(
                    f"f nothing heard from the launcher for {SILENCE_S:.0f} s (suspended, or cut off)\n".encode()
                )
                break
        self._end(GRACE_S)
        os._exit(1)

    def _obey(self, order: dict[str, Any]) -> bool:
        """Do what is asked for; True when it is to end."""
        if order["do"] == "signal":
            self._relay.signal(order["signal"])
        return bool(order["do"] == "end")

    def _end(self, grace_s: float) -> None:
        """Terminate, wait, kill, everything down to the last descendant; pass on the last output."""
        with self._end_lock:
            if grace_s > 0:
                self._relay.signal(signal.SIGTERM)
                self._relay.wait_for_ends(grace_s)
            # A rank that is being ended may start another process in between: until none is left.
            deadline = time.monotonic() + 3.0
            while (left := _descendants(os.getpid())) and time.monotonic() < deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._relay.wait_for_ends(0.2)
                _reap()
            self._relay.finish(1.0)
            self._pipes.cleanup()

    def _send(self, line: bytes) -> None:
        with self._write_lock:
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._out, view) :]
            except OSError:
                # The launcher is gone; its stream of orders has ended as well, and that ends us.
                pass


def _become_subreaper() -> None:
    # PR_SET_CHILD_SUBREAPER of prctl(2) is 36: orphans of our ranks become our children, so that we find them.
    ctypes.CDLL(None).prctl(36, 1)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _descendants(ancestor: int) -> list[int]:
    """All living processes below one (zombies are not living)."""
    import psutil

    try:
        below = psutil.Process(ancestor).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    living = []
    for process in below:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process.pid)
        except psutil.NoSuchProcess:
            pass
    return living


def main() -> None:
    """Read the job from standard input, run it, exit with 0 or 1. Standard output carries reports alone."""
    out = os.dup(1)
    # Whatever a library prints must not get between the reports.
    os.dup2(2, 1)
    orders = os.dup(0)
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(orders, 1)
        if not byte:
            sys.exit("hvdtrain launch: the launcher went away before it said what to do")
        line += byte
    job = Job.from_line(bytes(line))
    os.chdir(job.folder)
    os.environ.update(job.environment)
    status = Agent(job, orders, out).run()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Threads and torch's store must not delay or spoil the end.
    os._exit(status)


if __name__ == "__main__":
    main()
