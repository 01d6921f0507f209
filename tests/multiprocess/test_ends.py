"""Short runs end with status 0: nothing aborts while the interpreter shuts down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from script_ranks import run_script, run_train

# More by hand, before a release: HVDTRAIN_TEST_RUNS=100
NUM_RUNS = int(os.environ.get("HVDTRAIN_TEST_RUNS", "2"))

# Keeps what a careless user keeps: the wrapped model, a loss with its graph, the replica.
OWN_LOOP = """
import torch
with hvdtrain.connect({backend!r}, **options()) as backend:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), {compression!r})
    replica.broadcast_state()
    wrapped = replica.model
    for step in range(5):
        with replica.microbatch(0, 1):
            loss = wrapped(torch.ones(2, 8)).sum()
            pending = backend.start_sum(torch.ones(1, dtype=torch.float64), "x")
            loss.backward()
        replica.finish_gradients()
        assert pending.wait().item() == 2
        replica.step()
        replica.optimizer.zero_grad()
    backend.all_reduce(loss)
print("done")
"""

TASK = """\
import torch


class Task:
    def model(self):
        return torch.nn.Linear(4, 1)

    def train_dataset(self):
        return torch.utils.data.TensorDataset(torch.ones(16, 4))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""


@pytest.mark.timeout(60 * NUM_RUNS + 60)
@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_runs_of_an_own_loop_end_with_status_0(tmp_path: Path, backend: str, compression: str) -> None:
    for number in range(NUM_RUNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks = run_script(OWN_LOOP.format(backend=backend, compression=compression), folder)
        assert [(rank.status, rank.out, rank.err) for rank in ranks] == [(0, "done\n", "")] * 2, f"run {number}"


@pytest.mark.timeout(60 * NUM_RUNS + 60)
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_runs_of_the_trainer_end_with_status_0(tmp_path: Path, backend: str) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(
        f"task: {tmp_path}/task.py:Task\nbackend: {backend}\ndevice: cpu\nbatch_size: 2\nepochs: 1\n"
    )
    for number in range(NUM_RUNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks = run_train([str(tmp_path / "job.yaml"), "--output", str(folder / "out")], folder)
        assert [rank.status for rank in ranks] == [0, 0], f"run {number}: {ranks[0].err}{ranks[1].err}"
