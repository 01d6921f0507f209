"""One meaning per collective: the same exact results under every backend, inputs untouched, disagreement an error."""

from __future__ import annotations

import torch


def test_all_reduce_sums_without_touching_its_input(pool2):
    def work(backend):
        tensor = torch.tensor([1.0, 2.0]) * (backend.world.rank + 1)
        before = tensor.clone()
        result = backend.all_reduce(tensor)
        return result.tolist(), torch.equal(tensor, before)

    assert pool2.run(work) == [([3.0, 6.0], True)] * 2
