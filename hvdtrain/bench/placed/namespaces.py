"""Ranks on network namespaces of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.bench.hosts import NamespaceHosts
from hvdtrain.bench.placed.own_processes import OwnProcesses
from hvdtrain.bench.placed.placement import Spread
from hvdtrain.launch.host import usable_cpus

# The namespaces are new and nobody else is in them, so the port is free. Each job takes the next one, because the last
# one's connections linger on theirs.
_FIRST_PORT = 29500


class NamespacePlace(OwnProcesses):
    """Hosts with a network of their own that share this machine's cores."""

    def __init__(self, hosts: NamespaceHosts, ranks_per_host: int) -> None:
        super().__init__(Spread((ranks_per_host,) * len(hosts)))
        self.hosts = hosts
        each = f"each with {len(self._cpus[0])} of them" if self._cpus else "all of them on all cores"
        self.sharing = f"the hosts are network namespaces of one machine with {len(usable_cpus())} cores, {each}"
        self._num_jobs = 0

    def _meeting(self, folder: str) -> str:
        self._num_jobs += 1
        return f"tcp://{self.hosts[0].address}:{_FIRST_PORT + self._num_jobs}"

    def _command(self, host: int, line: Sequence[str]) -> list[str]:
        return self.hosts[host].command(line)
