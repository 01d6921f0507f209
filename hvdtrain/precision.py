"""Autocast, loss scaling, the check for non-finite gradients, clipping: in that order, under every backend.

The gradients are the same on every rank by the time they are looked at, so every rank comes to the same decision
without asking the others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import TrainingFailed

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A loss scale of 65536 halves at most 16 times before it is 1; beyond this nothing gets better by itself.
MAX_SKIPPED_IN_A_ROW = 50


class Precision:
    """What happens to numbers between the loss and the optimizer.

    Args:
        precision: fp32 | bf16 | fp16 (autocast; fp16 with a dynamic loss scale, which works on the CPU too).
        loss_scale: initial scale for fp16.
        clip_norm: largest norm of the averaged gradient; None: not clipped.

    Attributes:
        skipped_steps: steps that were left out because a gradient was not finite.
    """

    def __init__(
        self, precision: str, device: torch.device, *, loss_scale: float = 65536.0, clip_norm: float | None = None
    ) -> None:
        self._dtype = _AUTOCAST.get(precision)
        self._device_type = device.type
        self._clip_norm = clip_norm
        self._one: torch.Tensor | None = None
        self._scaler = torch.amp.GradScaler(device.type, init_scale=loss_scale) if precision == "fp16" else None
        self.skipped_steps = 0
        self._skipped_in_a_row = 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Enclose the forward pass and the loss."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward through the scaled loss."""
        scaled: Any = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()

    def unscale_and_clip(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Take the loss scale out, then clip. Call after the reduction, on averaged gradients.

        Returns:
            0-d tensor: the norm of the averaged gradient before clipping; not finite if any gradient is not.
        """
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = gradient_norm(gradients)
        if self._clip_norm is not None:
            # As torch.nn.utils.clip_grad_norm_, which does not take sparse gradients.
            if self._one is None:
                self._one = torch.ones_like(norm)
            # The smaller one that is a number: with a NaN in one gradient the others stay what they are, so that
            # `names_of_non_finite` finds the one at fault.
            factor = torch.fmin(self._clip_norm / (norm + 1e-6), self._one)
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def step(self, optimizer: torch.optim.Optimizer, finite: bool) -> None:
        """Apply the gradients, or skip; then adapt the loss scale."""
        if self._scaler is None:
            if finite:
                optimizer.step()
        else:
            # Skips by itself where unscale_ found an infinity; a norm that overflowed has to be told.
            if finite:
                self._scaler.step(optimizer)
            self._scaler.update()
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        self.skipped_steps += not finite

    def check_progress(self, names: Callable[[], list[str]], has_weight: bool = True) -> None:
        """Raise TrainingFailed when only skipping is left; `names` tells the parameters at fault.

        Args:
            has_weight: False: the last step was left out because nothing in it had a weight.
        """
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            if not has_weight:
                raise TrainingFailed(
                    f"{self._skipped_in_a_row} steps in a row were left out, the last because every microbatch of "
                    f"every rank had the weight 0. Check the weights that loss() returns"
                )
            raise TrainingFailed(
                f"{self._skipped_in_a_row} steps in a row had a gradient that is not finite; first at fault: "
                f"{', '.join(names()[:3]) or 'the norm overflows'}. Lower the learning rate, clip (clip_norm), or look "
                f"for NaN in the data" + (f"; the loss scale is {self.scale}" if self._scaler else "")
            )

    @property
    def scale(self) -> float:
        """The loss scale now; 1.0 where there is none."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        state = {} if self._scaler is None else self._scaler.state_dict()
        return {**state, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint, also one of another precision (then the scale starts afresh)."""
        self.skipped_steps = int(state.get("skipped_steps", 0))
        scale = {key: value for key, value in state.items() if key != "skipped_steps"}
        if self._scaler is not None and scale:
            self._scaler.load_state_dict(scale)


def gradient_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm over all gradients, 0-d, without reading a GPU's on the host. Of sparse ones the values count."""
    if not gradients:
        return torch.zeros(())
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norms = torch._foreach_norm(dense)
    device = dense[0].device
    if device.type == "cpu":
        # Reading is free there, and numbers are cheaper to add up than tensors are to stack.
        return torch.tensor(math.hypot(*(norm.item() for norm in norms)))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, torch.float32) for norm in norms]))
    return total


def names_of_non_finite(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient has an infinity or a NaN."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
            if not torch.isfinite(values).all():
                found.append(name)
    return found
