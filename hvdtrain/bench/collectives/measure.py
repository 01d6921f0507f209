"""Time and bytes of an all-reduce: so many ranks, one on each host, tensors of several sizes."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.bench.collectives.lessons import NAMES, module_of
from hvdtrain.bench.machine import machine
from hvdtrain.bench.placed import Place, Spread
from hvdtrain.launch.detect import ManualFlags

if TYPE_CHECKING:
    import torch

# The teaching code is written over torch.distributed.
_TEACHING_BACKEND = "ddp"


def measure(
    place: Place,
    lessons: dict[str, str],
    counts: Sequence[int],
    sizes: Sequence[int],
    backends: Sequence[str],
    *,
    rounds: int,
    limit_s: float,
) -> dict[str, Any]:
    """Run everything. Starts ranks on the place's hosts, one on each.

    Args:
        counts: numbers of ranks.
        sizes: of the tensor, bytes.

    Returns:
        {"machine", "sharing", "rounds", "rows": [{"way", "ranks", "bytes", "ms": median over the rounds of the slowest
        rank, "sent_bytes", "received_bytes": of each host for one all-reduce, "expected_sent_bytes": likewise, without
        headers (null where the way is a library's own), "ratio_sent": of the busiest host, to what is expected}]}.
    """
    rows = []
    for count in counts:
        for backend in backends:
            print(f"bench collectives: {count} ranks, {backend} ...", file=sys.stderr, flush=True)
            arguments = {
                "backend": backend,
                "lessons": lessons if backend == _TEACHING_BACKEND else {},
                "sizes": list(sizes),
                "rounds": rounds,
            }
            ranks = place.run(
                "hvdtrain.bench.collectives.measure:rank", arguments, spread=Spread((1,) * count), limit_s=limit_s
            )
            rows += [row_of(parts, lessons) for parts in zip(*ranks, strict=True)]
    return {"machine": machine(), "sharing": place.sharing, "rounds": rounds, "rows": rows}


def row_of(parts: Sequence[dict[str, Any]], lessons: dict[str, str]) -> dict[str, Any]:
    """One way, size and number of ranks: what all ranks measured of it."""
    way, num_bytes, count = parts[0]["way"], parts[0]["bytes"], len(parts)
    slowest = [max(part["seconds"][turn] for part in parts) for turn in range(len(parts[0]["seconds"]))]
    sent = [part["sent_bytes"] for part in parts]
    expected = None
    if way in NAMES:
        expected = module_of(way, lessons[way]).sent_bytes(count, num_bytes)
    return {
        "way": way,
        "ranks": count,
        "bytes": num_bytes,
        "ms": statistics.median(slowest) * 1000,
        "sent_bytes": sent,
        "received_bytes": [part["received_bytes"] for part in parts],
        "expected_sent_bytes": expected,
        "ratio_sent": None if expected is None else max(sent) / max(expected),
    }


def rank(
    flags: ManualFlags | None, backend: str, lessons: dict[str, str], sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """One rank of it. Collective.

    Returns:
        [{"way", "bytes", "seconds": of each round, "sent_bytes", "received_bytes": of this host for one all-reduce}]
    """
    import hvdtrain
    from hvdtrain.bench.hosts import read_traffic
    from hvdtrain.errors import TrainingFailed

    with hvdtrain.connect(backend, device="cpu", flags=flags) as connection:

        def own(tensor: torch.Tensor) -> None:
            tensor.copy_(connection.all_reduce(tensor))

        ways: dict[str, Callable[[torch.Tensor], None]] = {
            name: module_of(name, text).all_reduce for name, text in lessons.items()
        }
        ways[f"{backend} ({connection.transport})"] = own
        found = []
        for name, all_reduce in ways.items():
            for num_bytes in sizes:
                seconds = []
                # Once before it counts: connections are made at their first use.
                _once(connection, all_reduce, num_bytes)
                before = read_traffic(connection.interface)
                for _ in range(rounds):
                    elapsed_s, is_right = _once(connection, all_reduce, num_bytes)
                    seconds.append(elapsed_s)
                    if not is_right:
                        raise TrainingFailed(f"{name}: rank {connection.world.rank} got another sum")
                connection.barrier()
                traffic = read_traffic(connection.interface) - before
                found.append(
                    {
                        "way": name,
                        "bytes": num_bytes,
                        "seconds": seconds,
                        "sent_bytes": traffic.sent_bytes / rounds,
                        "received_bytes": traffic.received_bytes / rounds,
                    }
                )
        return found


def _once(connection: Any, all_reduce: Callable[[torch.Tensor], None], num_bytes: int) -> tuple[float, bool]:
    """Seconds of this rank, from when all are ready, and whether the sum is exact."""
    import torch

    world = connection.world
    numbers = torch.arange(num_bytes // 4, dtype=torch.float32) % 1024
    tensor = numbers + world.rank
    connection.barrier()
    start_s = time.perf_counter()
    with connection.guard.operation("all-reduce"):
        all_reduce(tensor)
    elapsed_s = time.perf_counter() - start_s
    return elapsed_s, torch.equal(tensor, numbers * world.size + sum(range(world.size)))
