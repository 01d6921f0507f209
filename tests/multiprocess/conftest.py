"""Fixtures: real ranks under every backend, shared by all tests of the session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import RankPool

from hvdtrain.launch import exported

# The contract holds under each: native DDP, real Horovod, and the Horovod backend over our own layer.
KINDS = ["ddp", "horovod", "hvd"]


_started: dict[tuple[str, int], RankPool] = {}


def _kind(item: pytest.Item) -> str:
    """The backend whose pools a test uses; "" for none, "several" where it asks for them itself."""
    names = getattr(item, "fixturenames", ())
    if "pools" not in names:
        return ""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    kinds = [parameters[name] for name in ("pool2", "pool3", "two") if name in parameters]
    return kinds[0] if kinds else "hvd" if {"ours", "ours3"} & set(names) else "several"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Backend after backend: ranks that wait for work cost time (Horovod's wake up every millisecond)."""
    order = ["", *KINDS, "several"]
    items.sort(key=lambda item: order.index(_kind(item)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the pools of the backend before, once the tests of the next one begin."""
    kind = _kind(item)
    if kind != "several" and any(known != kind for known, _ in _started):
        _close_pools()


def _close_pools() -> None:
    pools = list(_started.values())
    _started.clear()
    for pool in pools:
        pool.start_closing()
    for pool in pools:
        pool.close()


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """What a connection leaves in the environment is told to every job that later tests start."""
    before = exported.now(os.environ)
    yield
    assert exported.now(os.environ) == before


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str, int], RankPool]]:
    """`pools(kind, size)`: the pool of that backend and size, started on first use."""

    def get(kind: str, size: int) -> RankPool:
        if (kind, size) not in _started or not _started[kind, size].is_alive:
            _started[kind, size] = RankPool(kind, size)
        return _started[kind, size]

    yield get
    _close_pools()


@pytest.fixture(params=KINDS)
def pool2(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    """Two ranks, under each backend in turn."""
    return pools(request.param, 2)


@pytest.fixture(params=KINDS)
def pool3(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    """Three ranks, under each backend in turn."""
    return pools(request.param, 3)
