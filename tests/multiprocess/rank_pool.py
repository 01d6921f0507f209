"""Real ranks that outlive one test: what they cost to start is paid once for a whole test session.

    def test_sum(pool2):                              # under every backend
        def work(backend):
            return backend.all_reduce(torch.tensor(backend.world.rank + 1)).item()
        assert pool2.run(work) == [3, 3]

The function is sent to every rank by value (cloudpickle) and gets the connected backend first.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import cloudpickle

WORKER = Path(__file__).with_name("rank_worker.py")
START_LIMIT_S = 120.0
CLOSE_LIMIT_S = 60.0


class RankError(AssertionError):
    """What a rank raised, with its traceback. `kind` and `text` are of the original error."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank} raised {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


class RankPool:
    """`size` processes, connected under one backend: ddp, horovod, or hvd (the horovod backend over hvdtrain.hvd)."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self._closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-pool-")
        folder = Path(self._folder.name)
        with Listener(str(folder / "socket"), "AF_UNIX") as listener:
            self._processes = [self._start(folder, rank) for rank in range(size)]
            arrived: dict[int, Connection] = {}
            while len(arrived) < size:
                connection = listener.accept()
                arrived[connection.recv()] = connection
        self._connections = [arrived[rank] for rank in range(size)]
        for rank in range(size):
            assert self._receive(rank, START_LIMIT_S) == "ready"

    def _start(self, folder: Path, rank: int) -> subprocess.Popen[bytes]:
        arguments = [str(folder / "socket"), self.kind, str(rank), str(self.size), str(folder / "meeting")]
        return subprocess.Popen([sys.executable, str(WORKER), *arguments])

    @property
    def is_alive(self) -> bool:
        """Whether all ranks are there; a test that broke one must not break the tests after it."""
        return all(process.poll() is None for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `function(backend, *args, **kwargs)` on every rank; the results in rank order.

        Raises:
            RankError: of the lowest rank that raised, or did not answer in time (the pool is then ended).
        """
        outcomes = self.run_all(function, *args, limit_s=limit_s, **kwargs)
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                raise outcome
        return outcomes

    def run_all(self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """As `run`, but a rank that raised gives its RankError as its result."""
        request = cloudpickle.dumps((function, args, kwargs))
        for connection in self._connections:
            connection.send(request)
        outcomes: list[Any] = []
        for rank in range(self.size):
            worked, value = cloudpickle.loads(self._receive(rank, limit_s))
            outcomes.append(value if worked else RankError(rank, *value))
        return outcomes

    def _receive(self, rank: int, limit_s: float) -> Any:
        if not self._connections[rank].poll(limit_s):
            self.kill()
            raise RankError(rank, "TimeoutError", f"no answer within {limit_s:g} s", "")
        try:
            return self._connections[rank].recv()
        except EOFError:
            status = self._processes[rank].wait(10)
            self.kill()
            raise RankError(rank, "EOFError", f"the process ended with status {status}", "") from None

    def start_closing(self) -> None:
        """Tell the ranks to end, without waiting."""
        if self.is_alive and not self._closing:
            self._closing = True
            for connection in self._connections:
                connection.send(None)

    def close(self) -> None:
        """End the ranks; each must leave with status 0."""
        self.start_closing()
        if not self._closing:
            self.kill()
            return
        for rank in range(self.size):
            assert self._receive(rank, CLOSE_LIMIT_S) == "closed"
        statuses = [process.wait(CLOSE_LIMIT_S) for process in self._processes]
        self._folder.cleanup()
        assert statuses == [0] * self.size, f"ranks under {self.kind} ended with {statuses}"

    def kill(self) -> None:
        """End what is left, without grace."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()
