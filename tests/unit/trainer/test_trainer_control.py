"""How often the ranks speak to each other, and what they tell."""

from __future__ import annotations

import contextlib
import math
import types

import pytest
import torch

from hvdtrain.backends.pending import Pending
from hvdtrain.errors import ContractError
from hvdtrain.trainer import control
from hvdtrain.trainer.control import Control, LoggedSums, Said


class Alone:
    """The one rank of a world of one."""

    def __init__(self):
        self.world = types.SimpleNamespace(is_root=True, size=1)
        self.guard = types.SimpleNamespace(operation=lambda name: contextlib.nullcontext())

    def start_sum(self, tensor, name):
        return Pending(lambda: tensor)

    def all_gather_object(self, value):
        return [value]


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
    first = LoggedSums(10, weight=4.0, loss=8.0, values={"b": (2.0, 4.0), "a": (1.0, 4.0)})
    one, two = logged(it, first, LoggedSums(20, weight=2.0, loss=3.0, values={"a": (5.0, 2.0), "b": (4.0, 2.0)}))
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


class OneOfMany(Alone):
    """A rank whose sums are those of all, and whose gathered objects are given beforehand."""

    def __init__(self, rank, messages):
        super().__init__()
        self.world.is_root = rank == 0
        self.messages = messages
        self.gathered = None

    def start_sum(self, tensor, name):
        self.messages.append((name, tensor))
        return Pending(lambda: sum(tensor for _, tensor in self.messages))

    def all_gather_object(self, value):
        assert value in self.gathered
        return self.gathered


def heard(*ranks):
    """[(loss, values)] that all ranks hear; a rank: for each step {name: (sum, weight)}, or None without data."""
    messages = []
    controls = [Control(OneOfMany(rank, messages)) for rank in range(len(ranks))]
    steps = []
    for step in range(len(ranks[0])):
        messages.clear()
        values = [rank[step] for rank in ranks]
        for it, own in zip(controls, values, strict=True):
            it.log(LoggedSums(step) if own is None else LoggedSums(step, weight=1.0, loss=1.0, values=own))
        # What each rank will gather, since here one answers after the other.
        known = controls[0]._names
        news = [[{name: pair for name, pair in (own or {}).items() if name not in known}] for own in values]
        for it in controls:
            it._backend.gathered = news
        started = [it.start(step, Said()) for it in controls]
        assert len({(name, len(tensor)) for name, tensor in messages}) == 1, "the ranks' messages differ"
        results = [pending.wait().logged for pending in started]
        assert results == [results[0]] * len(results)
        steps.append((results[0][0].loss, results[0][0].values))
    return steps


def test_the_same_names_on_two_ranks_are_summed():
    assert heard([{"a": (1.0, 1.0)}] * 2, [{"a": (5.0, 1.0)}] * 2) == [(1.0, {"a": 3.0})] * 2


def test_a_rank_without_data_adds_nothing():
    assert heard([{"a": (1.0, 1.0)}, None], [None, {"a": (5.0, 1.0)}]) == [(1.0, {"a": 1.0}), (1.0, {"a": 5.0})]


def test_a_value_is_the_mean_over_those_that_gave_it_and_missing_where_none_did():
    first = [{"a": (1.0, 1.0)}, {}, {"b": (8.0, 0.5)}, {"a": (2.0, 1.0), "b": (1.0, 1.0)}, {}]
    second = [{}, {}, {"a": (3.0, 0.25), "c": (1.0, 1.0)}, {"a": (4.0, 2.0)}, {"b": (0.0, 1.0)}]
    assert [values for _, values in heard(first, second)] == [
        {"a": 1.0},
        {},
        {"a": 12.0, "b": 16.0, "c": 1.0},
        {"a": 2.0, "b": 1.0},
        {"b": 0.0},
    ]


def test_too_many_values():
    values = {f"value {i}": (0.0, 1.0) for i in range(57)}
    with pytest.raises(ContractError, match="came with 57 values to be logged; at most 56"):
        Control(Alone()).log(LoggedSums(1, weight=1.0, values=values))


def test_too_many_names_in_all():
    with pytest.raises(ContractError, match="57 different names to be logged, the last of them n 54, n 55, n 56; at"):
        heard([{f"n {step:02}": (0.0, 1.0)} for step in range(57)])


def test_the_length_of_a_message_follows_from_what_waits_and_the_names_so_far():
    lengths = []

    class Measured(Alone):
        def start_sum(self, tensor, name):
            lengths.append((name, len(tensor)))
            assert tensor.dtype == torch.float64
            return super().start_sum(tensor, name)

    it = Control(Measured())
    for values in ({}, {"a": (1.0, 1.0)}, {"a": (1.0, 1.0), "b": (2.0, 1.0)}):
        logged(it, LoggedSums(1, weight=1.0, values=values), LoggedSums(2))
        it.start(4, Said()).wait()
    # 5 numbers and, if any step waits, whether there are new names; for each waiting step 2, and 2 for each name.
    assert lengths == [
        ("control.5.2.0", 10), ("control.5.0.0", 5),
        ("control.5.2.0", 10), ("control.5.0.1", 5),
        ("control.5.2.1", 14), ("control.5.0.2", 5),
    ]  # fmt: skip
