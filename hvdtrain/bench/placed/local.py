"""Ranks on this machine, as they are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from hvdtrain.bench.placed.own_processes import OwnProcesses
from hvdtrain.bench.placed.placement import Spread


class LocalPlace(OwnProcesses):
    """One host: this one."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(Spread((num_ranks,)))

    def _meeting(self, folder: str) -> str:
        return f"file://{folder}/meeting"

    def _command(self, host: int, line: Sequence[str]) -> list[str]:
        # Of util-linux; where there is none, the ranks of a benchmark that is killed notice it by themselves.
        setpriv = shutil.which("setpriv")
        return [*([setpriv, "--pdeathsig", "KILL"] if setpriv else []), *line]
