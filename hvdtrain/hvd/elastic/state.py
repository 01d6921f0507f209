"""State of models, optimizers and samplers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdtrain.hvd.basics import rank
from hvdtrain.hvd.common.elastic import ObjectState
from hvdtrain.hvd.elastic.sampler import ElasticSampler
from hvdtrain.hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """State of a training process.

    Args:
        model: or None.
        optimizer: or None.
        kwargs: further models, optimizers, samplers (synchronized in their own ways) and plain objects; all become
            attributes.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        self._handlers: dict[str, StateHandler] = {}
        plain: dict[str, Any] = {}
        for name, value in kwargs.items():
            handler = _handler_for(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            # What all ranks have now is what a restore must return to.
            handler.save()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def _snapshot(self) -> Any:
        return {"objects": super()._snapshot(), "handlers": {n: h.saved for n, h in self._handlers.items()}}

    def _adopt(self, snapshot: Any) -> None:
        for name, saved in snapshot["handlers"].items():
            if name in self._handlers:
                self._handlers[name].saved = saved
                self._handlers[name].restore()
        super()._adopt(snapshot["objects"])


class StateHandler:
    """Saves, restores and synchronizes one value.

    Attributes:
        saved: the copy to return to.
    """

    saved: Any = None

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy the value's state in memory."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the copy."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Give all ranks rank 0's state. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take care of another value from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """For modules."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """For optimizers."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """For samplers."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.sampler"))


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a type and the handler of its values."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs."""
    global _registry
    _registry = registry


def _handler_for(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None
