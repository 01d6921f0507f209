"""The launcher's end of one agent: the ssh process, orders to it, whole lines from it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence

from hvdtrain.launch.remote.environment import of_this_host
from hvdtrain.launch.remote.hosts import Share
from hvdtrain.launch.remote.protocol import Job


class Connection:
    """A started agent.

    Args:
        share: the host and its ranks.
        command: the line that runs the agent, over ssh or here.
        job: sent to it at once.
    """

    def __init__(self, share: Share, command: Sequence[str], job: Job) -> None:
        self.share = share
        # A session of its own: Ctrl-C in the terminal is ours to pass on, and an ssh that got it would drop the agent.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=of_this_host(os.environ),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout = self._process.stdout.fileno()
        self.stderr = self._process.stderr.fileno()
        self._stdin = self._process.stdin
        self._rest = {self.stdout: b"", self.stderr: b""}
        self.open = {self.stdout, self.stderr}
        # What the agent's own stderr said last: ssh's reason when a connection breaks.
        self.stderr_tail: list[str] = []
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(job.line())
            self._stdin.flush()
        # Nobody waits for an agent that has stopped reading.
        os.set_blocking(self._stdin.fileno(), False)

    def order(self, line: bytes) -> None:
        """Send a line; an agent that is gone is noticed elsewhere."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._stdin.fileno(), line)

    def read(self, stream: int) -> list[bytes]:
        """The lines that have become whole on one of the two streams; at its end it leaves `open`."""
        data = os.read(stream, 1 << 16)
        if not data:
            self.open.discard(stream)
            rest, self._rest[stream] = self._rest[stream], b""
            return [rest] if rest else []
        *lines, self._rest[stream] = (self._rest[stream] + data).split(b"\n")
        return lines

    def status(self) -> int | None:
        """The exit status, once it has ended."""
        return self._process.poll()

    def hang_up(self) -> None:
        """Close all streams: the agent notices, and ends its ranks and itself."""
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
        self.open.clear()

    def wait(self, limit_s: float) -> None:
        """Wait for the end of ssh, or of the agent where no ssh is needed; after `limit_s` it is killed."""
        try:
            self._process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def drop(connections: Sequence[Connection], limit_s: float) -> None:
    """Hang up on all agents, and give them `limit_s` seconds together to end what they have started."""
    for connection in connections:
        connection.hang_up()
    deadline = time.monotonic() + limit_s
    for connection in connections:
        connection.wait(deadline - time.monotonic())
