"""Every launch line, on real hosts, with both backends: the job ends, all ranks took part and agree."""

from __future__ import annotations

import json
import re

import pytest

ALL = "host1:4,host2:4,host3:4,host4:4"
SSH = "-mca plm_rsh_args '-p 12345' -mca btl_tcp_if_include eth0"
MPI = "-bind-to none -map-by slot -mca pml ob1 -mca btl ^openib " + SSH
TWO = "--nnodes 2 --node_rank {} --nproc_per_node 2 --master_addr host1"
BACKENDS = ["ddp", "horovod"]

# What every complete run of the tiny job must have reached: 192 samples, 4 a microbatch, 2 epochs.
STEPS = {16: 6, 6: 16, 4: 24, 3: 32, 2: 48}


def launcher(name: str) -> str:
    return {
        "horovodrun-gloo": "horovodrun --gloo --start-timeout 1000 --verbose -np 16 -H {all} -p 12345",
        "horovodrun-mpi": "horovodrun --mpi --start-timeout 1000 --verbose -np 16 -H {all} -p 12345",
    }[name].format(all=ALL)


def train(output: str, backend: str, *more: str) -> str:
    return " ".join(["hvdtrain train tiny.yaml --output", output, "--backend", backend, *more])


def judge(summary: dict, size: int, backend: str) -> None:
    assert summary["status"] == "done"
    assert summary["backend"] == backend
    assert summary["world"]["size"] == size
    assert summary["steps"] == STEPS[size]
    assert summary["ranks_agree"] is True


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["horovodrun-gloo", "horovodrun-mpi"])
def test_sixteen_ranks_on_four_hosts(hosts, output, summary_of, name, backend):
    """`hvdtrain launch` with 16 ranks: test_agreement.py."""
    done = hosts.run(f"{launcher(name)} {train(output, backend)}", limit_s=800)
    assert done.status == 0, done.text
    # Open MPI's complaint where a container forbids reading another process's memory.
    assert "Read -1, expected" not in done.text
    judge(summary_of(output), 16, backend)


@pytest.mark.parametrize(
    "line",
    [
        "horovodrun --gloo -p 12345 -np 6 -H host2:4,host1:2",
        f"mpirun --allow-run-as-root --tag-output -np 6 -H host2:4,host1:2 -x NCCL_SOCKET_IFNAME=eth0 {SSH}",
        "hvdtrain launch -p 12345 -np 6 -H host2:4,host1:2",
    ],
    ids=["horovodrun", "mpirun", "launch"],
)
def test_uneven_slots(hosts, line):
    """Each rank's own view: six ranks in all, four of them on host2, numbered from 0 on each host."""
    done = hosts.run(f"{line} bash -c 'echo place $(hostname) $(hvdtrain world --json)'")
    assert done.status == 0, done.text
    places = [(host, json.loads(text)["world"]) for host, text in re.findall(r"place (\S+) (\{.*\})", done.text)]
    assert sorted(world["rank"] for _, world in places) == [0, 1, 2, 3, 4, 5]
    assert {world["size"] for _, world in places} == {6}
    for host, slots in (("host1", 2), ("host2", 4)):
        here = [world for name, world in places if name == host]
        assert sorted(world["local_rank"] for world in here) == list(range(slots))
        assert {world["local_size"] for world in here} == {slots}
        node = {"host2": 0, "host1": 1}[host]
        for world in here:
            if "mpirun" in line:
                # Open MPI does not say which node this is; the ranks learn it from each other when they meet.
                assert (world["node_rank"], world["num_nodes"]) == (None, None)
            elif "horovodrun" in line and world["local_rank"] >= 2:
                # Horovod's cross size counts the hosts that have this local rank: only host2 has.
                assert (world["node_rank"], world["num_nodes"]) == (0, 1)
            else:
                assert (world["node_rank"], world["num_nodes"]) == (node, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "line", ["horovodrun --gloo -p 12345", f"mpirun --allow-run-as-root {SSH}"], ids=["horovodrun", "mpirun"]
)
def test_training_on_uneven_slots(hosts, output, summary_of, line, backend):
    more = "-x MASTER_ADDR=host1 -x MASTER_PORT=29511" if line.startswith("mpirun") else ""
    done = hosts.run(f"{line} -np 3 -H host2:2,host1:1 {more} {train(output, backend)}")
    assert done.status == 0, done.text
    judge(summary_of(output), 3, backend)
    assert summary_of(output)["world"]["num_nodes"] == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("master", ["-x MASTER_ADDR -x MASTER_PORT", ""], ids=["master", "no-master"])
