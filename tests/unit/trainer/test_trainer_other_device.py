"""What the trainer computes on a GPU does not mix with what it has on the CPU; with the numbers, on a pretended one."""

from __future__ import annotations

import contextlib
import math
import types

import pytest
import torch
from pretended_device import DEVICE, Elsewhere
from torch import nn

from hvdtrain.backends import Replica, WrapOptions
from hvdtrain.backends.pending import Pending
from hvdtrain.config import Config
from hvdtrain.data.groups import Group, GroupSource
from hvdtrain.precision import Precision
from hvdtrain.trainer.evaluation import Evaluation
from hvdtrain.trainer.length import RunLength
from hvdtrain.trainer.loop import Loop
from hvdtrain.trainer.position import Position
from hvdtrain.trainer.schedule import Schedule


class Alone:
    """The backend of one rank, on the pretended device."""

    device = DEVICE

    def __init__(self):
        self.world = types.SimpleNamespace(rank=0, size=1, is_root=True)
        self.guard = types.SimpleNamespace(operation=lambda name: contextlib.nullcontext(), stop_requested=False)

    def start_sum(self, tensor, name):
        assert type(tensor) is torch.Tensor
        return Pending(lambda: tensor)

    def all_reduce(self, tensor, op="sum"):
        return tensor

    def all_gather_object(self, value):
        return [value]


class OneRank(Replica):
    """The replica of one rank."""

    def _microbatch(self, communicates):
        return contextlib.nullcontext()

    def _without_data(self):
        raise AssertionError

    def _finish_gradients(self):
        return

    def _watch_reductions(self):
        raise AssertionError

    def _close(self):
        return

    def sync_buffers(self, root=0):
        return


