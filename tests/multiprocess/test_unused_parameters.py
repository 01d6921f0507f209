"""Case L: ranks that use different parts of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from script_ranks import run_train
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1, 1, bias=False)
        self.b = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.a.weight)
        nn.init.zeros_(self.b.weight)

    def forward(self, x, heads):
        return sum(getattr(self, head)(x) for head in heads)


def one_step(backend, heads, count=1, **options):
    """Rank r takes two steps of `count` microbatches with heads[r] (or heads[r][microbatch]); the gradients."""
    model = TwoHeads()
    replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    own = heads[backend.world.rank]
    try:
        results = []
        for _ in range(2):
            for index in range(count):
                with replica.microbatch(index, count):
                    used = own if count == 1 else own[index]
                    replica.model(torch.ones(1, 1), used).sum().backward()
            replica.finish_gradients()
            results.append((model.a.weight.grad.item(), model.b.weight.grad.item()))
            replica.step()
            replica.optimizer.zero_grad()
        return results
    except Exception as error:
        return type(error).__name__, str(error), model.a.weight.item(), model.b.weight.item()
    finally:
        replica.close()


def test_horovod_averages_what_some_ranks_left_out(pools, pool2):
    if pool2.kind == "ddp":
        heads = pool2.run(one_step, ("a", "b"))
        for rank, (kind, text, *weights) in enumerate(heads):
            unused = "ba"[rank]
            assert (kind, weights) == ("ContractError", [0.0, 0.0])  # before anything moved
            assert text.startswith(
                f"rank {rank}: these parameters took no part in the last loss of this step, so their gradients (and "
                f"those of their buckets) were not reduced: {unused}.weight. Set find_unused_parameters: true"
            )
    else:
        assert pool2.run(one_step, ("a", "b")) == [[(0.5, 0.5)] * 2] * 2


def test_find_unused_parameters(pool2):
    assert pool2.run(one_step, ("a", "b"), find_unused_parameters=True) == [[(0.5, 0.5)] * 2] * 2
    assert pool2.run(one_step, ("ab", "a"), find_unused_parameters=True) == [[(1.0, 0.5)] * 2] * 2


def test_heads_used_in_an_earlier_microbatch_only(pool2):
    """Under ddp the search for unused parameters covers the whole step, not its last microbatch."""
    heads = (("a", "b"), ("b", "b"))
    assert pool2.run(one_step, heads, 2, find_unused_parameters=True) == [[(0.5, 1.5)] * 2] * 2


def test_static_graph(pool2):
    assert pool2.run(one_step, ("ab", "ab"), static_graph=True) == [[(1.0, 1.0)] * 2] * 2
    # torch itself fails on accumulation in the first step of a static graph
    assert pool2.run(one_step, (("ab", "ab"), ("ab", "ab")), 2, static_graph=True) == [[(2.0, 2.0)] * 2] * 2


def test_static_graph_with_a_rank_without_data(pool2):
    def work(backend):
        model = TwoHeads()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), static_graph=True)
        results = []
        for with_data in [(0, 1), (0,), (1,)]:
            if backend.world.rank in with_data:
                with replica.microbatch(0, 1):
                    replica.model(torch.ones(1, 1), "ab").sum().backward()
            else:
                replica.without_data()
            replica.finish_gradients()
            results.append((model.a.weight.grad.item(), model.b.weight.grad.item()))
            replica.step()
            replica.optimizer.zero_grad()
        replica.close()
        return results

    assert pool2.run(work) == [[(1.0, 1.0), (0.5, 0.5), (0.5, 0.5)]] * 2


TASK = """\
import torch
from torch import nn

import hvdtrain


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1, 1, bias=False)
        self.b = nn.Linear(1, 1, bias=False)


class Task:
    def __init__(self, unused_on):
        self.unused_on = unused_on

    def model(self):
        return TwoHeads()

    def train_dataset(self):
        return torch.utils.data.TensorDataset(torch.ones(64, 1))

    def loss(self, model, batch):
        def forward(x):
            heads = [self_model.a] if hvdtrain.world().rank in self.unused_on else [self_model.a, self_model.b]
            return sum(head(x) for head in heads).mean()

        self_model = bare(model)
        self_model.forward = forward
        return model(batch[0])


def bare(model):
    while not isinstance(model, TwoHeads):
        model = model.module if hasattr(model, "module") else model.model
    return model
"""


@pytest.mark.parametrize("unused_on", [[1], [0], [0, 1]])
def test_ddp_ends_the_job_naming_the_head_also_when_one_rank_alone_leaves_it_out(tmp_path: Path, unused_on) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(
        f"task: {tmp_path}/task.py:Task\n"
        f"task_options: {{unused_on: {unused_on}}}\n"
        f"backend: ddp\ndevice: cpu\nbatch_size: 4\nepochs: 1\noutput: {tmp_path}/out\n"
    )
    # The stall limits are minutes: within this limit only the rank at fault can end the other.
    ranks = run_train([str(tmp_path / "job.yaml")], tmp_path, limit_s=60)
    assert [rank.status for rank in ranks] == [1, 1]
    last = ranks[0].err.rstrip().splitlines()[-1]
    assert "b.weight" in last
    assert "find_unused_parameters" in last
    assert any(f"rank {rank}: these parameters" in last for rank in unused_on)
