"""Jobs take turns: one runs, the others are held; failures end everything and are shown."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.bench.contest import Command, Job, contest
from hvdtrain.errors import TrainingFailed

# A rank without any library: a step sleeps for so many milliseconds.
RANK = """
import sys, time
from hvdtrain.bench.turns import take_turns
take_turns(lambda: time.sleep(float(sys.argv[2]) / 1000), int(sys.argv[1]))
"""


def command(rank, ms=1.0, text=RANK):
    return Command([sys.executable, "-c", text, str(rank), str(ms)], dict(os.environ))


def children():
    return [p for p in psutil.Process().children(recursive=True) if "take_turns" in " ".join(p.cmdline())]


def test_turns_and_ratios():
    contestants = {"fast": [command(0), command(1)], "slow": [command(0, 10.0), command(1, 1.0)]}
    blocks = contest(contestants, num_ranks=2, rounds=3, steps=5, untimed=1, limit_s=30)
    assert [len(blocks.ms_per_step[name]) for name in ("fast", "slow")] == [3, 3]
    # The slowest rank of a job counts.
    assert blocks.median_ms("slow") >= 10.0
    assert blocks.ratio("fast", "slow") < 1.0
    assert children() == []


def test_a_job_is_held_when_it_is_not_its_turn(tmp_path):
    job = Job("one", [command(0), command(1)], 2, tmp_path)
    try:
        job.start()
        until = time.monotonic() + 5
        while any(p.status() != psutil.STATUS_STOPPED for p in children()) and time.monotonic() < until:
            time.sleep(0.01)
        assert [p.status() for p in children()] == [psutil.STATUS_STOPPED] * 2
        assert job.turn(steps=3, untimed=0, limit_s=30) >= 1.0
        job.end()
    finally:
        job.kill()
    assert children() == []


def test_a_rank_that_fails_is_shown_and_the_others_end(tmp_path):
    failing = command(1, text="import sys; sys.exit('no such device: take_turns')")
    with pytest.raises(TrainingFailed, match=r"bad: a process ended with status 1; .*\nno such device"):
        contest({"good": [command(0)], "bad": [failing]}, num_ranks=1, rounds=1, steps=1, untimed=0, limit_s=30)
    assert children() == []
    assert not list(Path(tmp_path).iterdir())
