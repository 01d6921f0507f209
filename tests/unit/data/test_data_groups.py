"""Microbatches grouped into steps, planned and voted, without other ranks."""

from __future__ import annotations

import pytest

from hvdtrain.data.groups import PlannedGroups, VotedGroups
from hvdtrain.data.order import StepPlan


def test_planned_groups_know_their_samples_and_the_last_one():
    batches = iter([("a", 2), ("b", 2), ("c", 1)])
    groups = list(PlannedGroups(batches, StepPlan(10, 2, 4, stop=False), 2))
    assert [group.microbatches for group in groups] == [[("a", 2), ("b", 2)], [("c", 1)]]
    assert [group.num_samples for group in groups] == [8, 2]
    assert [group.last_of_epoch for group in groups] == [False, True]


class Votes:
    """Sums of this rank's ballots and those of an imagined other rank."""

    def __init__(self, others):
        self.others, self.heard = list(others), []

    def __call__(self, ballot):
        self.heard.append(ballot)
        other = self.others.pop(0)
        return ballot[0] + other[0], ballot[1] + other[1]


def steps(source, votes):
    """Drive it as the loop does: read ahead and vote while a step runs."""
    found = []
    for group in source:
        source.read_ahead()
        source.decide(*votes(source.ballot()))
        found.append((group.microbatches, group.num_samples, group.last_of_epoch))
    return found


@pytest.mark.parametrize(("stop", "num_steps"), [(False, 3), (True, 1)])
def test_voted_groups_end_as_the_ranks_agree(stop, num_steps):
    mine = iter([[("a", 3)], [("b", 1)], []])
    votes = Votes([(1, 5), (0, 0), (1, 2), (0, 0)] if not stop else [(1, 5), (0, 0)])
    source = VotedGroups(lambda: next(mine, []), size=2, stop=stop, vote=votes)
    found = steps(source, votes)
    expected = [([("a", 3)], 8, False), ([("b", 1)], 1, False), ([], 2, True)]
    assert found == expected[:num_steps] if not stop else found == [([("a", 3)], 8, True)]
    assert votes.heard[:2] == [(1.0, 3.0), (1.0, 1.0)]


def test_nothing_is_read_twice_and_what_was_read_can_be_looked_at():
    reads = []
    source = VotedGroups(lambda: reads.append(1) or [("a", 1)], size=1, stop=False, vote=lambda ballot: ballot)
    assert source.peek() is None
    source.read_ahead()
    source.read_ahead()
    assert source.peek() == "a"
    assert next(iter(source)).microbatches == [("a", 1)]
    assert len(reads) == 1
