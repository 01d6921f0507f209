"""Which of several failures came first.

The first thing that the hub hears is often an echo: a peer whose connection broke may be quicker than the kernel that
closes the dead rank's sockets. So each report waits a moment for a better one.
"""

from __future__ import annotations

import dataclasses

from hvdtrain.failure.record import SIGNAL, Failure

# How long a report waits for a better one. A plain exception or a death is certain and waits only for ranks that fail
# in the same way at the same time; Open MPI kills the survivors one second after a death, so not longer.
CERTAIN_WAIT_S = 0.25
ABORT_WAIT_S = 1.0
CONSEQUENCE_WAIT_S = 2.0


def doubt(failure: Failure) -> int:
    """0: certain; 1: a library aborted, perhaps because of a peer; 2: an error of a collective."""
    if not failure.secondary:
        return 0
    return 1 if failure.kind == SIGNAL else 2


@dataclasses.dataclass
class Verdict:
    """Collects failures and decides. Times are those of one monotonic clock, in seconds."""

    reports: list[tuple[float, Failure]] = dataclasses.field(default_factory=list)

    def add(self, failure: Failure, now: float) -> None:
        """Add a report; only the first of each rank counts."""
        if all(known.rank != failure.rank for _, known in self.reports):
            self.reports.append((now, failure))

    def deadline(self) -> float | None:
        """When `decide` will have an answer; None while there is nothing to decide."""
        waits = (CERTAIN_WAIT_S, ABORT_WAIT_S, CONSEQUENCE_WAIT_S)
        return min((arrival + waits[doubt(failure)] for arrival, failure in self.reports), default=None)

    def decide(self, now: float, num_alive: int | None = None) -> Failure | None:
        """The first failure, or None while a better one may come. ``num_alive``: ranks that could still report."""
        deadline = self.deadline()
        if deadline is None or (now < deadline and num_alive != 0):
            return None
        ordered = sorted(self.reports, key=lambda report: (doubt(report[1]), report[0]))
        certain = [failure for _, failure in ordered]
        alike = [f for f in certain if (f.kind, f.message, doubt(f)) == (certain[0].kind, certain[0].message, 0)]
        # Of ranks that failed alike, the lowest is named: the same bug on every rank then reads the same every time.
        first = min(alike, key=lambda failure: failure.rank, default=certain[0])
        return dataclasses.replace(first, also_ranks=tuple(sorted(f.rank for f in alike if f.rank != first.rank)))
