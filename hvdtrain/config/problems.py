"""What can be wrong with a configuration, and where it was written."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from hvdtrain.errors import ConfigError

# The names of the keys from the outermost mapping inwards: ("lr", "warmup_steps").
KeyPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One fault: where it was written (file and line, or the command-line option), the key, what is wrong."""

    where: str
    key: str
    text: str
    line: int = 0  # of the job file, from 1; 0: somewhere else. Orders the list.

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.text) if part)


class Origins:
    """Remembers for each key where its value was written, so that an error can say it.

    Args:
        file: the job file as the user named it; empty for a configuration that was made in Python.
    """

    def __init__(self, file: str = "") -> None:
        self.file = file
        self._where: dict[KeyPath, tuple[str, int]] = {}

    def line(self, path: KeyPath, number: int) -> None:
        """The value of `path` stands in line `number` of the job file (lines count from 1)."""
        self._where[path] = (self.place(number), number)

    def place(self, number: int) -> str:
        """Line `number` of the job file in words; empty when there is no file."""
        return f"{self.file}, line {number}" if self.file else ""

    def replace(self, path: KeyPath, where: str) -> None:
        """The value of `path`, and all beneath it, now comes from `where`."""
        self._where = {key: place for key, place in self._where.items() if key[: len(path)] != path}
        self._where[path] = (where, 0)

    def adopt(self, path: KeyPath, other: Origins) -> None:
        """The value of `path`, and all beneath it, was written where `other` says."""
        for key, place in other._where.items():
            if key[: len(path)] == path:
                self._where[key] = place

    def problem(self, path: KeyPath, text: str) -> Problem:
        """A fault of the value of `path`, placed where it or else the nearest mapping around it was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._where:
                where, line = self._where[path[:length]]
                return Problem(where, ".".join(path), text, line)
        return Problem(self.file, ".".join(path), text)


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error that lists all problems; do nothing when there are none.

    Raises:
        ConfigError: there is at least one problem.
    """
    if len(problems) == 1:
        raise ConfigError(str(problems[0]))
    if problems:
        problems = sorted(problems, key=lambda problem: problem.line)
        raise ConfigError("\n  ".join([f"{len(problems)} errors in the configuration:", *map(str, problems)]))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is most probably a slip of, or None if none is near."""
    by_lower = {choice.lower().replace("-", "_"): choice for choice in choices}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None
