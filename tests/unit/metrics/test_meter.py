"""Throughput."""

from __future__ import annotations

import time

import pytest

from hvdtrain.metrics import ThroughputMeter
from hvdtrain.metrics import meter as meter_module


@pytest.fixture
def clock(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: now_s[0])
    return now_s


def test_rates_over_the_window_and_overall(clock):
    meter = ThroughputMeter(window_s=10.0)
    clock[0] += 100  # building the model
    meter.start()
    assert meter.samples_per_second == 0.0
    assert meter.data_wait_share == 0.0
    for second in range(40):
        clock[0] += 1
        meter.add_samples(100 if second < 20 else 300)
        meter.add_wait(0.5 if second < 20 else 0.25)
        meter.mark()
        if second == 0:
            assert meter.samples_per_second == 100
    assert meter.samples_per_second == 300
    assert meter.data_wait_share == 0.25
    assert meter.total_samples_per_second == 200


def test_evaluation_and_checkpoints_do_not_count(clock):
    meter = ThroughputMeter()
    clock[0] += 2
    meter.add_samples(10)
    with meter.paused():
        clock[0] += 50
    meter.mark()
    assert meter.samples_per_second == 5
    assert meter.total_samples_per_second == 5


def test_rare_marks_still_give_a_rate(clock):
    meter = ThroughputMeter(window_s=1.0)
    for _ in range(3):
        clock[0] += 60
        meter.add_samples(600)
        meter.mark()
    assert meter.samples_per_second == 10


def test_a_pause_that_fails_counts_as_pause(clock):
    meter = ThroughputMeter()

    def fail():
        with meter.paused():
            clock[0] += 5
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    clock[0] += 1
    meter.add_samples(3)
    assert meter.total_samples_per_second == 3


def test_with_the_real_clock():
    meter = ThroughputMeter()
    meter.start()
    time.sleep(0.02)
    meter.add_samples(1)
    meter.mark()
    assert 0 < meter.samples_per_second <= 50


def test_active_seconds_leave_pauses_out(clock):
    meter = ThroughputMeter()
    clock[0] += 5
    meter.start()
    clock[0] += 2
    with meter.paused():
        clock[0] += 50
    clock[0] += 1
    assert meter.active_s == 3.0
