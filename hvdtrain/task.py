"""What the user writes: a class with a model, data and a loss. Loaded from a file or a module by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.data import Dataset

from hvdtrain.config import Config
from hvdtrain.errors import ConfigError

Loss = torch.Tensor | tuple[torch.Tensor, float] | tuple[torch.Tensor, float, Mapping[str, float]]


@runtime_checkable
class Task(Protocol):
    """The least that a task has. Any class will do; there is nothing to inherit from.

    Optional besides these: `eval_dataset() -> Dataset | None`,
    `metrics(model, batch) -> {name: (total, count)}` (bare model in eval mode; summed over batches and ranks;
    without it the mean loss is evaluated),
    `optimizer(parameters) -> Optimizer`, `scheduler(optimizer) -> LRScheduler`, `collate(samples) -> batch`.
    """

    def model(self) -> nn.Module:
        """The model, on the CPU. Called on every rank with the same seed."""

    def train_dataset(self) -> Dataset[Any]:
        """A map dataset, the same on every rank (the trainer shards it), or an iterable one of this rank's samples."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The mean loss of the microbatch; with its weight (samples or tokens), and with values to be logged."""


def load_task(config: Config) -> Any:
    """The task that `config.task` names, constructed with `config.task_options`.

    Raises:
        ConfigError: no such file, module or class; it does not take these options; it lacks a method.
    """
    module = _module(config)
    found: Any = module
    for part in config.task_name.split("."):
        if not hasattr(found, part):
            classes = [
                name
                for name, item in vars(module).items()
                if inspect.isclass(item) and item.__module__ == module.__name__
            ]
            raise config.error(
                "task", f"{config.task_source} has no {part}; it defines {', '.join(classes) or 'no class'}"
            )
        found = getattr(found, part)
    try:
        inspect.signature(found).bind(**config.task_options)
    except TypeError as error:
        raise config.error("task_options", f"{config.task_name} cannot be made with these options: {error}") from None
    task = found(**config.task_options)
    missing = [name for name in ("model", "train_dataset", "loss") if not callable(getattr(task, name, None))]
    if missing:
        raise config.error(
            "task", f"{config.task_name} lacks {', '.join(f'{name}()' for name in missing)}, which every task has"
        )
    return task


def _module(config: Config) -> ModuleType:
    file = config.task_file()
    if file is None:
        # As `python -m` does: packages in the working directory are found.
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(config.task_source)
        except ModuleNotFoundError as error:
            if error.name is None or not config.task_source.startswith(error.name):
                raise  # the module is there, something that it imports is not: its traceback tells
            raise config.error(
                "task", f"there is no module {config.task_source}; to name a file write path/to/file.py:Class"
            ) from None
    return _module_of_file(file)


def _module_of_file(file: Path) -> ModuleType:
    """Import a file under its own name, with its folder on sys.path, so that neighbours import and workers unpickle."""
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    if known is not None:
        name = f"hvdtrain_task_{file.parent.name}_{file.stem}"
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
