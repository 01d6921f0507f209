"""Slurm itself, Debian's, on two containers: srun starts ranks; a batch job stops, waits in the queue and goes on."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from cluster_hosts import ROOT, docker

IMAGE = "hvdtrain:slurm"
NODES = ["node1", "node2"]


class Slurm:
    """Containers node1, with the controller, and node2."""

    def __init__(self, name: str) -> None:
        self.name = name

    def up(self, files: dict[str, str]) -> None:
        docker("network", "create", self.name)
        docker("volume", "create", self.name)
        for node in NODES:
            docker("run", "-d", "--init", "--name", f"{self.name}-{node}", "--hostname", node, "--network", self.name,
                   "--network-alias", node, "--shm-size", "1g", "-v", f"{self.name}:/shared", IMAGE)  # fmt: skip
        for path, text in files.items():
            words = ["docker", "exec", "-i", *self.who, "bash", "-c", f"cat >/shared/{path}"]
            subprocess.run(words, input=text, text=True, check=True)
        self.wait(lambda: self.run("sinfo -h -o '%T %D'").stdout.split() == ["idle", "2"], "both nodes idle")

    @property
    def who(self) -> list[str]:
        return ["--user", "hvdtrain", "-w", "/shared", f"{self.name}-node1"]

    def run(self, line: str, limit_s: float = 200) -> subprocess.CompletedProcess[str]:
        words = ["docker", "exec", *self.who, "bash", "-c", line]
        return subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)

    def wait(self, reached, what: str, limit_s: float = 60) -> None:
        deadline = time.monotonic() + limit_s
        while not reached():
            if time.monotonic() > deadline:
                state = self.run("sinfo -lN; squeue; tail -n 30 slurm-*.out").stdout
                raise AssertionError(f"{what}: not within {limit_s:.0f} s\n{state}")
            time.sleep(0.5)

    def down(self) -> None:
        for node in NODES:
            subprocess.run(["docker", "rm", "-f", f"{self.name}-{node}"], capture_output=True, check=False)
        subprocess.run(["docker", "network", "rm", self.name], capture_output=True, check=False)
        subprocess.run(["docker", "volume", "rm", self.name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def slurm(request):
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"there is no image {IMAGE} (docker build -t {IMAGE} tests/cluster/slurm)")
    here = ROOT / "tests/cluster"
    files = {name: (here / name).read_text() for name in ("tiny_task.py", "tiny.yaml")}
    # 24 steps an epoch on two ranks.
    files["slow.yaml"] = files["tiny.yaml"].replace("epochs: 2", "epochs: 8\ntask_options: {delay_s: 0.05}")
    cluster = Slurm("hvdtraintest-slurm")
    try:
        batch = (ROOT / "examples/launch/slurm.sbatch").read_text()
        # These nodes have no GPUs to ask for.
        assert "#SBATCH --gpus-per-node=4\n" in batch
        cluster.up({**files, "slurm.sbatch": batch.replace("#SBATCH --gpus-per-node=4\n", "")})
        yield cluster
    finally:
        cluster.down()


def summary(slurm: Slurm, output: str) -> dict:
    return json.loads(slurm.run(f"cat {output}/summary.json").stdout)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_srun(slurm, backend):
    done = slurm.run(
        f"srun --nodes 2 --ntasks-per-node 2 hvdtrain train tiny.yaml --backend {backend} --output {backend}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    end = summary(slurm, backend)
    assert (end["status"], end["launcher"], end["ranks_agree"]) == ("done", "srun", True)
    assert (end["world"]["size"], end["world"]["num_nodes"]) == (4, 2)


def test_a_batch_job_goes_on_after_its_time(slurm):
    """examples/launch/slurm.sbatch: at USR1 it saves and goes back into the queue; its second run ends it."""
    sizes = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1"
    job = slurm.run(f"sbatch --parsable {sizes} slurm.sbatch slow.yaml batch").stdout.strip()
    assert job.isdigit()
    slurm.wait(lambda: "ready" in slurm.run(f"cat slurm-{job}.out").stdout, "the first step")
    assert slurm.run(f"scancel --signal=USR1 {job}").returncode == 0
    slurm.wait(lambda: '"stopped"' in slurm.run("cat batch/summary.json").stdout, "stopped")
    steps = summary(slurm, "batch")["steps"]
    assert 0 < steps < 192
    slurm.wait(lambda: '"done"' in slurm.run("cat batch/summary.json").stdout, "done", limit_s=120)
    assert summary(slurm, "batch")["steps"] == 192
    said = slurm.run(f"cat slurm-{job}.out").stdout
    assert f"stopped with a checkpoint; job {job} goes back into the queue" in said
    slurm.wait(lambda: slurm.run("squeue -h").stdout == "", "an empty queue")


def test_what_an_earlier_run_left_does_not_requeue_one_that_fails_at_once(slurm):
    """The second run never comes to write a summary: the first one's `stopped` must not send it back for ever."""
    assert slurm.run('mkdir stale && echo \'{"status": "stopped"}\' >stale/summary.json').returncode == 0
    sizes = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1"
    job = slurm.run(f"sbatch --parsable {sizes} slurm.sbatch none.yaml stale").stdout.strip()
    slurm.wait(lambda: slurm.run("squeue -h").stdout == "", "an empty queue")
    said = slurm.run(f"cat slurm-{job}.out").stdout
    assert "none.yaml" in said
    assert "goes back into the queue" not in said
    assert "JobState=FAILED" in slurm.run(f"scontrol show job {job}").stdout
