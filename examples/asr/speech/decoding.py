"""Greedy decoding, and how far the result is from what was said."""

from __future__ import annotations

from collections.abc import Sequence

import jiwer
import torch
from torch import Tensor

from speech.model import Scores, SpeechModel
from speech.units import BLANK, EDGE, Units


def ctc_greedy(scores: Scores, units: Units) -> list[str]:
    """The best unit of each frame, repeats merged, blanks dropped (Graves et al. 2006)."""
    texts = []
    for best, length in zip(scores.ctc.argmax(dim=-1), scores.num_frames.tolist(), strict=True):
        merged = torch.unique_consecutive(best[:length])
        texts.append(units.decode(number for number in merged.tolist() if number != BLANK))
    return texts


def attention_greedy(model: SpeechModel, features: Tensor, num_frames: Tensor, units: Units) -> list[str]:
    """The decoder's best units, one by one, until the end of the sentence, or as many as there are frames."""
    if model.decoder is None:
        raise ValueError("the model has no decoder")
    encoded, mask, lengths = model.encode(features, num_frames)
    found = torch.empty(len(features), 0, dtype=torch.int64, device=features.device)
    ended = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    while not ended.all() and found.shape[1] < int(lengths.max()):
        best = model.decoder(found, encoded, mask)[:, -1].argmax(dim=-1)
        ended |= best == EDGE
        found = torch.cat([found, best.masked_fill(ended, EDGE)[:, None]], dim=1)
    return [units.decode(row) for row in found.tolist()]


def character_errors(said: Sequence[str], heard: Sequence[str]) -> tuple[int, int]:
    """(insertions + deletions + substitutions, characters said): the character error rate is their ratio."""
    found = jiwer.process_characters(list(said), list(heard))
    errors = found.substitutions + found.deletions + found.insertions
    return errors, found.substitutions + found.deletions + found.hits
