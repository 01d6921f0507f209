"""From a file and the command line to a Config, or to one error that lists all that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from hvdtrain.config import source
from hvdtrain.config.checks import check_together
from hvdtrain.config.models import Config
from hvdtrain.config.overrides import apply_overrides, put
from hvdtrain.config.problems import Origins, Problem, nearest, raise_problems
from hvdtrain.config.translate import translate
from hvdtrain.errors import ConfigError


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, backend: str | None = None, output: str | None = None
) -> Config:
    """Read a job file. Not collective; every rank reads it for itself.

    Args:
        path: the YAML file.
        overrides: `a.b=value` each, in the order of the command line (`--set`); a later one wins.
        backend: the value of `--backend`; wins over the file and the overrides.
        output: the value of `--output`; likewise.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or its content is wrong. The message lists every fault with
            file, line, key and what is right.
    """
    origins = Origins(str(path))
    tree = _read(Path(path), origins)
    problems = apply_overrides(tree, overrides, origins)
    for flag, value in (("backend", backend), ("output", output)):
        if value is not None:
            problems += put(tree, (flag,), value, f"--{flag} {value}", origins)
    tree.setdefault("output", f"runs/{Path(path).stem}")
    config, more = _validate(tree, origins)
    raise_problems(problems + more)
    assert config is not None
    config.task_file()
    return config


def _read(path: Path, origins: Origins) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_beside(path)}") from None
    except IsADirectoryError:
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml"))
        hint = f"; it holds {', '.join(files)}" if files else ""
        raise ConfigError(f"{path}: is a folder, not a YAML file{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); is this a YAML file?") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    tree = source.parse(text, origins)
    if tree is None:
        raise ConfigError(f"{path}: is empty; a job file needs at least `task: path/to/file.py:Class`")
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else f"the single value {tree!r}"
        raise ConfigError(f"{path}, line 1: the file is {kind}; expected keys, such as `task: path/to/file.py:Class`")
    return tree


def _beside(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (there is no folder {folder} either; the working directory is {Path.cwd()})"
    names = [entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")]
    found = nearest(path.name, names)
    return f"; did you mean {path.with_name(found)}?" if found else f" (the working directory is {Path.cwd()})"


def _validate(tree: dict[str, Any], origins: Origins) -> tuple[Config | None, list[Problem]]:
    try:
        config = Config.model_validate(tree)
    except pydantic.ValidationError as error:
        wrong = translate(error, tree, origins)
        # The rest may hold combinations that do not fit, too: list them now and not on the next attempt.
        return None, wrong + _combinations_of_rest(tree, {str(path[0]) for path in _paths(error)}, origins)
    config._origins = origins
    return config, check_together(config, origins)


def _paths(error: pydantic.ValidationError) -> list[tuple[int | str, ...]]:
    return [fault["loc"] for fault in error.errors(include_url=False) if fault["loc"]]


def _combinations_of_rest(tree: dict[str, Any], faulty: set[str], origins: Origins) -> list[Problem]:
    rest = {key: value for key, value in tree.items() if key not in faulty}
    config = Config.model_validate({"task": "module:Class", **rest})
    # A key that was left out has its default here, which says nothing about what was meant.
    return check_together(config, origins, ignore=faulty)
