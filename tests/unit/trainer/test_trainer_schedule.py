"""Learning rates: scaling, warm-up, schedules, and how they go on after a resume."""

from __future__ import annotations

import warnings

import pytest
import torch

from hvdtrain.config import Config
from hvdtrain.errors import ConfigError
from hvdtrain.trainer.length import RunLength
from hvdtrain.trainer.schedule import Schedule, effective_batch, scale_factor, scale_learning_rate


def config(**keys):
    return Config.model_validate({"task": "module:Class", **keys})


@pytest.mark.parametrize(
    ("keys", "size", "batch"),
    [({"batch_size": 4}, 2, 8), ({"batch_size": 4, "accumulate": 3}, 2, 24), ({"batch_size": None}, 2, None)],
)
def test_effective_batch(keys, size, batch):
    assert effective_batch(config(**keys), size) == batch


@pytest.mark.parametrize(
    ("scaling", "accumulate", "factor"),
    [("none", 2, 1.0), ("linear", 1, 1.0), ("linear", 2, 2.0), ("sqrt", 2, 2**0.5), ("linear", 4, 4.0)],
)
def test_scale_factors(scaling, accumulate, factor):
    keys = {"batch_size": 4, "accumulate": accumulate, "lr": {"scaling": scaling, "base_batch": 8}}
    assert scale_factor(config(**keys), 2) == factor
    assert scale_factor(config(**{**keys, "batch_size": None}), 2) == 1.0


def optimizer(lr=0.1):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]},
                            {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr / 10}], lr=lr)  # fmt: skip


def test_every_group_is_scaled():
    made = optimizer()
    keys = {"batch_size": 4, "lr": {"scaling": "linear", "base_batch": 4}}
    scale_learning_rate(config(**keys), made, 3)
    assert [group["lr"] for group in made.param_groups] == pytest.approx([0.3, 0.03])


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0]),
        ("linear", 2, [0.5, 1, 1, 0.5, 0]),
        ("cosine", 0, [1, 0.8535534, 0.5, 0.1464466, 0]),
    ],
)
def test_schedules_over_four_steps(schedule, warmup, expected):
    made = optimizer(1.0)
    scheduler = Schedule(object(), config(lr={"schedule": schedule, "warmup_steps": warmup}), made, RunLength(4))
    rates = []
    for _ in range(5):
        rates.append(made.param_groups[0]["lr"])
        made.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=1e-7)


def test_a_falling_schedule_needs_an_end():
    with pytest.raises(ConfigError, match=r"lr\.schedule.*only max_steps tells it"):
        Schedule(object(), config(lr={"schedule": "linear"}), optimizer(), RunLength())
    Schedule(object(), config(lr={"warmup_steps": 3}), optimizer(), RunLength())


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


class Halving:
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


class Tenths(Halving):
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)


def resumed(before, after, *, steps=3, total=4):
    """Rates (of groups of base 1 and 0.1) after `steps` steps by `before`, and after going on by `after`."""

    def made(task_or_lr, lr):
        task, keys = (object(), task_or_lr) if isinstance(task_or_lr, dict) else (task_or_lr, {})
        optim = optimizer(lr)
        return optim, Schedule(task, config(lr=keys), optim, RunLength(total))

    old, schedule = made(before, 1.0)
    for _ in range(steps):
        old.step()
        schedule.step()
    # Another rate in the job file counts for nothing: the optimizer's options are the checkpoint's.
    new, following = made(after, 7.0)
    new.load_state_dict(old.state_dict())
    following.resume(schedule.state_dict(), steps)
    assert (following.asked_lr, following.base_lr, following.lr) == (7.0, 1.0, new.param_groups[0]["lr"])
    return rates(old), rates(new), following, new


CONSTANT, LINEAR = {"schedule": "constant"}, {"schedule": "linear"}
WARM = {"schedule": "constant", "warmup_steps": 6}


