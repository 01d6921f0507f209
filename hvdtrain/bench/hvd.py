"""`hvdtrain bench hvd`: one unchanged Horovod script on hvdtrain.hvd and on the real Horovod, with DDP beside them.

Two ranks, on this machine or on two hosts made of network namespaces. All contestants are alive at the same time and
take turns (see `contest.py`); a ratio is the median of the ratios within the rounds.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench.blocks import Blocks
from hvdtrain.bench.contest import contest, note
from hvdtrain.bench.hosts import namespace_hosts
from hvdtrain.bench.hvd_contestants import CONTESTANTS, Place, commands, missing

TRAININGS = ("small", "large", "resnet")
REDUCTIONS = ("latency", "throughput")
GBIT_PER_S = 10.0
# Steps of one block, so that it takes about a second on a small machine; and how many before it are not timed.
_STEPS = {"small": (200, 10), "large": (8, 2), "resnet": (20, 3), "latency": (600, 20), "throughput": (12, 2)}
_TITLES = {
    "small": "MLP 784-128-128-10, batch 32",
    "large": "MLP 784-2048x3-10, batch 16",
    "resnet": "ResNet of 18 convolutions, batch 16",
    "latency": "allreduce of 4 bytes",
    "throughput": "allreduce of 64 MB",
}
# (work, compression, base): upper limits of ours / base, on one host.
_LIMITS_ONE_HOST = {
    ("large", "fp16", "gloo"): 0.6,
    ("large", "none", "gloo"): 0.8,
    ("small", "none", "gloo"): 1.05,
    ("small", "fp16", "gloo"): 1.05,
    ("latency", "none", "gloo"): 0.5,
}
_LIMIT_DDP = 1.15
_LIMIT_TWO_HOSTS = 1.0


def limit(work: str, compression: str, base: str, num_hosts: int) -> float | None:
    """What ours / base must not exceed; None where the ratio is only reported."""
    if base == "ddp":
        return _LIMIT_DDP if work in TRAININGS else None
    if num_hosts == 1:
        return _LIMITS_ONE_HOST.get((work, compression, base))
    return _LIMIT_TWO_HOSTS if work in TRAININGS else None


def measure(
    works: Sequence[str], compressions: Sequence[str], rounds: int, *, separate_hosts: bool = False
) -> dict[str, Any]:
    """Run the benchmark. Starts its own ranks.

    Args:
        works: of TRAININGS and REDUCTIONS.
        compressions: of none and fp16, for the trainings.
        rounds: turns of each contestant.
        separate_hosts: put the ranks into two network namespaces (needs root).

    Returns:
        {"rounds", "ranks", "hosts", "gbit_per_s", "left_out": {contestant: why}, "rows": [{"work", "compression",
        "<contestant>_ms", ...}]}: medians of milliseconds per step, and ours / base either as "ratio_to_<base>" with
        its limit as "limit_to_<base>", or as "reported_to_<base>" where there is no limit.

    Raises:
        LaunchError: two hosts cannot be made.
        TrainingFailed: a contestant failed.
    """
    left_out = missing()
    names = [name for name in CONTESTANTS if name not in left_out]
    for name, reason in left_out.items():
        note(f"bench hvd: without {CONTESTANTS[name]}: {reason}")
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-")))
        places = stack.enter_context(_places(separate_hosts))
        for work in works:
            for compression in compressions if work in TRAININGS else ("none",):
                note(f"bench hvd: {_TITLES[work]}, compression {compression}, {rounds} rounds ...")
                started = {name: commands(name, work, compression, places, folder) for name in names}
                steps, untimed = _STEPS[work]
                blocks = contest(started, num_ranks=2, rounds=rounds, steps=steps, untimed=untimed, limit_s=300)
                rows.append(_row(work, compression, blocks, 2 if separate_hosts else 1))
    return {
        "rounds": rounds,
        "ranks": 2,
        "hosts": 2 if separate_hosts else 1,
        "gbit_per_s": GBIT_PER_S if separate_hosts else None,
        "left_out": left_out,
        "rows": rows,
    }


@contextlib.contextmanager
def _places(separate_hosts: bool) -> Iterator[list[Place]]:
    if not separate_hosts:
        yield [Place(), Place()]
        return
    with namespace_hosts(2, GBIT_PER_S * 1e9) as hosts:
        yield [Place(host.command, host.address, host.interface) for host in hosts]


def _row(work: str, compression: str, blocks: Blocks, num_hosts: int) -> dict[str, Any]:
    row: dict[str, Any] = {"work": work, "compression": compression}
    row |= {f"{name}_ms": blocks.median_ms(name) for name in blocks.ms_per_step}
    for base in blocks.ms_per_step:
        if base == "ours":
            continue
        bound = limit(work, compression, base, num_hosts)
        if bound is None:
            row[f"reported_to_{base}"] = blocks.ratio("ours", base)
        else:
            row |= {f"ratio_to_{base}": blocks.ratio("ours", base), f"limit_to_{base}": bound}
    return row


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table: medians of ms per step, and ours divided by each of the others."""
    names = [name for name in CONTESTANTS if name not in result["left_out"]]
    bases = [name for name in names if name != "ours"]
    heads = [
        "work",
        "compression",
        *(f"{CONTESTANTS[n]}, ms" for n in names),
        *(f"ours / {CONTESTANTS[b]}" for b in bases),
    ]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in result["rows"]:
        cells = [_TITLES[row["work"]], row["compression"], *(f"{row[f'{name}_ms']:.2f}" for name in names)]
        cells += [_ratio(row, base) for base in bases]
        lines.append(_line(cells))
    return "\n".join(lines)


def _ratio(row: dict[str, Any], base: str) -> str:
    if f"reported_to_{base}" in row:
        return f"{row[f'reported_to_{base}']:.2f}"
    return f"{row[f'ratio_to_{base}']:.2f} (at most {row[f'limit_to_{base}']:g})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
