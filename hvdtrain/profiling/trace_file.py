"""One trace file of a rank: what torch.profiler saw, the phases of the steps, and the library's own timeline.

The Trace Event Format (JSON), which Perfetto and chrome://tracing read; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.profiling.step_clock import StepSpans, without

# Beyond this viewers become slow. What does not fit is left out, last steps first.
MAX_BYTES = 48 * 2**20
# Rows of ours have process ids that no process has (Linux: at most 2^22).
_PHASES_PID = 2**30
_TIMELINE_PID = 2**30 + 1
_PHASES_ROW, _REDUCTIONS_ROW = 1, 2
Event = dict[str, Any]


def assemble(recorded: dict[str, Any], steps: Sequence[StepSpans], timeline: str | None, rank: int) -> dict[str, Any]:
    """Add our rows to what torch.profiler exported.

    Args:
        recorded: its file.
        steps: the steps that lie in it.
        timeline: the text of the library's own timeline; None: there is none.
    """
    base_ns = int(recorded.get("baseTimeNanoseconds", 0))
    events: list[Event] = [*recorded["traceEvents"], *phase_events(steps, base_ns, rank)]
    if timeline is not None:
        events += timeline_events(timeline, base_ns)
    return {**recorded, "traceEvents": events}


def phase_events(steps: Sequence[StepSpans], base_ns: int, rank: int) -> Iterator[Event]:
    """Two rows: what the training thread was doing, and the reductions that were under way."""
    rows = {_PHASES_ROW: "training thread", _REDUCTIONS_ROW: "gradients under way"}
    yield from _names(_PHASES_PID, f"hvdtrain, rank {rank}: steps", -2, rows)
    for number, step in enumerate(steps, 1):
        yield _slice(f"step ({number} of {len(steps)})", _PHASES_ROW, step.start_ns, step.end_ns, base_ns)
        waits = step.waits
        for name, start, end in step.spans:
            if name != "communication":
                for part in without((start, end), waits):
                    yield _slice(name.replace("_", " "), _PHASES_ROW, *part, base_ns)
        for start, end in waits:
            yield _slice("communication (not hidden)", _PHASES_ROW, start, end, base_ns)
        for reduction in step.reductions:
            start, end = reduction.started_ns, reduction.finished_ns
            yield _slice("communication", _REDUCTIONS_ROW, start, end, base_ns)


def timeline_events(text: str, base_ns: int) -> Iterator[Event]:
    """The events of Horovod's timeline: one row per tensor instead of one process per tensor."""
    events = parse_timeline(text)
    names: dict[int, str] = {}
    start_us = 0.0
    for event in events:
        if event.get("name") == "process_name":
            names[event["pid"]] = event["args"].get("name", "cycles")
            start_us = float(event["args"].get("start_time_since_epoch_in_micros", start_us))
    yield from _names(_TIMELINE_PID, "Horovod's timeline, rank 0", -1, names)
    shift_us = start_us - base_ns / 1000
    for event in events:
        if "ts" in event:
            yield {"cat": "horovod", **event, "ts": event["ts"] + shift_us, "pid": _TIMELINE_PID, "tid": event["pid"]}


def parse_timeline(text: str) -> list[Event]:
    """Horovod's file, also one that was not finished: the array may lack its end."""
    text = text.strip()
    try:
        parsed: list[Event] = json.loads(text)
    except ValueError:
        whole = text.rpartition("}")[0] + "}]"
        try:
            parsed = json.loads(whole)
        except ValueError:
            # Cut in the middle of an event: the last complete line is what ends well.
            parsed = json.loads(text[: text.rfind("\n")].rstrip().rstrip(",").removesuffix("]") + "]")
    return [event for event in parsed if event]


def _names(pid: int, process: str, order: int, rows: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}
    for tid, name in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(name: str, row: int, start_ns: int, end_ns: int, base_ns: int) -> Event:
    return {
        "ph": "X", "cat": "hvdtrain", "name": name, "pid": _PHASES_PID, "tid": row,
        "ts": (start_ns - base_ns) / 1000, "dur": max(0, end_ns - start_ns) / 1000,
    }  # fmt: skip


def to_bytes(trace: dict[str, Any], steps: Sequence[StepSpans], max_bytes: int = MAX_BYTES) -> bytes:
    """The file's content within the limit: the last steps are left out; where one is too much, its operations are."""
    content = _dump(trace)
    kept = len(steps)
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    while len(content) > max_bytes and kept > 1:
        kept = max(1, min(kept - 1, kept * max_bytes // len(content)))
        end_us = (steps[kept - 1].end_ns - base_ns) / 1000
        trace = {**trace, "traceEvents": list(_before(trace["traceEvents"], end_us))}
        content = _dump(trace)
    if len(content) > max_bytes:
        events = trace["traceEvents"]
        ours = [event for event in events if event.get("cat") in ("hvdtrain", "user_annotation") or event["ph"] == "M"]
        content = _dump({**trace, "traceEvents": ours})
    return content


def _before(events: Iterable[Event], end_us: float) -> Iterator[Event]:
    return (event for event in events if float(event.get("ts", 0.0)) < end_us)


def _dump(trace: dict[str, Any]) -> bytes:
    return json.dumps(trace, separators=(",", ":")).encode()


def read_recorded(path: Path) -> dict[str, Any]:
    """What torch.profiler exported."""
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded
