"""Bits of `horovod.runner` that training scripts import. Starting jobs from Python is not provided."""

from __future__ import annotations

from typing import Any


def run(*args: Any, **kwargs: Any) -> Any:
    """Not provided.

    Raises:
        NotImplementedError: always; says what to use.
    """
    raise NotImplementedError(
        "horovod.run() is not provided by hvdtrain: start the script with torchrun, horovodrun or mpirun and "
        "`hvdtrain exec`"
    )
