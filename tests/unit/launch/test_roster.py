"""Places worked out from host identities, and versions compared, without processes."""

from __future__ import annotations

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.roster import Peer, check_versions, complete_places, ranks_text
from hvdtrain.launch.world import World


def peers(hosts: str, local_ranks: list[int | None] | None = None, local_sizes: list[int] | None = None) -> list[Peer]:
    return [
        Peer(
            rank=rank,
            size=len(hosts),
            local_rank=local_ranks[rank] if local_ranks else None,
            local_size=local_sizes[rank] if local_sizes else None,
            node_rank=None,
            num_nodes=None,
            host=f"host-{host}",
            host_id=host,
            pid=100 + rank,
            address="10.0.0.1",
            cpus=(0, 1),
            hvdtrain="0.1.0",
            torch="2.13.0+cpu",
        )
        for rank, host in enumerate(hosts)
    ]


def test_places_from_host_identities() -> None:
    worlds = [peer.world for peer in complete_places(peers("abab"))]
    assert worlds == [
        World(0, 4, 0, 2, 0, 2),
        World(1, 4, 0, 2, 1, 2),
        World(2, 4, 1, 2, 0, 2),
        World(3, 4, 1, 2, 1, 2),
    ]


def test_uneven_hosts() -> None:
    worlds = [peer.world for peer in complete_places(peers("bbba"))]
    assert [(w.local_rank, w.local_size, w.node_rank, w.num_nodes) for w in worlds] == [
        (0, 3, 0, 2),
        (1, 3, 0, 2),
        (2, 3, 0, 2),
        (0, 1, 1, 2),
    ]


def test_given_local_ranks_stand_and_others_fill_the_gaps() -> None:
    assert [peer.world.local_rank for peer in complete_places(peers("aaa", [2, None, None]))] == [2, 0, 1]


def test_open_mpi_gets_its_node_rank() -> None:
    worlds = [peer.world for peer in complete_places(peers("aabb", [0, 1, 0, 1], [2, 2, 2, 2]))]
    assert [(w.node_rank, w.num_nodes) for w in worlds] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_same_local_rank_twice_on_one_host_is_two_nodes() -> None:
    worlds = [peer.world for peer in complete_places(peers("aa", [0, 0]))]
    assert worlds == [World(0, 2, 0, 1, 0, 2), World(1, 2, 0, 1, 1, 2)]


def test_local_rank_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"rank 1 \(host host-a, process 101\) has an impossible place: local_rank=3"):
        complete_places(peers("aa", [0, 3]))


def test_versions() -> None:
    import dataclasses

    group = peers("ab")
    check_versions(group)
    other = [group[0], dataclasses.replace(group[1], torch="2.12.0+cpu")]
    with pytest.raises(LaunchError, match=r"torch: 2\.13\.0\+cpu: rank 0 \(host-a\); 2\.12\.0\+cpu: rank 1 \(host-b\)"):
        check_versions(other)
    check_versions([group[0], dataclasses.replace(group[1], torch="2.13.0+cu130")])  # a warning
    with pytest.raises(LaunchError, match="different releases of hvdtrain"):
        check_versions([group[0], dataclasses.replace(group[1], hvdtrain="0.2.0")])


def test_ranks_text() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 4, 5, 6, 7]) == "ranks 1, 4-7"
