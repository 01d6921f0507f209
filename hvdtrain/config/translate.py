"""Pydantic's validation errors to sentences about the job file."""

from __future__ import annotations

from typing import Any

import pydantic

from hvdtrain.config import schema
from hvdtrain.config.problems import KeyPath, Origins, Problem, nearest
from hvdtrain.config.source import dump_short

# What other trainers call our keys.
SYNONYMS = {
    "learning_rate": "optimizer.lr",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "batches_per_allreduce": "accumulate",
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "output_dir": "output",
    "log_dir": "output",
    "amp": "precision",
    "mixed_precision": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "fp16_allreduce": "compression",
    "scheduler": "lr.schedule",
    "lr_scheduler": "lr.schedule",
    "warmup": "lr.warmup_steps",
    "bucket_cap_mb": "bucket_mb",
    "timeout": "start_timeout_s",
    "model": "task",
    "dataset": "task_options",
    "data": "task_options",
}
FLAGS = ("resume", "profile", "rank", "world_size", "local_rank", "init_method")
TRANSPORTS_AS_BACKEND = ("nccl", "gloo", "mpi")


def translate(error: pydantic.ValidationError, tree: dict[str, Any], origins: Origins) -> list[Problem]:
    """One problem per fault, in the order of the keys."""
    return [
        origins.problem(_path(fault["loc"]), _sentence(fault["type"], _path(fault["loc"]), fault["input"]))
        for fault in error.errors(include_url=False)
    ]


def _path(location: tuple[int | str, ...]) -> KeyPath:
    return tuple(str(part) for part in location)


def _sentence(kind: str, path: KeyPath, value: Any) -> str:
    if kind == "extra_forbidden":
        return _unknown_key(path)
    field = schema.field_at(path)
    if field is None:
        return f"cannot be {_shown(value)}"
    if kind == "missing":
        example = ", such as examples/mnist/task.py:Mnist" if path == ("task",) else f" ({schema.in_words(field)})"
        return f"this key is required{example}"
    if path == ("task",):
        return f"must be path/to/file.py:Class or package.module:Class, not {_shown(value)}"
    if path == ("backend",) and isinstance(value, str) and value.lower() in TRANSPORTS_AS_BACKEND:
        name = value.lower()
        return (
            f"{name} is a transport, not a backend; backends are ddp and horovod. Use `backend: ddp` with "
            f"`transport: {name}` (on the command line: --backend ddp --set transport={name})"
        )
    if path == ("transport",) and value in ("ddp", "horovod"):
        return f"{value} is a backend, not a transport; use `backend: {value}` (on the command line: --backend {value})"
    return f"must be {schema.in_words(field)}, not {_shown(value)}{_hint(path, value)}"


def _hint(path: KeyPath, value: Any) -> str:
    field = schema.field_at(path)
    assert field is not None
    accepts = schema.in_words(field)
    words = schema.choices(field)
    if path == ("lr",) and isinstance(value, int | float | str):
        return "; the learning rate itself is optimizer.lr"
    if path == ("optimizer",) and isinstance(value, str):
        return f"; write {{name: {value}, lr: 0.05}}"
    if path == ("device",) and isinstance(value, str) and value.startswith(("cuda:", "gpu")):
        return "; write cuda: each rank takes the device of its local rank"
    if words and value is None and "none" in words:
        return "; write none"
    if words and isinstance(value, str):
        found = nearest(value, words)
        return f"; did you mean {found}?" if found else ""
    if accepts.startswith("true") and isinstance(value, str) and value.lower() in ("yes", "on", "no", "off"):
        return f"; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if isinstance(value, str) and value.lower() == "none" and "null" in accepts:
        return "; write null"
    if isinstance(value, str) and "number" in accepts and _is_number(value):
        return "; remove the quotes"
    if isinstance(value, float) and value.is_integer() and "whole number" in accepts:
        return f"; write {int(value)}"
    return ""


def _unknown_key(path: KeyPath) -> str:
    outer, name = path[:-1], path[-1]
    if not outer and name.replace("-", "_").lstrip("_") in FLAGS:
        return f"unknown key; this is an option of the command line: --{name.replace('_', '-').lstrip('-')}"
    if found := _nearest_key(outer, name):
        return f"unknown key; did you mean {found}?"
    if not outer:
        return "unknown key; `python -m hvdtrain.config` lists all keys"
    prefix = ".".join(outer) + "."
    keys = [key[len(prefix) :] for key in schema.all_keys() if key.startswith(prefix)]
    return f"unknown key; the keys here are {', '.join(key for key in keys if '.' not in key)}"


def _nearest_key(outer: KeyPath, name: str) -> str | None:
    """The same name elsewhere, then a similar one here, then another trainer's word for it, then a similar one."""
    keys = schema.all_keys()
    prefix = ".".join(outer) + "." if outer else ""
    here = {key[len(prefix) :]: key for key in keys if key.startswith(prefix) and "." not in key[len(prefix) :]}
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(keys)}
    plain = name.lower().replace("-", "_")
    if plain in elsewhere:
        return elsewhere[plain]
    if plain in SYNONYMS:
        return SYNONYMS[plain]
    for names in (here, elsewhere):
        if found := nearest(name, names):
            return names[found]
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    """The value as it would stand in YAML; text in quotes."""
    text = f"'{value}'" if isinstance(value, str) else dump_short(value)
    return text if len(text) <= 60 else text[:57] + "..."
