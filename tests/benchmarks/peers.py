"""The trainer beside the loops that people write without it, and beside its peers, in one interleaved run.

    python tests/benchmarks/peers.py --model small
    python tests/benchmarks/peers.py --model large

Two ranks on this machine, one thread each, over gloo. Every contestant is a job of its own; all are alive at once and
take turns of some steps, in an order that rotates, while the processes of the others are held. A ratio is the median of
the ratios within the rounds. DDP and Horovod by hand run twice: against themselves they show how far a ratio can be
trusted. Needs Horovod and `pip install -e '.[peers]'`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_loops import CONTESTANTS

from hvdtrain.bench.blocks import Blocks
from hvdtrain.bench.contest import Command, Job, note
from hvdtrain.bench.machine import machine, machine_text
from hvdtrain.bench.workloads import MLPS
from hvdtrain.launch import free_port

LOOPS = Path(__file__).with_name("peer_loops.py")
NUM_RANKS = 2
# Steps of a turn, and how many before it are not timed. Turns are short and many: where Horovod's threads happen to run
# on so few cores stays the same within a turn, and makes its steps up to three times as long.
STEPS = {"small": (25, 5), "large": (4, 2)}
ROUNDS = {"small": 100, "large": 35}
PACKAGES = ("torch", "horovod", "accelerate", "lightning-fabric", "pytorch-ignite")
_LIMIT_S = 120.0


def commands(name: str, model: str) -> list[Command]:
    """One command per rank, as a person starts ranks by hand."""
    script = [str(LOOPS), name, model]
    if name.startswith("raw-horovod"):
        # Brings Horovod's ranks together and leaves the script to itself.
        argv = [sys.executable, "-m", "hvdtrain", "exec", "--backend", "horovod", *script]
    else:
        argv = [sys.executable, *script]
    places = {
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        # A Horovod that was held for the others' turns must not take that for a silent peer.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",
        # Accelerate, without which it would look for other devices.
        "ACCELERATE_USE_CPU": "true",
    }
    return [
        Command(argv, {**os.environ, **places, "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"})
        for rank in range(NUM_RANKS)
    ]


def contest(names: Sequence[str], model: str, rounds: int) -> Blocks:
    """All contestants in turns."""
    steps, untimed = STEPS[model]
    jobs: list[Job] = []
    with tempfile.TemporaryDirectory(prefix="hvdtrain-peers-") as folder:
        try:
            for name in names:
                note(f"starting {name} ...")
                # Not before its turn: a port that is free now may be another contestant's a moment later.
                jobs.append(Job(name, commands(name, model), NUM_RANKS, Path(folder)))
                jobs[-1].start()
            measured: dict[str, list[float]] = {job.name: [] for job in jobs}
            for job in jobs:
                job.turn(steps, untimed, _LIMIT_S)
            for turn in range(rounds):
                shift = turn % len(jobs)
                for job in jobs[shift:] + jobs[:shift]:
                    measured[job.name].append(job.turn(steps, untimed, _LIMIT_S))
            for job in jobs:
                job.release()
            for job in jobs:
                job.end()
        finally:
            for job in jobs:
                job.kill()
    return Blocks(measured)


def measure(model: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """The whole run.

    Returns:
        {"model", "rounds", "machine", "versions", "rows": [{"name", "title", "ms", "ms_of_rounds", "base", "ratio"}]};
        ratio: to the base, None for a base.
    """
    blocks = contest(names, model, rounds)
    rows = []
    for name in names:
        title, base, _ = CONTESTANTS[name]
        ratio = blocks.ratio(name, base) if base in names else None
        ms = blocks.median_ms(name)
        rows.append(
            {"name": name, "title": title, "ms": ms, "ms_of_rounds": blocks.ms_per_step[name], "base": base}
            | {"ratio": ratio}
        )
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"model": model, "rounds": rounds, "machine": machine(), "versions": versions, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """As Markdown."""
    widths, batch_size = MLPS[result["model"]]
    lines = [
        f"MLP {'-'.join(map(str, widths))}, batch {batch_size}; median of {result['rounds']} rounds",
        "",
        "| loop | ms/step | ratio | to |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        base = "" if row["ratio"] is None else CONTESTANTS[row["base"]][0]
        lines.append(f"| {row['title']} | {row['ms']:.2f} | {ratio} | {base} |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"{machine_text(result['machine'])}; {versions}"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(STEPS), default="small")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (small: 100, large: 35)")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--json", metavar="FILE", help="also write the figures of every round there")
    chosen = parser.parse_args()
    result = measure(chosen.model, chosen.only, chosen.rounds or ROUNDS[chosen.model])
    print(table(result))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
