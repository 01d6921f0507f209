"""A collective that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A collective that has been started; `wait()` returns its result."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._results: list[T] = []

    def wait(self) -> T:
        """Block until the result is there; again: the same result. Not collective: every rank has joined in already."""
        if self._finish is not None:
            self._results.append(self._finish())
            self._finish = None
        return self._results[0]
