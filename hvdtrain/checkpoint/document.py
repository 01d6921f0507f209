"""What is in a checkpoint file: the keys of format 1, checked on the way out and on the way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.names import strip_wrapper_names
from hvdtrain.checkpoint.plain import plain
from hvdtrain.errors import CheckpointError

FORMAT = 1
KEYS = ("format", "model", "optimizer", "scheduler", "scaler", "progress", "rng", "config")
PROGRESS_KEYS = ("epoch", "step", "samples_in_epoch")


def to_document(state: dict[str, Any], *, step: int) -> dict[str, Any]:
    """The plain, complete content of the file of `step`.

    Raises:
        CheckpointError: a key is missing or unknown, the counters are wrong, or a value has no plain form.
    """
    _check_keys("the state to save", state)
    _check_progress("the state to save", state["progress"])
    if state["progress"]["step"] != step:
        raise CheckpointError(f"the state is of step {state['progress']['step']}, but is to be saved as step {step}")
    document = {key: plain(state[key], key) for key in KEYS if key != "model"}
    document["model"] = plain(strip_wrapper_names(state["model"]), "model")
    return {key: document[key] for key in KEYS}


def from_document(path: Path, document: Any) -> dict[str, Any]:
    """The state in a file that was read, its model keys without the names of wrappers.

    Raises:
        CheckpointError: this is not a checkpoint of a format that we know.
    """
    if not isinstance(document, dict) or "format" not in document:
        what = "a state dict or another file of torch.save" if isinstance(document, dict) else "something else"
        raise CheckpointError(
            f"{path} is not an hvdtrain checkpoint: it has no 'format' key ({what}). To start from bare weights, load "
            f"them in the task's model()"
        )
    if document["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {document['format']!r}; this hvdtrain reads format {FORMAT}. Use the version that "
            f"wrote it, or a newer one"
        )
    missing = [key for key in KEYS if key not in document]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}: it is not a complete checkpoint")
    _check_progress(str(path), document["progress"])
    return {**document, "model": strip_wrapper_names(document["model"])}


def _check_keys(what: str, state: dict[str, Any]) -> None:
    missing = [key for key in KEYS if key not in state]
    unknown = [key for key in state if key not in KEYS]
    if missing or unknown:
        raise CheckpointError(
            f"{what} has the wrong keys (missing: {', '.join(missing) or 'none'}; unknown: "
            f"{', '.join(map(str, unknown)) or 'none'}); a checkpoint has exactly {', '.join(KEYS)}"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(f"{what} has format {state['format']!r}; format {FORMAT} is what is written here")


def _check_progress(what: str, progress: Any) -> None:
    if not isinstance(progress, dict) or set(progress) != set(PROGRESS_KEYS):
        raise CheckpointError(f"{what}: progress must have exactly {', '.join(PROGRESS_KEYS)}; it is {progress!r}")
    for key in PROGRESS_KEYS:
        if not isinstance(progress[key], int) or progress[key] < 0:
            raise CheckpointError(f"{what}: progress[{key!r}] must be an int from 0 up; it is {progress[key]!r}")
