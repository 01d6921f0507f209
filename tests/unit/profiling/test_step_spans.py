"""Where the time of a step goes, by hand; times in nanoseconds."""

from __future__ import annotations

import pytest

from hvdtrain.backends.reductions import Reduction
from hvdtrain.profiling.breakdown import Totals, markdown_table, summarize, text_table
from hvdtrain.profiling.step_clock import StepClock, StepSpans, length, merged, without

MS = 1_000_000


def ms(step):
    return {name: round(seconds * 1000, 9) for name, seconds in step.seconds().items()}


def test_a_union_of_intervals():
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 7)]
    assert length([(0, 4), (5, 7)]) == 6


@pytest.mark.parametrize(
    ("interval", "left"),
    [((0, 10), [(0, 2), (4, 6), (8, 10)]), ((3, 7), [(4, 6)]), ((2, 4), []), ((9, 12), [(9, 12)]), ((7, 9), [(8, 9)])],
)
def test_what_lies_outside_a_union(interval, left):
    assert without(interval, [(2, 4), (6, 8)]) == left


# The last gradient is there at 60 ms, while reductions are under way since 40 ms; they end at 70 ms, in backward().
IN_BACKWARD = StepSpans(
    0,
    100 * MS,
    [
        ("data_wait", 0, 10 * MS),
        ("forward", 10 * MS, 30 * MS),
        ("backward", 30 * MS, 70 * MS),
        ("communication", 70 * MS, 71 * MS),
        ("optimizer", 71 * MS, 91 * MS),
    ],
    [Reduction(40 * MS, 60 * MS, 70 * MS)],
)
# The same, waited for after backward(), and a control message that is waited for before the optimizer's step.
AFTER_BACKWARD = StepSpans(
    0,
    100 * MS,
    [
        ("data_wait", 0, 10 * MS),
        ("forward", 10 * MS, 30 * MS),
        ("backward", 30 * MS, 60 * MS),
        ("communication", 60 * MS, 71 * MS),
        ("communication", 72 * MS, 74 * MS),
        ("optimizer", 71 * MS, 91 * MS),
    ],
    [Reduction(40 * MS, 59 * MS, 71 * MS)],
)


def test_waiting_within_backward_is_communication():
    assert ms(IN_BACKWARD) == {
        "data_wait": 10, "forward": 20, "backward": 30, "communication": 11, "optimizer": 20, "other": 9,
    }  # fmt: skip
    assert length(IN_BACKWARD.under_way) == 31 * MS


def test_waiting_after_backward_is_communication():
    assert ms(AFTER_BACKWARD) == {
        "data_wait": 10, "forward": 20, "backward": 29, "communication": 14, "optimizer": 18, "other": 9,
    }  # fmt: skip
    assert length(AFTER_BACKWARD.under_way) == 33 * MS


def test_communication_that_ends_before_the_last_gradient_is_hidden():
    step = StepSpans(0, 50 * MS, [("backward", 0, 50 * MS)], [Reduction(10 * MS, 40 * MS, 30 * MS)])
    assert ms(step)["communication"] == 0
    assert length(step.under_way) == 20 * MS


def test_two_backward_passes_that_both_reduce():
    reductions = [Reduction(10 * MS, 20 * MS, 25 * MS), Reduction(60 * MS, 70 * MS, 85 * MS)]
    step = StepSpans(0, 100 * MS, [("backward", 0, 30 * MS), ("backward", 50 * MS, 90 * MS)], reductions)
    assert (ms(step)["communication"], ms(step)["backward"]) == (20, 50)


def test_all_ranks_together():
    ranks = []
    for step in (IN_BACKWARD, AFTER_BACKWARD):
        totals = Totals()
        totals.add(step)
        totals.add(step)
        ranks.append((totals.num_steps, totals.mean_ms()))
    found = summarize(ranks, traced=False)
    assert (found["steps"], found["step_ms"]) == (2, 100)
    communication = found["phases"]["communication"]
    assert communication["ms_of_ranks"] == pytest.approx([11, 14])
    assert (communication["ms"], communication["share"]) == pytest.approx((12.5, 0.125))
    assert sum(phase["share"] for phase in found["phases"].values()) == pytest.approx(1)
    assert found["communication"]["not_hidden_share"] == pytest.approx(12.5 / 32)
    for table in (text_table(found), markdown_table(found)):
        assert "communication not hidden" in table
        assert "39% of that was not hidden" in table
        assert "11.00 to 14.00" in table


def test_no_step_no_table():
    assert summarize([(0, {})], traced=True) is None


def test_no_communication_has_no_share():
    totals = Totals()
    totals.add(StepSpans(0, 10 * MS, [("forward", 0, 5 * MS)]))
    found = summarize([(1, totals.mean_ms())], traced=False)
    assert found["communication"] == {"under_way_ms": 0, "not_hidden_ms": 0, "not_hidden_share": None}
    assert "No communication" in text_table(found)


def test_a_step_begins_where_its_data_is_asked_for_and_knows_whether_it_was_disturbed():
    steps, begun = [], []
    clock = StepClock(lambda: None, steps.append, lambda: begun.append(len(steps)))
    for number in range(4):
        clock.next_step()
        with clock.span("optimizer"):
            pass
        if number == 1:
            clock.disturb()
    clock.next_step()  # an epoch's end that is found out by asking
    clock.end()
    assert [step.disturbed for step in steps] == [False, True, True, False]
    assert begun == [0, 1, 2, 3, 4]
    assert all(step.start_ns <= step.spans[0][1] <= step.spans[0][2] <= step.end_ns for step in steps)
