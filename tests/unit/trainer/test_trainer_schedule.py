"""Learning rates: scaling, warm-up, schedules."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.config import Config
from hvdtrain.errors import ConfigError
from hvdtrain.trainer.schedule import effective_batch, make_scheduler, scale_factor, scale_learning_rate


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
    assert scale_learning_rate(config(**keys), made, 3) == pytest.approx(0.3)
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
    scheduler = make_scheduler(object(), config(lr={"schedule": schedule, "warmup_steps": warmup}), made, 4)
    rates = []
    for _ in range(5):
        rates.append(made.param_groups[0]["lr"])
        made.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=1e-7)


def test_a_falling_schedule_needs_an_end():
    with pytest.raises(ConfigError, match=r"lr\.schedule.*only max_steps tells it"):
        make_scheduler(object(), config(lr={"schedule": "linear"}), optimizer(), None)
    make_scheduler(object(), config(lr={"warmup_steps": 3}), optimizer(), None)
