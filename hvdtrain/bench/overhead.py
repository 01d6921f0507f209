"""`hvdtrain bench overhead`: what the trainer costs over a loop written by hand, per backend and model.

Two ranks on this machine. The trainer, the loop by hand and the loop by hand once more are jobs of their own that take
turns; the last two against each other show the noise that the ratio has to be read with.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hvdtrain.bench.blocks import Blocks, split_evenly
from hvdtrain.bench.contest import Command, contest, note
from hvdtrain.bench.hvd_contestants import Place, by_hand
from hvdtrain.bench.machine import machine

# Steps of a turn, and before them some that are not timed.
_STEPS = {"small": (100, 10), "large": (4, 2)}
# How often the jobs are started anew: two jobs of the same loop differ by some percent for as long as they live.
_STARTS = 6
_LIMIT_S = 120.0


def measure(backends: Sequence[str], models: Sequence[str], rounds: int, num_ranks: int = 2) -> dict[str, Any]:
    """Run the benchmark. Starts its own ranks.

    Returns:
        {"rounds", "ranks", "machine", "rows": [{"backend", "model", "trainer_ms", "raw_ms", "ratio", "ratio_noise"}]}:
        medians of milliseconds per step; ratio: trainer / raw, ratio_noise: raw / raw, medians over the rounds.

    Raises:
        TrainingFailed: a rank failed; the message has its last lines.
    """
    rows = []
    for backend in backends:
        for model in models:
            note(f"bench overhead: {backend}, {model} model, {rounds} rounds ...")
            steps, untimed = _STEPS[model]
            blocks = Blocks({})
            for part in split_evenly(rounds, _STARTS):
                blocks += contest(
                    {
                        "trainer": _commands(f"trainer-{backend}", model, num_ranks),
                        "raw": _commands(f"by-hand-{backend}", model, num_ranks),
                        "raw-again": _commands(f"by-hand-{backend}", model, num_ranks),
                    },
                    num_ranks=num_ranks, rounds=part, steps=steps, untimed=untimed, limit_s=_LIMIT_S,
                )  # fmt: skip
            rows.append(
                {
                    "backend": backend,
                    "model": model,
                    "trainer_ms": blocks.median_ms("trainer"),
                    "raw_ms": blocks.median_ms("raw"),
                    "ratio": blocks.ratio("trainer", "raw"),
                    "ratio_noise": blocks.ratio("raw-again", "raw"),
                }
            )
    return {"rounds": rounds, "ranks": num_ranks, "machine": machine(), "rows": rows}


def _commands(name: str, model: str, num_ranks: int) -> list[Command]:
    argv = ["hvdtrain.bench.overhead_loops", name, model]
    if name == "by-hand-horovod":
        # Brings Horovod's ranks together and leaves the script to itself.
        argv = ["hvdtrain", "exec", "--backend", "horovod", "-m", *argv]
    return by_hand([sys.executable, "-m", *argv], [Place()] * num_ranks)


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [
        "| backend | model | trainer, ms/step | by hand, ms/step | trainer / by hand | by hand / itself |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        figures = f"{row['trainer_ms']:.2f} | {row['raw_ms']:.2f} | {row['ratio']:.3f} | {row['ratio_noise']:.3f}"
        lines.append(f"| {row['backend']} | {row['model']} | {figures} |")
    return "\n".join(lines)
