"""Batch normalization over the batches of all ranks, on CPU and CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.hvd.allreduce import allreduce
from hvdtrain.hvd.basics import Sum, size


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm over the samples of all ranks, which may have different numbers of them.

    Input: (N, C, ...), C = num_features. In training the forward and the backward pass are collective.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize.

        Raises:
            ValueError: the input has fewer than two dimensions.
        """
        self._check_input_dim(input)
        synchronized = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        if not synchronized or size() == 1:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, synchronized, momentum, self.eps
            )
        update = self.training and self.track_running_stats
        mean = self.running_mean if update else None
        variance = self.running_var if update else None
        return _Normalize.apply(  # type: ignore[no-untyped-call,no-any-return]
            input, self.weight, self.bias, mean, variance, self.eps, momentum
        )


class _Normalize(torch.autograd.Function):
    """Statistics are sums over all ranks: count, sum and, around the common mean, squares."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_variance: torch.Tensor | None,
        eps: float,
        momentum: float,
    ) -> torch.Tensor:
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        channels = wide.shape[1]
        over = [d for d in range(wide.dim()) if d != 1]
        count = wide.numel() // channels
        sums = allreduce(torch.cat([wide.sum(over), wide.new_tensor([float(count)])]), op=Sum)
        total = float(sums[-1])
        mean = sums[:-1] / total
        centered = wide - _per_channel(mean, wide)
        variance = allreduce((centered * centered).sum(over), op=Sum) / total
        inverse = torch.rsqrt(variance + eps)
        normalized = centered * _per_channel(inverse, wide)
        if running_mean is not None and running_variance is not None:
            unbiased = variance * (total / max(total - 1.0, 1.0))
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
            running_variance.mul_(1 - momentum).add_(unbiased.to(running_variance.dtype), alpha=momentum)
        ctx.save_for_backward(normalized, weight, inverse)
        ctx.total = total
        output = normalized
        if weight is not None:
            output = output * _per_channel(weight, wide)
        if bias is not None:
            output = output + _per_channel(bias, wide)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        normalized, weight, inverse = ctx.saved_tensors
        gradient = grad_output.to(normalized.dtype)
        over = [d for d in range(gradient.dim()) if d != 1]
        grad_bias = gradient.sum(over)
        grad_weight = (gradient * normalized).sum(over)
        grad_input = None
        if ctx.needs_input_grad[0]:
            channels = gradient.shape[1]
            sums = allreduce(torch.cat([grad_bias, grad_weight]), op=Sum) / ctx.total
            mean_gradient = _per_channel(sums[:channels], gradient)
            mean_product = _per_channel(sums[channels:], gradient)
            scale = inverse if weight is None else inverse * weight
            grad_input = (gradient - mean_gradient - normalized * mean_product) * _per_channel(scale, gradient)
            grad_input = grad_input.to(grad_output.dtype)
        if weight is None:
            return grad_input, None, None, None, None, None, None
        # Summed over this rank's samples: the optimizer reduces them like any other gradient.
        return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None, None


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))
