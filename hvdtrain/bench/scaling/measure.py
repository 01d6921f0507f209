"""The runs of `hvdtrain bench scaling`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from hvdtrain.bench.machine import machine, shown
from hvdtrain.bench.placed import Place, Spread
from hvdtrain.bench.timing import Variant
from hvdtrain.errors import LaunchError

_START_S = 180.0


def counts_up_to(total: int) -> list[int]:
    """1, 2, 4, ... and the total itself."""
    doubled = [2**i for i in range(total.bit_length()) if 2**i < total]
    return [*doubled, total]


def spreads_of(place: Place, counts: Sequence[int] | None) -> list[Spread]:
    """Where each number of ranks runs: on as few hosts as possible.

    Raises:
        LaunchError: more ranks than the hosts take.
    """
    total = place.full.size
    chosen = sorted(set(counts)) if counts else counts_up_to(total)
    if chosen[-1] > total:
        raise LaunchError(f"{chosen[-1]} ranks: the hosts take {total} ({place.full}); name more hosts or slots")
    return [place.hosts_first(count) for count in chosen]


def measure(
    place: Place,
    job: dict[str, Any],
    spreads: Sequence[Spread],
    backends: Sequence[str],
    *,
    rounds: int,
    block_s: float,
) -> dict[str, Any]:
    """Train the job on each spread: every rank keeps its batch, so that more ranks take more samples in a step.

    Returns:
        {"machine", "job", "sharing", "rounds", "rows": [{"backend", "hosts", "ranks", "num_steps_per_gpu" (steps that a
        rank takes in an epoch; None: unknown), "avg_step_time" (seconds), "step_ms", "step_ms_rounds",
        "samples_per_s", "steps_per_s", "speed_up", "efficiency", "threads", "transport", "device"}]}; speed_up: work
        per time against the smallest number of ranks, in ranks, so that the ideal is the number of ranks; efficiency:
        speed_up / ranks.

    Raises:
        TrainingFailed: a run failed.
    """
    rows = []
    variant = Variant(job["compression"], job["accumulate"], not job["sync_every_microbatch"])
    for backend in backends:
        first: dict[str, Any] | None = None
        for spread in spreads:
            print(f"bench scaling: {backend}, {spread} ...", file=sys.stderr, flush=True)
            arguments = {
                "backend": backend,
                "job": job,
                "variants": [variant.to_dict()],
                "rounds": rounds,
                "block_s": block_s,
            }
            limit_s = _START_S + (rounds + 3) * max(10 * block_s, 60.0)
            results = place.run("hvdtrain.bench.timing:rank", arguments, spread=spread, limit_s=limit_s)
            row = _row(backend, job, spread, results[0])
            first = first or row
            speed = (row["ranks"] / row["avg_step_time"]) / (first["ranks"] / first["avg_step_time"])
            row["speed_up"] = speed * first["ranks"]
            row["efficiency"] = row["speed_up"] / row["ranks"]
            rows.append(row)
            print(steps_line(row), file=sys.stderr, flush=True)
    return {"machine": machine(), "job": shown(job), "sharing": place.sharing, "rounds": rounds, "rows": rows}


def steps_line(row: dict[str, Any]) -> str:
    """The two figures that users of the ResNet recipe look for."""
    steps = "unknown" if row["num_steps_per_gpu"] is None else row["num_steps_per_gpu"]
    who = f"{row['backend']}, {row['ranks']} rank(s) on {row['hosts']} host(s)"
    return f"{who}: num_steps_per_gpu: {steps}, avg_step_time: {row['avg_step_time']:.4f}"


def _row(backend: str, job: dict[str, Any], spread: Spread, result: dict[str, Any]) -> dict[str, Any]:
    step_s = statistics.median(result["variants"][0]["step_s"])
    batch_size = job["batch_size"]
    taken = (batch_size or 1) * job["accumulate"] * spread.size
    return {
        "backend": backend,
        "hosts": spread.num_hosts,
        "ranks": spread.size,
        "num_steps_per_gpu": None if result["items"] is None else math.ceil(result["items"] / taken),
        "avg_step_time": step_s,
        "step_ms": step_s * 1000,
        "step_ms_rounds": [seconds * 1000 for seconds in result["variants"][0]["step_s"]],
        "samples_per_s": None if batch_size is None else taken / step_s,
        "steps_per_s": 1 / step_s,
        "threads": result["threads"],
        "transport": result["transport"],
        "device": result["device"],
    }
