"""Threads, as helper functions that scripts and tests of Horovod import."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a function in a thread and return the thread.

    Args:
        silent: an exception of the function is not printed.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {args!r}")

    def quiet(*arguments: Any) -> None:
        try:
            target(*arguments)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=quiet, args=args, name=name, daemon=daemon)
    thread.start()
    return thread
