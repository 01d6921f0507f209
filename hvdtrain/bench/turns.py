"""The ranks' side of a benchmark in which whole jobs take turns: a rank runs steps when it is told to, and waits.

The other side is `contest.py`, which holds every job that is not on turn.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator

from hvdtrain.failure.workers import die_with_parent

# Path of the socket at which the conductor of the benchmark listens; a path, which reaches across network namespaces.
SOCKET = "HVDTRAIN_BENCH_SOCKET"
JOB = "HVDTRAIN_BENCH_JOB"


def take_turns(step: Callable[[], None], rank: int) -> None:
    """Run steps as the conductor asks for them, until it asks for none. Called by all ranks of a job.

    Args:
        step: one step, which no rank can finish before all ranks have begun it.
    """
    for _ in turns(rank):
        step()


def turns(rank: int) -> Iterator[None]:
    """Yields each time a step is to be taken, and ends when there are no more: for loops that are not ours to write.

    Each turn begins with steps that are not timed: they bring the ranks together, and the caches back.
    """
    # This process may be held when the benchmark is killed, and would stay so.
    die_with_parent()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ[SOCKET])
        with connection.makefile("rw") as lines:
            _say(lines, {"job": os.environ[JOB], "rank": rank, "pid": os.getpid()})
            while True:
                turn = json.loads(lines.readline() or '{"steps": 0}')
                if not turn["steps"]:
                    return
                for _ in range(turn["untimed"]):
                    yield
                start_s = time.perf_counter()
                for _ in range(turn["steps"]):
                    yield
                _say(lines, {"ms_per_step": (time.perf_counter() - start_s) * 1000 / turn["steps"]})


def _say(lines: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=lines, flush=True)  # type: ignore[call-overload]
