"""metrics.jsonl and TensorBoard, read back."""

from __future__ import annotations

import json
import math
import struct
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.errors import TrainingFailed
from hvdtrain.metrics import MetricsWriter
from hvdtrain.metrics import writer as writer_module


def lines(output):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (output / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def curves(output, purge=True):
    reader = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=purge)
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def log(writer, *steps, loss=None, **more):
    for step in steps:
        values = {
            "loss": float(step) if loss is None else loss,
            "grad_norm": 1.0,
            "lr": 0.5,
            "samples_per_second": 100.0,
        }
        writer.log(step=step, epoch=0, **{**values, **more})


def test_what_is_logged_is_in_both_files(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 10, data_wait_share=0.25, values={"aux": 2.0, "loss": -1.0})
        log(writer, 20, grad_norm=None)
        writer.log_eval(step=20, epoch=0, metrics={"accuracy": 0.5})
    assert lines(tmp_path) == [
        {
            "aux": 2.0,
            "loss": 10.0,
            "step": 10,
            "epoch": 0,
            "grad_norm": 1.0,
            "lr": 0.5,
            "samples_per_second": 100.0,
            "data_wait_share": 0.25,
        },
        {"step": 20, "epoch": 0, "loss": 20.0, "grad_norm": None, "lr": 0.5, "samples_per_second": 100.0},
        {"step": 20, "epoch": 0, "eval": {"accuracy": 0.5}},
    ]
    assert curves(tmp_path) == {
        "train/aux": [(10, 2.0)],
        "train/loss": [(10, 10.0), (20, 20.0)],
        "train/grad_norm": [(10, 1.0)],
        "train/lr": [(10, 0.5), (20, 0.5)],
        "train/samples_per_second": [(10, 100.0), (20, 100.0)],
        "train/data_wait_share": [(10, 0.25)],
        "eval/accuracy": [(20, 0.5)],
    }


def test_nan_and_infinity_are_null_in_json_and_themselves_in_tensorboard(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 1, loss=math.nan, grad_norm=math.inf)
        writer.log_eval(step=1, epoch=0, metrics={"loss": -math.inf})
    assert lines(tmp_path)[0]["loss"] is None
    assert lines(tmp_path)[0]["grad_norm"] is None
    assert lines(tmp_path)[1]["eval"] == {"loss": None}
    read = curves(tmp_path)
    assert math.isnan(read["train/loss"][0][1])
    assert read["train/grad_norm"] == [(1, math.inf)]


@pytest.mark.parametrize("purge", [True, False])
def test_a_resume_leaves_no_later_and_no_double_steps(tmp_path, purge):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 10, 20, 30, 40, loss=1.0)
        writer.log_eval(step=20, epoch=0, metrics={"accuracy": 0.1})
        writer.log_eval(step=40, epoch=1, metrics={"accuracy": 0.2})
    for again in (2.0, 3.0):  # two resumes from the same step, the first being killed later on
        with MetricsWriter(tmp_path, resume_step=25) as writer:
            assert [line["step"] for line in lines(tmp_path)] == [10, 20, 20]
            log(writer, 30, 40, loss=again)
            writer.log_eval(step=40, epoch=1, metrics={"accuracy": again})
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 20, 30, 40, 40]
    read = curves(tmp_path, purge)
    assert read["train/loss"] == [(10, 1.0), (20, 1.0), (30, 3.0), (40, 3.0)]
    assert read["eval/accuracy"] == [(20, pytest.approx(0.1)), (40, 3.0)]


def test_a_resume_at_the_end_repeats_nothing(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 10, 20)
        writer.log_eval(step=20, epoch=0, metrics={"accuracy": 0.5})
    with MetricsWriter(tmp_path, resume_step=20) as writer:
        log(writer, 20, loss=7.0)
        writer.log_eval(step=20, epoch=0, metrics={"accuracy": 0.75})
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 20]
    assert curves(tmp_path)["eval/accuracy"] == [(20, 0.5)]
    assert curves(tmp_path)["train/loss"] == [(10, 10.0), (20, 20.0)]


def test_a_new_run_removes_what_an_earlier_one_left(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 10, 20)
    (tmp_path / "tensorboard" / "notes.txt").write_text("mine")
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 5)
    assert [line["step"] for line in lines(tmp_path)] == [5]
    assert curves(tmp_path)["train/loss"] == [(5, 5.0)]
    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "mine"


def test_torn_ends_of_a_killed_run(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 10, 20, 30)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-20])
    with MetricsWriter(tmp_path, resume_step=30) as writer:
        log(writer, 30, 40)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30, 40]
    assert curves(tmp_path)["train/loss"] == [(10, 10.0), (20, 20.0), (30, 30.0), (40, 40.0)]


def test_a_line_without_its_newline_counts_as_torn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n\xff\n{"no": 1}\n[1]\n{"step": 2}')
    MetricsWriter(tmp_path, resume_step=9).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_events_of_torchs_summary_writer_are_understood(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard")) as other:
        for step in (1, 2, 3):
            other.add_scalar("mine", float(step), step)
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        log(writer, 3)
    assert curves(tmp_path)["mine"] == [(1, 1.0), (2, 2.0)]
    assert curves(tmp_path)["train/loss"] == [(3, 3.0)]


def test_a_new_event_file_sorts_last_even_when_the_clock_runs_behind(tmp_path, monkeypatch):
    now_s = time.time()
    for offset_s in (0.0, 0.0, -500.0):
        monkeypatch.setattr(time, "time", lambda offset_s=offset_s: now_s + offset_s)
        step = 1 + len(list((tmp_path / "tensorboard").glob("*")))
        with MetricsWriter(tmp_path, resume_step=step - 1) as writer:
            log(writer, step)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3
    assert curves(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_kept_records_are_copied_byte_for_byte(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        log(writer, 1, 2)
    (events,) = (tmp_path / "tensorboard").iterdir()
    before = events.read_bytes()
    MetricsWriter(tmp_path, resume_step=1).close()
    after = events.read_bytes()
    assert before.startswith(after)
    (length,) = struct.unpack_from("<Q", before, len(after))
    assert len(before) == len(after) + 12 + length + 4


def test_lines_are_held_back_and_reach_the_file_in_time(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, resume_step=None)
    clock_s = [time.monotonic()]
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: clock_s[0])
    writer.flush()
    log(writer, 1, 2)
    assert lines(tmp_path) == []
    clock_s[0] += 3.5
    log(writer, 3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    log(writer, 4)
    writer.log_eval(step=4, epoch=0, metrics={})  # rare and waited for: at once
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 4]
    log(writer, 5)
    writer.close()
    writer.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 4, 5]


def test_a_failure_in_the_block_still_writes(tmp_path):
    def fail():
        with MetricsWriter(tmp_path, resume_step=None) as writer:
            log(writer, 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_a_full_disk_is_named_and_close_still_works(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=None)
    writer._lines.close()
    writer._lines = open("/dev/full", "ab", buffering=0)  # noqa: SIM115, PTH123
    log(writer, 1)
    with pytest.raises(TrainingFailed, match=r"cannot write .*metrics\.jsonl: No space left on device; [\d,]+ bytes"):
        writer.flush()
    writer.close()
