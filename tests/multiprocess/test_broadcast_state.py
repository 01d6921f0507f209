"""Case I: optimizer state that only the root has reaches every rank; nothing moves; options are equal everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

OPTIMIZERS = {
    "SGD": {"weight_decay": 0.1},
    "SGD+momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"foreach": True, "weight_decay": 0.1, "amsgrad": True},
    "Adagrad": {"weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5, "weight_decay": 0.1},
    "SparseAdam": {},
}


def make(name, arguments, rank):
    """A model with two groups of two learning rates and a frozen parameter, different on every rank."""
    torch.manual_seed(rank)
    sparse = name == "SparseAdam"
    model = nn.ModuleList([nn.Embedding(4, 3, sparse=sparse), nn.Embedding(2, 3, sparse=sparse), nn.Linear(3, 2)])
    model[2].requires_grad_(False)
    model.register_buffer("steps", torch.tensor(rank, dtype=torch.int64))
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight], "lr": 0.5 + rank}]
    optimizer = getattr(torch.optim, name.partition("+")[0])(groups, lr=0.01 * (rank + 1), **arguments)
    return model, optimizer


def take_steps(model, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        for index in range(2):
            model[index](torch.tensor([step, 1])).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def flat(state):
    """Options and state of an optimizer as plain values, to compare between ranks."""
    return {
        "groups": state["param_groups"],
        "state": {
            (index, key): (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value
            for index, values in state["state"].items()
            for key, value in values.items()
        },
    }


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_state_of_the_root_alone_reaches_every_rank(pool2, name, root):
    def work(backend, name, arguments, root):
        rank = backend.world.rank
        model, optimizer = make(name, arguments, rank)
        if rank == root:
            take_steps(model, optimizer)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        replica = backend.wrap(model, optimizer)
        replica.broadcast_state(root)
        after = {key: value.tolist() for key, value in model.state_dict().items()}
        if rank == root:
            assert after == {key: value.tolist() for key, value in before.items()}, "the root's parameters moved"
        state = flat(optimizer.state_dict())
        # and the next step does the same everywhere
        for index in range(2):
            with replica.microbatch(index, 2):
                loss = sum(model[i](torch.tensor([1])).sum() for i in range(2))
                if backend.name == "ddp":
                    loss = through(replica, loss)
                loss.backward()
        replica.finish_gradients()
        replica.step()
        final = {key: value.tolist() for key, value in model.state_dict().items()}
        replica.close()
        return after, state, final, dict(optimizer.state_dict()["state"])

    def through(replica, loss):
        # the model is a list of modules: let DDP see a forward pass
        replica.bare_model.forward = lambda value: value
        return replica.model(loss)

    arguments = OPTIMIZERS[name]
    results = pool2.run(lambda backend: work(backend, name, arguments, root))
    after, state, final, _ = results[root]
    for result in results:
        assert result[0] == after
        assert result[1] == state
        assert result[2] == final
    assert [group["lr"] for group in state["groups"]] == [0.01 * (root + 1), 0.5 + root]
    assert after["steps"] == root
    num_states = 0 if name == "SGD" else 2
    assert len({index for index, _ in state["state"]}) == num_states


@pytest.mark.parametrize("root", [0, 1])
def test_a_root_without_state_clears_that_of_the_others(pool2, root):
    def work(backend, root):
        rank = backend.world.rank
        model, optimizer = make("Adam", {}, rank)
        if rank != root:
            take_steps(model, optimizer)
        replica = backend.wrap(model, optimizer)
        replica.broadcast_state(root)
        replica.close()
        return len(optimizer.state), [group["lr"] for group in optimizer.param_groups]

    assert pool2.run(work, root) == [(0, [0.01 * (root + 1), 0.5 + root])] * 2


def test_every_dtype_shape_and_layout_arrives(pool2):
    def work(backend):
        rank = backend.world.rank
        model = nn.Linear(2, 2, bias=False)
        values = {
            "bools": torch.tensor([rank == 1, True]),
            "bytes": torch.tensor([rank + 250], dtype=torch.uint8),
            "zero_d": torch.tensor(rank, dtype=torch.int64),
            "empty": torch.empty(0, 3),
            "fp16": torch.tensor([rank + 0.5], dtype=torch.float16),
            "bf16": torch.tensor([rank + 0.5], dtype=torch.bfloat16),
            "fp64": torch.tensor([rank + 1e-12], dtype=torch.float64),
            "complex": torch.tensor([complex(rank, 2)]),
            "transposed": torch.arange(6).reshape(2, 3).t() * rank,
        }
        for name, value in values.items():
            model.register_buffer(name, value, persistent=name != "bytes")
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        replica.broadcast_state(root=1)
        replica.close()
        return {name: (str(buffer.dtype), buffer.tolist()) for name, buffer in model.named_buffers()}

    first, second = pool2.run(work)
    assert first == second
    assert {name: values for name, (_, values) in first.items()} == {
        "bools": [True, True],
        "bytes": [251],
        "zero_d": 1,
        "empty": [],
        "fp16": [1.5],
        "bf16": [1.5],
        "fp64": [1 + 1e-12],
        "complex": [1 + 2j],
        "transposed": [[0, 3], [1, 4], [2, 5]],
    }


def test_state_wider_than_its_parameter_stays_so(pool2):
    """A bfloat16 parameter with float32 state, as careful optimizers keep it; torch's load_state_dict would cast it."""

    def work(backend):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if backend.world.rank == 0:
            optimizer.state[model.weight] = {"momentum_buffer": torch.tensor([[1.001]]), "seen": 3, "note": ("a", None)}
        replica = backend.wrap(model, optimizer)
        replica.broadcast_state()
        replica.close()
        return optimizer.state[model.weight]

    for state in pool2.run(work):
        assert state["momentum_buffer"].dtype is torch.float32
        assert state["momentum_buffer"].item() == torch.tensor(1.001).item()
        assert (state["seen"], state["note"]) == (3, ("a", None))


def test_models_and_optimizers_that_differ_are_named_on_every_rank(pool2):
    def work(backend):
        rank = backend.world.rank
        errors = []

        def attempt(model, optimizer):
            replica = backend.wrap(model, optimizer)
            try:
                replica.broadcast_state()
            except Exception as error:
                errors.append((type(error).__name__, str(error)))
            replica.close()
            assert backend.all_reduce(torch.tensor(1)).item() == 2

        model = nn.Linear(1, 1)
        model.register_buffer("table", torch.zeros(3 + rank))
        attempt(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model = nn.Linear(1, 1)
        groups = [model.parameters()] if rank == 0 else [[model.weight], [model.bias]]
        attempt(model, torch.optim.SGD([{"params": list(group)} for group in groups], lr=0.1))
        return errors

    for rank, errors in enumerate(pool2.run(work)):
        tables = [f"('table', ({length},), 'torch.float32')" for length in (4, 3)]
        forms = ["SGD with groups of [2]", "SGD with groups of [1, 1]"]
        assert errors == [
            (
                "CollectiveError",
                f"rank 1 and rank 0 hold different tensors: {', '.join(tables)}; build the same model everywhere",
            ),
            (
                "CollectiveError",
                (
                    f"the optimizers differ: rank {1 - rank} has {forms[1 - rank]} parameters, rank {rank} has "
                    f"{forms[rank]}; make the same optimizer on every rank"
                ),
            ),
        ]
