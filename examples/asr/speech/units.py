"""Characters as numbers: 0 is CTC's blank, 1 an unknown character, 2 begin and end of a sentence for the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hvdtrain.errors import UserError

BLANK, UNKNOWN, EDGE = 0, 1, 2
_SPECIAL = ("<blank>", "<unk>", "<sos/eos>")
_SPACE = "<space>"


class Units:
    """The characters of a corpus.

    Args:
        characters: distinct, in the order of their numbers.
    """

    def __init__(self, characters: Sequence[str]) -> None:
        self._characters = list(characters)
        self._numbers = {character: number for number, character in enumerate(characters, start=len(_SPECIAL))}

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> Units:
        """All characters of the texts, sorted."""
        return cls(sorted(set().union(*texts)))

    def __len__(self) -> int:
        return len(_SPECIAL) + len(self._characters)

    def encode(self, text: str) -> list[int]:
        """A number for each character."""
        return [self._numbers.get(character, UNKNOWN) for character in text]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text; an unknown character shows as a question mark, blanks and edges do not show."""
        shown = {BLANK: "", EDGE: "", UNKNOWN: "?"}
        return "".join(
            shown[number] if number in shown else self._characters[number - len(_SPECIAL)] for number in numbers
        )

    def save(self, path: Path) -> None:
        """Write one line a unit: the unit and its number."""
        names = [*_SPECIAL, *(_SPACE if character == " " else character for character in self._characters)]
        path.write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Units:
        """Read what `save` wrote.

        Raises:
            UserError: no such file, or another content.
        """
        if not path.is_file():
            raise UserError(f"there is no {path}; examples/asr/prepare.py writes it")
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        names = [line[0] for line in lines if len(line) == 2]
        if len(names) != len(lines) or tuple(names[: len(_SPECIAL)]) != _SPECIAL:
            raise UserError(
                f"{path}: not a file of units (a unit and its number in a line, {' '.join(_SPECIAL)} first)"
            )
        return cls([" " if name == _SPACE else name for name in names[len(_SPECIAL) :]])
