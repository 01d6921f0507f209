"""The choice of the network interface on this host."""

from __future__ import annotations

import errno
import socket

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch import exported, network


def test_loopback_is_found_and_reached_through_itself() -> None:
    name = network.loopback_interface()
    assert network.interfaces()[name][0] == "127.0.0.1"
    assert network.interface_towards("127.0.0.1") == name
    assert network.interface_of("127.0.1.1") == name
    assert network.interface_of("203.0.113.77") is None


def test_own_address_belongs_to_its_interface() -> None:
    for name, addresses in network.interfaces().items():
        for address in addresses:
            assert network.interface_of(address) == name


def test_absent_interface_lists_those_present() -> None:
    with pytest.raises(LaunchError, match=r"ib77 .*lo \(127\.0\.0\.1\)"):
        network.check_interface("ib77")
    network.check_interface(network.loopback_interface())


def test_export_leaves_what_the_user_set() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    expected = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib0", "HOROVOD_GLOO_IFACE": "eth1"}
    assert network.export_interface("eth1", environ) == expected
    assert environ == expected
    assert set(network.export_interface("eth2", environ, override=True).values()) == {"eth2"}


def test_busy_port_is_seen_on_any_address() -> None:
    with network.listening_socket(0, "127.0.0.1") as holder:
        port = holder.getsockname()[1]
        for address in ("", "127.0.0.1"):
            with pytest.raises(OSError) as caught:
                network.listening_socket(port, address)
            assert caught.value.errno == errno.EADDRINUSE
        assert "process" in network.user_of_port(port)


def test_free_port_can_be_used() -> None:
    port = network.free_port()
    with network.listening_socket(port) as listener:
        assert listener.getsockname()[1] == port
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            assert connection.getpeername()[1] == port


def test_what_a_connection_exports_is_given_back() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0", "HOROVOD_RANK": "0", "HOME": "/root"}
    before = exported.now(environ)
    network.export_interface("lo", environ, override=True)
    environ.update(HOROVOD_RANK="1", HOROVOD_TIMELINE="/tmp/t", OMP_NUM_THREADS="2", HVDTRAIN_WORLD="[]", USERS="own")
    exported.give_back(before, environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "ib0", "HOROVOD_RANK": "0", "HOME": "/root", "USERS": "own"}
