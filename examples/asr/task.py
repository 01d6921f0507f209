"""Speech recognition on features that prepare.py made: a Conformer encoder, CTC and attention trained jointly."""

from __future__ import annotations

from pathlib import Path

import torch
from speech.batches import Batch, Microbatches, check_ctc
from speech.building import load_weights, make_model, model_options
from speech.decoding import character_errors, ctc_greedy
from speech.model import Scores
from speech.prepared import CMVN, UNITS, PreparedSplit
from speech.units import EDGE, Units
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from hvdtrain.errors import UserError


class SpeechRecognition:
    """The task. Needs `batch_size: null`: microbatches are made here.

    Args:
        data: the corpus; prepare.py has written its `prepared` folder.
        cmvn: file of CMVN sums; default: the one in `prepared`.
        checkpoint: a checkpoint of the trainer, to start from its weights (not to resume: optimizer, schedule and
            counters start anew).
        max_frames: largest padded microbatch, in frames of 10 ms.
        ctc_weight: share of the CTC loss; the rest is the decoder's. 1: there is no decoder.
        num_masks: SpecAugment masks over frequency, and over time.
        eval_splits: what is evaluated, each with a CER of its own; empty: nothing is.
        model: sizes, as in ModelOptions.
    """

    def __init__(
        self,
        data: str,
        cmvn: str | None = None,
        checkpoint: str | None = None,
        max_frames: int = 800,
        ctc_weight: float = 0.7,
        num_masks: int = 1,
        eval_splits: tuple[str, ...] | list[str] = ("dev", "test"),
        model: dict[str, float] | None = None,
    ) -> None:
        if not 0 <= ctc_weight <= 1:
            raise UserError(f"task_options.ctc_weight is {ctc_weight}; it is a share, from 0 to 1")
        folder = Path(data).expanduser() / "prepared"
        self.units = Units.load(folder / UNITS)
        self.train = PreparedSplit(folder, "train")
        self.evaluated = {split: PreparedSplit(folder, split) for split in eval_splits}
        check_ctc([self.train], self.units)
        self.cmvn = Path(cmvn).expanduser() if cmvn else folder / CMVN
        self.checkpoint = Path(checkpoint).expanduser() if checkpoint else None
        self.max_frames, self.ctc_weight, self.num_masks = max_frames, ctc_weight, num_masks
        self.sizes = model_options(model or {}, with_decoder=ctc_weight < 1)

    def model(self) -> nn.Module:
        model = make_model(self.cmvn, self.train.num_mels, self.units, self.sizes)
        if self.checkpoint is not None:
            load_weights(model, self.checkpoint)
        return model

    def train_dataset(self) -> Dataset[Batch]:
        return Microbatches([self.train], self.units, max_frames=self.max_frames, seed=0, num_masks=self.num_masks)

    def eval_dataset(self) -> Dataset[Batch] | None:
        if not self.evaluated:
            return None
        return Microbatches(list(self.evaluated.values()), self.units, max_frames=4 * self.max_frames, seed=0)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float, dict[str, float]]:
        """Negative log-probability per character, so that every character of a step weighs the same on all ranks."""
        ctc, attention = self._losses(model(batch.features, batch.num_frames, batch.characters), batch)
        total = self.ctc_weight * ctc
        values = {"ctc_loss": ctc.item()}
        if attention is not None:
            total = total + (1 - self.ctc_weight) * attention
            values["attention_loss"] = attention.item()
        return total, float(batch.num_characters.sum()), values

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        scores = model(batch.features, batch.num_frames, batch.characters)
        rows = zip(batch.characters.tolist(), batch.num_characters.tolist(), strict=True)
        said = [self.units.decode(row[:length]) for row, length in rows]
        errors, count = character_errors(said, ctc_greedy(scores, self.units))
        found: dict[str, tuple[float, float]] = {"cer": (errors, count)}
        for place, split in enumerate(self.evaluated):
            here = place == batch.split
            found[f"cer_{split}"] = (errors * here, count * here)
        ctc, _ = self._losses(scores, batch)
        found["ctc_loss"] = (ctc.item() * count, count)
        return found

    def _losses(self, scores: Scores, batch: Batch) -> tuple[Tensor, Tensor | None]:
        num_characters = batch.num_characters.sum()
        ctc = functional.ctc_loss(
            scores.ctc.transpose(0, 1), batch.characters, scores.num_frames, batch.num_characters, reduction="sum"
        )
        if scores.decoder is None:
            return ctc / num_characters, None
        # The decoder has one thing more to say: that the sentence is over.
        place = torch.arange(batch.characters.shape[1] + 1, device=batch.characters.device)
        ends = batch.num_characters[:, None]
        wanted = (
            functional.pad(batch.characters, (0, 1)).masked_fill(place == ends, EDGE).masked_fill(place > ends, -100)
        )
        attention = functional.cross_entropy(
            scores.decoder.flatten(0, 1), wanted.flatten(), reduction="sum", label_smoothing=0.1
        )
        return ctc / num_characters, attention / num_characters
