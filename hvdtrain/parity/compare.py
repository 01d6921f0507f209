"""Two runs side by side: their losses step by step, and the weights that they ended with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class LossDifference:
    """How the losses of two runs differ.

    Attributes:
        largest_relative: of |a - b| / max(|a|, |b|) over the steps; infinite where one of them is not finite.
        largest_at_step: the step (from 1) of the largest; None: all losses are equal.
        first_step_that_differs: the first step (from 1) whose losses are not the same number; None: there is none.
        first_step_beyond: the first step (from 1) beyond the tolerance; None: there is none.
        num_steps: steps that were compared.
    """

    largest_relative: float
    largest_at_step: int | None
    first_step_that_differs: int | None
    first_step_beyond: int | None
    num_steps: int


@dataclasses.dataclass(frozen=True)
class WeightDifference:
    """How the final weights (parameters and buffers) of two runs differ.

    Attributes:
        largest_relative: of the differences of tensors (see `compare_weights`); infinite where a value is not finite.
        tensor: the name of the tensor with the largest; None: all are equal.
        largest_absolute: over all elements.
        num_tensors: tensors that were compared.
        num_differing: of those, how many have not the same bits.
    """

    largest_relative: float
    tensor: str | None
    largest_absolute: float
    num_tensors: int
    num_differing: int


def compare_losses(first: Sequence[float | None], second: Sequence[float | None], tolerance: float) -> LossDifference:
    """Compare the losses of two runs of the same number of steps; None stands for a loss that is not finite."""
    differences = [_relative(a, b) for a, b in zip(first, second, strict=True)]
    largest = max(differences, default=0.0)
    return LossDifference(
        largest_relative=largest,
        largest_at_step=differences.index(largest) + 1 if largest > 0 else None,
        first_step_that_differs=_first(differences, 0.0),
        first_step_beyond=_first(differences, tolerance),
        num_steps=len(differences),
    )


def compare_weights(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], parameters: Collection[str]
) -> WeightDifference:
    """Compare two state_dicts with the same names and shapes.

    The difference of a tensor is its largest |a - b|, over the largest |a| or |b| of the tensor. Tensors that are small
    all over (a bias that began at zero) are measured by the root mean square of all parameters instead: there, a
    rounding error would be a large part of the value and no part of what the model computes. Whole numbers have to be
    equal. A parameter has to be finite; a buffer (a mask of -inf) where it is the same.

    Args:
        parameters: which of the names are parameters; the others are buffers, which may hold anything.

    Raises:
        ValueError: names or shapes differ.
    """
    if {name: t.shape for name, t in first.items()} != {name: t.shape for name, t in second.items()}:
        raise ValueError("the runs ended with different names or shapes of weights")
    usual = _root_mean_square([first[name] for name in parameters])
    worst, worst_name, absolute, differing = 0.0, None, 0.0, 0
    for name, mine in first.items():
        theirs = second[name]
        if torch.equal(mine, theirs) and (name not in parameters or bool(torch.isfinite(mine).all())):
            continue
        differing += 1
        elsewhere = (mine != theirs) | ~torch.isfinite(mine) if name in parameters else mine != theirs
        apart = float((mine[elsewhere].double() - theirs[elsewhere].double()).abs().max())
        scale = max(_largest_finite(mine), _largest_finite(theirs), usual)
        relative = apart / scale if mine.is_floating_point() and math.isfinite(apart) else math.inf
        if relative > worst or worst_name is None:
            worst, worst_name = relative, name
        absolute = max(absolute, apart if math.isfinite(apart) else math.inf)
    return WeightDifference(worst, worst_name, absolute, len(first), differing)


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _first(differences: Sequence[float], limit: float) -> int | None:
    return next((step for step, difference in enumerate(differences, 1) if difference > limit), None)


def _largest_finite(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _root_mean_square(tensors: Iterable[torch.Tensor]) -> float:
    floating = [tensor.double() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return 0.0
    squares = sum(float(tensor.square().sum()) for tensor in floating)
    return math.sqrt(squares / sum(tensor.numel() for tensor in floating))
