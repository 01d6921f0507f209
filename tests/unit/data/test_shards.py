"""Shards: every sample once, mounts in turn, the same order for the same (seed, epoch)."""

import collections
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from hvdtrain.data.shards import Shards, read_shard
from hvdtrain.errors import UserError

MOUNTS, SHARDS, SAMPLES = 3, 4, 5


@pytest.fixture
def patterns(tmp_path):
    """Three mounts of four shards of five samples."""
    for mount in range(MOUNTS):
        folder = tmp_path / f"mount{mount}"
        folder.mkdir()
        for shard in range(SHARDS):
            write_tar(folder / f"train-{shard}.tar", [f"{mount}-{shard}-{sample}" for sample in range(SAMPLES)])
    return [f"{tmp_path}/mount{mount}/train-*.tar" for mount in range(MOUNTS)]


def write_tar(path, keys):
    with tarfile.open(path, "w") as tar:
        for key in keys:
            for extension, content in (("txt", key.encode()), ("cls", b"7")):
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def keys(dataset):
    return [sample["key"] for sample in dataset]


EVERYTHING = sorted(f"{m}-{s}-{i}" for m in range(MOUNTS) for s in range(SHARDS) for i in range(SAMPLES))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("buffer", [0, 7])
def test_every_sample_once(patterns, size, buffer):
    ranks = [keys(Shards(patterns, rank=rank, size=size, shuffle_buffer=buffer)) for rank in range(size)]
    assert sorted(key for rank in ranks for key in rank) == EVERYTHING


def test_workers_share_a_ranks_part(patterns):
    dataset = Shards(patterns, rank=1, size=2)
    alone = keys(dataset)
    together = [sample["key"] for sample in DataLoader(dataset, batch_size=None, num_workers=2)]
    # Readers are numbered over all workers, so a rank's part changes with their number; all parts together do not.
    other = [sample["key"] for sample in DataLoader(Shards(patterns, rank=0, size=2), batch_size=None, num_workers=2)]
    assert len(alone) == len(together) == 30
    assert sorted(together + other) == EVERYTHING


def test_mounts_are_read_in_turn(patterns):
    order = Shards(patterns, rank=0, size=3).shards_of_epoch()
    mounts = [Path(shard).parent.name for shard in order]
    assert mounts == ["mount0", "mount1", "mount2"] * SHARDS
    # Three ranks, three mounts: each rank has its own.
    for rank in range(3):
        read = collections.Counter(key.split("-")[0] for key in keys(Shards(patterns, rank=rank, size=3)))
        assert read == {str(rank): SHARDS * SAMPLES}


def test_the_order_is_that_of_seed_and_epoch(patterns):
    def order(seed, epoch, rank=0):
        dataset = Shards(patterns, rank=rank, size=2, seed=seed, shuffle_buffer=4)
        dataset.set_epoch(epoch)
        return keys(dataset)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    plain = Shards(patterns, rank=0, size=1, shuffle=False)
    assert keys(plain)[:6] == ["0-0-0", "0-0-1", "0-0-2", "0-0-3", "0-0-4", "1-0-0"]


def test_tar_samples_and_decode(patterns):
    dataset = Shards(
        patterns, lambda sample: (sample["txt"].decode(), int(sample["cls"])), rank=0, size=1, shuffle=False
    )
    assert next(iter(dataset)) == ("0-0-0", 7)


def test_npz_samples(tmp_path):
    np.savez(tmp_path / "a.npz", image=np.arange(6).reshape(3, 2), label=np.array([4, 5, 6]))
    samples = list(Shards([f"{tmp_path}/*.npz"], rank=0, size=1))
    assert [(sample["image"].tolist(), int(sample["label"])) for sample in samples] == [
        ([0, 1], 4),
        ([2, 3], 5),
        ([4, 5], 6),
    ]


def test_too_few_shards_are_told(patterns):
    with pytest.warns(UserWarning, match="12 shards for 13 readers .13 ranks x 1 workers.: 1 of them read nothing"):
        keys(Shards(patterns, rank=0, size=13))


def test_what_is_wrong_is_named(tmp_path, patterns):
    with pytest.raises(UserError, match=r"none-\*\.tar matches no file on this host; is it mounted here\?"):
        Shards([*patterns, f"{tmp_path}/none-*.tar"], rank=0, size=1)
    (tmp_path / "odd.txt").write_text("")
    with pytest.raises(UserError, match=r"odd\.txt is neither \.tar, \.tar\.gz nor \.npz"):
        Shards([f"{tmp_path}/odd.txt"], rank=0, size=1)
    with pytest.raises(UserError, match="no mounts"):
        Shards([], rank=0, size=1)
    broken = tmp_path / "broken.tar"
    broken.write_bytes((tmp_path / "mount0/train-0.tar").read_bytes()[:700])
    with pytest.raises(UserError, match=r"shard .*broken\.tar: "):
        list(read_shard(broken))
    np.savez(tmp_path / "uneven.npz", a=np.zeros(2), b=np.zeros(3))
    with pytest.raises(UserError, match=r"uneven\.npz: its arrays have different lengths"):
        list(read_shard(tmp_path / "uneven.npz"))
