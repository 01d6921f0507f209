"""Elastic training: `hvd.elastic.run`, TorchState and ElasticSampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.hvd.basics import init, shutdown
from hvdtrain.hvd.common.elastic import ObjectState, State, run_fn
from hvdtrain.hvd.elastic.sampler import ElasticSampler
from hvdtrain.hvd.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is the state, to make it elastic (see `run_fn`)."""
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
