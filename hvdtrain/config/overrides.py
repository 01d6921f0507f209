"""`--set a.b=value` and the flags that stand for a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.config import source
from hvdtrain.config.problems import Origins, Problem
from hvdtrain.errors import ConfigError


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str], origins: Origins) -> list[Problem]:
    """Put each `a.b=value` into `tree`, in order; the value is read as YAML, a mapping replaces a mapping.

    Returns:
        What is wrong with the overrides themselves; each problem names its override.
    """
    problems = []
    for text in overrides:
        where = f"--set {text}"
        key, equals, written = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            problems.append(Problem(where, "", "expected KEY=VALUE, such as --set optimizer.lr=0.1"))
            continue
        if not written.strip():
            problems.append(Problem(where, key, "no value after `=`; write null for none"))
            continue
        try:
            value = source.parse(written, Origins())
        except ConfigError as error:
            hint = (
                "; write lists and mappings as [1, 2] and {a: 1}, in quotes" if "not valid YAML" in str(error) else ""
            )
            problems.append(Problem(where, key, f"{error}{hint}"))
            continue
        problems += put(tree, path, value, where, origins)
    return problems


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any, where: str, origins: Origins) -> list[Problem]:
    """Set one key; mappings on the way that are missing or null are made."""
    mapping = tree
    for depth, name in enumerate(path[:-1], start=1):
        inner = mapping.get(name)
        if inner is None:
            inner = mapping[name] = {}
            origins.replace(path[:depth], where)
        if not isinstance(inner, dict):
            outer = ".".join(path[:depth])
            return [Problem(where, ".".join(path), f"{outer} is {inner!r}, which has no keys beneath it")]
        mapping = inner
    mapping[path[-1]] = value
    origins.replace(path, where)
    return []
