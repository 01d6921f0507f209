"""The job that benchmarks run where the user names none."""

from __future__ import annotations

from typing import Any

# A multi-layer perceptron with 10 million parameters: much to send (40 MB) for little to compute.
LARGE_MLP: dict[str, Any] = {
    "task": "hvdtrain.bench.workloads:Mlp",
    "task_options": {"widths": [784, 2048, 2048, 2048, 10]},
    "batch_size": 16,
    "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9},
}