@pytest.mark.parametrize(
    ("before", "after", "old", "new", "next_one"),
    [
        (LINEAR, LINEAR, 0.25, 0.25, 0.0),
        (WARM, WARM, 4 / 6, 4 / 6, 5 / 6),
        # A new schedule goes on as if it had been there from the start ...
        (CONSTANT, LINEAR, 1.0, 0.25, 0.0),
        (CONSTANT, WARM, 1.0, 4 / 6, 5 / 6),
        (WARM, LINEAR, 4 / 6, 0.25, 0.0),
        (CONSTANT, Halving(), 1.0, 0.125, 0.0625),
        (LINEAR, Halving(), 0.25, 0.125, 0.0625),
        (Tenths(), Halving(), 0.001, 0.125, 0.0625),
        # ... and one that is gone leaves the rate that it started from.
        (LINEAR, CONSTANT, 0.25, 1.0, 1.0),
        (WARM, CONSTANT, 4 / 6, 1.0, 1.0),
        (Halving(), CONSTANT, 0.125, 1.0, 1.0),
        (CONSTANT, CONSTANT, 1.0, 1.0, 1.0),
        (Halving(), Halving(), 0.125, 0.125, 0.0625),
    ],
)
def test_schedules_of_a_resumed_run(before, after, old, new, next_one):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        was, now, schedule, made = resumed(before, after)
        assert was == pytest.approx([old, old / 10])
        assert now == pytest.approx([new, new / 10])
        made.step()
        schedule.step()
    assert rates(made) == pytest.approx([next_one, next_one / 10], abs=1e-12)


def test_an_unchanged_schedule_goes_on_with_the_same_bits():
    for lr in ({"schedule": "cosine"}, {"schedule": "cosine", "warmup_steps": 300}):
        was, now, schedule, _ = resumed(lr, lr, steps=777, total=1000)
        assert now == was
        again = schedule.state_dict()
        assert again == {**resumed(lr, lr, steps=777, total=1000)[2].state_dict()}
        assert (again["last_epoch"], again["_step_count"]) == (777, 778)


def test_a_rate_that_is_a_tensor_is_set_in_place():
    weight = torch.nn.Parameter(torch.zeros(1))
    old = torch.optim.Adam([weight], lr=torch.tensor(1.0), capturable=False)
    schedule = Schedule(object(), config(lr=LINEAR), old, RunLength(4))
    old.step()
    schedule.step()
    new = torch.optim.Adam([weight], lr=torch.tensor(1.0))
    following = Schedule(object(), config(lr=CONSTANT), new, RunLength(4))
    new.load_state_dict(old.state_dict())
    assert following.lr == 0.75
    following.resume(schedule.state_dict(), 1)
    assert (following.lr, following.base_lr) == (1.0, 1.0)
    assert isinstance(new.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize(
    ("length", "step", "factor"),
    [
        # 10 epochs of 200 steps on 4 ranks; after 5 of them, 5 of 100 on 8: half of the way is half of the way.
        (RunLength(2000), 1000, 0.5),
        (RunLength(1500, -500), 1000, 0.5),
        (RunLength(1500, -500), 1250, 0.25),
        (RunLength(1500, -500), 1499, 0.001),
        (RunLength(1500, -500), 1500, 0.0),
        # From 8 ranks to 4.
        (RunLength(1500, 500), 500, 0.5),
        (RunLength(1500, 500), 1000, 0.25),
        (RunLength(1500, 500), 1500, 0.0),
    ],
)
def test_a_schedule_ends_with_the_run_though_its_ranks_have_changed(length, step, factor):
    made = optimizer(1.0)
    schedule = Schedule(object(), config(lr=LINEAR), made, RunLength(2000))
    schedule._length.__dict__.update(length.__dict__)
    schedule.resume(schedule.state_dict(), step)
    assert schedule.lr == pytest.approx(factor, abs=1e-12)