class Product(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(Elsewhere(torch.full((1,), value)))

    def forward(self, x):
        return self.w * x


def replica(model, backend, **options):
    return OneRank(backend, model, model, torch.optim.SGD(model.parameters(), lr=0.1), WrapOptions(**options))


def config(**keys):
    return Config.model_validate({"task": "module:Class", **keys})


def test_the_pretended_device_refuses_what_a_gpu_refuses():
    number, row = Elsewhere(torch.tensor(2.0)), Elsewhere(torch.tensor([2.0, 3.0]))
    assert (row * torch.tensor(2.0)).inner.tolist() == [4.0, 6.0]
    for wrong in (
        lambda: row + torch.zeros(2),
        lambda: torch.stack([number, torch.tensor(1.0)]),
        lambda: torch.zeros(()).add_(number),
    ):
        with pytest.raises(RuntimeError, match="cpu"):
            wrong()
    assert torch.stack([number, number]).cpu().tolist() == [2.0, 2.0]


# What a task may return of a batch x: the total on the device or not, the count on the device or not.
PAIRS = {
    "total there, count here": lambda x: (x.sum(), len(x)),
    "total there, count here, a tensor": lambda x: (x.sum(), torch.tensor(len(x))),
    "both there": lambda x: (x.sum(), torch.ones_like(x).sum()),
    "total here, count there": lambda x: (float(x.sum()), torch.ones_like(x).sum()),
    "both here": lambda x: (float(x.sum()), len(x)),
    "as it comes": lambda x: (x.sum(), len(x)) if len(x) > 1 else (float(x), torch.ones_like(x).sum()),
}


def evaluated(task, batches, model):
    backend = Alone()
    task.eval_dataset = lambda: [0.0]
    evaluation = Evaluation(task, config(), backend)
    evaluation._loader = [(Elsewhere(torch.tensor(batch)), len(batch)) for batch in batches]
    return evaluation.run(replica(model, backend), Precision("fp32", DEVICE))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_metrics_of_any_device(pair):
    task = types.SimpleNamespace(metrics=lambda model, x: {"mean": pair(x)})
    assert evaluated(task, [[1.0, 2.0], [6.0]], Product()) == {"mean": 3.0}


def test_totals_stay_on_the_device_until_the_end():
    task = types.SimpleNamespace(metrics=lambda model, x: {"mean": (x.sum(), len(x))})
    before = Elsewhere.reads
    assert evaluated(task, [[1.0]] * 50, Product()) == {"mean": 1.0}
    assert Elsewhere.reads - before == 1


@pytest.mark.parametrize("weight", [lambda mask: mask.sum(), lambda mask: int(mask.sum())], ids=["there", "here"])
def test_the_mean_loss_with_a_batch_of_nothing(weight):
    """w = 2; over 1, 3 and 5 of three batches, of which one is all masked: 0/0."""

    def loss(model, x):
        mask = (x > 0).float()
        return (model(x) * mask).sum() / mask.sum(), weight(mask)

    found = evaluated(types.SimpleNamespace(loss=loss), [[1.0, 3.0], [-1.0, -2.0], [5.0, -1.0]], Product(2.0))
    assert found == {"loss": 6.0}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("total", [math.nan, math.inf])
def test_a_metric_of_nothing_that_is_not_finite_counts_for_nothing(there, total):
    def pair(x):
        count = (x > 0).sum()
        return (x.sum() if float(count) else x.sum() * total), (count if there else int(count))

    task = types.SimpleNamespace(metrics=lambda model, x: {"mean": pair(x)})
    assert evaluated(task, [[1.0, 3.0], [-1.0], [5.0]], Product()) == {"mean": 3.0}


class Source(GroupSource):
    votes = False

    def __init__(self, *steps):
        self.steps = steps

    def __iter__(self):
        for number, batches in enumerate(self.steps):
            microbatches = [(Elsewhere(torch.tensor(batch)), len(batch)) for batch in batches]
            yield Group(microbatches, sum(map(len, batches)), number == len(self.steps) - 1)


def steps(task, source, *, precision="fp32", clip_norm=None, **keys):
    """Every step of the loop over the source: [(loss, values, gradient norm)], and the parameter."""
    backend, model = Alone(), Product()
    settings = config(**{"log_every_steps": 1, **keys}, optimizer={"name": "SGD", "lr": 0.1})
    replica_ = replica(model, backend, find_unused_parameters=settings.find_unused_parameters)
    made = Precision(precision, DEVICE, clip_norm=clip_norm)
    schedule = Schedule(task, settings, replica_.optimizer, RunLength(10))
    loop = Loop(task, settings, backend, replica_, made, schedule, Position())
    found = []
    for _, step in loop.steps(source):
        found += [(logged.loss, logged.values, step.norm) for logged in [*step.results, *loop.flush()]]
    return found, round(model.w.inner.item(), 6)


def test_steps_of_plain_losses():
    task = types.SimpleNamespace(loss=lambda model, x: model(x).mean())
    found, w = steps(task, Source([[1.0, 3.0], [5.0, 7.0]], [[10.0]]))
    assert [norm for _, _, norm in found] == [4.0, 10.0]
    assert w == -1.4


def test_steps_of_clipped_gradients():
    task = types.SimpleNamespace(loss=lambda model, x: model(x).mean())
    found, w = steps(task, Source([[3.0]], [[0.5]]), clip_norm=1.0)
    assert [norm for _, _, norm in found] == [3.0, 0.5]
    assert w == pytest.approx(-0.15, abs=1e-6)


def test_a_step_that_is_not_logged_reads_one_number():
    task = types.SimpleNamespace(loss=lambda model, x: model(x).mean())
    before = Elsewhere.reads
    steps(task, Source(*[[[3.0]]] * 20), clip_norm=1.0, log_every_steps=100)
    assert Elsewhere.reads - before == 20


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("there", [True, False])
def test_steps_of_weights_and_values(there, find_unused):
    """Weights 1 and 3 of gradients 4 and 8, and one of NaN that weighs nothing: (4 + 24) / 4 = 7."""

    def loss(model, x):
        weight = x.clamp(min=0).sum() / 4
        mean = (model(x) * (x > 0)).sum() / (x > 0).sum()
        return mean * {4: 1.0, 12: 8 / 12}.get(int(weight * 4), 1.0), (weight if there else float(weight)), {"x": x[0]}

    found, w = steps(
        types.SimpleNamespace(loss=loss), Source([[4.0], [-1.0], [12.0]]), find_unused_parameters=find_unused
    )
    assert found == [(0.0, {"x": 10.0}, 7.0)]
    assert w == -0.7
