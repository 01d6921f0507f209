"""The lines between launcher and agent.

Launcher to agent, JSON a line: first the job (Job), then orders: {"do": "ping"}, {"do": "signal", "signal": N} (to
every rank), {"do": "end"} (terminate, then kill, then leave). The end of the stream is an order to end, too.

Agent to launcher, a line each, the first byte tells the kind:

    o RANK TEXT     a line that the rank wrote to stdout
    e RANK TEXT     a line that it wrote to stderr
    s RANK PID      the rank started
    x RANK STATUS   it ended; STATUS is negative for a signal
    f TEXT          the agent itself failed
"""

from __future__ import annotations

import dataclasses
import json

# The launcher says something at least this often; an agent that hears nothing for SILENCE_S is cut off and ends.
PING_S = 5.0
SILENCE_S = 20.0
# Between SIGTERM and SIGKILL when a job is ended because something failed.
GRACE_S = 5.0


@dataclasses.dataclass(frozen=True)
class Job:
    """The part of one host in a job."""

    run_id: str
    num_nodes: int
    node_rank: int
    first_rank: int
    num_ranks: int
    root_address: str
    root_port: int
    folder: str
    environment: dict[str, str]
    command: list[str]
    start_timeout_s: float

    def line(self) -> bytes:
        """The job as the first line to the agent."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Job:
        """The job that `line` holds."""
        return cls(**json.loads(line))


def order(do: str, **more: int) -> bytes:
    """An order to the agent."""
    return json.dumps({"do": do, **more}).encode() + b"\n"


def report(kind: str, rank: int, text: bytes) -> bytes:
    """A line to the launcher; `text` holds no newline."""
    return f"{kind} {rank} ".encode() + text + b"\n"


def read_report(line: bytes) -> tuple[str, int, bytes] | None:
    """(kind, rank, text) of an agent's line (rank -1 where it has none); None for any other line."""
    words = line.rstrip(b"\n").split(b" ", 2)
    if words[0] == b"f":
        return "f", -1, line.rstrip(b"\n")[2:]
    if len(words) < 3 or words[0] not in (b"o", b"e", b"s", b"x") or not words[1].isdigit():
        return None
    return words[0].decode(), int(words[1]), words[2]
