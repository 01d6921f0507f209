"""Two hosts in small: two network namespaces joined by a cable, each a host of its own to us. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_rendezvous import MEET, ended, errors, results, start

NAMES = ("hvdtrain-a", "hvdtrain-b")
ADDRESSES = ("10.77.31.1", "10.77.31.2")
# Other names on each side, as on clusters whose hosts differ.
INTERFACES = ("hvda0", "hvdb0")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    def remove() -> None:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=20)

    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    remove()
    try:
        for name in NAMES:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", INTERFACES[0], "netns", NAMES[0], "type", "veth", "peer", INTERFACES[1], "netns", NAMES[1])
        for name, interface, address in zip(NAMES, INTERFACES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            # A bridge with one address on both sides, like docker0: it must not be taken for the way across.
            ip("-n", name, "link", "add", "bridge0", "type", "bridge")
            ip("-n", name, "address", "add", "172.31.77.1/24", "dev", "bridge0")
            ip("-n", name, "link", "set", "bridge0", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove()
        pytest.skip(f"no network namespaces here: {error}")
    yield
    remove()


def rank(host: int, **variables: str) -> subprocess.Popen[str]:
    return start("ip", "netns", "exec", NAMES[host], sys.executable, MEET, **variables)


def manual(host: int, number: int, size: int, url: str, **variables: str) -> subprocess.Popen[str]:
    return rank(host, FLAGS=json.dumps({"init_method": url, "rank": number, "world_size": size}), **variables)


def check(outputs: list[str], size: int, host_of: list[int], launcher: str) -> None:
    found = results("".join(outputs))
    assert len(found) == size, outputs
    for number, result in enumerate(found):
        on_host = [r for r in range(size) if host_of[r] == host_of[number]]
        place = [number, size, on_host.index(number), len(on_host), host_of[number], 2]
        assert result["place"] == place
        assert result["interface"] == INTERFACES[host_of[number]]
        assert result["launcher"] == launcher
        assert result["hosts"] == 2


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_by_hand(scheme: str, tmp_path: Path) -> None:
    """Places and interfaces are worked out; ranks 0 and 2 share a host."""
    url = f"tcp://{ADDRESSES[0]}:29511" if scheme == "tcp" else f"file://{tmp_path}/meet"
    with ended(manual(0, 0, 3, url), manual(1, 1, 3, url), manual(0, 2, 3, url)) as outputs:
        check(outputs, 3, [0, 1, 0], "manual")


@pytest.mark.usefixtures("hosts")
def test_open_mpi_with_a_connected_backend(tmp_path: Path) -> None:
    """Open MPI tells no node: it is worked out; the address goes through the backend's own broadcast."""
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    variables["EXCHANGE_FILE"] = str(tmp_path / "exchange")
    ranks = [rank(number, OMPI_COMM_WORLD_RANK=str(number), **variables) for number in range(2)]
    with ended(*ranks) as outputs:
        check(outputs, 2, [0, 1], "mpirun")


@pytest.mark.usefixtures("hosts")
def test_rank_0_on_the_wrong_host() -> None:
    """The other rank waits out its limit; rank 0 says at once what is wrong."""
    process = manual(1, 0, 2, f"tcp://{ADDRESSES[0]}:29512", TIMEOUT_S="60")
    with ended(process) as (output,):
        assert process.returncode == 2
    (message,) = errors(output)
    assert f"does not have the address {ADDRESSES[0]}" in message
    assert f"{ADDRESSES[1]} ({INTERFACES[1]})" in message


@pytest.mark.usefixtures("hosts")
def test_loopback_address_over_two_hosts() -> None:
    ranks = [manual(number, number, 2, "tcp://localhost:29513", TIMEOUT_S="3") for number in range(2)]
    with ended(*ranks) as outputs:
        assert [process.returncode for process in ranks] == [2, 2]
    assert "Missing: rank 1." in errors(outputs[0])[0]
    assert "localhost means this same host on every host" in errors(outputs[1])[0]
