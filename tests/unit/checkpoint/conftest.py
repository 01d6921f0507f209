from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def make_state() -> Callable[..., dict[str, Any]]:
    """A small complete state of a step; its weights are the step."""

    def make(step: int, **changes: Any) -> dict[str, Any]:
        state = {
            "format": 1,
            "model": {"weight": torch.full((2, 3), float(step)), "bias": torch.zeros(2)},
            "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]},
            "scheduler": {"last_epoch": step},
            "scaler": None,
            "progress": {"epoch": 0, "step": step, "samples_in_epoch": 8 * step},
            "rng": {},
            "config": {"seed": 1, "shuffle": True},
        }
        return {**state, **changes}

    return make
