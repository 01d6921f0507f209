"""torch.profiler over a few steps, with the library's own timeline over the same steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from hvdtrain.backends import Backend
from hvdtrain.profiling.step_clock import StepSpans
from hvdtrain.profiling.trace_file import assemble, read_recorded, to_bytes

# Steps that are recorded; before them steps that warm up the job, and steps that warm up the profiler.
NUM_STEPS = 10
_JOB_WARM_UP = 20
_PROFILER_WARM_UP = 2


class Tracer:
    """Records steps `first` to `first + count - 1` of this session, counted from 0.

    Args:
        num_steps: that the session will have; None: nobody knows.

    Attributes:
        content: the trace file, once the steps are over; None: they were not reached.
    """

    def __init__(self, backend: Backend, num_steps: int | None) -> None:
        self._backend = backend
        self.first, self.count = plan(num_steps)
        self.content: bytes | None = None
        self._steps: list[StepSpans] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-trace-")
        self._recorded = Path(self._folder.name) / "torch.json"
        self._timeline = Path(self._folder.name) / "timeline.json"
        self._next = 0
        activities = [ProfilerActivity.CPU]
        if backend.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        warm_up = min(_PROFILER_WARM_UP, self.first)
        self._profiler: Any = profile(
            activities=activities,
            schedule=schedule(wait=self.first - warm_up, warmup=warm_up, active=self.count, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self._recorded)),
        )
        self._is_recording = False

    def slows(self, step: int) -> bool:
        """Whether step `step` of the session (from 0) is slower than usual because of this."""
        return self.first - _PROFILER_WARM_UP <= step <= self.first + self.count

    def before_step(self, step: int) -> None:
        """Step `step` of the session (from 0) is about to begin. A second call for the same step does nothing."""
        if self._profiler is None or step < self._next:
            return
        if step == 0:
            self._profiler.start()
        else:
            self._profiler.step()
        if step == self.first:
            self._is_recording = True
            self._backend.start_timeline(self._timeline)
        elif step == self.first + self.count:
            self.finish()
        self._next = step + 1

    def after_step(self, step: StepSpans) -> None:
        """A step is over."""
        if self._is_recording:
            self._steps.append(step)

    def finish(self) -> None:
        """End the recording, if it goes on; what there is becomes the content. Not collective."""
        profiler, self._profiler = self._profiler, None
        if profiler is None or self._next == 0:
            return
        self._backend.stop_timeline()
        self._is_recording = False
        profiler.stop()
        if self._steps and self._recorded.exists():
            timeline = self._timeline.read_text() if self._timeline.exists() else None
            trace = assemble(read_recorded(self._recorded), self._steps, timeline, self._backend.world.rank)
            self.content = to_bytes(trace, self._steps)
        self._folder.cleanup()


def plan(num_steps: int | None) -> tuple[int, int]:
    """(first step, number of steps) to record in a session of so many steps."""
    if num_steps is None or num_steps >= _JOB_WARM_UP + NUM_STEPS:
        return _JOB_WARM_UP, NUM_STEPS
    first = num_steps // 3
    return first, max(1, min(NUM_STEPS, num_steps - first))


def settle(device: torch.device) -> None:
    """Wait for what was queued on an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
