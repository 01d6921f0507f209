"""What `bench network` and `bench scaling` share besides their place: which backends, and the folder of the results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import click

from hvdtrain.errors import LaunchError


def backends_or_all(chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Those that were asked for, else all that are installed here."""
    if chosen:
        return tuple(dict.fromkeys(chosen))
    if importlib.util.find_spec("horovod") is None:
        click.echo("Horovod is not installed (hvdtrain build-horovod), so ddp alone is measured", err=True)
        return ("ddp",)
    return ("ddp", "horovod")


def results_folder(path: str) -> Path:
    """The folder, made if it is missing; before the measuring, which takes minutes.

    Raises:
        LaunchError: it cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--output {path}: cannot be made ({error.strerror}); choose another folder") from None
    return folder


def publish(result: dict[str, Any], text: str, folder: Path, name: str) -> None:
    """Write NAME.md and NAME.json."""
    (folder / f"{name}.md").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict[str, Any], text: str, folder: Path, *, as_json: bool) -> None:
    """Print the text, or the JSON object alone."""
    click.echo(json.dumps(result) if as_json else text)
    click.echo(f"results: {folder}", err=True)
