"""What has to travel, and how long that takes at least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# (shape, bytes per element) of each trained parameter.
Gradients = Iterable[Sequence[object]]

_COMPRESSED_BYTES = {"fp16": 2, "bf16": 2}
# hvdtrain.backends.ddp_compression: rank 1; torch compresses a matrix where that makes it at least twice as small.
_POWERSGD_RANK = 1
_POWERSGD_LEAST_GAIN = 2


def payload_bytes(gradients: Gradients, compression: str) -> int:
    """Bytes that one rank contributes to one reduction of all gradients.

    PowerSGD (Vogels et al. 2019): a matrix [n, m] becomes two factors [n, r] and [m, r]; vectors travel as they are.
    """
    total = 0
    for shape, element_bytes in gradients:
        assert isinstance(shape, Sequence)
        assert isinstance(element_bytes, int)
        count = math.prod(shape)
        if compression == "powersgd" and len(shape) > 1:
            factors = (shape[0] + count // shape[0]) * _POWERSGD_RANK
            count = factors if factors * _POWERSGD_LEAST_GAIN < count else count
        total += count * min(element_bytes, _COMPRESSED_BYTES.get(compression, element_bytes))
    return total


def wire_bytes(payload: float, num_hosts: int) -> float:
    """Bytes that each host has to send (and to receive) at least to reduce `payload` bytes over all hosts.

    2 (N - 1) / N times the payload (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009). Hosts, not
    ranks: ranks of one host can add up before anything leaves it.
    """
    return 2 * (num_hosts - 1) / num_hosts * payload


def wire_s(payload: float, num_hosts: int, bits_per_s: float) -> float:
    """Seconds for that where every host sends and receives at `bits_per_s` at once; headers not counted."""
    return wire_bytes(payload, num_hosts) * 8 / bits_per_s
