"""Compute features, CMVN and units of a corpus in AISHELL-1's layout, once, before the training.

    python examples/asr/prepare.py --data FOLDER [--cmvn FILE]

writes into FOLDER/prepared: train, dev and test as `.list` (names, texts, lengths) and `.f16` (log-mel frames,
float16), units.txt (characters of the training texts) and global_cmvn.json (sums over the training frames, in WeNet's
form; elsewhere with --cmvn). AISHELL-1 makes about 10 GB of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from speech.aishell import SPLITS, Utterance, read_split
from speech.cmvn import CmvnSums
from speech.features import FeatureOptions, log_mel, read_wav
from speech.prepared import CMVN, UNITS, write_split
from speech.units import Units

from hvdtrain.errors import UserError


def features_of(utterance: Utterance, options: FeatureOptions) -> NDArray[np.float16]:
    """Features of a file, rounded to float16 (log-mel values are within about 25 of 0: two decimals are left)."""
    samples, rate = read_wav(utterance.wav)
    return log_mel(samples, rate, options).astype(np.float16)


def prepare(
    data: Path, *, cmvn: Path | None = None, options: FeatureOptions | None = None, keep_spaces: bool, jobs: int = 1
) -> Path:
    """Prepare a corpus.

    Returns:
        The folder that was written.

    Raises:
        UserError: the corpus is not as it should be.
    """
    options = options or FeatureOptions()
    folder = data / "prepared"
    splits = {split: read_split(data, split, keep_spaces=keep_spaces) for split in SPLITS}
    folder.mkdir(exist_ok=True)
    Units.of_texts(utterance.text for utterance in splits["train"]).save(folder / UNITS)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(jobs)) if jobs > 1 else None
        for split, utterances in splits.items():
            compute = functools.partial(features_of, options=options)
            found = pool.map(compute, utterances, chunksize=50) if pool else map(compute, utterances)
            sums = CmvnSums(options.num_mels)
            count, num_frames = write_split(folder, split, zip(utterances, sums.counting(found), strict=True))
            print(f"{split}: {count:,} utterances, {num_frames / 6000:.1f} minutes")
            if split == "train":
                sums.save(cmvn or folder / CMVN)
    return folder


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="The corpus.")
@click.option("--cmvn", type=click.Path(path_type=Path, dir_okay=False), help="Where to write the CMVN sums.")
@click.option("--num_mels", default=40, show_default=True, help="Size of a feature vector; WeNet uses 80.")
@click.option("--high_hz", default=7600.0, show_default=True, help="Upper end of the mel filters.")
@click.option("--keep_spaces/--drop_spaces", default=True, show_default=True, help="AISHELL-1: --drop_spaces.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default="cores", help="Processes.")
def main(data: Path, cmvn: Path | None, num_mels: int, high_hz: float, keep_spaces: bool, jobs: int) -> None:
    try:
        folder = prepare(data, cmvn=cmvn, options=FeatureOptions(num_mels, high_hz), keep_spaces=keep_spaces, jobs=jobs)
    except UserError as error:
        raise SystemExit(_refuse(error)) from None
    print(f"wrote {folder}")


def _refuse(error: UserError) -> int:
    click.echo(f"error: {error}", err=True)
    return 2


if __name__ == "__main__":
    main()
