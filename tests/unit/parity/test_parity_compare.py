"""Differences of losses and weights, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hvdtrain.parity.compare import LossDifference, WeightDifference, compare_losses, compare_weights

PARAMETERS = {"w", "b"}
SAME = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0]), "n": torch.tensor(7)}


def changed(**tensors):
    return {**SAME, **tensors}


def test_equal_losses_differ_nowhere():
    assert compare_losses([1.0, 0.5], [1.0, 0.5], 0.0) == LossDifference(0.0, None, None, None, 2)


def test_the_first_step_that_differs_is_not_the_first_beyond():
    found = compare_losses([4.0, 2.0, 1.0], [4.0, 2.0 * (1 - 2**-20), 0.75], 1e-3)
    assert found == LossDifference(0.25, 3, 2, 3, 3)


def test_the_sign_of_a_loss_does_not_matter():
    assert compare_losses([-2.0], [-1.0], 0.1).largest_relative == 0.5


@pytest.mark.parametrize("other", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_never_passes(other):
    found = compare_losses([1.0, other], [1.0, other], 1e9)
    assert (found.largest_relative, found.first_step_beyond) == (math.inf, 2)


def test_equal_weights_differ_nowhere():
    assert compare_weights(SAME, changed(), PARAMETERS) == WeightDifference(0.0, None, 0.0, 3, 0)


def test_a_tensor_is_measured_by_its_largest_element():
    found = compare_weights(SAME, changed(w=torch.tensor([3.0, 4.0 - 0.5])), PARAMETERS)
    assert found == WeightDifference(0.125, "w", 0.5, 3, 1)


def test_a_small_tensor_is_measured_by_the_usual_weight():
    # sqrt((9 + 16 + 0) / 3), of the first run
    found = compare_weights(SAME, changed(b=torch.tensor([2.0**-10])), PARAMETERS)
    assert found.tensor == "b"
    assert found.largest_relative == pytest.approx(2**-10 / math.sqrt(25 / 3), rel=1e-12)
    assert found.largest_absolute == 2**-10


def test_the_worst_tensor_is_named():
    found = compare_weights(SAME, changed(w=torch.tensor([3.0, 5.0]), b=torch.tensor([2.5])), PARAMETERS)
    assert (found.tensor, found.num_differing) == ("b", 2)


def test_whole_numbers_have_to_be_equal():
    found = compare_weights(SAME, changed(n=torch.tensor(8)), PARAMETERS)
    assert (found.largest_relative, found.tensor) == (math.inf, "n")


def test_equal_weights_that_are_not_finite_do_not_pass():
    broken = changed(w=torch.tensor([math.nan, 4.0]))
    assert compare_weights(broken, broken, PARAMETERS).largest_relative == math.inf


def test_what_a_buffer_holds_does_not_make_parameters_look_alike():
    mask = {"mask": torch.full((64,), -1e9)}
    found = compare_weights({**SAME, **mask}, {**changed(b=torch.tensor([1.0])), **mask}, PARAMETERS)
    assert found.tensor == "b"
    assert found.largest_relative == pytest.approx(1 / math.sqrt(25 / 3), rel=1e-12)


def test_a_buffer_may_hold_infinities_where_both_do():
    mine = {**SAME, "mask": torch.tensor([-math.inf, 0.0, 4.0])}
    assert compare_weights(mine, mine, PARAMETERS) == WeightDifference(0.0, None, 0.0, 4, 0)
    theirs = {**SAME, "mask": torch.tensor([-math.inf, 0.0, 3.0])}
    assert compare_weights(mine, theirs, PARAMETERS) == WeightDifference(0.25, "mask", 1.0, 4, 1)
    theirs = {**SAME, "mask": torch.tensor([0.0, 0.0, 4.0])}
    assert compare_weights(mine, theirs, PARAMETERS).largest_relative == math.inf


@pytest.mark.parametrize("other", [{"w": torch.zeros(3)}, {"v": torch.zeros(2)}])
def test_other_models_are_refused(other):
    with pytest.raises(ValueError, match="names or shapes"):
        compare_weights({"w": torch.zeros(2)}, other, PARAMETERS)
