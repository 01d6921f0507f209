"""The promise of the whole: MNIST on four hosts with four ranks each, and on one host, gives one model."""

from __future__ import annotations

import json
import math

import pytest
from cluster_hosts import ROOT

# 16 ranks share two cores here, so the training is short; 16 steps are enough to tell one model from another.
MNIST = "hvdtrain train {example} --set epochs=null --set max_steps=16 --set batch_size=8 --set log_every_steps=4"


def train_line(hosts, output: str, backend: str) -> str:
    example = "/examples/mnist/ddp.yaml" if hosts.kind == "containers" else f"{ROOT}/examples/mnist/ddp.yaml"
    return f"{MNIST.format(example=example)} --backend {backend} --output {output}"


def run_to_the_end(hosts, line: str) -> None:
    """As a person does it: by docker/cluster run, where the hosts are containers."""
    if hosts.kind == "containers":
        script = hosts.script("run", line, limit_s=700)
        assert script.returncode == 0, script.stdout + script.stderr
    else:
        done = hosts.run(line, limit_s=700)
        assert done.status == 0, done.text


@pytest.mark.timeout(2000)
def test_one_model_everywhere(hosts, output, summary_of):
    everywhere = f"hvdtrain launch -np 16 -H {hosts.slots(4)} -p 12345 --start-timeout 240"
    here = "hvdtrain launch -np 16 --start-timeout 240"
    runs = {"ddp": (everywhere, "ddp"), "one-host": (here, "ddp"), "horovod": (everywhere, "horovod")}
    summaries, losses = {}, {}
    for name, (launcher, backend) in runs.items():
        run_to_the_end(hosts, f"{launcher} {train_line(hosts, f'{output}/{name}', backend)}")
        summaries[name] = summary_of(f"{output}/{name}")
        lines = hosts.read(f"{output}/{name}/metrics.jsonl").splitlines()
        losses[name] = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    for name, summary in summaries.items():
        assert (name, summary["status"], summary["world"]["size"], summary["steps"]) == (name, "done", 16, 16)
        assert (name, summary["ranks_agree"]) == (name, True)
    assert [summaries[name]["world"]["num_nodes"] for name in runs] == [4, 1, 4]
    # Native DDP adds in one order, wherever the ranks are: the same bits.
    assert summaries["ddp"]["parameters_sha256"] == summaries["one-host"]["parameters_sha256"]
    assert losses["ddp"] == losses["one-host"]
    # Horovod's fusion depends on timing, so its sums may differ in the last bits.
    assert len(losses["horovod"]) == len(losses["ddp"]) >= 4
    for ours, theirs in zip(losses["ddp"], losses["horovod"], strict=True):
        assert math.isclose(ours, theirs, rel_tol=0, abs_tol=1e-5)
