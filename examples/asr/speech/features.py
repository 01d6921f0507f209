"""Log-mel features, as Kaldi computes them (kaldi-native-fbank)."""

from __future__ import annotations

import dataclasses
import wave
from pathlib import Path

import kaldi_native_fbank
import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class FeatureOptions:
    """What a feature vector is. Frames are 25 ms long, one every 10 ms.

    Attributes:
        num_mels: filters of the mel bank, between 20 Hz and `high_hz`.
        high_hz: the same for every sampling rate, so that rates may be mixed; below half of the lowest one.
    """

    num_mels: int = 40
    high_hz: float = 7600.0


def read_wav(path: Path) -> tuple[NDArray[np.float32], int]:
    """(samples [T] in the range of int16, sampling rate in Hz) of a file with one channel of 16 bits.

    Raises:
        UserError: the file is damaged or of another kind.
    """
    try:
        with wave.open(str(path), "rb") as file:
            kind = (file.getnchannels(), file.getsampwidth())
            rate, content = file.getframerate(), file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise UserError(f"{path}: cannot be read as a wav file ({error})") from None
    if kind != (1, 2):
        raise UserError(f"{path}: {kind[0]} channel(s) of {8 * kind[1]} bits; the recipe reads one channel of 16 bits")
    return np.frombuffer(content, dtype="<i2").astype(np.float32), rate


def log_mel(samples: NDArray[np.float32], rate: int, options: FeatureOptions) -> NDArray[np.float32]:
    """Features [frames, num_mels] of samples [T] in the range of int16.

    Raises:
        UserError: the sampling rate is too low for `high_hz`.
    """
    if rate < 2 * options.high_hz:
        raise UserError(f"audio at {rate} Hz holds nothing above {rate / 2:g} Hz; use --high_hz {rate // 2} or less")
    settings = kaldi_native_fbank.FbankOptions()
    settings.frame_opts.samp_freq = rate
    # Kaldi's default adds noise: features would differ from run to run.
    settings.frame_opts.dither = 0.0
    settings.mel_opts.num_bins = options.num_mels
    settings.mel_opts.high_freq = options.high_hz
    computer = kaldi_native_fbank.OnlineFbank(settings)
    computer.accept_waveform(rate, samples.tolist())
    computer.input_finished()
    num_frames = computer.num_frames_ready
    if num_frames == 0:
        return np.zeros((0, options.num_mels), np.float32)
    return np.stack([computer.get_frame(index) for index in range(num_frames)]).astype(np.float32)
