"""`train --profile`: planted times are found in their phases, under every backend, and every rank leaves a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_ranks import run_train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_runs import job

SLOW = Path(__file__).parents[1] / "tasks" / "slow_tasks.py"
NUM_STEPS = 40


def profiled(pool, output, **keys):
    """Train on the pool's ranks; the profile in summary.json."""
    options = keys.pop("task_options", {})
    tree = job(f"{SLOW}:Slow", output, task_options=options, max_steps=NUM_STEPS, log_every_steps=10, **keys)

    def work(backend, tree):
        from hvdtrain.config import Config
        from hvdtrain.trainer import train_on

        return train_on(backend, Config(**tree), profile=True)

    assert set(pool.run(work, tree, limit_s=120)) == {0}
    return json.loads((output / "summary.json").read_text())["profile"]


def phase_ms(found):
    return {name: phase["ms"] for name, phase in found["phases"].items()}


def trace(output, rank):
    return json.loads((output / "traces" / f"rank-{rank}.json").read_text())["traceEvents"]


def test_planted_times_are_found_in_their_phases(pool2, tmp_path):
    planted = {"data_s": 0.003, "forward_s": 0.004, "backward_s": 0.005, "optimizer_s": 0.006}
    found = profiled(pool2, tmp_path, task_options=planted)
    ms = phase_ms(found)
    for name, seconds in (("data_wait", 0.003), ("forward", 0.004), ("backward", 0.005), ("optimizer", 0.006)):
        assert ms[name] >= seconds * 1000, name
    assert sum(ms.values()) == pytest.approx(found["step_ms"], rel=1e-6)
    assert found["traced"] is False
    assert found["steps"] >= 10
    assert found["traces"] == ["traces/rank-0.json", "traces/rank-1.json"]
    for rank in range(2):
        events = trace(tmp_path, rank)
        names = [event.get("name") for event in events if event["ph"] == "X"]
        for name in ("data wait", "forward", "backward", "communication", "communication (not hidden)", "optimizer"):
            assert names.count(name) >= 10, name
        assert "aten::addmm" in names
        assert sum(name.startswith("step (") for name in names) == 10
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "profile/forward_ms" in events.Tags()["scalars"]
    (text,) = events.Tensors("profile")
    assert b"communication not hidden" in text.tensor_proto.string_val[0]


def test_waiting_for_a_late_rank_is_communication_that_is_not_hidden(pool2, tmp_path):
    found = profiled(pool2, tmp_path, task_options={"late_s": 0.02})
    in_time, late = found["phases"]["communication"]["ms_of_ranks"]
    # Both leave together, however long the rest takes on a busy machine: the one that came in time waited 20 ms more.
    assert in_time - late >= 10
    forward = found["phases"]["forward"]["ms_of_ranks"]
    assert forward[1] >= 20
    assert forward[1] - forward[0] >= 10


def test_communication_beside_backward_is_hidden(pool2, tmp_path):
    """The last layer's gradients travel while backward() has 20 ms to go."""
    found = profiled(pool2, tmp_path, task_options={"backward_s": 0.02}, bucket_mb=0.001)
    communication = found["communication"]
    assert communication["under_way_ms"] >= 20
    # However long the rest takes on a busy machine.
    assert communication["under_way_ms"] * (1 - communication["not_hidden_share"]) >= 15
    assert phase_ms(found)["backward"] >= 19


def test_accumulated_microbatches_reduce_once(pool2, tmp_path):
    found = profiled(pool2, tmp_path, task_options={"forward_s": 0.002, "backward_s": 0.002}, accumulate=4)
    ms = phase_ms(found)
    assert ms["forward"] >= 8
    assert ms["backward"] >= 8
    assert sum(event.get("name") == "communication" for event in trace(tmp_path, 0)) == 10


def test_a_run_without_profile_tells_nothing(pool2, tmp_path):
    def work(backend, tree):
        from hvdtrain.config import Config
        from hvdtrain.trainer import train_on

        return train_on(backend, Config(**tree))

    tree = job(f"{SLOW}:Slow", tmp_path, max_steps=3)
    assert set(pool2.run(work, tree)) == {0}
    assert "profile" not in json.loads((tmp_path / "summary.json").read_text())
    assert not (tmp_path / "traces").exists()


def test_horovods_own_timeline_is_in_rank_0s_trace_and_the_table_at_the_end(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(f"task: {SLOW}:Slow\nbatch_size: 1\nmax_steps: 20\ndevice: cpu\n")
    ended = run_train([str(file), "--profile", "--backend", "horovod", "--output", str(tmp_path / "out")], tmp_path)
    assert [one.status for one in ended] == [0, 0], ended[0].err
    assert "Where a step's time goes" in ended[0].err
    assert "not hidden by computation" in ended[0].err
    assert "profiler_start" not in ended[0].err
    events = trace(tmp_path / "out", 0)
    steps = [event for event in events if event.get("name", "").startswith("step (")]
    first_us, last_us = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
    reduced = [event["ts"] for event in events if event.get("name") == "GLOO_ALLREDUCE"]
    assert reduced
    # One clock for all.
    assert all(first_us <= at <= last_us for at in reduced)
    assert not any(event.get("cat") == "horovod" for event in trace(tmp_path / "out", 1))
