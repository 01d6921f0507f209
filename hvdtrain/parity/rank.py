"""One rank of one run: the first steps of the job as it is written, and the weights after them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from hvdtrain.backends import make_backend
from hvdtrain.config import load_config
from hvdtrain.errors import TrainingFailed
from hvdtrain.launch.detect import ManualFlags
from hvdtrain.metrics import parameters_sha256
from hvdtrain.trainer.run import Job, connect_options

WEIGHTS = "weights.pt"


def rank(flags: ManualFlags, file: str, overrides: list[str], backend: str, output: str, steps: int) -> dict[str, Any]:
    """Train `steps` steps. Collective.

    The job's own limits stay as they are, so that a learning rate that falls to zero at the last step is in step 20
    what it is there in the whole job. No evaluation and no checkpoint; rank 0 leaves the weights in `output`.

    Returns:
        {"losses": [...] (None: not finite), "skipped_steps", "transport", "parameters_sha256", "ranks_agree",
        "config": every key as resolved}.
    """
    config = load_config(file, overrides, backend=backend, output=output)
    with make_backend(config.backend, connect_options(config, flags)) as connection:
        with contextlib.ExitStack() as stack:
            prepared = Job(config, connection).prepare("none", stack)
            stepping = prepared.session.steps()
            for taken, _ in enumerate(stepping, 1):
                if taken == steps:
                    break
            prepared.session.flush()
            stepping.close()  # type: ignore[attr-defined]
            if prepared.session.stopped:
                raise TrainingFailed("stopped on request before the steps to compare were done")
        replica = prepared.replica
        replica.sync_buffers()
        digest = parameters_sha256(replica.bare_model)
        digests = connection.all_gather_object(digest)
        if connection.world.is_root:
            state = replica.bare_model.state_dict()
            weights = {name: value.cpu() for name, value in state.items() if isinstance(value, torch.Tensor)}
            parameters = [name for name, _ in replica.bare_model.named_parameters()]
            torch.save({"weights": weights, "parameters": parameters}, Path(output) / WEIGHTS)
        return {
            "losses": _losses(Path(output)) if connection.world.is_root else [],
            "skipped_steps": prepared.precision.skipped_steps,
            "transport": connection.transport,
            "device": str(connection.device),
            "parameters_sha256": digest,
            "ranks_agree": len(set(digests)) == 1,
            "config": config.to_dict(),
        }


def _losses(output: Path) -> list[float | None]:
    lines = (json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]
