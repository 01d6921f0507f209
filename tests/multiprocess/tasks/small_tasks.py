"""Tasks small enough to work out by hand. SEEN collects, on each rank, what the training losses were given."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import hvdtrain

SEEN: list = []


class Product(nn.Module):
    """w * x, w of `size` elements, starting at 0."""

    def __init__(self, size: int = 1, value: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), value))

    def forward(self, x):
        return self.w * x


class Values(Dataset):
    """Floats, or rows of floats."""

    def __init__(self, values) -> None:
        self.values = torch.tensor(values, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


class Stream(IterableDataset):
    def __init__(self, values, noise: float = 0.0) -> None:
        self.values, self.noise = values, noise

    def __iter__(self):
        for value in self.values:
            yield torch.tensor(value, dtype=torch.float32) + self.noise * torch.rand(())


class ResumableStream(IterableDataset):
    """Knows where it is, over all ranks: with state, another number of ranks can go on."""

    def __init__(self, values) -> None:
        self.values, self.position = values, 0

    def set_epoch(self, epoch: int) -> None:
        self.position = 0

    def __iter__(self):
        world = hvdtrain.world()
        while self.position + world.rank < len(self.values):
            value = self.values[self.position + world.rank]
            self.position += world.size
            yield torch.tensor(value, dtype=torch.float32)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state) -> None:
        self.position = state["position"]


class Linear:
    """loss = mean(w * x) over a map dataset of the given values.

    Args:
        weight: what loss() returns as the microbatch's weight; null: none is returned.
        held_out: values of the evaluation dataset; its metric "mean" is their mean, "w" the parameter.
    """

    def __init__(self, values=(), weight=None, size=1, held_out=None, start=0.0) -> None:
        self.values, self.weight, self.size, self.held_out, self.start = values, weight, size, held_out, start

    def model(self):
        return Product(self.size, self.start)

    def train_dataset(self):
        return Values(self.values)

    def loss(self, model, batch):
        SEEN.append(batch.tolist())
        loss = model(batch).sum() / len(batch)
        return loss if self.weight is None else (loss, self.weight)

    def eval_dataset(self):
        return None if self.held_out is None else Values(self.held_out)

    def metrics(self, model, batch):
        assert not model.training
        return {"mean": (batch.sum(), len(batch)), "w": (model.w.detach().sum(), 1)}


class Ranks(Linear):
    """A stream of each rank's own values: `values` has one list per rank."""

    def train_dataset(self):
        return Stream(self.values[hvdtrain.world().rank])


class RanksNoise(Ranks):
    def train_dataset(self):
        return Stream(self.values[hvdtrain.world().rank], noise=1.0)


class Resumable(Linear):
    def train_dataset(self):
        return ResumableStream(self.values)


class RanksMap(Linear):
    """Wrong on purpose: the ranks' map datasets differ."""

    def train_dataset(self):
        return Values(self.values[hvdtrain.world().rank])


class TwoGradients(Linear):
    """Gradient (6, 0) on rank 0 and (0, 2) on rank 1 in every step."""

    def __init__(self) -> None:
        super().__init__(values=[[6.0, 0.0], [0.0, 2.0]] * 4, size=2)


