"""Names for hosts that are network namespaces: there, the name of the machine leads nowhere.

Horovod 0.28.1 needs one that leads somewhere: HOROVOD_GLOO_IFACE does not reach the connections of its process sets,
the one of all ranks included, which start from the host's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.bench.hosts import NamespaceHost, NamespaceHosts

_SCRIPT = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


class NamedHost:
    """A namespace in which processes find a name of their own, and the names of the others.

    Args:
        table: a file like /etc/hosts, see `write_table`.
    """

    def __init__(self, host: NamespaceHost, table: Path) -> None:
        self._host = host
        self._table = table

    def command(self, line: Sequence[str]) -> list[str]:
        """The command line that runs `line` there, as a process with the id of the one that is started."""
        enter = ["unshare", "--uts", "--mount", "sh", "-c", _SCRIPT, "sh"]
        return self._host.command([*enter, host_name(self._host), str(self._table), *line])


def host_name(host: NamespaceHost) -> str:
    """The host's name."""
    return f"host{host.number}"


def write_table(hosts: NamespaceHosts, path: Path) -> None:
    """Write the names of all hosts, in the form of /etc/hosts."""
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host_name(host)}" for host in hosts)]
    path.write_text("\n".join(lines) + "\n")
