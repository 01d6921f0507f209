"""A dataset of shards that lie on several file servers, read from all of them at the same time.

One NFS server is as fast as its network card. Put the shards onto the disks of several hosts, let each host export its
part, mount them all everywhere, and let every rank start at another mount:

    Shards(["/mnt/host1/train-*.tar", "/mnt/host2/train-*.tar", "/mnt/host3/train-*.tar", "/mnt/host4/train-*.tar"])
"""

from __future__ import annotations

import glob
import random
import tarfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from hvdtrain.errors import UserError

# Reads are sequential; large ones spare the server.
_READ_BYTES = 1 << 20


class Shards(IterableDataset[Any]):
    """This rank's samples of all shards; with data-loader workers, each worker's.

    The shards are taken in turn from the mounts (the first of each, the second of each, ...), and shard i goes to
    reader i mod readers, a reader being one worker of one rank. With as many shards on each mount and a multiple of as
    many readers, every mount always serves the same number of readers.

    A sample of a tar shard is {"key": NAME, EXTENSION: bytes, ...} of the members that share NAME up to the first dot
    (the layout of webdataset); of an .npz shard {name: array[i]} of its arrays, which have the same length.

    Args:
        mounts: a glob pattern of shards (`*.tar`, `*.tar.gz`, `*.npz`) for each mount.
        decode: makes of a sample what the task wants; None: the sample as it is.
        shuffle: permute each mount's shards anew in every epoch, by (seed, epoch) alone.
        shuffle_buffer: of the samples read, yield a random one out of so many; 0: in their order.
        seed: of both.
        rank, size: this rank among the ranks; None: the launcher's (`hvdtrain.world()`).

    Raises:
        UserError: a mount has no shard, or a shard is neither tar nor npz.
    """

    def __init__(
        self,
        mounts: Sequence[str],
        decode: Callable[[dict[str, Any]], Any] | None = None,
        *,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
        seed: int = 1,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if rank is None or size is None:
            import hvdtrain

            world = hvdtrain.world()
            rank, size = world.rank, world.size
        self.rank, self.size = rank, size
        self.decode = decode
        self.shuffle, self.shuffle_buffer, self.seed = shuffle, shuffle_buffer, seed
        self.epoch = 0
        self.mounts = [_shards_of(pattern) for pattern in mounts]
        if not self.mounts:
            raise UserError("Shards: no mounts; give a pattern for each, such as /mnt/host1/train-*.tar")

    def set_epoch(self, epoch: int) -> None:
        """Another epoch, another order. The trainer calls it."""
        self.epoch = epoch

    def shards_of_epoch(self) -> list[str]:
        """All shards in the order of this epoch, the same on every rank: in turn from the mounts that have one left."""
        columns = []
        for number, shards in enumerate(self.mounts):
            column = list(shards)
            if self.shuffle:
                random.Random(f"{self.seed} {self.epoch} {number}").shuffle(column)
            columns.append(column)
        longest = max(map(len, columns))
        return [column[row] for row in range(longest) for column in columns if row < len(column)]

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        # Neighbouring readers are on different ranks: rank r's first worker starts at mount r mod mounts.
        reader, readers = number * self.size + self.rank, workers * self.size
        order = self.shards_of_epoch()
        if reader == 0 and len(order) < readers:
            warnings.warn(
                f"{len(order)} shards for {readers} readers ({self.size} ranks x {workers} workers): "
                f"{readers - len(order)} of them read nothing; make more shards or use fewer workers",
                stacklevel=2,
            )
        samples: Iterator[dict[str, Any]] = (
            sample for shard in order[reader::readers] for sample in read_shard(Path(shard))
        )
        if self.shuffle_buffer > 1:
            samples = _shuffled(samples, self.shuffle_buffer, random.Random(f"{self.seed} {self.epoch} of {reader}"))
        yield from samples if self.decode is None else map(self.decode, samples)


def read_shard(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of one shard, front to back.

    Raises:
        UserError: the file cannot be read or is damaged; it is named.
    """
    try:
        if path.suffix == ".npz":
            yield from _read_npz(path)
        else:
            yield from _read_tar(path)
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise UserError(f"shard {path}: {error}; make it anew, or take it out of the folder") from error


def _read_tar(path: Path) -> Iterator[dict[str, Any]]:
    sample: dict[str, Any] = {}
    # Streaming mode: one pass, no seeks, which network file systems answer slowly.
    with (
        path.open("rb", buffering=_READ_BYTES) as file,
        tarfile.open(fileobj=file, mode="r|*", bufsize=_READ_BYTES) as tar,
    ):
        for member in tar:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            if sample and sample["key"] != key:
                yield sample
                sample = {}
            content = tar.extractfile(member)
            assert content is not None
            sample.update({"key": key, extension: content.read()})
    if sample:
        yield sample


def _read_npz(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb", buffering=_READ_BYTES) as file, np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"its arrays have different lengths ({lengths})")
    for index in range(next(iter(lengths.values()), 0)):
        yield {name: array[index] for name, array in arrays.items()}


def _shuffled(samples: Iterator[dict[str, Any]], size: int, generator: random.Random) -> Iterator[dict[str, Any]]:
    held: list[dict[str, Any]] = []
    for sample in samples:
        if len(held) < size:
            held.append(sample)
            continue
        place = generator.randrange(size)
        held[place], sample = sample, held[place]
        yield sample
    generator.shuffle(held)
    yield from held


def _shards_of(pattern: str) -> list[str]:
    found = sorted(glob.glob(pattern))  # noqa: PTH207  (a pattern from the root, as the user writes it)
    if not found:
        raise UserError(f"Shards: {pattern} matches no file on this host; is it mounted here?")
    for name in found:
        if not name.endswith((".tar", ".tar.gz", ".tgz", ".npz")):
            raise UserError(f"Shards: {name} is neither .tar, .tar.gz nor .npz")
    return found
