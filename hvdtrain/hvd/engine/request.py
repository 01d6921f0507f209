"""What a rank announces, and what it keeps of it until the result is there."""

from __future__ import annotations

import enum
import math
import threading
from typing import Any

import torch

from hvdtrain.hvd.common.exceptions import HorovodInternalError


class Kind(str, enum.Enum):
    """The operations that are negotiated; the value is the prefix of the operation's name."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    ADD_SET = "add_process_set"
    REMOVE_SET = "remove_process_set"
    PLAN = "plan"


# Fields that must be equal on all ranks, in the order in which `Entry.strict` lists them. Shapes leave out the first
# dimension where it may differ between ranks.
STRICT_FIELDS: dict[str, tuple[str, ...]] = {
    "allreduce": ("dtype", "shape", "device", "op", "prescale_factor", "postscale_factor"),
    "allgather": ("dtype", "shape after the first dimension", "device"),
    "broadcast": ("dtype", "shape", "device", "root rank"),
    "alltoall": ("dtype", "shape after the first dimension", "device"),
    "reducescatter": ("dtype", "shape", "device", "op", "prescale_factor", "postscale_factor"),
    "barrier": (),
    "add_process_set": ("ranks",),
    "remove_process_set": ("process set id",),
    "plan": ("parameters", "options"),
}

# Numbers of Horovod's reduction operations, as scripts may print or compare them.
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The data thread and a failure noticed by the control thread may finish an entry at the same time.
_finish_lock = threading.Lock()


class Entry:
    """One submitted operation on this rank: its tensors, its metadata and, in the end, its result or error.

    Attributes:
        strict: metadata that every rank must share, in the order of STRICT_FIELDS.
        varying: metadata that may differ (rows per tensor for allgather, splits for alltoall, a plan's details).
        inputs: what this rank contributes.
        outputs: where the results go; None where their size is known only after the negotiation.
        result: what `synchronize` returns.
    """

    __slots__ = (
        "_lock",
        "done",
        "done_event",
        "error",
        "inputs",
        "kind",
        "name",
        "op",
        "outputs",
        "postscale",
        "prescale",
        "ready_event",
        "result",
        "root",
        "set_id",
        "single",
        "splits",
        "strict",
        "varying",
    )

    def __init__(
        self,
        kind: Kind,
        name: str,
        set_id: int,
        strict: list[Any],
        *,
        varying: Any = None,
        inputs: list[torch.Tensor] | None = None,
        outputs: list[torch.Tensor] | None = None,
        single: bool = True,
        op: int = SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: torch.Tensor | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.set_id = set_id
        self.strict = strict
        self.varying = varying
        self.inputs = inputs or []
        self.outputs = outputs
        self.single = single
        self.op = op
        self.prescale = prescale
        self.postscale = postscale
        self.root = root
        self.splits = splits
        self.result: Any = None
        self.error: str | None = None
        self.done = False
        # Device work: recorded when the inputs are ready, and when the results are.
        self.ready_event: torch.cuda.Event | None = None
        self.done_event: torch.cuda.Event | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def finish(self, result: Any = None, error: str | None = None) -> None:
        """Wake whoever waits. Only the first call counts."""
        with _finish_lock:
            if self.done:
                return
            self.result = result
            self.error = error
            self.done = True
            self.inputs = []
        self._lock.release()

    def wait(self, timeout_s: float = -1) -> Any:
        """Block until the result is there.

        Raises:
            HorovodInternalError: the operation failed, or ranks disagree.
            TimeoutError: not finished within timeout_s (negative: no limit).
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError(f"{self.name}: not finished after {timeout_s:g} s")
        self._lock.release()
        if self.error is not None:
            raise HorovodInternalError(self.error)
        if self.done_event is not None:
            torch.cuda.current_stream().wait_event(self.done_event)
        return self.result


def shape_numel(shape: list[int]) -> int:
    return math.prod(shape)