class Halving(Linear):
    """Its scheduler halves the learning rate after each step that was not skipped."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


class OwnEverything(Linear):
    """Own optimizer, scheduler and collate (which doubles the values)."""

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=1.0)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def collate(self, samples):
        return torch.stack(samples) * 2


class Weighted(Linear):
    """Each microbatch weighs the sum of its values; its loss is the mean."""

    def loss(self, model, batch):
        SEEN.append(batch.tolist())
        return model.__call__(torch.ones(1)).sum() * batch.mean(), float(batch.sum()), {"first": batch[0]}


class Dynamic(Linear):
    """Items are finished microbatches: lists of values of any length."""

    def train_dataset(self):
        return Microbatches(self.values)


class DynamicRanks(Linear):
    def train_dataset(self):
        return MicrobatchStream(self.values[hvdtrain.world().rank])


class Microbatches(Dataset):
    def __init__(self, values) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
        return torch.tensor(self.values[index], dtype=torch.float32)


class MicrobatchStream(IterableDataset):
    def __init__(self, values) -> None:
        self.values = values

    def __iter__(self):
        # numpy arrays, as many readers give them.
        return (np.array(value, dtype=np.float32) for value in self.values)


class WrongLoss(Linear):
    """Returns what a loss must not return."""

    def __init__(self, kind, **options) -> None:
        super().__init__(values=[1.0] * 8, **options)
        self.kind, self.calls = kind, 0

    def loss(self, model, batch):
        self.calls += 1
        loss = model(batch).mean()
        return {
            "none": lambda: None,
            "float": lambda: 1.0,
            "list": lambda: [loss, 1],
            "long tuple": lambda: (loss, 1, {}, 2),
            "vector": lambda: model(batch) + torch.zeros(2),
            "detached": lambda: loss.detach(),
            "weight none": lambda: (loss, None),
            "weight text": lambda: (loss, "many"),
            "weight negative": lambda: (loss, -1.0),
            "weight nan": lambda: (loss, float("nan")),
            "values list": lambda: (loss, 1.0, [1]),
            "value text": lambda: (loss, 1.0, {"accuracy": "high"}),
            "value vector": lambda: (loss, 1.0, {"accuracy": torch.zeros(3)}),
            "weight sometimes": lambda: (loss, 1.0) if self.calls == 1 else loss,
            "weight on one rank": lambda: (loss, 1.0) if hvdtrain.world().rank == 0 else loss,
        }[self.kind]()


class WrongMetrics(Linear):
    def __init__(self, kind) -> None:
        super().__init__(values=[1.0] * 4, held_out=[1.0] * 4)
        self.kind = kind

    def eval_dataset(self):
        return {"no dataset": 5, "empty": Values([])}.get(self.kind, Values(self.held_out))

    def metrics(self, model, batch):
        return {
            "number": lambda: 1.0,
            "bare": lambda: {"accuracy": 1.0},
            "vector": lambda: {"accuracy": (torch.zeros(2), 2)},
            "names differ": lambda: {f"on rank {hvdtrain.world().rank}": (1, 1)},
            "no count": lambda: {"accuracy": (0, 0)},
            "empty": lambda: {"accuracy": (0, 1)},
        }[self.kind]()


class Mlp(Linear):
    """16-16-16-1. Keeps, before each backward, the gradient that is there so far: sums of this rank, or reduced."""

    def __init__(self, num_samples=16) -> None:
        super().__init__()
        self.num_samples = num_samples

    def model(self):
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def train_dataset(self):
        return Values(torch.randn(self.num_samples, 16, generator=torch.Generator().manual_seed(0)).tolist())

    def loss(self, model, batch):
        SEEN.append(batch[:, 0].tolist())
        return model(batch).mean()


class Noisy(Linear):
    """All that a resume could get wrong: dropout, augmentation in the dataset, batch norm, momentum in the YAML.

    Args:
        kind: map | stream | state (a stream with a state_dict) | finished (items are finished microbatches).
    """

    def __init__(self, kind="map", num_samples=40) -> None:
        super().__init__()
        self.kind, self.num_samples = kind, num_samples

    def model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def _samples(self):
        return torch.arange(3.0 * self.num_samples).reshape(-1, 3) / (3 * self.num_samples)

    def train_dataset(self):
        samples = self._samples()
        if self.kind == "map":
            return NoisyValues(samples)
        if self.kind == "finished":
            return NoisyValues(samples.reshape(-1, 2, 3))
        return (NoisyStream if self.kind == "stream" else NoisyStreamWithState)(samples)

    def eval_dataset(self):
        # Finished microbatches in both datasets, or in none.
        samples = self._samples()
        return NoisyValues(samples[:6].reshape(-1, 2, 3) if self.kind == "finished" else samples[:7])

    def metrics(self, model, batch):
        return {"loss": (model(batch).sum(), len(batch))}

    def loss(self, model, batch):
        SEEN.append(batch.tolist())
        return (model(batch) ** 2).mean()


def noise():
    return torch.rand(3) + random.random() + np.random.rand()


class NoisyValues(Dataset):
    def __init__(self, samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] + noise()


class NoisyStream(IterableDataset):
    """Split by rank and worker; reads in an order that it draws itself."""

    def __init__(self, samples) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _mine(self):
        world, worker = hvdtrain.world(), get_worker_info()
        mine = self.samples[world.rank :: world.size]
        return mine if worker is None else mine[worker.id :: worker.num_workers]

    def __iter__(self):
        mine = self._mine()
        for index in torch.randperm(len(mine)).tolist():
            yield mine[index] + noise() + self.epoch


class NoisyStreamWithState(NoisyStream):
    def __init__(self, samples) -> None:
        super().__init__(samples)
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.position = 0

    def __iter__(self):
        mine = self._mine()
        while self.position < len(mine):
            self.position += 1
            yield mine[self.position - 1] + noise() + self.epoch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state) -> None:
        self.position = state["position"]


class Augmented(Linear):
    """Each sample is (index, a random number drawn where it is loaded, the worker's number)."""

    def __init__(self, num_samples=8) -> None:
        super().__init__()
        self.num_samples = num_samples

    def train_dataset(self):
        return AugmentedValues(self.num_samples)

    def loss(self, model, batch):
        SEEN.append(batch.tolist())
        return model(batch[:, 0].float()).mean()


class AugmentedValues(Dataset):
    def __init__(self, num_samples) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index):
        worker = get_worker_info()
        drawn = float(torch.rand((), dtype=torch.float64) + random.random() + np.random.rand())
        return torch.tensor([float(index), drawn, -1.0 if worker is None else worker.id], dtype=torch.float64)


