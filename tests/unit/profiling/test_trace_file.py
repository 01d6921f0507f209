"""The trace: our rows beside torch's, Horovod's timeline in the same clock, and a size that is bounded."""

from __future__ import annotations

import json

import pytest

from hvdtrain.backends.reductions import Reduction
from hvdtrain.profiling.step_clock import StepSpans
from hvdtrain.profiling.trace_file import assemble, parse_timeline, to_bytes
from hvdtrain.profiling.tracer import plan

US = 1000
BASE = 1_000_000 * US
TIMELINE = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1000500}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.w"}},
{"ph": "B", "name": "ALLREDUCE", "ts": 10, "pid": 1},{"ph": "E", "ts": 30, "pid": 1},
{"ph": "B", "name": "ALLREDUCE", "ts": 40, "pid": 1},{"ph": "E", "ts": 60, "pid": 1}]"""


def step(start, end):
    spans = [("backward", BASE + start, BASE + end - 10 * US), ("optimizer", BASE + end - 10 * US, BASE + end)]
    return StepSpans(
        BASE + start, BASE + end, spans, [Reduction(BASE + start, BASE + end - 20 * US, BASE + end - 10 * US)]
    )


def operations(*times_us):
    return [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7, "ts": t, "dur": 1} for t in times_us]


def recorded(events):
    return {"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": events}


def slices(trace, name):
    return [(e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == name]


def test_our_rows_are_in_torchs_clock():
    trace = assemble(recorded(operations(5)), [step(0, 100 * US)], None, 3)
    assert slices(trace, "step (1 of 1)") == [(0, 100)]
    # From 80 us on backward() only waits.
    assert slices(trace, "backward") == [(0, 80)]
    assert slices(trace, "communication (not hidden)") == [(80, 10)]
    assert slices(trace, "communication") == [(0, 90)]
    assert slices(trace, "optimizer") == [(90, 10)]
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["hvdtrain, rank 3: steps"]


def test_horovods_timeline_is_in_the_same_clock():
    trace = assemble(recorded([]), [step(0, 100 * US)], TIMELINE, 0)
    found = [(e["ph"], e["ts"], e["tid"]) for e in trace["traceEvents"] if e.get("cat") == "horovod"]
    # It began 500 us after torch's clock.
    assert found == [("B", 510, 1), ("E", 530, 1), ("B", 540, 1), ("E", 560, 1)]
    rows = [e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "thread_name" and e["pid"] != 2**30]
    assert "allreduce.w" in rows


@pytest.mark.parametrize("cut", [1, 2, 20, 40])
def test_a_timeline_that_was_not_finished(cut):
    found = parse_timeline(TIMELINE[:-cut])
    assert {"ph": "E", "ts": 30, "pid": 1} in found


def test_a_trace_that_is_too_large_loses_its_last_steps():
    steps = [step(n * 100 * US, (n + 1) * 100 * US) for n in range(4)]
    trace = assemble(recorded(operations(*range(400))), steps, None, 0)
    whole = to_bytes(trace, steps)
    assert json.loads(whole) == trace
    limited = to_bytes(trace, steps, len(whole) // 2)
    assert len(limited) <= len(whole) // 2
    kept = json.loads(limited)["traceEvents"]
    assert [e["name"] for e in kept if e["name"].startswith("step (")] in (
        ["step (1 of 4)"],
        ["step (1 of 4)", "step (2 of 4)"],
    )
    last_us = max(e["ts"] + e["dur"] for e in kept if e["name"].startswith("step ("))
    assert all(e["ts"] < last_us for e in kept if e["ph"] == "X")


def test_one_step_that_is_too_large_loses_its_operations():
    steps = [step(0, 400 * US)]
    trace = assemble(recorded(operations(*range(400))), steps, None, 0)
    kept = json.loads(to_bytes(trace, steps, 3000))["traceEvents"]
    assert {e["cat"] for e in kept if e["ph"] == "X"} == {"hvdtrain"}


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (None, (20, 10)),
        (1000, (20, 10)),
        (30, (20, 10)),
        (29, (9, 10)),
        (12, (4, 8)),
        (3, (1, 2)),
        (1, (0, 1)),
        (0, (0, 1)),
    ],
)
def test_which_steps_are_recorded(num_steps, expected):
    assert plan(num_steps) == expected
