"""Operations that wait for other ranks: which one a rank is in, for how long, and what the others do meanwhile."""

from __future__ import annotations

import dataclasses
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from hvdtrain.failure.record import FRAME, STALL, Failure, name_ranks

STACK_FRAMES = 12
# A report stays readable on one screen: so many stacks are shown, the other ranks get a line.
STACKS_SHOWN = 4
_STATES = {
    "finished": "has finished its part and left",
    "absent": "has never connected",
    "mute": "gives no answer (stopped, or busy in native code that holds the interpreter)",
}


class Operation:
    """One guarded operation, as a context manager. Entering and leaving take no system call and no lock."""

    __slots__ = ("_watch", "abort_at_s", "age_s", "name", "thread", "warn_at_s")

    def __init__(self, watch: OperationWatch, name: str) -> None:
        self._watch = watch
        self.name = name
        self.thread = 0
        self.age_s = 0.0
        # Set by the monitor when it has spoken: when to speak again.
        self.warn_at_s = self.abort_at_s = 0.0

    def __enter__(self) -> Operation:
        self.thread = threading.get_ident()
        # Assignment and deletion of a key are atomic under CPython, so threads need no lock here.
        self._watch.running[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._watch.running[id(self)]
        if error is not None:
            self._watch.note_error(error, self.name)


class OperationWatch:
    """The operations that this process is in.

    Ages are counted by the thread that calls `advance`, not by a clock: while the process is stopped (Ctrl-Z, a
    suspended job or machine) nothing ages, so its awakening raises no alarm.
    """

    def __init__(self) -> None:
        self.running: dict[int, Operation] = {}
        self._failed_in: tuple[int, str] = (0, "")

    def operation(self, name: str) -> Operation:
        """A context manager around a call that waits for other ranks, named as in ``all_reduce 'loss'``."""
        return Operation(self, name)

    def advance(self, passed_s: float) -> Operation | None:
        """Let ``passed_s`` seconds pass; returns the operation that waits longest."""
        operations = list(self.running.values())
        for operation in operations:
            operation.age_s += passed_s
        return max(operations, key=lambda operation: operation.age_s, default=None)

    def note_error(self, error: BaseException, name: str) -> None:
        """Remember that ``error`` left the operation ``name``; of nested operations the innermost counts."""
        if self._failed_in[0] != id(error):
            self._failed_in = (id(error), name)

    def operation_of(self, error: BaseException) -> str:
        """The operation that ``error`` came out of; empty where it came from elsewhere."""
        return self._failed_in[1] if self._failed_in[0] == id(error) else ""

    def whereabouts(self) -> dict[str, Any]:
        """What this process does now: its operations, each with its stack, else the stack of its main thread."""
        frames = sys._current_frames()
        main = threading.main_thread().ident or 0
        operations = list(self.running.values())
        return {
            "operations": [
                {"name": each.name, "age_s": each.age_s, "stack": _stack(frames.get(each.thread))}
                for each in operations
            ],
            "stack": "" if any(each.thread == main for each in operations) else _stack(frames.get(main)),
        }


def _stack(frame: Any) -> str:
    return "".join(traceback.format_stack(frame)[-STACK_FRAMES:]).rstrip() if frame is not None else ""


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """What one rank answered, or why it has not: ``state`` is ``here``, ``finished``, ``absent`` or ``mute``."""

    rank: int
    host: str
    pid: int
    state: str = "here"
    operations: Sequence[Mapping[str, Any]] = ()
    stack: str = ""
    workers: str = ""

    def is_in(self, name: str) -> bool:
        """Whether this rank is in the operation ``name``."""
        return any(each["name"] == name for each in self.operations)

    @property
    def who(self) -> str:
        """``rank 1 (node-2, pid 4711)``."""
        return f"rank {self.rank}" + (f" ({self.host}, pid {self.pid})" if self.host else "")

    def doing(self) -> str:
        """What it does, as the end of a sentence that begins with its name."""
        if self.state != "here":
            return _STATES[self.state]
        if self.operations:
            return "is in " + ", ".join(f"{each['name']} for {each['age_s']:.0f} s" for each in self.operations)
        return "is in no operation"

    def stacks(self) -> str:
        """The Python stacks, innermost call last; those of its data-loader workers follow where they are known."""
        parts = [str(each["stack"]) for each in self.operations] + [self.stack, self.workers]
        return "\n".join(part for part in parts if part)


def missing_ranks(name: str, everyone: Sequence[Whereabouts]) -> list[int]:
    """The ranks that are not in the operation ``name``."""
    return [each.rank for each in everyone if not each.is_in(name)]


def stall_warning(name: str, age_s: float, by_rank: int, everyone: Sequence[Whereabouts], abort_s: float) -> str:
    """The text of a warning: who waits where, who is not there, and the stacks that explain it."""
    missing = missing_ranks(name, everyone)
    limit = f"; the job ends after {abort_s:g} s (stall_abort_s)" if abort_s else ""
    if missing:
        cause = f"{name_ranks(missing)} {'is' if len(missing) == 1 else 'are'} not there"
    elif len(everyone) > 1:
        cause = "every rank is in it: the network is slow or cut, or the ranks disagree about shapes or types"
    else:
        cause = "nothing is known of other ranks"
    head = f"hvdtrain: warning: rank {by_rank} has waited {age_s:.0f} s in {name}; {cause}{limit}"
    return "\n".join([head, *_describe(name, by_rank, everyone), ""])


def stall_failure(name: str, age_s: float, by_rank: int, everyone: Sequence[Whereabouts]) -> Failure:
    """The failure of a job that stalled: blames the first rank that did not arrive, or the waiting one if all did."""
    missing = missing_ranks(name, everyone)
    by = {each.rank: each for each in everyone}
    blamed = by[missing[0] if missing else by_rank]
    text = "\n".join(_describe(name, by_rank, everyone))
    if not missing:
        message = (
            f"waited {age_s:.0f} s in {name} with every other rank in it too: a slow or cut network, or a mismatch"
        )
    else:
        message = f"did not come to {name}, in which rank {by_rank} waited {age_s:.0f} s; it {_blame(blamed)}"
        if len(missing) > 1:
            message += f"; {name_ranks(missing[1:])} did not come either"
    return Failure(blamed.rank, blamed.host, blamed.pid, STALL, message, traceback=text, operation=name)


def _blame(where: Whereabouts) -> str:
    frames = list(FRAME.finditer(where.stack))
    if where.state == "here" and not where.operations and frames:
        return f"is in {frames[-1]['function']} ({frames[-1]['file']}:{frames[-1]['line']})"
    return where.doing()


def _describe(name: str, by_rank: int, everyone: Sequence[Whereabouts]) -> list[str]:
    shown = [each for each in everyone if each.rank == by_rank]
    shown += [each for each in everyone if not each.is_in(name) and each.rank != by_rank][: STACKS_SHOWN - 1]
    lines = []
    for each in shown:
        lines.append(f"  {each.who} {each.doing()}")
        lines += [f"  {line}" for line in each.stacks().splitlines()]
    others = [each for each in everyone if each not in shown]
    for there in (True, False):
        ranks = [each.rank for each in others if each.is_in(name) is there]
        if ranks:
            lines.append(f"  {name_ranks(ranks)}: {'in ' + name + ' too' if there else 'not there'}")
    return lines
