"""A corpus in AISHELL-1's folders.

    ROOT/transcript/aishell_transcript_v0.8.txt     one line an utterance: its name, a blank, the words
    ROOT/wav/SPLIT/SPEAKER/NAME.wav                 SPLIT: train, dev, test

AISHELL-1: Bu et al. 2017, https://www.openslr.org/33/ (178 hours of Mandarin; wavs without a transcript are in it, and
are left out here as in everybody's recipe).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hvdtrain.errors import UserError

TRANSCRIPT = "transcript/aishell_transcript_v0.8.txt"
SPLITS = ("train", "dev", "test")


@dataclasses.dataclass(frozen=True)
class Utterance:
    """One recording: its name (unique in the corpus), its speaker, its file and what is said."""

    name: str
    speaker: str
    wav: Path
    text: str


def read_transcript(root: Path, *, keep_spaces: bool) -> dict[str, str]:
    """{name of the utterance: text}.

    Args:
        keep_spaces: words are separated by spaces in writing (English). False: the blanks only show a segmentation
            (AISHELL-1), and are taken out.

    Raises:
        UserError: no such file, or a line without text.
    """
    path = root / TRANSCRIPT
    if not path.is_file():
        raise UserError(f"{root} is not a corpus in AISHELL-1's layout: it has no {TRANSCRIPT}")
    texts: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        name, *words = line.split()
        if not words:
            raise UserError(f"{path}:{number}: no text after the name of the utterance")
        texts[name] = (" " if keep_spaces else "").join(words)
    return texts


def read_split(root: Path, split: str, *, keep_spaces: bool) -> list[Utterance]:
    """The utterances of a split that have a transcript, sorted by name.

    Raises:
        UserError: the corpus has no such split, or no utterance in it.
    """
    texts = read_transcript(root, keep_spaces=keep_spaces)
    found = [
        Utterance(wav.stem, wav.parent.name, wav, texts[wav.stem])
        for wav in (root / "wav" / split).glob("*/*.wav")
        if wav.stem in texts
    ]
    if not found:
        raise UserError(f"{root}/wav/{split}/SPEAKER/ holds no .wav that {TRANSCRIPT} has a line for")
    return sorted(found, key=lambda utterance: utterance.name)
