"""Horovod's ranks give way where they share cores, and nothing changes where they do not."""

from __future__ import annotations

import sys
import time
import types

import pytest

from hvdtrain.backends import horovod_wait
from hvdtrain.backends.horovod_wait import SharedCores, ranks_per_core

BOTH = frozenset({0, 1})


@pytest.mark.parametrize(
    ("machine_cpus", "num_local", "quota", "expected"),
    [
        ([BOTH] * 16, 16, None, 8.0),
        ([BOTH] * 16, 4, None, 8.0),  # four containers
        ([BOTH] * 2, 2, None, 1.0),
        ([frozenset({0}), frozenset({1})], 2, None, 1.0),
        ([frozenset(range(64))] * 8, 4, 2.0, 2.0),
        ([frozenset(range(64))] * 4, 4, None, 4 / 64),
        ([BOTH], 1, 0.5, 1.0),
    ],
)
def test_ranks_per_core(
    machine_cpus: list[frozenset[int]], num_local: int, quota: float | None, expected: float
) -> None:
    assert ranks_per_core(machine_cpus, num_local, quota) == expected


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Horovod's extension, as far as it is used: a result is there at the third look."""
    looks = iter([False, False, True])
    spun: list[int] = []
    made = types.SimpleNamespace(
        horovod_torch_poll=lambda handle: next(looks), horovod_torch_wait_and_clear=spun.append, spun=spun
    )
    for name in ("horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", types.SimpleNamespace(mpi_lib=made))  # type: ignore[arg-type]
    monkeypatch.setattr(horovod_wait, "container_quota", lambda: None)
    return made


def test_a_rank_without_a_core_of_its_own_sleeps_while_it_waits(
    library: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    cores = SharedCores([BOTH] * 4, 4)
    environ: dict[str, str] = {}
    cores.prepare(environ)
    assert environ == {"HOROVOD_CYCLE_TIME": "2"}
    own = library.horovod_torch_wait_and_clear
    cores.open()
    library.horovod_torch_wait_and_clear(7)
    assert library.spun == [7]
    assert len(slept) == 2
    assert all(horovod_wait.SHORTEST_S <= each <= horovod_wait.LONGEST_S for each in slept)
    cores.close()
    cores.close()
    assert library.horovod_torch_wait_and_clear is own


def test_the_users_cycle_time_stays(library: types.SimpleNamespace) -> None:
    environ = {"HOROVOD_CYCLE_TIME": "0.1"}
    SharedCores([BOTH] * 4, 4).prepare(environ)
    assert environ == {"HOROVOD_CYCLE_TIME": "0.1"}


def test_with_a_core_for_every_rank_nothing_changes(library: types.SimpleNamespace) -> None:
    own = library.horovod_torch_wait_and_clear
    cores = SharedCores([BOTH] * 2, 2)
    environ: dict[str, str] = {}
    cores.prepare(environ)
    cores.open()
    assert library.horovod_torch_wait_and_clear is own
    assert environ == {}
    cores.close()
