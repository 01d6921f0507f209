"""Ranks that this process starts itself, on hosts that share its machine."""

from __future__ import annotations

import abc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench.placed.placement import Place, Spread
from hvdtrain.bench.placed.processes import end_all, wait_for_all
from hvdtrain.bench.placed.specification import encode
from hvdtrain.launch.host import usable_cpus

# How long a rank may take to notice that another has failed, and to say so.
_GRACE_S = 5.0


class OwnProcesses(Place):
    """Where there are cores enough each host gets cores of its own, as a machine would have, so that one host's
    arithmetic does not slow the other's; the ranks of a host share its cores, and have as many threads as with all
    ranks at work, however many are.
    """

    def __init__(self, full: Spread) -> None:
        self.full = full
        self._cpus = divided(sorted(usable_cpus()), full.num_hosts)

    def run(
        self, target: str, arguments: dict[str, Any], *, spread: Spread, limit_s: float, apart: bool = False
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
            files = [Path(folder) / f"rank-{rank}.json" for rank in range(spread.size)]
            url = self._meeting(folder)
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for host, ranks in enumerate(spread.ranks):
                    for _ in range(ranks):
                        rank = len(processes)
                        specification = {
                            "target": target,
                            "arguments": arguments,
                            "flags": [url, rank, spread.size],
                            "apart": apart,
                            "cpus": self._cpus[host] if self._cpus else None,
                            "result": str(files[rank]),
                        }
                        processes.append(self._start(host, specification))
            except BaseException:
                end_all(processes, _GRACE_S)
                raise
            wait_for_all(processes, limit_s, _GRACE_S)
            return [json.loads(file.read_text()) for file in files]

    def _start(self, host: int, specification: dict[str, Any]) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "hvdtrain.bench.placed.rank", encode(specification)]
        # torch warns where an address has no name in a DNS.
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        # A rank sees the cores of its host, not that other ranks of it, or other hosts, use them too.
        cores = len(self._cpus[host]) if self._cpus else len(usable_cpus()) // self.full.num_hosts
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.full.ranks[host])))
        return subprocess.Popen(self._command(host, line), env=environment, stdout=sys.stderr)

    @abc.abstractmethod
    def _meeting(self, folder: str) -> str:
        """The init_method of a new job; `folder` is its own."""

    @abc.abstractmethod
    def _command(self, host: int, line: Sequence[str]) -> list[str]:
        """The command line that runs `line` on the host; the process ends with ours."""


def divided(cpus: Sequence[int], num_hosts: int) -> list[list[int]]:
    """Equal shares of the cores, or nothing where there are fewer cores than hosts."""
    share = len(cpus) // num_hosts
    return [list(cpus[number * share : (number + 1) * share]) for number in range(num_hosts)] if share else []
