"""The weighted mean from a plain mean over ranks."""

from __future__ import annotations

import pytest

from hvdtrain.trainer.weights import correction, reference_for


@pytest.mark.parametrize(
    ("total", "size", "reference"),
    [
        (2.0, 2, 1.0),
        (8192.0 * 2, 2, 8192.0),
        (10000.0, 1, 8192.0),
        (12000.0, 1, 16384.0),
        (0.75, 1, 1.0),
        (0.0, 4, 1.0),
    ],
)
def test_the_reference_is_the_nearest_power_of_two(total, size, reference):
    assert reference_for(total, size) == reference


def test_reference_and_correction_give_the_weighted_mean():
    # Two ranks with weights 3 and 5 and gradients 2 and 10: (6 + 50) / 8 = 7.
    for reference in (1.0, 4.0, 64.0):
        mean_over_ranks = (3 / reference * 2 + 5 / reference * 10) / 2
        assert mean_over_ranks * correction(reference, 2, 8.0) == 7.0


def test_nothing_weighs_nothing():
    assert correction(4.0, 2, 0.0) == 0.0
