"""How often the ranks speak to each other, and what they tell."""

from __future__ import annotations

import contextlib
import math
import types

import pytest
import torch

from hvdtrain.backends.base import Pending
from hvdtrain.errors import CollectiveError, ContractError
from hvdtrain.trainer import control
from hvdtrain.trainer.control import Control, LoggedSums, Said


class Alone:
    """One rank of a world of one, or with another's numbers added to its own."""

    def __init__(self, other=None):
        self.world = types.SimpleNamespace(is_root=True, size=1)
        self.guard = types.SimpleNamespace(operation=lambda name: contextlib.nullcontext())
        self.other = other

    def start_sum(self, tensor, name):
        return Pending(lambda: tensor if self.other is None else tensor + self.other(tensor))


def spoken_steps(monkeypatch, step_s, num_steps):
    now = [100.0]
    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    it = Control(Alone())
    spoken = []
    for step in range(1, num_steps + 1):
        now[0] += step_s
        if it.is_due(step):
            spoken.append(step)
            it.start(step, Said()).wait()
    return spoken


def test_slow_steps_speak_every_time(monkeypatch):
    assert spoken_steps(monkeypatch, 0.3, 6) == [1, 2, 3, 4, 5, 6]


def test_steps_of_twenty_milliseconds_speak_every_fifth_of_a_second(monkeypatch):
    # 19.99 ms, so that ten of them are safely less than the limit.
    assert spoken_steps(monkeypatch, 0.01999, 45) == [1, 2, 12, 22, 32, 42]


def test_fast_steps_speak_every_64(monkeypatch):
    assert spoken_steps(monkeypatch, 1e-4, 200) == [1, 2, 66, 130, 194]


def logged(it, *steps):
    """Keep the steps, then speak; what is heard."""
    for sums in steps:
        it.log(sums)
    return it.start(steps[-1].step, Said()).wait().logged


def test_what_is_said_comes_back():
    heard = Control(Alone()).start(1, Said(stop=True, has_next=1.0, next_samples=3.0, weight=4.0)).wait()
    assert (heard.stop, heard.num_ranks_with_next, heard.next_samples, heard.weight) == (True, 1.0, 3.0, 4.0)
    assert heard.logged == []


def test_logged_steps_come_back_in_order_as_means():
    it = Control(Alone())
    first = LoggedSums(10, weight=4.0, loss=8.0, values={"b": 2.0, "a": 1.0})
    one, two = logged(it, first, LoggedSums(20, weight=2.0, loss=3.0, values={"a": 5.0, "b": 4.0}))
    assert (one.step, one.loss, one.values) == (10, 2.0, {"a": 0.25, "b": 0.5})
    assert (two.step, two.loss, two.values) == (20, 1.5, {"a": 2.5, "b": 2.0})
    assert it.start(21, Said()).wait().logged == []


def test_a_step_without_weight_has_no_mean():
    (step,) = logged(Control(Alone()), LoggedSums(1))
    assert math.isnan(step.loss)
    assert step.values == {}


def test_flush_brings_what_waits_once():
    it = Control(Alone())
    it.log(LoggedSums(10, weight=2.0, loss=3.0))
    assert [(step.step, step.loss) for step in it.flush()] == [(10, 1.5)]
    assert it.flush() == []


def test_sixteen_waiting_steps_make_a_message_due(monkeypatch):
    monkeypatch.setattr(control.time, "monotonic", lambda: 100.0)
    it = Control(Alone())
    for step in (1, 2):
        it.start(step, Said()).wait()
    for step in range(3, 18):
        it.log(LoggedSums(step))
        assert not it.is_due(step)
    it.log(LoggedSums(18))
    assert it.is_due(18)


def other_rank(values):
    """What another rank with these values adds to a message of one logged step."""

    def add(tensor):
        held = {}
        alone = Alone()
        alone.start_sum = lambda tensor, name: held.setdefault("tensor", tensor) is None or Pending(lambda: tensor)
        it = Control(alone)
        it.log(LoggedSums(1, weight=1.0, values=values))
        it.start(1, Said())
        return held["tensor"]

    return add


def test_the_same_names_on_two_ranks_are_summed():
    (step,) = logged(Control(Alone(other_rank({"a": 5.0}))), LoggedSums(1, weight=1.0, values={"a": 1.0}))
    assert step.values == {"a": 3.0}


def test_a_rank_without_data_still_knows_the_names():
    it = Control(Alone(other_rank({"a": 5.0})))
    logged(it, LoggedSums(1, weight=1.0, values={"a": 1.0}))
    (step,) = logged(it, LoggedSums(2))
    assert step.values == {"a": 5.0}


@pytest.mark.parametrize("mine", [{"b": 1.0}, {}, {"a": 1.0, "b": 2.0}])
def test_other_names_on_another_rank_are_an_error(mine):
    it = Control(Alone(other_rank({"a": 5.0})))
    it.log(LoggedSums(1, weight=1.0, values=mine))
    pending = it.start(1, Said())
    with pytest.raises(CollectiveError, match="different names"):
        pending.wait()


def test_too_many_values():
    values = {f"value {i}": 0.0 for i in range(57)}
    with pytest.raises(ContractError, match="came with 57 values to be logged; at most 56"):
        Control(Alone()).log(LoggedSums(1, weight=1.0, values=values))


def test_the_length_of_a_message_follows_from_what_waits():
    lengths = {}

    class Measured(Alone):
        def start_sum(self, tensor, name):
            lengths.setdefault(name, set()).add(len(tensor))
            assert tensor.dtype == torch.float64
            return super().start_sum(tensor, name)

    it = Control(Measured())
    for values in ({}, {"a": 1.0}, {"a": 1.0, "b": 2.0}):
        logged(it, LoggedSums(1, weight=1.0, values=values))
        logged(it, LoggedSums(2, weight=1.0, values=values), LoggedSums(3))
        it.start(4, Said()).wait()
    assert lengths == {"control.5.0": {5}, "control.5.1": {65}, "control.5.2": {125}}
