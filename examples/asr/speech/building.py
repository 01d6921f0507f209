"""A model from files: its CMVN, its units, its sizes, its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import UserError
from speech.cmvn import load_cmvn
from speech.model import ModelOptions, SpeechModel
from speech.units import Units


def model_options(given: Mapping[str, Any], *, with_decoder: bool = True) -> ModelOptions:
    """The sizes from `task_options.model`.

    Raises:
        UserError: an unknown name.
    """
    if not with_decoder:
        given = {**given, "num_decoder_layers": 0}
    try:
        return ModelOptions(**given)
    except TypeError as error:
        raise UserError(f"task_options.model: {error}; known are {', '.join(ModelOptions.__annotations__)}") from None


def make_model(cmvn: Path, num_mels: int, units: Units, sizes: ModelOptions) -> SpeechModel:
    """A model with fresh weights.

    Raises:
        UserError: the CMVN is of other features.
    """
    mean, inverse_std = load_cmvn(cmvn)
    if len(mean) != num_mels:
        raise UserError(f"{cmvn} is for {len(mean)} filters, the features have {num_mels}: run prepare.py again")
    return SpeechModel(torch.from_numpy(mean), torch.from_numpy(inverse_std), len(units), sizes)


def load_weights(model: SpeechModel, checkpoint: Path) -> None:
    """Take over the weights of a checkpoint; the CMVN stays the model's own.

    Raises:
        UserError: the file is missing or damaged, or its model has other shapes.
    """
    try:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["model"]
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {checkpoint}") from None
    except Exception as error:
        raise UserError(f"{checkpoint}: not a checkpoint of the trainer ({error})") from None
    own = model.state_dict()
    weights = {**weights, "mean": own["mean"], "inverse_std": own["inverse_std"]}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit this model: {error}") from None
