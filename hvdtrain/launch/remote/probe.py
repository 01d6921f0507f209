"""Runs on a host before the job: what is installed there, which way leads to the other hosts, a free port.

Standard library alone, one file: its text is sent over ssh to the host's interpreter, which need not have hvdtrain.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import struct
import sys
from typing import Any


def probe(packages: list[str], folder: str, peer: str | None, state: str | None) -> dict[str, Any]:
    """Facts about this host.

    Args:
        packages: distributions whose version is asked for (None where it is not installed).
        folder: whether this folder exists here.
        peer: name of another host of the job; how it is reached from here.
        state: folder in which `hvdtrain-ssh` keeps its files, if the caller's host has one (see `identity`).
    """
    return {
        "hostname": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "packages": {name: _version(name) for name in packages},
        "folder": os.path.isdir(folder),  # noqa: PTH112  (nothing beyond the standard library's basics)
        "identity": identity(state) if state else None,
        "machine": f"{_read('/proc/sys/kernel/random/boot_id')} {_namespace()}",
        "port": _free_port(),
        **_way_to(peer),
    }


def identity(state: str) -> str | None:
    """What `hvdtrain-ssh install` noted: cluster and host. `state`: its folder; ~ and {hostname} are this host's."""
    folder = os.path.expanduser(state.replace("{hostname}", socket.gethostname()))  # noqa: PTH111
    return _read(folder + "/identity") or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return None


def _namespace() -> str:
    """Containers of one machine share its boot id, not their network and files."""
    try:
        return os.readlink("/proc/self/ns/mnt") + os.readlink("/proc/self/ns/net")  # noqa: PTH115
    except OSError:
        return socket.gethostname()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _way_to(peer: str | None) -> dict[str, Any]:
    """The address and the interface that the kernel would use towards `peer`. No packet is sent."""
    nowhere = {"address": None, "interface": None, "peer_error": None}
    if peer is None:
        return nowhere
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe_socket:
            probe_socket.connect(target)
            address = probe_socket.getsockname()[0]
    except OSError as error:
        return {**nowhere, "peer_error": error.strerror or str(error)}
    return {"address": address, "interface": _interface_of(address), "peer_error": None}


def _interface_of(address: str) -> str | None:
    try:
        import fcntl

        for _, name in socket.if_nameindex():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                try:
                    # SIOCGIFADDR of netdevice(7): the interface's IPv4 address at bytes 20 to 23 of struct ifreq.
                    answer = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    except (ImportError, OSError):
        pass
    return None
