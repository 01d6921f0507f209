"""The launcher's end of one agent: the ssh process, orders to it, whole lines from it."""

from __future__ import annotations

import contextlib
import os
import subprocess
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
        self.order(job.line())

    def order(self, line: bytes) -> None:
        """Send a line; an agent that is gone is noticed elsewhere."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stdin.write(line)
            self._stdin.flush()

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

    def drop(self) -> None:
        """Close the order stream and kill our end: the agent ends by itself when it notices."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Give the descriptors back."""
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
