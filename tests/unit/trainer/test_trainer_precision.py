"""Unscale, check, clip, step: in one process."""

from __future__ import annotations

import math

import pytest
import torch

from hvdtrain.errors import TrainingFailed
from hvdtrain.precision import MAX_SKIPPED_IN_A_ROW, Precision, gradient_norm, names_of_non_finite

CPU = torch.device("cpu")


def weights(*gradients):
    found = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        found.append(parameter)
    return found


def test_the_norm_is_over_all_gradients():
    assert gradient_norm([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]).item() == 5.0
    assert gradient_norm([torch.tensor([-7.0])]).item() == 7.0
    assert gradient_norm([]).item() == 0.0
    sparse = torch.sparse_coo_tensor([[0, 0]], [3.0, 1.0], (5,))  # one row twice: 4
    assert gradient_norm([sparse, torch.tensor([3.0])]).item() == 5.0


@pytest.mark.parametrize(("clip_norm", "expected"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_clipping_returns_the_norm_before_it(clip_norm, expected):
    parameters = weights([3.0], [4.0])
    precision = Precision("fp32", CPU, clip_norm=clip_norm)
    assert precision.unscale_and_clip(torch.optim.SGD(parameters, lr=1.0), parameters).item() == 5.0
    assert [p.grad.item() for p in parameters] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_clipping_leaves_the_one_at_fault_to_be_found(wrong):
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(1)) for name in "abcd"})
    for name, parameter in model.items():
        parameter.grad = torch.tensor([wrong if name == "d" else 3.0])
    parameters = list(model.parameters())
    precision = Precision("fp32", CPU, clip_norm=1.0)
    assert not math.isfinite(precision.unscale_and_clip(torch.optim.SGD(parameters, lr=1.0), parameters).item())
    assert names_of_non_finite(model) == ["d"]
    # And the next step is clipped as ever.
    for parameter in parameters:
        parameter.grad = torch.tensor([2.0])
    assert precision.unscale_and_clip(torch.optim.SGD(parameters, lr=1.0), parameters).item() == 4.0
    assert [p.grad.item() for p in parameters] == pytest.approx([0.5] * 4, rel=1e-5)


def test_sparse_gradients_are_clipped():
    parameter = torch.nn.Parameter(torch.zeros(5))
    parameter.grad = torch.sparse_coo_tensor([[2]], [4.0], (5,))
    Precision("fp32", CPU, clip_norm=1.0).unscale_and_clip(torch.optim.SGD([parameter], lr=1.0), [parameter])
    assert parameter.grad.to_dense().tolist() == pytest.approx([0, 0, 1, 0, 0], rel=1e-5)


def test_the_loss_scale_is_out_before_the_norm():
    (parameter,) = weights([0.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision = Precision("fp16", CPU, loss_scale=1024.0)
    precision.backward((parameter * 3).sum())
    assert parameter.grad.item() == 3 * 1024.0
    assert precision.unscale_and_clip(optimizer, [parameter]).item() == 3.0
    precision.step(optimizer, finite=True)
    assert parameter.item() == -3.0


def test_a_skip_moves_nothing_and_halves_the_scale():
    (parameter,) = weights([math.inf])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision = Precision("fp16", CPU, loss_scale=1024.0)
    precision._scaler.scale(torch.zeros(()))
    assert not math.isfinite(precision.unscale_and_clip(optimizer, [parameter]).item())
    precision.step(optimizer, finite=False)
    assert (parameter.item(), precision.scale, precision.skipped_steps) == (0.0, 512.0, 1)


def test_the_limit_of_skips_names_the_parameter():
    precision = Precision("fp32", CPU)
    optimizer = torch.optim.SGD(weights([1.0]), lr=1.0)
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        precision.step(optimizer, finite=False)
    precision.check_progress(lambda: ["a"])
    precision.step(optimizer, finite=False)
    with pytest.raises(TrainingFailed, match="first at fault: a, b, c"):
        precision.check_progress(lambda: ["a", "b", "c", "d"])
    with pytest.raises(TrainingFailed, match="had the weight 0"):
        precision.check_progress(list, has_weight=False)
    precision.step(optimizer, finite=True)
    precision.check_progress(lambda: ["a"])
    assert precision.skipped_steps == MAX_SKIPPED_IN_A_ROW


def test_names_of_non_finite_gradients():
    model = torch.nn.Linear(2, 1)
    assert names_of_non_finite(model) == []
    model.weight.grad = torch.tensor([[1.0, math.nan]])
    model.bias.grad = torch.tensor([1.0])
    assert names_of_non_finite(model) == ["weight"]


@pytest.mark.parametrize(("saved", "loaded", "scale"), [("fp16", "fp16", 256.0), ("fp32", "fp16", 64.0)])
def test_state_goes_between_precisions(saved, loaded, scale):
    old = Precision(saved, CPU, loss_scale=256.0)
    old.skipped_steps = 3
    new = Precision(loaded, CPU, loss_scale=64.0)
    new.load_state_dict(old.state_dict())
    assert (new.skipped_steps, new.scale) == (3, scale)
    Precision("fp32", CPU).load_state_dict(new.state_dict())


def test_autocast():
    for name, dtype in [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]:
        with Precision(name, CPU).autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
