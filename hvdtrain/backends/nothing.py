"""A loss of no sample: its backward pass takes part in every reduction and adds zeros to every gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

import torch
from torch import nn


def loss_of_nothing(parameters: Iterable[nn.Parameter], sparse: Collection[int]) -> torch.Tensor:
    """0, made from no element of each parameter: exact zeros in backward(), also of a parameter that is infinite.

    Args:
        parameters: those that are trained.
        sparse: `id` of those whose gradients are sparse (see `sparse_parameters`); they get one without rows, because
            a dense one never meets the other ranks' sparse ones.
    """
    return torch.stack([_none_of(p, id(p) in sparse) for p in parameters]).sum()


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters whose gradients are sparse, as far as their modules tell."""
    weights: dict[nn.Parameter, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            weights[cast(nn.Parameter, module.weight)] = None
    return list(weights)


def _none_of(parameter: nn.Parameter, is_sparse: bool) -> torch.Tensor:
    # The sum of no elements, not 0 * an element: that would be NaN for a parameter that is infinite.
    if not is_sparse:
        return parameter.reshape(-1)[:0].sum()
    no_rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    return nn.functional.embedding(no_rows, parameter, sparse=True).sum()
