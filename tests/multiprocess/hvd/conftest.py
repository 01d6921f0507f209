"""Ranks for the tests of the Horovod API."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_pool import RankPool

Pools = Callable[[str, int], RankPool]


@pytest.fixture(params=["hvd", "horovod"])
def two(request: pytest.FixtureRequest, pools: Pools) -> RankPool:
    """Two ranks under hvdtrain.hvd and under the real Horovod in turn; `backend._hvd` is the module."""
    return pools(request.param, 2)


@pytest.fixture
def ours(pools: Pools) -> RankPool:
    """Two ranks under hvdtrain.hvd."""
    return pools("hvd", 2)


@pytest.fixture
def ours3(pools: Pools) -> RankPool:
    """Three ranks under hvdtrain.hvd."""
    return pools("hvd", 3)
