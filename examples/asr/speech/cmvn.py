"""Mean and variance of the features over the training data, in the JSON form that WeNet's tools write and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UserError


class CmvnSums:
    """Sums over frames, from which mean and variance follow."""

    def __init__(self, num_mels: int) -> None:
        self.total = np.zeros(num_mels, np.float64)
        self.total_of_squares = np.zeros(num_mels, np.float64)
        self.num_frames = 0

    def add(self, features: NDArray[np.float16 | np.float32]) -> None:
        """Add the frames of an utterance, [frames, num_mels]."""
        exact = features.astype(np.float64)
        self.total += exact.sum(axis=0)
        self.total_of_squares += (exact**2).sum(axis=0)
        self.num_frames += len(features)

    def counting(self, utterances: Iterable[NDArray[np.float16]]) -> Iterator[NDArray[np.float16]]:
        """The same utterances, each added on its way."""
        for features in utterances:
            self.add(features)
            yield features

    def save(self, path: Path) -> None:
        """Write {"mean_stat": sums, "var_stat": sums of squares, "frame_num": frames}."""
        path.write_text(
            json.dumps(
                {
                    "mean_stat": self.total.tolist(),
                    "var_stat": self.total_of_squares.tolist(),
                    "frame_num": self.num_frames,
                }
            )
            + "\n"
        )


def load_cmvn(path: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(mean, 1 / standard deviation), each [num_mels], of a file that `CmvnSums.save` or WeNet wrote.

    Raises:
        UserError: no such file, or another content.
    """
    try:
        found = json.loads(path.read_text())
        count = float(found["frame_num"])
        mean = np.array(found["mean_stat"], np.float64) / count
        variance = np.array(found["var_stat"], np.float64) / count - mean**2
    except FileNotFoundError:
        raise UserError(f"there is no {path}; examples/asr/prepare.py computes it (global_cmvn.json)") from None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path}: not a file of CMVN sums with mean_stat, var_stat and frame_num ({error!r})") from None
    # A filter that never changes has no variance; the floor keeps it finite.
    return mean.astype(np.float32), (1.0 / np.sqrt(np.maximum(variance, 1e-10))).astype(np.float32)
