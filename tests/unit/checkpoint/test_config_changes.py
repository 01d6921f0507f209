"""What changed in the job file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.checkpoint import config_differences, refuse_changed
from hvdtrain.errors import CheckpointError

OLD = {"seed": 1, "shuffle": True, "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "output": "runs/a", "eval": None}


def test_differences_are_lines_with_dotted_keys():
    new = {**OLD, "optimizer": {"lr": 0.2, "betas": (0.9, 0.99)}, "output": Path("runs/a"), "eval": 1, "shuffle": False}
    assert config_differences(OLD, new) == ["shuffle: true -> false", "optimizer.lr: 0.1 -> 0.2", "eval: null -> 1"]
    assert config_differences(OLD, OLD) == []


def test_another_seed_or_shuffle_is_refused():
    refuse_changed(OLD, {**OLD, "output": "elsewhere"})
    with pytest.raises(CheckpointError, match=r"another seed and shuffle \(seed: 1 -> 2; shuffle: true -> false\)"):
        refuse_changed(OLD, {**OLD, "seed": 2, "shuffle": False})
    with pytest.raises(CheckpointError, match=r"another seed \(seed: 1 -> 3\)"):
        refuse_changed(OLD, {**OLD, "seed": 3})
