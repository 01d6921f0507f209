"""The random state of this process, in plain types."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """State of the generators of Python, numpy, torch's CPU and this process's current CUDA device (if any).

    Returns:
        {"python": (version, tuple of ints, gauss), "numpy": [name, list of ints, position, has_gauss, gauss],
        "torch": uint8 tensor, "cuda": [uint8 tensor]}, "cuda" an empty list where CUDA is not in use.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    # Where CUDA is there but not in use, asking would set it up.
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        # weights_only refuses numpy arrays; 624 ints are 3 KB.
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned, also read from a file; a CUDA state is passed over without CUDA."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, numpy_gauss = state["numpy"]
    np.random.set_state((name, np.array(numpy_keys, dtype=np.uint32), position, has_gauss, numpy_gauss))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0].cpu())
