"""Network interfaces: which there are, which one would be chosen, and whether one that was asked for is alive."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Mapping, Sequence

import psutil

from hvdtrain.doctor.finding import Finding, absent, fault, ok, warn
from hvdtrain.launch.network import INTERFACE_VARIABLES, interface_towards, is_loopback

# An address of the documentation range of RFC 5737: nobody has it, so the kernel answers with the default route.
_ELSEWHERE = "203.0.113.1"


@dataclasses.dataclass(frozen=True)
class Nic:
    """An interface of this host; `speed_mbps` is 0 where the driver does not tell."""

    name: str
    up: bool
    addresses: tuple[str, ...] = ()
    speed_mbps: int = 0

    @property
    def alive(self) -> bool:
        """Up, and with an address to be reached at."""
        return self.up and bool(self.addresses)

    def __str__(self) -> str:
        words = [self.name]
        if not self.up:
            words.append("down")
        words.append(", ".join(self.addresses) if self.addresses else "no address")
        if self.up and self.speed_mbps:
            words.append(f"{self.speed_mbps / 1000:g} Gb/s")
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class NetworkSeen:
    """The interfaces; the one towards other hosts (None: no route); this host's name and what it resolves to."""

    nics: tuple[Nic, ...] = ()
    chosen: str | None = None
    host: str = ""
    host_addresses: tuple[str, ...] = ()


def probe_network(root: str | None = None) -> NetworkSeen:
    """Ask the kernel.

    Args:
        root: address of the host of rank 0, if known; else the way to anywhere else is asked for.
    """
    stats = psutil.net_if_stats()
    nics = []
    for name, addresses in psutil.net_if_addrs().items():
        by_family = {
            family: [a.address.split("%")[0] for a in addresses if a.family == family]
            for family in (socket.AF_INET, socket.AF_INET6)
        }
        state = stats.get(name)
        # An address of the link alone (fe80::) is none that another host can be told.
        reachable = [a for a in by_family[socket.AF_INET6] if not a.startswith("fe80:")]
        nics.append(
            Nic(
                name,
                up=bool(state and state.isup),
                addresses=(*by_family[socket.AF_INET], *reachable),
                speed_mbps=state.speed if state and 0 < state.speed < 1_000_000 else 0,
            )
        )
    host = socket.gethostname()
    return NetworkSeen(tuple(nics), interface_towards(root or _ELSEWHERE), host, _resolve(host))


def check_network(seen: NetworkSeen, environ: Mapping[str, str]) -> list[Finding]:
    """Interfaces, the choice, the host's name.

    Args:
        seen: what the kernel says.
        environ: looked at for variables that name an interface.
    """
    findings = []
    loopback = next((nic for nic in seen.nics if "127.0.0.1" in nic.addresses or nic.name == "lo"), None)
    if loopback is None or not loopback.alive:
        cure = "ip link set lo up (ranks on one host talk over it)"
        findings.append(fault("loopback", str(loopback) if loopback else "there is none", cure))
    others = [nic for nic in seen.nics if nic is not loopback]
    alive = [nic for nic in others if nic.alive]
    dead = [nic for nic in others if not nic.alive]
    chosen = next((nic for nic in alive if nic.name == seen.chosen), None)

    for variable in INTERFACE_VARIABLES:
        for name in _names(environ.get(variable, "")):
            finding = _check_named(variable, name, seen.nics)
            if finding is not None:
                findings.append(finding)

    aside = f"; not usable: {'; '.join(map(str, dead))}" if dead else ""
    if chosen is not None:
        rest = [str(nic) for nic in alive if nic is not chosen]
        also = f"; also {'; '.join(rest)}" if rest else ""
        findings.append(ok("network", f"{chosen} would be chosen{also}{aside}"))
    elif alive:
        listed = "; ".join(map(str, alive))
        cure = "for several hosts set a route (ip route), or network_interface in the job file"
        findings.append(warn("network", f"no route to other hosts: {listed}{aside}", cure))
    elif any(nic.addresses for nic in dead):
        nic = next(nic for nic in dead if nic.addresses)
        cure = f"ip link set {nic.name} up, and look at the cable and the driver (ethtool {nic.name})"
        findings.append(fault("network", f"{nic}: no interface is up", cure))
    else:
        cure = "one host works over loopback; for several: ip link set NIC up, ip address add ADDRESS/BITS dev NIC"
        findings.append(absent("network", f"no interface with an address but loopback{aside}", cure if dead else ""))

    if not seen.host_addresses:
        cure = f'echo "127.0.1.1 {seen.host}" >> /etc/hosts, or its real address for several hosts'
        findings.append(warn("host name", f"{seen.host} has no address: libraries that look it up wait or fail", cure))
    elif alive and all(is_loopback(address) for address in seen.host_addresses):
        found = f"{seen.host} resolves to {seen.host_addresses[0]}: fine on one host; other hosts cannot use it"
        findings.append(ok("host name", found))
    else:
        findings.append(ok("host name", f"{seen.host} is {seen.host_addresses[0]}"))
    return findings


def _check_named(variable: str, name: str, nics: Sequence[Nic]) -> Finding | None:
    """A fault if the interface that a variable names cannot be used."""
    # NCCL takes prefixes, so that eth stands for eth0 and eth1.
    prefix = variable == "NCCL_SOCKET_IFNAME"
    meant = [nic for nic in nics if nic.name == name or (prefix and nic.name.startswith(name))]
    if any(nic.alive for nic in meant):
        return None
    usable = ", ".join(nic.name for nic in nics if nic.alive)
    cure = f"unset {variable}, or name one that is alive: {usable}" if usable else f"unset {variable}"
    if not meant:
        return fault("network", f"{variable}={name}: this host has no such interface", cure)
    nic = meant[0]
    what = "is down" if not nic.up else "has no address"
    if nic.name == name and not nic.up:
        cure += f"; or ip link set {name} up"
    return fault("network", f"{variable}={name}: the interface {what}", cure)


def _names(value: str) -> list[str]:
    """The interfaces that a variable names: gloo takes several with commas; NCCL's ^ excludes, so names none."""
    if value.startswith("^"):
        return []
    return [re.sub(r"^=", "", name.strip()).split(":")[0] for name in value.split(",") if name.strip()]


def _resolve(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
