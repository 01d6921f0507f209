"""The order of a map dataset and how it is dealt."""

from __future__ import annotations

import pytest

from hvdtrain.data.loader import EpochSampler
from hvdtrain.data.order import StepPlan, derived_seed, epoch_order, share


def test_derived_seeds_are_the_same_for_ever():
    # FNV-1a over the little-endian bytes, halved.
    assert derived_seed() == 0xCBF29CE484222325 >> 1
    assert derived_seed(0) == 6080981106521087202
    assert derived_seed(1, 2) == 4290747377652101171


def test_derived_seeds_differ_in_every_part_and_its_place():
    found = {derived_seed(*parts) for parts in [(1, 2, 3), (3, 2, 1), (1, 2), (1, 2, 4), (1, -2, 3), (0, 0), (0,)]}
    assert len(found) == 7
    assert all(0 <= seed < 2**63 for seed in found)


def test_the_order_is_a_permutation_of_seed_and_epoch():
    orders = {(seed, epoch): tuple(epoch_order(50, shuffle=True, seed=seed, epoch=epoch).tolist())
              for seed in (0, 1) for epoch in (0, 1)}  # fmt: skip
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 4
    again = epoch_order(50, shuffle=True, seed=1, epoch=1)
    assert tuple(again.tolist()) == orders[1, 1]


def test_without_shuffling_sample_i_goes_to_rank_i_mod_size():
    order = epoch_order(10, shuffle=False, seed=1, epoch=0)
    assert [share(order, 0, rank, 3) for rank in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [share(order, 4, rank, 3) for rank in range(3)] == [[4, 7], [5, 8], [6, 9]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", [False, True])
def test_after_whole_steps_the_used_samples_are_a_prefix(size, stop):
    num_samples, per_step = 23, 2
    order = epoch_order(num_samples, shuffle=True, seed=3, epoch=2).tolist()
    plan = StepPlan(num_samples, size, per_step, stop=stop)
    used: list[int] = []
    for step in range(plan.num_steps):
        for rank in range(size):
            used += share(order, 0, rank, size)[step * per_step : (step + 1) * per_step]
        assert len(used) == sum(plan.samples(done) for done in range(step + 1))
        assert sorted(used) == sorted(order[: len(used)])
    if not stop:
        assert len(used) == num_samples


@pytest.mark.parametrize(
    ("remaining", "size", "per_step", "stop", "counts"),
    [
        (14, 2, 3, False, [6, 6, 2]),
        (14, 2, 3, True, [6, 6, 2]),
        (15, 2, 1, False, [2, 2, 2, 2, 2, 2, 2, 1]),
        (15, 2, 1, True, [2, 2, 2, 2, 2, 2, 2]),
        (15, 2, 4, True, [8, 7]),
        (1, 3, 4, False, [1]),
        (1, 3, 4, True, []),
        (0, 3, 4, False, []),
    ],
)
def test_plans(remaining, size, per_step, stop, counts):
    plan = StepPlan(remaining, size, per_step, stop=stop)
    assert [plan.samples(step) for step in range(plan.num_steps)] == counts
    assert plan.samples(plan.num_steps + 20) == 0


def test_the_sampler_starts_at_its_position():
    samplers = [EpochSampler(10, rank=rank, size=2, batch_size=2, shuffle=False, seed=1) for rank in range(2)]
    for sampler in samplers:
        sampler.set_position(3, 4)
    found = [list(sampler) for sampler in samplers]
    assert [[indices for _, *indices in batches] for batches in found] == [[[4, 6], [8]], [[5, 7], [9]]]
    # Each fetch knows its epoch and the position of its first sample.
    assert [[tuple(fetch) for fetch, *_ in batches] for batches in found] == [[(3, 4), (3, 8)], [(3, 5), (3, 9)]]
    assert [len(sampler) for sampler in samplers] == [2, 2]
