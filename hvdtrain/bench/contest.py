"""Whole jobs take turns: each runs a block of steps while every process of the others is held.

Held, and not merely idle: a Horovod without work still negotiates every millisecond, and an MPI rank that waits keeps
its core busy. The ranks' side is `turns.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench.blocks import Blocks
from hvdtrain.bench.turns import JOB, SOCKET
from hvdtrain.errors import TrainingFailed

_START_LIMIT_S = 120.0
_END_LIMIT_S = 20.0
_SHOWN_LINES = 20


@dataclasses.dataclass(frozen=True)
class Command:
    """How to start one rank, or a launcher that starts all ranks."""

    argv: Sequence[str]
    environ: Mapping[str, str]


class Job:
    """The processes of one contestant.

    Args:
        commands: what to start.
        num_ranks: ranks that will ask for turns.
        folder: for the socket and the output of the processes.
    """

    def __init__(self, name: str, commands: Sequence[Command], num_ranks: int, folder: Path) -> None:
        self.name = name
        self._commands = commands
        self._num_ranks = num_ranks
        self._output = folder / f"{name}.log"
        self._path = folder / f"{name}.socket"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[int, _Rank] = {}

    def start(self) -> None:
        """Start the processes, and hold them as soon as all ranks are ready for their first turn.

        Raises:
            TrainingFailed: a process ended, or the ranks are not ready in time.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._output.open("wb") as output:
            listener.bind(str(self._path))
            listener.listen(self._num_ranks)
            listener.settimeout(0.2)
            for command in self._commands:
                environ = {**command.environ, SOCKET: str(self._path), JOB: self.name}
                self._processes.append(
                    subprocess.Popen(
                        command.argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                    )
                )
            until = time.monotonic() + _START_LIMIT_S
            while len(self._ranks) < self._num_ranks:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self._check_alive(until)
                    continue
                # One that closes without a word has failed; its process will end.
                with contextlib.suppress(OSError, ValueError):
                    rank = _Rank(connection)
                    self._ranks[rank.number] = rank
        self.hold()

    def turn(self, steps: int, untimed: int, limit_s: float) -> float:
        """Let the ranks go, run a block, hold them again.

        Returns:
            Milliseconds per step, of the slowest rank.

        Raises:
            TrainingFailed: a rank ended, or did not answer within the limit.
        """
        self.release()
        for rank in self._ranks.values():
            rank.send({"steps": steps, "untimed": untimed})
        until = time.monotonic() + limit_s
        try:
            answers = [rank.answer(until) for rank in self._ranks.values()]
        except (OSError, ValueError) as error:
            raise TrainingFailed(f"{self.name}: a rank did not finish its turn ({error}); {self._shown()}") from error
        self.hold()
        return max(float(answer["ms_per_step"]) for answer in answers)

    def hold(self) -> None:
        """Stop the ranks' processes."""
        self._signal(signal.SIGSTOP)

    def release(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Say that there are no more turns, and wait for the processes; end those that do not end."""
        self.release()
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                rank.send({"steps": 0, "untimed": 0})
        until = time.monotonic() + _END_LIMIT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End what is left, at once."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None:
                # Not SIGKILL at first: a launcher has ranks to take along.
                process.terminate()
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()

    def _signal(self, number: int) -> None:
        if all(process.poll() is not None for process in self._processes):
            return  # the numbers of processes that have ended may belong to others by now
        for rank in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    def _check_alive(self, until: float) -> None:
        ended = [process.returncode for process in self._processes if process.poll() is not None]
        if ended:
            raise TrainingFailed(f"{self.name}: a process ended with status {ended[0]}; {self._shown()}")
        if time.monotonic() > until:
            raise TrainingFailed(f"{self.name}: not all ranks were ready in time; {self._shown()}")

    def _shown(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return "its last lines:\n" + "\n".join(lines) if lines else "it printed nothing"


class _Rank:
    """The conductor's end of one rank's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        hello = self.answer(time.monotonic() + 10)
        self.number, self.pid = int(hello["rank"]), int(hello["pid"])

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def answer(self, until: float) -> dict[str, Any]:
        self._connection.settimeout(max(0.1, until - time.monotonic()))
        line = self._lines.readline()
        if not line:
            raise ConnectionError("it closed its connection")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


def contest(
    contestants: Mapping[str, Sequence[Command]],
    *,
    num_ranks: int,
    rounds: int,
    steps: int,
    untimed: int,
    limit_s: float,
) -> Blocks:
    """Run the contestants in turns, in an order that rotates.

    Args:
        contestants: name -> commands that start its ranks, which call `turns.take_turns`.
        steps, untimed: steps of a block that count, and before them some that do not.
        limit_s: for one block.

    Raises:
        TrainingFailed: a rank of a contestant failed; the message has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        jobs = [Job(name, commands, num_ranks, Path(folder)) for name, commands in contestants.items()]
        try:
            for job in jobs:
                job.start()
            measured: dict[str, list[float]] = {job.name: [] for job in jobs}
            for job in jobs:  # warm-up: buckets are planned, caches filled
                job.turn(steps, untimed, limit_s)
            for turn in range(rounds):
                shift = turn % len(jobs)
                for job in jobs[shift:] + jobs[:shift]:
                    measured[job.name].append(job.turn(steps, untimed, limit_s))
            for job in jobs:
                job.end()
        finally:
            for job in jobs:
                job.kill()
    return Blocks(measured)


def note(text: str) -> None:
    """Tell how far the benchmark is, on stderr."""
    print(text, file=sys.stderr, flush=True)
