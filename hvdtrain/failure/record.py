"""What is known about the one failure that ended the job."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import traceback as traceback_module
from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.errors import EXIT_FAILED, CollectiveError, HvdtrainError, PeerLost, UserError

EXCEPTION = "exception"
SIGNAL = "signal"
EARLY_EXIT = "early_exit"
SILENT = "silent"
STALL = "stall"

# What the communication libraries say when the other end of a connection has gone. An error with such a text is a
# consequence until proven otherwise: its rank waits a moment for a better explanation. A wrong match costs two seconds.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused|timed out)|closed by peer|broken pipe|socket closed|gloo[/:]|\bnccl\b|"
    r"timed out (after )?waiting|operation timed out|horovod has been shut down|has been aborted|remote process exited|"
    r"\bMPI_|heartbeat|TCPStore|store\.cpp",
    re.IGNORECASE,
)
_CONSEQUENCE_TYPES = frozenset({"HorovodInternalError", "DistBackendError", "DistNetworkError", "DistStoreError"})

# The first line that `faulthandler` writes for each deadly signal (CPython, Modules/faulthandler.c).
_FAULT_NAMES = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
_OWN_THREAD = re.compile(r"hvdtrain/failure/(monitor|hub)\.py")


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first failure of a job: who, how, and where it was.

    Attributes:
        rank: the rank that is to blame.
        host: the host it ran on.
        pid: its process id there.
        kind: ``exception`` | ``signal`` | ``early_exit`` | ``silent`` | ``stall``.
        message: what happened, without the rank: ``ValueError: bad batch``.
        traceback: Python stack or traceback; empty where nothing could be learnt.
        operation: the guarded operation it was in (``all_reduce 'loss'``); empty outside of one.
        secondary: likely a consequence of another rank's failure.
        exit_status: what every process of the job exits with.
        also_ranks: other ranks that failed with the same message at the same time.
    """

    rank: int
    host: str
    pid: int
    kind: str
    message: str
    traceback: str = ""
    operation: str = ""
    secondary: bool = False
    exit_status: int = EXIT_FAILED
    also_ranks: tuple[int, ...] = ()

    @property
    def who(self) -> str:
        """``rank 1 (node-2, pid 4711)``."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def sentence(self) -> str:
        """One line that says who failed and how."""
        first_line = next((line.strip() for line in self.message.splitlines() if line.strip()), "")
        if self.kind == EXCEPTION:
            text = f"{self.who} failed: {first_line or 'no message'}"
            if self.operation:
                text += f" [in {self.operation}]"
        else:
            text = f"{self.who} {first_line}"
        if self.also_ranks:
            text += f" ({name_ranks(self.also_ranks)} likewise)"
        return text

    def report(self) -> str:
        """The whole report: the traceback of the rank to blame, then the sentence as the last line."""
        lines = []
        if self.traceback.strip():
            title = "where the ranks are" if self.kind == STALL else self.who
            lines += [f"hvdtrain: {title}:", self.traceback.strip("\n")]
        return "\n".join([*lines, f"hvdtrain: {self.sentence()}", ""])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the wire and for ``summary.json``."""
        return {**dataclasses.asdict(self), "also_ranks": list(self.also_ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Failure:
        """The inverse of `to_dict`."""
        return cls(**{**values, "also_ranks": tuple(values.get("also_ranks", ()))})

    @classmethod
    def from_exception(cls, error: BaseException, rank: int, host: str, operation: str = "") -> Failure:
        """The failure of this process because of ``error``; a `SystemExit` is an early exit."""
        place: dict[str, Any] = {"rank": rank, "host": host, "pid": os.getpid(), "operation": operation}
        if isinstance(error, SystemExit):
            status = error.code if error.code is not None else 0
            stack = "".join(traceback_module.format_tb(error.__traceback__))
            return cls(
                **place,
                kind=EARLY_EXIT,
                traceback=stack,
                message=f"exited early, before the job's end: exit({status!r})",
            )
        # A mistake in the input needs no stack of ours to be understood.
        stack = "" if isinstance(error, UserError) else "".join(traceback_module.format_exception(error))
        text = str(error)
        name = type(error).__name__
        return cls(
            **place,
            kind=EXCEPTION,
            message=f"{name}: {text}" if text else name,
            traceback=stack,
            secondary=is_consequence(error),
            exit_status=error.exit_status if isinstance(error, HvdtrainError) else EXIT_FAILED,
        )

    @classmethod
    def from_fault(cls, text: str, rank: int, host: str, pid: int) -> Failure:
        """The failure of a process whose `faulthandler` wrote ``text`` in its last moment."""
        first_line, _, rest = text.partition("\n")
        name = first_line.removeprefix("Fatal Python error:").strip()
        stacks = _useful_stacks(rest)
        number = _FAULT_NAMES.get(name)
        what = describe_signal(number) if number else name or "a deadly signal"
        frame = FRAME.search(stacks[-1]) if stacks else None
        if frame:
            what += f" in {frame['function']} ({frame['file']}:{frame['line']})"
        if number == signal.SIGABRT:
            what += "; a library gave up: its own message is further up in that rank's output"
        aborted = number == signal.SIGABRT
        return cls(rank, host, pid, SIGNAL, f"died: {what}", traceback="\n\n".join(stacks), secondary=aborted)


def _useful_stacks(text: str) -> list[str]:
    """The stacks that faulthandler wrote, one per thread: the one that crashed last, our own background threads not."""
    blocks = [block.strip("\n") for block in text.split("\n\n") if '  File "' in block]
    blocks = [block for block in blocks if not _OWN_THREAD.search(block)]
    return sorted(blocks, key=lambda block: block.startswith("Current thread"))


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` looks like the echo of another rank's failure (a connection that was closed)."""
    if isinstance(error, (CollectiveError, PeerLost, ConnectionError)):
        return True
    names = {base.__name__ for base in type(error).__mro__}
    if names & _CONSEQUENCE_TYPES:
        return True
    return isinstance(error, RuntimeError) and bool(_CONSEQUENCE.search(str(error)))


def describe_signal(number: int) -> str:
    """``SIGSEGV (signal 11)``."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