class StopAt(Noisy):
    """One rank is asked to stop while it computes its nth loss."""

    def __init__(self, rank=1, call=5, **options) -> None:
        super().__init__(**options)
        self.rank, self.call, self.calls = rank, call, 0
        self.request_stop = None

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.call and hvdtrain.world().rank == self.rank:
            STOP[0]("the test")
        return super().loss(model, batch)


# Set by the test to the guard's request_stop.
STOP: list = [None]


class MaskedTokens(Linear):
    """The weight is the number of positive values; the mean over none of them is 0/0, as with a batch all masked."""

    def loss(self, model, batch):
        kept = batch[batch > 0]
        return model(kept).sum() / len(kept), len(kept)


class MaskedMean(Linear):
    """As MaskedTokens, in the form whose gradient is NaN too: 0/0 times what was masked.

    Args:
        heads: "a" or "b" for each sample: which of two parameters its microbatch uses; null: both.
        sparse: the parameter is a row of an embedding with sparse gradients.
    """

    def __init__(self, heads=None, sparse=False, **options) -> None:
        super().__init__(**options)
        self.heads, self.sparse = heads, sparse

    def model(self):
        return Rows() if self.sparse else Heads()

    def loss(self, model, batch):
        mask = batch > 0
        used = model(batch) if self.heads is None else model(batch, self.heads[hvdtrain.world().rank])
        return (used * mask).sum() / mask.sum(), mask.sum()


class Heads(nn.Module):
    """a * x + b * x, or one of the two; both start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x, heads="ab"):
        return sum(getattr(self, head) * x for head in heads)


class Rows(nn.Module):
    """w[0] * x + bias; w is the sparse embedding of 2 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Embedding(2, 1, sparse=True)
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.w.weight)

    def forward(self, x):
        return self.w(torch.zeros(len(x), dtype=torch.int64)).flatten() * x + self.bias


class Sometimes(Linear):
    """Values to be logged that not every microbatch has: "big" where x > 10, "odd" where x is odd."""

    def loss(self, model, batch):
        x = float(batch[0])
        values = {"x": x, **({"big": x} if x > 10 else {}), **({"odd": x} if x % 2 else {})}
        return model(batch).sum(), 1.0, values


class NoMetrics:
    """Held out: 1, 2, 3; no metrics().

    Args:
        masked: held out are 1, -2, 3, -4, -5 of which the negative ones count for nothing; their loss is NaN.
    """

    def __init__(self, masked=False) -> None:
        held_out = [1.0, -2.0, 3.0, -4.0, -5.0] if masked else [1.0, 2.0, 3.0]
        self.inner = (MaskedTokens if masked else Linear)(values=[1.0, 1.0], held_out=held_out, start=2.0)
        self.model, self.train_dataset = self.inner.model, self.inner.train_dataset
        self.loss, self.eval_dataset = self.inner.loss, self.inner.eval_dataset
