"""The spans of a step: what the training thread was doing, and what was under way beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

from hvdtrain.backends.reductions import Reduction

DATA_WAIT, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER = PHASES = (
    "data_wait",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "other",
)
Interval = tuple[int, int]


@dataclasses.dataclass
class StepSpans:
    """One step. Times: nanoseconds since the epoch.

    Attributes:
        start_ns, end_ns: from asking for the step's data to asking for the next step's.
        spans: (phase, start, end) of the training thread; they do not overlap but for backward and communication.
        reductions: of the step's backward passes.
        disturbed: an evaluation or a checkpoint lies in it or just before it, and ranks wait for each other there.
    """

    start_ns: int
    end_ns: int = 0
    spans: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    reductions: list[Reduction] = dataclasses.field(default_factory=list)
    disturbed: bool = False

    @property
    def waits(self) -> list[Interval]:
        """When the training thread did nothing but wait for communication."""
        after_computing = [(max(r.started_ns, r.computed_ns), r.finished_ns) for r in self.reductions]
        return merged([*after_computing, *((start, end) for name, start, end in self.spans if name == COMMUNICATION)])

    @property
    def under_way(self) -> list[Interval]:
        """When communication was under way, hidden or not: from a reduction's first gradients to its last."""
        return merged([*((r.started_ns, r.finished_ns) for r in self.reductions), *self.waits])

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase; together the whole step.

        `communication` is what is not hidden: what lies in `waits`. It counts for no other phase.
        """
        waits = self.waits
        found = dict.fromkeys(PHASES, 0)
        for name, start, end in self.spans:
            if name != COMMUNICATION:
                found[name] += length(without((start, end), waits))
        found[COMMUNICATION] = length(waits)
        found[OTHER] = max(0, self.end_ns - self.start_ns - sum(found.values()))
        return {name: nanoseconds / 1e9 for name, nanoseconds in found.items()}


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as intervals in order that do not touch; empty ones are dropped."""
    union: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(intervals: Iterable[Interval]) -> int:
    """The sum of the lengths."""
    return sum(end - start for start, end in intervals)


def without(interval: Interval, union: Iterable[Interval]) -> list[Interval]:
    """The parts of the interval that lie outside a union (see `merged`)."""
    parts, at = [], interval[0]
    for start, end in union:
        if end > at and start < interval[1]:
            parts.append((at, start))
            at = end
    parts.append((at, interval[1]))
    return [part for part in parts if part[1] > part[0]]


class StepClock:
    """Collects the spans of the step that is going on, and hands them over when the next one begins.

    Args:
        settle: called before the end of a span is read: on an accelerator it waits for what was queued.
        on_step: gets each complete step; its own time counts for no step.
        before_step: called before each step; likewise.
    """

    def __init__(
        self, settle: Callable[[], None], on_step: Callable[[StepSpans], None], before_step: Callable[[], None]
    ) -> None:
        self._settle, self._on_step, self._before_step = settle, on_step, before_step
        self._step: StepSpans | None = None
        self._disturbed = False

    def next_step(self) -> None:
        """The data of the next step is asked for."""
        self.end()
        self._before_step()
        self._step = StepSpans(time.time_ns(), disturbed=self._disturbed)
        self._disturbed = False

    def end(self) -> None:
        """The step that was going on is over; if another follows, `next_step` tells."""
        step, self._step = self._step, None
        # A step without a microbatch is an epoch's end that was found out by asking.
        if step is not None and any(name == OPTIMIZER for name, _, _ in step.spans):
            step.end_ns = time.time_ns()
            step.disturbed |= self._disturbed
            self._on_step(step)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Encloses a phase."""
        start_ns = time.time_ns()
        try:
            yield
        finally:
            self._settle()
            self.add(name, start_ns, time.time_ns())

    def now(self) -> int:
        """This moment, once everything that was queued is done."""
        self._settle()
        return time.time_ns()

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """A phase that is over."""
        if self._step is not None:
            self._step.spans.append((name, start_ns, end_ns))

    def add_reductions(self, reductions: Iterable[Reduction]) -> None:
        """What a ReductionWatch gave."""
        if self._step is not None:
            self._step.reductions.extend(reductions)

    def disturb(self) -> None:
        """An evaluation or a checkpoint: neither this step nor the next shows what a step costs."""
        self._disturbed = True
