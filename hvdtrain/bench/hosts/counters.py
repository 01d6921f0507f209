"""Bytes that went through an interface, as the kernel counts them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hvdtrain.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes since the interface was made, or between two readings.

    Frames as the interface handed them on: headers count once per frame, and where the kernel leaves the cutting of
    large frames to the device (a veth) once per large frame, so that payload and count hardly differ there.
    """

    sent_bytes: int
    received_bytes: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


def read_traffic(interface: str, process: str | int = "self") -> Traffic:
    """What the interface carried so far, in the network namespace of `process`.

    From /proc/PID/net/dev and not from /sys/class/net, which shows the namespace of whoever mounted it.

    Raises:
        LaunchError: there is no such interface.
    """
    return traffic_in(Path(f"/proc/{process}/net/dev").read_text(), interface)


def traffic_in(table: str, interface: str) -> Traffic:
    """The interface's row of the text of /proc/net/dev (see proc(5)).

    Raises:
        LaunchError: there is no such row.
    """
    rows = {}
    for line in table.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        rows[name.strip()] = numbers.split()
    if interface not in rows:
        raise LaunchError(f"no interface {interface} on this host; it has {', '.join(rows)}")
    numbers_of_it = rows[interface]
    return Traffic(sent_bytes=int(numbers_of_it[8]), received_bytes=int(numbers_of_it[0]))
