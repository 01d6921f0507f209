"""At which step a run ends, from any position on, with the same ranks and with others."""

from __future__ import annotations

import types

import pytest

from hvdtrain.config import Config
from hvdtrain.data.order import StepPlan
from hvdtrain.trainer.length import RunLength
from hvdtrain.trainer.position import Position


def feed(num_samples, size, *, batch=2, stop=False):
    def left(used):
        return StepPlan(num_samples - used, size, batch, stop=stop).num_steps

    return types.SimpleNamespace(steps_per_epoch=left(0), steps_left=left)


def length(feed, position, **limits):
    found = RunLength()
    found.measure(Config.model_validate({"task": "module:Class", **limits}), feed, position)
    return found.total_steps, found.ahead_steps


@pytest.mark.parametrize(
    ("size", "position", "expected"),
    [
        # 1600 samples, 2 of each rank in a step: 200 steps an epoch on 4 ranks, 100 on 8.
        (4, Position(0, 0, 0), (2000, 0)),
        (4, Position(5, 1000, 0), (2000, 0)),
        (4, Position(5, 1050, 400), (2000, 0)),
        (8, Position(5, 1000, 0), (1500, -500)),
        (8, Position(5, 1050, 400), (1050 + 75 + 400, 1000 - 1525)),
        (4, Position(5, 500, 0), (1500, 500)),
        # All epochs are done.
        (4, Position(10, 2000, 0), (2000, 0)),
        (8, Position(10, 2000, 0), (2000, -1000)),
    ],
)
def test_ten_epochs(size, position, expected):
    assert length(feed(1600, size), position, epochs=10) == expected


def test_steps_alone_do_not_depend_on_the_ranks():
    assert length(feed(1600, 8), Position(5, 1000, 0), epochs=None, max_steps=1200) == (1200, 0)


def test_the_first_limit_counts():
    assert length(feed(1600, 8), Position(5, 1000, 0), epochs=10, max_steps=1499) == (1499, 0)
    assert length(feed(1600, 8), Position(5, 1000, 0), epochs=10, max_steps=1500) == (1500, -500)
    assert length(feed(1600, 8), Position(5, 1000, 0), epochs=10, max_steps=1501) == (1500, -500)


def test_a_stream_has_no_length_but_max_steps():
    stream = types.SimpleNamespace(steps_per_epoch=None, steps_left=lambda used: None)
    assert length(stream, Position(1, 7, 0), epochs=3) == (None, 0)
    assert length(stream, Position(1, 7, 0), epochs=3, max_steps=9) == (9, 0)


@pytest.mark.parametrize("stop", [False, True])
def test_a_resume_with_the_same_ranks_never_changes_it(stop):
    for num_samples in range(1, 40):
        for size in (1, 2, 3):
            it = feed(num_samples, size, stop=stop)
            plan = StepPlan(num_samples, size, 2, stop=stop)
            for epoch in (0, 1):
                for step in range(plan.num_steps):
                    position = Position(epoch, epoch * plan.num_steps + step, sum(map(plan.samples, range(step))))
                    assert length(it, position, epochs=3) == (3 * plan.num_steps, 0)


def test_once_changed_it_stays_through_later_resumes():
    """2 ranks do 3 steps of 1 sample each of 20; one rank does the rest."""
    one = feed(20, 1, batch=1)
    expected = (3 + 14 + 20, 2 * 20 - 37)
    for step in range(14):
        assert length(one, Position(0, 3 + step, 6 + step), epochs=2) == expected
    for step in range(20):
        assert length(one, Position(1, 17 + step, step), epochs=2) == expected
