"""How often the ranks speak to each other, and what they tell."""

from __future__ import annotations

import types

import pytest
import torch

from hvdtrain.backends.base import Pending
from hvdtrain.errors import CollectiveError, ContractError
from hvdtrain.trainer import control
from hvdtrain.trainer.control import Control, Said


class Alone:
    """One rank of a world of one, or with another's numbers added to its own."""

    def __init__(self, other=None):
        self.world = types.SimpleNamespace(is_root=True, size=1)
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
            it.start(step, Said(), logged=False).wait()
    return spoken


def test_slow_steps_speak_every_time(monkeypatch):
    assert spoken_steps(monkeypatch, 0.2, 6) == [1, 2, 3, 4, 5, 6]


def test_steps_of_ten_milliseconds_speak_every_tenth_of_a_second(monkeypatch):
    # 9.99 ms, so that ten of them are safely less than the limit.
    assert spoken_steps(monkeypatch, 0.00999, 45) == [1, 2, 12, 22, 32, 42]


def test_fast_steps_speak_every_64(monkeypatch):
    assert spoken_steps(monkeypatch, 1e-4, 200) == [1, 2, 66, 130, 194]


def test_logged_numbers_come_back_by_name():
    said = Said(stop=True, has_next=1.0, next_samples=3.0, weight=4.0, loss=8.0, values={"b": 2.0, "a": 1.0})
    heard = Control(Alone()).start(1, said, logged=True).wait()
    assert (heard.stop, heard.num_ranks_with_next, heard.next_samples) == (True, 1.0, 3.0)
    assert (heard.weight, heard.loss, heard.values) == (4.0, 8.0, {"a": 1.0, "b": 2.0})


def test_a_rank_without_data_still_knows_the_names():
    it = Control(Alone())
    it.start(1, Said(weight=1.0, values={"a": 1.0}), logged=True).wait()
    assert it.start(2, Said(), logged=True).wait().values == {"a": 0.0}


def other_rank(values):
    def add(tensor):
        said = Said(weight=1.0, values=values)
        held = {}
        alone = Alone()
        alone.start_sum = lambda tensor, name: held.setdefault("tensor", tensor) is None or Pending(lambda: tensor)
        Control(alone).start(1, said, logged=True)
        return held["tensor"]

    return add


def test_the_same_names_on_two_ranks_are_summed():
    heard = Control(Alone(other_rank({"a": 5.0}))).start(1, Said(weight=1.0, values={"a": 1.0}), logged=True).wait()
    assert heard.values == {"a": 6.0}


@pytest.mark.parametrize("mine", [{"b": 1.0}, {}, {"a": 1.0, "b": 2.0}])
def test_other_names_on_another_rank_are_an_error(mine):
    pending = Control(Alone(other_rank({"a": 5.0}))).start(1, Said(weight=1.0, values=mine), logged=True)
    with pytest.raises(CollectiveError, match="different names"):
        pending.wait()


def test_too_many_values():
    values = {f"value {i}": 0.0 for i in range(57)}
    with pytest.raises(ContractError, match="came with 57 values to be logged; at most 56"):
        Control(Alone()).start(1, Said(weight=1.0, values=values), logged=True)


def test_the_message_has_a_fixed_length():
    lengths = {}

    class Measured(Alone):
        def start_sum(self, tensor, name):
            lengths.setdefault(name, set()).add(len(tensor))
            assert tensor.dtype == torch.float64
            return super().start_sum(tensor, name)

    it = Control(Measured())
    for values in ({}, {"a": 1.0}, {"a": 1.0, "b": 2.0}):
        it.start(1, Said(weight=1.0, values=values), logged=True)
        it.start(1, Said(), logged=False)
    assert lengths == {"control.logged": {64}, "control": {5}}
