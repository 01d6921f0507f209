"""The teaching code of examples/collectives adds exactly, on two ranks and on three, whatever the size."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "collectives"


def sums(backend, folder, name):
    """What all_reduce makes of tensors of several sizes; as lists."""
    import importlib.util

    import torch

    specification = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    rank, found = backend.world.rank, []
    for numel in (1, 2, 3, 5, 6, 1000):
        tensor = torch.arange(numel, dtype=torch.float32) * (rank + 1)
        module.all_reduce(tensor)
        found.append(tensor.tolist())
    table = torch.full((2, 5), 2**40 + rank, dtype=torch.int64)
    module.all_reduce(table)
    found.append(table.tolist())
    return found


def expected(size):
    factor = size * (size + 1) // 2
    exact = [[float(number * factor) for number in range(numel)] for numel in (1, 2, 3, 5, 6, 1000)]
    return [*exact, [[size * 2**40 + size * (size - 1) // 2] * 5] * 2]


@pytest.mark.parametrize("name", ["parameter_server", "ring"])
@pytest.mark.parametrize("pool2", ["ddp"], indirect=True)
def test_two_ranks(pool2, name):
    assert pool2.run(sums, FOLDER, name) == [expected(2)] * 2


@pytest.mark.parametrize("name", ["parameter_server", "ring"])
@pytest.mark.parametrize("pool3", ["ddp"], indirect=True)
def test_three_ranks(pool3, name):
    assert pool3.run(sums, FOLDER, name) == [expected(3)] * 3
