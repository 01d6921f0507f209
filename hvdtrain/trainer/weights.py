"""The weighted mean over microbatches and ranks, from a plain mean over ranks.

Wanted: sum(w * grad) / sum(w) over all microbatches of all ranks. The backends give: mean over ranks of what each rank
accumulated. So each loss is multiplied by w / reference before backward(), and the reduced gradient by
reference * size / sum(w). With the sum known beforehand the reference is sum(w) / size, and nothing is left to
multiply. Otherwise it is a power of two near the usual weight: large weights (tokens) would overflow a gradient that
travels as float16, and a power of two costs no bits.
"""

from __future__ import annotations

import math


def reference_for(total: float, size: int) -> float:
    """The power of two nearest to the mean weight of a rank; 1 where there is no weight."""
    mean = total / size
    return 2.0 ** round(math.log2(mean)) if mean > 0 else 1.0


def correction(reference: float, size: int, total: float) -> float:
    """What the reduced gradient is multiplied by; 0 where nothing had a weight."""
    return reference * size / total if total > 0 else 0.0
