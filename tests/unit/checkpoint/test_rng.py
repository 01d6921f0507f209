"""The random state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hvdtrain.checkpoint import CheckpointStore, load, rng_state, set_rng_state


def draw() -> tuple[list[float], list[float], list[float]]:
    python = [random.random(), random.gauss(0, 1)]
    numpy = [float(np.random.rand()), float(np.random.randn())]
    return python, numpy, torch.randn(3).tolist()


def test_draws_continue_where_the_file_was_written(tmp_path, make_state):
    draw()  # leaves half a Gaussian pair in python's and numpy's generators
    path = CheckpointStore(tmp_path).save(make_state(1, rng={"ranks": [rng_state()]}), step=1)
    expected = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    set_rng_state(load(path)["rng"]["ranks"][0])
    assert draw() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_continue(tmp_path, make_state):
    tied = torch.randn(3, device="cuda")
    model = {"a": tied, "b": tied[:]}
    path = CheckpointStore(tmp_path).save(make_state(1, model=model, rng=rng_state()), step=1)
    expected = torch.randn(3, device="cuda")
    state = load(path)
    set_rng_state(state["rng"])
    assert torch.equal(torch.randn(3, device="cuda"), expected)
    assert state["model"]["a"].device.type == "cpu"
    assert state["model"]["a"].data_ptr() == state["model"]["b"].data_ptr()
