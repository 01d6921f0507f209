"""Ranks on real hosts (or containers), started by `hvdtrain launch`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench.placed.placement import Place, Spread
from hvdtrain.bench.placed.processes import wait_for_all
from hvdtrain.bench.placed.specification import MARK, encode
from hvdtrain.errors import TrainingFailed
from hvdtrain.launch.remote.hosts import Host


class ClusterPlace(Place):
    """Hosts that are reached over ssh.

    Args:
        hosts: with the ranks that each takes.
        options: further options of `hvdtrain launch` (port, identity file, interfaces).
        python: the interpreter on the hosts.
    """

    def __init__(self, hosts: Sequence[Host], options: Sequence[str] = (), python: str = sys.executable) -> None:
        self._hosts, self._options, self._python = list(hosts), list(options), python
        self.full = Spread(tuple(host.slots for host in hosts))

    def run(
        self, target: str, arguments: dict[str, Any], *, spread: Spread, limit_s: float, apart: bool = False
    ) -> list[Any]:
        named = ",".join(str(Host(host.name, ranks)) for host, ranks in zip(self._hosts, spread.ranks, strict=False))
        specification = encode({"target": target, "arguments": arguments, "apart": apart})
        with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
            line = [
                sys.executable, "-m", "hvdtrain", "launch", "-H", named, "--output-filename", folder,
                "--python", self._python, *self._options,
                self._python, "-m", "hvdtrain.bench.placed.rank", specification,
            ]  # fmt: skip
            # Its standard output repeats the results; what the ranks say to people comes through standard error.
            process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
            wait_for_all([process], limit_s)
            return [_result_of(Path(folder), rank, spread.size) for rank in range(spread.size)]


def _result_of(folder: Path, rank: int, size: int) -> Any:
    file = folder / f"rank.{rank:0{len(str(size - 1))}d}" / "stdout"
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise TrainingFailed(f"rank {rank} ended without a result; its messages are above")
