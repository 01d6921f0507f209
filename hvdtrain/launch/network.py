"""Which network interface carries the traffic, asked of the kernel rather than guessed from names."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import MutableMapping

from hvdtrain.errors import LaunchError

# Each library's own variable for the interface: torch's gloo, NCCL, Horovod's gloo.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")


def interfaces() -> dict[str, list[str]]:
    """The interfaces of this host that are up, each with its IP addresses (IPv4 first; link-local ones left out)."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name in up:
            by_family = {
                family: [a.address for a in addresses if a.family == family and not a.address.startswith("fe80:")]
                for family in (socket.AF_INET, socket.AF_INET6)
            }
            if any(by_family.values()):
                found[name] = by_family[socket.AF_INET] + by_family[socket.AF_INET6]
    return found


def loopback_interface() -> str:
    """The name of the loopback interface ("lo" on Linux)."""
    return next((name for name, addresses in interfaces().items() if "127.0.0.1" in addresses), "lo")


def is_loopback(address: str) -> bool:
    """Whether an IP address reaches this host alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def source_address(target: str) -> str | None:
    """The address of this host from which the kernel would send to `target` (an IP address); None: no route.

    Connecting a UDP socket sends nothing: it only makes the kernel look up the route.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0]).split("%")[0]


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address, or None."""
    for name, addresses in interfaces().items():
        if address in addresses:
            return name
    # 127.0.1.1 and the rest of 127.0.0.0/8 belong to loopback without being listed.
    return loopback_interface() if is_loopback(address) else None


def interface_towards(target: str) -> str | None:
    """The name of the interface through which this host reaches `target` (an IP address), or None without a route."""
    source = source_address(target)
    return None if source is None else interface_of(source)


def check_interface(name: str) -> None:
    """Raise LaunchError where this host has no such interface that is up with an address."""
    present = interfaces()
    if name not in present:
        listed = ", ".join(f"{key} ({addresses[0]})" for key, addresses in present.items())
        raise LaunchError(
            f"network_interface: {name} is not there, or is down or without an address, on host "
            f"{socket.gethostname()}, which has {listed}. Name one of these, or set network_interface: auto"
        )


def free_port(address: str = "") -> int:
    """A TCP port that is free on this host now. Another process may take it first: bind port 0 where you can."""
    with listening_socket(0, address) as listener:
        return int(listener.getsockname()[1])


def listening_socket(port: int, address: str = "") -> socket.socket:
    """A socket that listens on a port (0: any free one), on all addresses of this host or on one.

    Raises:
        OSError: the port is in use, or the address is not this host's.
    """
    last: OSError | None = None
    families = [socket.AF_INET6, socket.AF_INET]
    if address:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET]
    for family in families:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a kernel without IPv6
            last = error
            continue
        try:
            # A port whose last connections are in TIME_WAIT is free: a job must be able to start again at once.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and not address:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((address, port))
            listener.listen(4096)
            return listener
        except OSError as error:
            listener.close()
            last = error
            if family == socket.AF_INET6 and error.errno == errno.EADDRINUSE:
                break  # IPv4 alone would seem free, and split the ranks between two servers
    assert last is not None
    raise last


def user_of_port(port: int) -> str:
    """Who listens on a TCP port of this host, in words; "another process" where the system does not say."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if connection.pid is None:
                    break
                command = " ".join(psutil.Process(connection.pid).cmdline())[:120]
                return f"process {connection.pid} ({command})"
    except (psutil.Error, OSError):
        pass
    return "another process"


def export_interface(
    name: str, environ: MutableMapping[str, str] | None = None, *, override: bool = False
) -> dict[str, str]:
    """Tell torch's gloo, NCCL and Horovod's gloo which interface to use, where the user has not already.

    Args:
        name: the interface of this host.
        environ: changed in place; os.environ if None.
        override: replace what is set (the user named `network_interface` in the job file).

    Returns:
        the three variables as they are now.
    """
    environ = os.environ if environ is None else environ
    for variable in INTERFACE_VARIABLES:
        if override or not environ.get(variable):
            environ[variable] = name
    return {variable: environ[variable] for variable in INTERFACE_VARIABLES}
