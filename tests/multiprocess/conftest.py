"""Fixtures: real ranks under every backend, shared by all tests of the session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import RankPool

# The contract holds under each: native DDP, real Horovod, and the Horovod backend over our own layer.
KINDS = ["ddp", "horovod", "hvd"]


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str, int], RankPool]]:
    """`pools(kind, size)`: the pool of that backend and size, started on first use."""
    started: dict[tuple[str, int], RankPool] = {}

    def get(kind: str, size: int) -> RankPool:
        if (kind, size) not in started or not started[kind, size].is_alive:
            started[kind, size] = RankPool(kind, size)
        return started[kind, size]

    yield get
    for pool in started.values():
        pool.close()


@pytest.fixture(params=KINDS)
def pool2(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    """Two ranks, under each backend in turn."""
    return pools(request.param, 2)


@pytest.fixture(params=KINDS)
def pool3(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    """Three ranks, under each backend in turn."""
    return pools(request.param, 3)
