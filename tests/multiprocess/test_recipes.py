"""The recipes as their users start them: main.py under a launcher, and what it prints."""

from __future__ import annotations

import json
import re
import sys

import launchers
import pytest

from hvdtrain.bench.hosts import namespace_hosts
from hvdtrain.bench.hosts.namespaces import why_not

EXAMPLES = launchers.REPOSITORY / "examples"
LIMIT_S = 120.0
STARTS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "launch": [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"],
    "mpirun": [
        *["mpirun", "-np", "2", "--oversubscribe", "-bind-to", "none", "-mca", "pml", "ob1", "-mca", "btl", "^openib"],
        sys.executable,
    ],
    "horovodrun": [*launchers.LAUNCHERS["horovodrun-gloo"][:-1], sys.executable],
}


def output_of(launcher: str, script: str, *options: str) -> str:
    process = launchers.start_command([*STARTS[launcher], str(EXAMPLES / script), *options], OMP_NUM_THREADS="1")
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, text
    return text


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_message_passing(launcher):
    text = output_of(launcher, "message_passing/main.py", "--backend=gloo", "--size=1000")
    assert re.search(r"Rank 0 sent data to Rank 1 \(host \S+\)", text)
    assert re.search(r"Rank 1 has received data from rank 0 \(host \S+\)", text)
    assert f"started by {launcher}; 1 message(s) of 4,000 bytes over gloo" in text


def test_message_passing_across_hosts():
    if reason := why_not():
        pytest.skip(reason)
    script = str(EXAMPLES / "message_passing/main.py")
    with namespace_hosts(2) as hosts:
        ranks = [
            launchers.start_command(
                [
                    *hosts[node].command(
                        [
                            *[sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"],
                            *[
                                f"--node_rank={node}",
                                f"--master_addr={hosts[0].address}",
                                "--master_port=29500",
                                script,
                            ],
                            "--backend=gloo",
                        ]
                    )
                ],
                OMP_NUM_THREADS="1",
            )
            for node in range(2)
        ]
        texts = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(texts)
    assert "Rank 0 sent data to Rank 1" in texts[0]
    assert "Rank 1 has received data from rank 0" in texts[1]
    assert "2 ranks on 2 host(s)" in texts[0]


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "gloo"), ("horovodrun", "horovod")])
def test_resnet(launcher, backend, tmp_path):
    options = ["--use_syn", "--arch=resnet18", "--batch_size=2", "--image_size=16", "--steps_syn=2", "--num_epochs=2"]
    text = output_of(launcher, "resnet/main.py", f"--backend={backend}", f"--model_dir={tmp_path}", *options)
    for rank in range(2):
        for epoch in range(2):
            assert f"Local Rank: {rank}, Epoch: {epoch}, Training ..." in text
    assert len(re.findall(r"num_steps_per_gpu: 2, avg_step_time: \d+\.\d{4}", text)) == 2
    assert re.search(r"Average epoch time: \d+\.\d{4}", text)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["ranks_agree"]) == ("done", 4, True)
    assert summary["backend"] == ("horovod" if backend == "horovod" else "ddp")
