"""What a task's loss() returned: taken apart, checked, and added up for the log."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import ContractError
from hvdtrain.trainer.control import LoggedSums


def unpack(result: Any, num_samples: int) -> tuple[torch.Tensor, float, Mapping[str, Any], bool]:
    """(loss, weight, values, whether the task gave the weight).

    Raises:
        ContractError: what the task's loss() returned has another form.
    """
    if isinstance(result, torch.Tensor):
        return _one_number(result), float(num_samples), {}, False
    if not isinstance(result, tuple) or not 2 <= len(result) <= 3 or not isinstance(result[0], torch.Tensor):
        what = type(result).__name__
        if isinstance(result, tuple):
            what = f"a tuple of ({', '.join(type(item).__name__ for item in result)})"
        raise ContractError(
            f"loss() returned {what}; return a tensor, (tensor, weight) or (tensor, weight, {{name: value}})"
        )
    try:
        weight = float(result[1])
    except (TypeError, ValueError, RuntimeError):
        raise ContractError(
            f"loss() returned a {type(result[1]).__name__} as the weight; a weight is one number: samples or tokens"
        ) from None
    if not (weight >= 0 and math.isfinite(weight)):
        raise ContractError(f"loss() returned the weight {weight}; a weight is a finite number that is not negative")
    values = result[2] if len(result) == 3 else {}
    if not isinstance(values, Mapping):
        raise ContractError(f"loss() returned a {type(values).__name__} as the values to log; return {{name: number}}")
    return _one_number(result[0]), weight, values, True


def _one_number(loss: torch.Tensor) -> torch.Tensor:
    if loss.numel() != 1:
        raise ContractError(
            f"loss() returned a tensor of shape {tuple(loss.shape)}; return one number, the mean over the microbatch"
        )
    return loss


def add_logged(sums: LoggedSums, loss: torch.Tensor, weight: float, values: Mapping[str, Any]) -> None:
    """Add a microbatch to what is logged of the step."""
    if weight == 0.0:
        return  # the mean over nothing may be NaN, and counts for nothing
    sums.weight += weight
    sums.loss += float(loss.detach()) * weight
    for name, value in values.items():
        try:
            total, given = sums.values.get(name, (0.0, 0.0))
            sums.values[name] = (total + float(value) * weight, given + weight)
        except (TypeError, ValueError, RuntimeError):
            raise ContractError(
                f"loss() returned a {type(value).__name__} as the value {name!r}; values to log are single numbers"
            ) from None


def require_gradient(loss: torch.Tensor) -> None:
    """Raise ContractError for a loss that leads nowhere."""
    if not loss.requires_grad:
        raise ContractError(
            "loss() returned a tensor without a gradient: was it detached, or computed under no_grad(), or does it "
            "not use the model that was passed in?"
        )


@contextlib.contextmanager
def zero_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A backward pass inside reaches the parameters that it would reach, and adds exact zeros to their gradients,
    whatever it computes."""
    hooks = [p.register_hook(torch.zeros_like) for p in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
