"""A core for a rank: only where there is exactly one for each; and its workers go anywhere."""

from __future__ import annotations

import os
import threading

import pytest

from hvdtrain.launch import cores

TWO = frozenset({0, 1})
FOUR = frozenset({4, 5, 6, 7})


@pytest.mark.parametrize(
    ("machine_cpus", "machine_rank", "num_threads", "quota", "expected"),
    [
        ([TWO] * 2, 0, 1, None, 0),
        ([TWO] * 2, 1, 1, None, 1),
        ([FOUR] * 4, 2, 1, None, 6),
        ([FOUR] * 2, 0, 1, None, -1),  # cores to spare
        ([TWO] * 3, 0, 1, None, -1),  # too few
        ([frozenset({0}), frozenset({1})], 0, 1, None, -1),  # bound by the launcher
        ([TWO] * 2, 0, 2, None, -1),  # the user wants more threads
        ([TWO] * 2, 0, 1, 1.5, -1),  # the container's limit is below
        ([frozenset({0})], 0, 1, None, -1),
    ],
)
def test_own_core(machine_cpus, machine_rank, num_threads, quota, expected):
    assert cores.own_core(machine_cpus, machine_rank, num_threads, quota) == expected


def test_staying_and_roaming_again():
    before = os.sched_getaffinity(0)
    environ: dict[str, str] = {}
    found = []

    def work():  # affinity is a thread's own
        cores.roam_again(environ)
        found.append(os.sched_getaffinity(0))
        cores.stay_on(min(before), environ)
        found.append(os.sched_getaffinity(0))
        cores.roam_again(environ)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before, {min(before)}, before]
    assert environ == {cores.GIVEN_UP_VARIABLE: ",".join(map(str, sorted(before)))}
