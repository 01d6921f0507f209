"""What changed in the job file between a checkpoint and the run that resumes from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.checkpoint.plain import plain
from hvdtrain.config.differences import differences
from hvdtrain.errors import CheckpointError


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines "a.b: old -> new" for every value that differs; nested keys are joined by dots, None is shown as null."""
    return [f"{key}: {_shown(before)} -> {_shown(now)}" for key, before, now in _changes(old, new)]


def refuse_changed(old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str] = ("seed", "shuffle")) -> None:
    """Raise if one of `keys` differs: they decide the order of the data, so the epoch could not be continued.

    Raises:
        CheckpointError: with each key, its old and its new value.
    """
    wanted = set(keys)
    changed = [(key, before, now) for key, before, now in _changes(old, new) if key in wanted]
    if changed:
        listed = "; ".join(f"{key}: {_shown(before)} -> {_shown(now)}" for key, before, now in changed)
        raise CheckpointError(
            f"the checkpoint was written with another {' and '.join(key for key, _, _ in changed)} ({listed}): the "
            f"data would come in another order. Set the old value, or start afresh in another --output folder"
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return differences(_listed(plain(old, "config")), _listed(plain(new, "config")))


def _listed(value: Any) -> Any:
    """Tuples as lists: that YAML has one and a checkpoint the other means nothing."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
