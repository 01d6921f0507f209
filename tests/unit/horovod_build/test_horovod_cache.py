"""The wheel cache: what its key depends on, whole files only, one builder at a time."""

import dataclasses
import threading

import pytest

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.cache import WheelCache, WheelKey, default_cache

KEY = WheelKey(
    torch="2.13.0+cpu",
    cxx11_abi=True,
    cxx_standard=20,
    python="cpython-311-x86_64-linux-gnu",
    machine="x86_64",
    libc="glibc 2.36",
    mpi="Open MPI 4.1.4",
    nccl=None,
)


def test_the_name_can_be_read_and_is_a_file_name():
    assert KEY.name.startswith("torch-2.13.0+cpu-py311-gloo-mpi-")
    assert len(KEY.name) == len("torch-2.13.0+cpu-py311-gloo-mpi-") + 10
    assert KEY.transports == ("gloo", "mpi")


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "2.13.0+cu128"},
        {"cxx11_abi": False},
        {"cxx_standard": 17},
        {"python": "cpython-312-x86_64-linux-gnu"},
        {"python": "cpython-311d-x86_64-linux-gnu"},
        {"machine": "aarch64"},
        {"libc": "glibc 2.31"},
        {"mpi": None},
        {"mpi": "MPICH 4.0.2"},
        {"nccl": "12.8"},
        {"fast_fp16": True},
    ],
)
def test_whatever_decides_whether_a_wheel_loads_changes_the_key(change):
    assert dataclasses.replace(KEY, **change).name != KEY.name


def test_a_stored_wheel_is_found_under_its_key_alone(tmp_path):
    built = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    built.write_bytes(b"wheel")
    cache = WheelCache(tmp_path / "cache")
    assert cache.find(KEY) is None
    stored = cache.store(KEY, built)
    assert stored.read_bytes() == b"wheel"
    assert cache.find(KEY) == stored
    assert cache.find(dataclasses.replace(KEY, mpi=None)) is None
    assert sorted(file.name for file in stored.parent.iterdir()) == ["build.json", built.name]
    # A part that a killed copy left is no wheel.
    stored.rename(stored.with_name(f".{built.name}.123.part"))
    assert cache.find(KEY) is None


def test_a_second_builder_waits_and_the_first_is_named(tmp_path):
    cache = WheelCache(tmp_path)
    said, order = [], []

    def second():
        with cache.lock(KEY, 30, said.append):
            order.append("second")

    with cache.lock(KEY, 0, said.append):
        other = threading.Thread(target=second)
        other.start()
        while not said:
            other.join(timeout=0.05)
        order.append("first")
    other.join(timeout=30)
    assert order == ["first", "second"]
    assert len(said) == 1
    assert "is building the same wheel; waiting for it" in said[0]


def test_waiting_for_another_builder_has_a_limit(tmp_path):
    cache = WheelCache(tmp_path)
    with (
        cache.lock(KEY, 0, lambda _: None),
        pytest.raises(UserError, match=r"process \d+ on .* has held .*\.lock"),
        cache.lock(KEY, 0, lambda _: None),
    ):
        pass


def test_where_the_cache_is():
    assert str(default_cache({"HVDTRAIN_CACHE": "/big/cache", "XDG_CACHE_HOME": "/x"})) == "/big/cache"
    assert str(default_cache({"XDG_CACHE_HOME": "/x"})) == "/x/hvdtrain"
    assert default_cache({}).parts[-2:] == (".cache", "hvdtrain")
