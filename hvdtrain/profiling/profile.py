"""A profile of one session of a job, on one rank: `watch` what the trainer calls, then `finish`."""

from __future__ import annotations

import dataclasses
import gzip
import logging
import time
from pathlib import Path
from typing import Any

from hvdtrain.backends import Backend, Replica
from hvdtrain.checkpoint.atomic import atomic_write
from hvdtrain.data.feed import Feed
from hvdtrain.profiling.breakdown import Totals, markdown_table, summarize, text_table
from hvdtrain.profiling.step_clock import StepClock, StepSpans
from hvdtrain.profiling.tracer import Tracer, settle
from hvdtrain.profiling.watched import WatchedShow, watch

logger = logging.getLogger(__name__)
# Steps at the start of a session are slower: buckets are rebuilt, caches filled.
_WARM_UP = 5
# Untraced steps that make a mean; with fewer, traced ones are taken.
_ENOUGH = 5
# Points of a curve in TensorBoard.
_MAX_POINTS = 1000


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What came out.

    Attributes:
        summary: see `breakdown.summarize`, and "traces": paths in the output folder; for summary.json.
        text: the table for the terminal.
        markdown: the table for TensorBoard.
        points: (step, wall time, {phase: ms}) over the session, of this rank, for TensorBoard.
    """

    summary: dict[str, Any]
    text: str
    markdown: str
    points: list[tuple[int, float, dict[str, float]]]


class Profile:
    """See above.

    Args:
        every_steps: steps between the points of the curves.
    """

    def __init__(self, backend: Backend, output: Path, *, every_steps: int) -> None:
        self._backend, self._output, self._every = backend, output, every_steps
        self._tracer = Tracer(backend, None)
        self._clock = StepClock(lambda: settle(backend.device), self._count, self._before_step)
        self._first_step = self._num_steps = 0
        self._usual, self._traced, self._recent = Totals(), Totals(), Totals()
        self._points: list[tuple[int, float, dict[str, float]]] = []

    def plan(self, first_step: int, total_steps: int | None) -> None:
        """Say where the session begins and, unless nobody knows, where it ends; before its first step."""
        self._first_step = first_step
        self._tracer = Tracer(self._backend, None if total_steps is None else max(0, total_steps - first_step))

    def watch(self, task: Any, backend: Backend, replica: Replica, feed: Feed) -> tuple[Any, Any, Any, Any]:
        """Stand-ins for these four, to be used in their place for training steps."""
        return watch(task, backend, replica, feed, self._clock)

    def watch_show(self, show: Any) -> Any:
        """A stand-in for what shows the run."""
        return WatchedShow(show, self._clock)

    def _before_step(self) -> None:
        self._tracer.before_step(self._num_steps)

    def _count(self, step: StepSpans) -> None:
        self._tracer.after_step(step)
        number = self._num_steps
        self._num_steps += 1
        if step.disturbed:
            return
        if self._tracer.slows(number):
            self._traced.add(step)
        elif number >= _WARM_UP:
            self._usual.add(step)
            self._recent.add(step)
        if self._num_steps % self._every == 0 and self._recent.num_steps:
            self._points.append((self._first_step + self._num_steps, time.time(), self._recent.take()))
            if len(self._points) > _MAX_POINTS:
                # Every second one, and from now on half as many.
                self._points = self._points[::2]
                self._every *= 2

    def finish(self) -> Profiled | None:
        """The session is over. Collective. The root writes the traces. None: no step can be told about."""
        self._clock.end()
        self._tracer.finish()
        mine = ((self._usual.num_steps, self._usual.mean_ms()), (self._traced.num_steps, self._traced.mean_ms()))
        ranks = self._backend.all_gather_object(mine)
        enough = all(usual[0] >= _ENOUGH for usual, _ in ranks)
        summary = summarize([usual if enough else traced for usual, traced in ranks], traced=not enough)
        traces = self._write_traces()
        if summary is None:
            logger.warning("--profile: the session had too few steps to tell where their time goes")
            return None
        summary["traces"] = traces
        return Profiled(summary, text_table(summary), markdown_table(summary), self._points)

    def _write_traces(self) -> list[str]:
        """Every rank's trace travels to the root, which alone writes into the output folder. Collective."""
        names = []
        for rank in range(self._backend.world.size):
            is_mine = rank == self._backend.world.rank
            content = self._tracer.content if is_mine else None
            packed = None if content is None else gzip.compress(content, compresslevel=1)
            packed = self._backend.broadcast_object(packed, root=rank)
            if packed is None:
                continue
            names.append(f"traces/rank-{rank}.json")
            if self._backend.world.is_root:
                with atomic_write(self._output / names[-1]) as file:
                    file.write(gzip.decompress(packed))
        return names
