"""The way through a model that needs no batch, and the parameters with sparse gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hvdtrain.backends.entry import Entry
from hvdtrain.backends.nothing import sparse_parameters


def test_without_the_model_every_trained_parameter_gets_exact_zeros() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.BatchNorm1d(2), nn.Linear(2, 1).bfloat16())
    model.append(nn.Linear(1, 1).requires_grad_(False))
    with torch.no_grad():
        model[2].weight[0, 0] = math.inf
        model[1].weight[0] = math.nan
    calls: list[object] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    entry = Entry(model, sparse_parameters(model))
    with entry.without_model():
        loss = entry()
    assert loss.item() == 0
    loss.backward()
    assert calls == []
    assert model[1].num_batches_tracked.item() == 0
    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad._nnz() == 0
    for parameter in [*model[1].parameters(), *model[2].parameters()]:
        assert parameter.grad.eq(0).all()
        assert parameter.grad.dtype is parameter.dtype
    assert model[3].weight.grad is None


def test_calls_go_to_the_model_and_so_do_unknown_attributes() -> None:
    model = nn.Linear(2, 1)
    model.note = "here"
    entry = Entry(model, [])
    assert not entry.was_called
    x = torch.ones(1, 2)
    assert torch.equal(entry(x), model(x))
    assert entry.was_called
    assert entry.note == "here"
    with pytest.raises(AttributeError, match="missing"):
        entry.missing  # noqa: B018


def test_sparse_parameters_are_found_once_and_frozen_ones_left_out() -> None:
    shared = nn.Embedding(3, 2, sparse=True)
    bag = nn.EmbeddingBag(3, 2, sparse=True)
    frozen = nn.Embedding(3, 2, sparse=True).requires_grad_(False)
    model = nn.ModuleList([shared, nn.ModuleList([shared, bag]), frozen, nn.Embedding(3, 2)])
    assert [id(p) for p in sparse_parameters(model)] == [id(shared.weight), id(bag.weight)]
