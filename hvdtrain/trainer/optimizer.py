"""The optimizer: the task's own, or the one that the YAML file names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.config import Config

# Those of which torch has a fused CPU kernel in every release that we take.
_FUSED_ON_CPU = ("SGD", "Adam", "AdamW", "Adagrad")
# Options that choose an implementation, or that the fused one does not take.
_OWN_CHOICE = ("fused", "foreach", "differentiable", "capturable")


def make_optimizer(task: Any, config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The task's optimizer, or the one that the YAML names, over the parameters that require a gradient.

    Raises:
        ConfigError: torch has no such optimizer, or it does not take these options.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if callable(getattr(task, "optimizer", None)):
        made: torch.optim.Optimizer = task.optimizer(parameters)
        return made
    name = config.optimizer.name
    if name not in _known():
        close = [other for other in _known() if other.lower() == name.lower()]
        hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(_known())}"
        raise config.error("optimizer.name", f"torch.optim has no {name}{hint}")
    options = dict(config.optimizer.options)
    if _fuses(name, options, config, parameters, model):
        options["fused"] = True
    try:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **options)
    except (TypeError, ValueError) as error:
        raise config.error("optimizer", f"torch.optim.{name} does not take these options: {error}") from None
    return optimizer


def _known() -> list[str]:
    return sorted(
        key
        for key, item in vars(torch.optim).items()
        if inspect.isclass(item) and issubclass(item, torch.optim.Optimizer) and item is not torch.optim.Optimizer
    )


def _fuses(
    name: str, options: dict[str, Any], config: Config, parameters: Sequence[nn.Parameter], model: nn.Module
) -> bool:
    """Whether to take torch's fused kernel: one pass over the memory in place of one per operation.

    torch itself never chooses it on a CPU. It takes no sparse gradients, and its SGD fails when some parameters get
    their first gradient later than others.
    """
    return (
        name in _FUSED_ON_CPU
        and not any(key in options for key in _OWN_CHOICE)
        and not config.find_unused_parameters
        and all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) for p in parameters)
        and not any(getattr(module, "sparse", False) for module in model.modules())
    )
