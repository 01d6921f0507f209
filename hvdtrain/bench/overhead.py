"""`hvdtrain bench overhead`: what the trainer costs over a loop written by hand, per backend and model.

Two ranks on this machine. In each round the trainer, the hand-written loop and the hand-written loop once more take the
same number of steps; the last two against each other show the noise that the ratio has to be read with.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from hvdtrain.bench.ranks import run_ranks
from hvdtrain.launch.detect import ManualFlags

# Steps of one block, so that a block takes about half a second on a small machine.
_STEPS = {"small": 100, "large": 6}


def measure(backends: Sequence[str], models: Sequence[str], rounds: int, num_ranks: int = 2) -> dict[str, Any]:
    """Run the benchmark. Starts its own ranks.

    Returns:
        {"rounds", "ranks", "rows": [{"backend", "model", "trainer_ms", "raw_ms", "ratio", "ratio_noise"}]}: medians of
        milliseconds per step; ratio: trainer / raw, ratio_noise: raw / raw, medians over the rounds.
    """
    rows = []
    for backend in backends:
        for model in models:
            print(f"bench overhead: {backend}, {model} model, {rounds} rounds ...", file=sys.stderr, flush=True)
            arguments = {"backend": backend, "model": model, "rounds": rounds}
            limit_s = 60 + rounds * 30.0
            rows.append(run_ranks("hvdtrain.bench.overhead:rank", arguments, num_ranks=num_ranks, limit_s=limit_s))
    return {"rounds": rounds, "ranks": num_ranks, "rows": rows}


def rank(flags: ManualFlags, backend: str, model: str, rounds: int) -> dict[str, Any]:
    """One rank of it. Collective."""
    import torch

    import hvdtrain
    from hvdtrain.bench.blocks import take_turns
    from hvdtrain.bench.raw_loops import RAW_LOOPS
    from hvdtrain.bench.workloads import MLPS, Mlp
    from hvdtrain.config import Config
    from hvdtrain.trainer.run import Job

    widths, batch_size = MLPS[model]
    options = {"widths": widths}
    with tempfile.TemporaryDirectory() as output, hvdtrain.connect(backend, device="cpu", flags=flags) as connection:
        config = Config(
            task="hvdtrain.bench.workloads:Mlp",
            task_options=options,
            backend=backend,  # type: ignore[arg-type]
            device="cpu",
            epochs=None,
            max_steps=10**9,
            batch_size=batch_size,
            optimizer={"name": "SGD", "lr": 0.01, "momentum": 0.9},  # type: ignore[arg-type]
            checkpoint={"every_steps": None},  # type: ignore[arg-type]
            output=output,
        )
        torch.manual_seed(1)
        raw = RAW_LOOPS[backend](Mlp(widths), batch_size, connection)
        with contextlib.ExitStack() as stack:
            steps = Job(config, connection).prepare("none", stack).session.steps()

            def trainer(count: int) -> None:
                for _ in range(count):
                    next(steps)

            contestants = {"trainer": trainer, "raw": raw.run, "raw again": raw.run}
            blocks = take_turns(contestants, rounds=rounds, steps=_STEPS[model], before=connection.barrier)
        return {
            "backend": backend,
            "model": model,
            "trainer_ms": blocks.median_ms("trainer"),
            "raw_ms": blocks.median_ms("raw"),
            "ratio": blocks.ratio("trainer", "raw"),
            "ratio_noise": blocks.ratio("raw again", "raw"),
        }


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
