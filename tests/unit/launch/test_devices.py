"""Device choice without devices: what each rank sees is given."""

from __future__ import annotations

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.devices import VisibleDevices, assign_devices, visible_uuids
from hvdtrain.launch.world import World


def ranks(*seen: tuple[str, ...], hosts: str = "") -> tuple[list[World], list[VisibleDevices]]:
    """Worlds and views: `hosts` gives the host of each rank, "aabb"; one host if empty."""
    hosts = hosts or "a" * len(seen)
    names = list(dict.fromkeys(hosts))
    worlds = [
        World(r, len(seen), hosts[:r].count(h), hosts.count(h), names.index(h), len(names)) for r, h in enumerate(hosts)
    ]
    views = [VisibleDevices(r, f"host-{hosts[r]}", hosts[r], uuids) for r, uuids in enumerate(seen)]
    return worlds, views


def test_local_rank_picks_the_device() -> None:
    both = ("g0", "g1")
    assert assign_devices("auto", "nccl", *ranks(both, both)) == ["cuda:0", "cuda:1"]
    assert assign_devices("cuda", "auto", *ranks(both, both, both, both, hosts="aabb")) == ["cuda:0", "cuda:1"] * 2


def test_one_private_device_each() -> None:
    assert assign_devices("auto", "nccl", *ranks(("g0",), ("g1",))) == ["cuda:0", "cuda:0"]


def test_same_uuid_on_two_hosts_is_two_devices() -> None:
    assert assign_devices("auto", "nccl", *ranks(("g0",), ("g0",), hosts="ab")) == ["cuda:0", "cuda:0"]


def test_no_device_is_the_cpu() -> None:
    assert assign_devices("auto", "auto", *ranks((), ())) == ["cpu", "cpu"]
    assert assign_devices("cpu", "gloo", *ranks(("g0",), ("g0",))) == ["cpu", "cpu"]


def test_too_few_devices_names_both_ranks() -> None:
    with pytest.raises(
        LaunchError, match=r"host host-a has 2 ranks but rank 1 \(local rank 1\) sees only 1 CUDA device"
    ) as e:
        assign_devices("auto", "nccl", *ranks(("g0",), ("g0",)))
    assert "rank 0" in str(e.value)


def test_two_ranks_on_one_device_under_nccl_names_both() -> None:
    worlds = [World(0, 2, 0, 1, 0, 2), World(1, 2, 0, 1, 1, 2)]  # two torchruns on one host
    _, views = ranks(("g0", "g1"), ("g0", "g1"))
    with pytest.raises(LaunchError, match="rank 0 and rank 1 on host host-a would use the same CUDA device g0"):
        assign_devices("cuda", "nccl", worlds, views)
    assert assign_devices("cuda", "gloo", worlds, views) == ["cuda:0", "cuda:0"]


def test_gloo_may_share_a_device() -> None:
    assert assign_devices("cuda", "gloo", *ranks(("g0",), ("g0",))) == ["cuda:0", "cuda:0"]


def test_a_rank_without_a_device_is_named() -> None:
    with pytest.raises(LaunchError, match="rank 1 on host host-b see no CUDA device while the other ranks have one"):
        assign_devices("auto", "auto", *ranks(("g0",), (), hosts="ab"))
    with pytest.raises(LaunchError, match="ranks 0-1 on host host-a see no CUDA device"):
        assign_devices("cuda", "nccl", *ranks((), ()))


def test_nccl_on_the_cpu_is_refused() -> None:
    with pytest.raises(LaunchError, match="nccl needs CUDA devices"):
        assign_devices("auto", "nccl", *ranks((), ()))


def test_what_this_process_sees_has_a_reason_when_empty() -> None:
    uuids, reason = visible_uuids({})
    assert bool(uuids) != bool(reason)