def test_mpirun(hosts, output, summary_of, master, backend):
    environ = {"MASTER_ADDR": "host1", "MASTER_PORT": "29512"} if master else {}
    done = hosts.run(
        f"mpirun --allow-run-as-root -np 4 -H host1:2,host2:2 {master} {MPI} {train(output, backend)}", **environ
    )
    assert done.status == 0, done.text
    judge(summary_of(output), 4, backend)
    assert summary_of(output)["launcher"] == "mpirun"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "line",
    [
        "torchrun {two} --master_port 29513",
        "python -m torch.distributed.launch {two} --master_port 29514",
        "torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint host1:29515 --rdzv_id {job}",
    ],
    ids=["torchrun", "torch.distributed.launch", "c10d"],
)
def test_torchrun_once_per_host(hosts, output, summary_of, line, backend):
    command = train(output, backend).replace("hvdtrain train", "-m hvdtrain train")
    ended = on_each(hosts, [f"{line.format(two=TWO.format(node), job=backend)} {command}" for node in range(2)])
    assert [done.status for done in ended] == [0, 0], "\n".join(done.text for done in ended)
    judge(summary_of(output), 4, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["tcp://host1:29516", "file://{output}.meeting"], ids=["tcp", "file"])
def test_by_hand(hosts, output, summary_of, method, backend):
    """run.sh on each machine: a rank per visible device, or num_procs."""
    url = method.format(output=output)
    script = "/examples/launch/run.sh" if hosts.kind == "containers" else "run.sh"
    if hosts.kind == "namespaces":
        from cluster_hosts import ROOT

        hosts.write(f"{hosts.shared}/run.sh", (ROOT / "examples/launch/run.sh").read_text())
    hosts.run(f"mkdir -p $(dirname {output})")
    options = train(output, backend).removeprefix("hvdtrain train ")
    ended = on_each(
        hosts, [f"num_nodes=2 node_rank={n} num_procs=2 init_method={url} bash {script} {options}" for n in range(2)]
    )
    assert [done.status for done in ended] == [0, 0], "\n".join(done.text for done in ended)
    judge(summary_of(output), 4, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_srun(hosts, output, summary_of, backend):
    """The variables that srun sets, recorded from Slurm 22.05: two nodes of two tasks."""
    if hosts.kind == "containers":
        pytest.skip("test_slurm.py starts Slurm itself")
    lines = []
    for node in range(2):
        ranks = []
        for local in range(2):
            variables = {
                "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": 2 * node + local, "SLURM_LOCALID": local,
                "SLURM_NODEID": node, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_NUM_NODES": 2,
                "SLURM_STEP_TASKS_PER_NODE": "'2(x2)'", "SLURM_STEP_NODELIST": "'host[1-2]'", "SLURM_NNODES": 2,
                "SLURM_TASKS_PER_NODE": "'2(x2)'", "SLURM_JOB_NODELIST": "'host[1-2]'", "SLURM_JOB_NUM_NODES": 2,
            }  # fmt: skip
            ranks.append(
                " ".join(f"{k}={v}" for k, v in variables.items()) + f" {train(output, backend)} & a{local}=$!"
            )
        lines.append("\n".join(ranks) + "\nwait $a0 && wait $a1")
    ended = on_each(hosts, lines)
    assert [done.status for done in ended] == [0, 0], "\n".join(done.text for done in ended)
    judge(summary_of(output), 4, backend)
    assert summary_of(output)["launcher"] == "srun"


def on_each(hosts, lines):
    """One line on each of the first hosts, at the same time; the later hosts begin first."""
    started = {
        host: hosts.start(line, host=host) for host, line in reversed(list(zip(hosts.names, lines, strict=False)))
    }
    return [started[host].finish(280) for host in hosts.names if host in started]
