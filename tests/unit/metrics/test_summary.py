"""summary.json, the end report, the fingerprint of the parameters."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch

from hvdtrain.launch.world import World
from hvdtrain.metrics import Summary, clear_summary, end_report, parameters_sha256, write_summary

WORLD = World(rank=0, size=2, local_rank=0, local_size=2)


def summary(**changes):
    values = {
        "status": "done",
        "backend": "ddp",
        "launcher": "torchrun",
        "transport": "gloo",
        "world": WORLD,
        "steps": 1125,
        "epochs": 3,
        "samples_per_second": 5321.4,
        "eval": {"accuracy": 0.9745, "loss": 0.0812},
        "parameters_sha256": "ab",
        "ranks_agree": True,
    }
    return Summary(**{**values, **changes})


def test_summary_json(tmp_path):
    path = write_summary(summary(eval={"accuracy": math.nan}), tmp_path)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == {
        "status": "done",
        "backend": "ddp",
        "launcher": "torchrun",
        "transport": "gloo",
        "world": {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "node_rank": 0, "num_nodes": 1},
        "steps": 1125,
        "epochs": 3,
        "skipped_steps": 0,
        "samples_per_second": 5321.4,
        "eval": {"accuracy": None},
        "parameters_sha256": "ab",
        "ranks_agree": True,
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_failure_is_in_it(tmp_path):
    failed = summary(status="failed", failure={"rank": 1, "host": "b", "message": "boom"})
    assert json.loads(write_summary(failed, tmp_path).read_text())["failure"] == {
        "rank": 1,
        "host": "b",
        "message": "boom",
    }


def test_a_new_session_clears_the_old_summary(tmp_path):
    clear_summary(tmp_path)
    write_summary(summary(), tmp_path)
    clear_summary(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_end_report_when_done():
    output = Path("runs/mnist")
    report = end_report(
        summary(skipped_steps=1), output, checkpoint=output / "checkpoints/b.pt", best=output / "checkpoints/a.pt"
    )
    assert report.splitlines() == [
        "Done: 1,125 steps, 3 epochs on 2 ranks, ddp over gloo, 5,321 samples/s",
        "  evaluation   accuracy 0.9745, loss 0.0812",
        "  skipped      1 step with a gradient that was not finite",
        "  results      runs/mnist (config.yaml, metrics.jsonl, summary.json)",
        "  checkpoint   runs/mnist/checkpoints/b.pt",
        "  best         runs/mnist/checkpoints/a.pt",
        "  curves       tensorboard --logdir runs/mnist/tensorboard",
    ]


def test_end_report_when_stopped_or_failed():
    stopped = end_report(summary(status="stopped", eval={}), Path("o"))
    assert stopped.splitlines()[0] == (
        "Stopped on request after 1,125 steps, 3 epochs on 2 ranks, ddp over gloo, 5,321 samples/s. "
        "Continue with --resume auto"
    )
    assert "evaluation" not in stopped
    failed = end_report(summary(status="failed", transport=None, ranks_agree=False, world=World()), Path("o"))
    assert failed.splitlines()[0] == "Failed after 1,125 steps, 3 epochs on 1 rank, ddp"
    assert "different parameters" in failed


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.nn.Linear(2, 1, bias=False)
        self.a = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t().to(torch.bfloat16))
        self.a_2 = torch.nn.Parameter(torch.tensor(3, dtype=torch.int32), requires_grad=False)
        self.register_buffer("c", torch.ones(1))


def test_parameters_sha256_is_over_sorted_names_and_float32_bytes():
    net = Net()
    expected = hashlib.sha256()
    for values in ([0, 3, 1, 4, 2, 5], [3], net.b.weight.flatten().tolist()):
        expected.update(np.array(values, dtype="<f4").tobytes())
    assert parameters_sha256(net) == expected.hexdigest()


def test_parameters_sha256_ignores_wrappers():
    net = Net()
    holder = torch.nn.Module()
    holder.module = net
    assert parameters_sha256(holder) == parameters_sha256(net)
    compiled = torch.compile(net)
    assert next(iter(dict(compiled.named_parameters()))).startswith("_orig_mod.")
    assert parameters_sha256(compiled) == parameters_sha256(net)
    with torch.no_grad():
        net.b.weight[0, 0] += 1
    assert parameters_sha256(holder) != parameters_sha256(Net())
