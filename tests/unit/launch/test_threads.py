"""CPU threads per rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdtrain.launch.host import host_identity, launcher_environment
from hvdtrain.launch.threads import choose_threads, fair_threads, set_threads, user_threads
from hvdtrain.launch.world import World

EIGHT = frozenset(range(8))


@pytest.mark.parametrize(
    ("cpus", "local", "quota", "threads"),
    [
        (EIGHT, [EIGHT], None, 8),
        (EIGHT, [EIGHT, EIGHT], None, 4),
        (EIGHT, [EIGHT] * 3, None, 2),
        (EIGHT, [EIGHT] * 16, None, 1),
        # Bound to own cores: nothing is divided.
        (frozenset({0, 1}), [frozenset({0, 1}), frozenset({2, 3})], None, 2),
        # One rank is bound, the other is not: cores 0 and 1 are shared.
        (EIGHT, [EIGHT, frozenset({0, 1})], None, 7),
        (EIGHT, [EIGHT, EIGHT], 4.0, 2),
        (EIGHT, [EIGHT], 0.5, 1),
    ],
)
def test_fair_threads(cpus: frozenset[int], local: list[frozenset[int]], quota: float | None, threads: int) -> None:
    assert fair_threads(cpus, local, quota) == threads


def test_user_setting_stands() -> None:
    world = World(0, 2, 0, 2, 0, 1)
    assert choose_threads(world, {"OMP_NUM_THREADS": "3"}, cpus=EIGHT) == 3
    assert choose_threads(world, {"OMP_NUM_THREADS": "1"}, cpus=EIGHT) == 1
    assert user_threads({"OMP_NUM_THREADS": "2,4"}) == 2
    assert user_threads({"OMP_NUM_THREADS": "many"}) is None
    assert user_threads({}) is None


def test_set_threads_writes_the_variable() -> None:
    environ = {"OMP_NUM_THREADS": "2"}
    assert set_threads(World(), environ) == 2
    assert environ == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(("given", "expected"), [({}, "None"), ({"OMP_NUM_THREADS": "1"}, "1")])
def test_a_one_from_torchrun_is_not_the_users(given: dict[str, str], expected: str) -> None:
    """A grandchild sees OMP_NUM_THREADS=1 and torchrun's mark; the process above has no mark, as torchrun has none."""
    rank = "import os; from hvdtrain.launch.threads import user_threads; print(user_threads(os.environ))"
    agent = (
        "import os, subprocess, sys; os.environ.setdefault('OMP_NUM_THREADS', '1'); "
        "os.environ['TORCHELASTIC_RUN_ID'] = 'x'; "
        # A shell in between, as wrapper scripts have: it carries the mark and is passed over.
        "subprocess.run(['sh', '-c', sys.argv[1] + '; true'], check=True)"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")}
    result = subprocess.run(
        [sys.executable, "-c", agent, f'{sys.executable} -c "{rank}"'],
        env=clean | given,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == expected


def test_host_identity_is_the_same_in_another_process() -> None:
    code = "from hvdtrain.launch.host import host_identity; print(host_identity())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == host_identity()


def test_parent_without_the_mark_is_the_launcher() -> None:
    found = launcher_environment("HVDTRAIN_NO_SUCH_VARIABLE")
    assert found is not None
    assert found[0].startswith(f"{os.getppid()}-")
