"""Hosts and slots as horovodrun spells them, and which host gets which ranks."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from hvdtrain.errors import LaunchError

_SPELLING = re.compile(r"^(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<slots>[^:]*))?$")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclasses.dataclass(frozen=True)
class Share:
    """The ranks of one host: `first_rank` and the `num_ranks - 1` after it. The first share has node_rank 0."""

    host: Host
    node_rank: int
    first_rank: int
    num_ranks: int


def looks_like_hosts(word: str) -> bool:
    """Whether a word of the command line is a host with slots, which a space instead of a comma put where it is."""
    match = _SPELLING.match(word)
    return match is not None and match["slots"] is not None and match["slots"].isdigit()


def parse_hosts(text: str) -> list[Host]:
    """Hosts from `host1:4,host2:2`; a host without a number has one slot.

    Raises:
        LaunchError: the spelling is wrong, a host has no slots, or a host is named twice.
    """
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise LaunchError("-H: no hosts; write them as -H host1:4,host2:4")
    return _distinct([_parse_host(word, "-H") for word in words if word], "-H")


def read_hostfile(path: str) -> list[Host]:
    """Hosts from a file with a host a line: `host1 slots=4` (Open MPI, horovodrun) or `host1:4` (MPICH).

    Raises:
        LaunchError: the file cannot be read, names no host, or a line is wrong (file and line are named).
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise LaunchError(f"--hostfile {path}: {reason}; it holds a host a line, as in: host1 slots=4") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _parse_host(words[0], where)
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "slots":
                host = Host(host.name, _slots(value, host.name, where))
            elif key != "max_slots" and key != "max-slots":
                raise LaunchError(f"{where}: {word!r} is not understood; write: {host.name} slots=4")
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"--hostfile {path}: names no host; it holds a host a line, as in: host1 slots=4")
    return _distinct(hosts, path)


def allot(hosts: list[Host], num_ranks: int | None) -> list[Share]:
    """Fill the hosts in their order, as horovodrun and mpirun do; hosts that get no rank are left out.

    Args:
        num_ranks: -np; None fills all slots.

    Raises:
        LaunchError: fewer than one rank, or more ranks than slots.
    """
    total = sum(host.slots for host in hosts)
    wanted = total if num_ranks is None else num_ranks
    if wanted < 1:
        raise LaunchError(f"-np {wanted}: a job has at least one rank")
    if wanted > total:
        named = ", ".join(map(str, hosts))
        raise LaunchError(
            f"-np {wanted}: the hosts have {total} slot{'s' * (total != 1)} ({named}); "
            f"add hosts or slots, or ask for -np {total}"
        )
    shares: list[Share] = []
    first = 0
    for host in hosts:
        here = min(host.slots, wanted - first)
        if here == 0:
            break
        shares.append(Share(host, len(shares), first, here))
        first += here
    return shares


def _parse_host(word: str, where: str) -> Host:
    match = _SPELLING.match(word)
    if match is None:
        raise LaunchError(f"{where}: {word!r} is not a host; write it as host1 or host1:4 (IPv6 as [::1]:4)")
    name = match["name"].strip("[]")
    return Host(name, 1 if match["slots"] is None else _slots(match["slots"], name, where))


def _slots(text: str, name: str, where: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise LaunchError(
            f"{where}: {name} with {text or 'no'} slots: slots are the ranks it takes, a number from 1 up"
        )
    return int(text)


def _distinct(hosts: list[Host], where: str) -> list[Host]:
    seen: dict[str, Host] = {}
    for host in hosts:
        if host.name in seen:
            together = Host(host.name, host.slots + seen[host.name].slots)
            raise LaunchError(f"{where}: {host.name} is named twice; name it once, with all its slots: {together}")
        seen[host.name] = host
    return hosts
