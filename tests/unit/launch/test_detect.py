"""Detection on recorded and written-down environments of every launcher, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch import slurm
from hvdtrain.launch.detect import LAUNCHERS, Detected, ManualFlags, Meeting, detect
from hvdtrain.launch.world import World

ENVIRONMENTS = sorted((Path(__file__).parent / "environments").glob("*.json"))


def load(name: str) -> dict[str, str]:
    path = Path(__file__).parent / "environments" / f"{name}.json"
    return dict(json.loads(path.read_text())["environ"])


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
def test_environment(path: Path) -> None:
    case = json.loads(path.read_text())
    detected = detect(case["environ"])
    assert detected.launcher == case["expected"]["launcher"]
    assert detected.fields() == case["expected"]["world"]
    for key, value in case["expected"]["meeting"].items():
        assert getattr(detected.meeting, key) == value


def test_every_launcher_has_an_environment() -> None:
    seen = {json.loads(path.read_text())["expected"]["launcher"] for path in ENVIRONMENTS}
    assert seen == {row.name for row in LAUNCHERS} | {"none"}


def test_precedence_takes_all_fields_from_the_first_launcher() -> None:
    """Everything set at once: each launcher in turn wins, then loses its variables to the next."""
    environ: dict[str, str] = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
    environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    names = ["torchrun", "horovodrun", "mpirun", "mvapich2", "hydra", "jsrun", "srun", "manual"]
    assert [row.name for row in LAUNCHERS] == names
    for index, row in enumerate(LAUNCHERS[1:], 1):
        # A different size each, so that mixing two launchers would show.
        for field in ("rank", "local_rank"):
            environ |= dict.fromkeys(getattr(row, field), "0")
        for field in ("size", "local_size"):
            environ |= {name: str(index + 1) for name in getattr(row, field)}
    environ |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.9", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
    environ |= {"SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "n1"}
    for index, row in enumerate(LAUNCHERS):
        detected = detect(environ)
        assert (detected.launcher, detected.size) == (row.name, 8 if index == 0 else index + 1)
        for mark in row.marks:
            del environ[mark]
        if row.name == "torchrun":
            assert environ["RANK"] == "0"
    assert detect(environ).launcher == "none"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("torchrun", "RANK"),
        ("torchrun", "WORLD_SIZE"),
        ("torchrun", "LOCAL_RANK"),
        ("torchrun", "LOCAL_WORLD_SIZE"),
        ("torchrun", "MASTER_ADDR"),
        ("torchrun", "MASTER_PORT"),
        ("horovodrun_gloo", "HOROVOD_RANK"),
        ("horovodrun_gloo", "HOROVOD_SIZE"),
        ("horovodrun_gloo", "HOROVOD_LOCAL_RANK"),
        ("horovodrun_gloo", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        ("horovodrun_gloo", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        ("openmpi", "OMPI_COMM_WORLD_RANK"),
        ("openmpi", "OMPI_COMM_WORLD_SIZE"),
        ("openmpi", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("openmpi", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("mpich", "PMI_RANK"),
        ("mpich", "PMI_SIZE"),
        ("mpich", "MPI_LOCALRANKID"),
        ("mvapich2", "MV2_COMM_WORLD_SIZE"),
        ("jsrun", "JSM_NAMESPACE_SIZE"),
        ("srun", "SLURM_LOCALID"),
        ("srun", "SLURM_STEP_NODELIST"),
        ("bare", "RANK"),
        ("bare", "WORLD_SIZE"),
        ("bare", "MASTER_ADDR"),
        ("bare", "MASTER_PORT"),
    ],
)
def test_half_set_launcher_names_the_missing_variable(name: str, missing: str) -> None:
    environ = load(name)
    del environ[missing]
    if missing == "SLURM_STEP_NODELIST":
        del environ["SLURM_NODELIST"]
    with pytest.raises(LaunchError, match=rf"\b{missing}\b") as caught:
        detect(environ)
    assert "is not" in str(caught.value) or "needs" in str(caught.value)


def test_srun_without_any_size_is_half_set() -> None:
    environ = load("srun")
    del environ["SLURM_STEP_NUM_TASKS"], environ["SLURM_NTASKS"]
    with pytest.raises(LaunchError, match="SLURM_PROCID is set but SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not"):
        detect(environ)


def test_bad_values_name_the_variable() -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE='two' is not a whole number"):
        detect(load("torchrun") | {"WORLD_SIZE": "two"})
    with pytest.raises(LaunchError, match="MASTER_PORT=70000 is not a port"):
        detect(load("bare") | {"MASTER_PORT": "70000"})
    with pytest.raises(LaunchError, match="rank 2 of 2"):
        detect(load("bare") | {"RANK": "2"})
    with pytest.raises(LaunchError, match="SLURM_STEP_TASKS_PER_NODE='2x3'"):
        detect(load("srun") | {"SLURM_STEP_TASKS_PER_NODE": "2x3"})


def test_elastic_horovodrun_is_refused() -> None:
    with pytest.raises(LaunchError, match="HOROVOD_ELASTIC=1"):
        detect(load("horovodrun_gloo") | {"HOROVOD_ELASTIC": "1"})


def test_srun_port_is_derived_alike_by_all_ranks_and_differs_between_steps() -> None:
    environ = load("srun")
    first, other_rank = detect(environ).meeting, detect(environ | {"SLURM_PROCID": "0"}).meeting
    assert first == other_rank
    assert first.port is not None
    assert 10000 <= first.port < 30000
    assert detect(environ | {"SLURM_STEP_ID": "1"}).meeting.port != first.port
    assert detect(environ | {"SLURM_JOB_ID": "4712"}).meeting.port != first.port
    assert detect(environ | {"MASTER_PORT": "29500"}).meeting == Meeting("tcp", "n01", 29500)
    assert detect(environ | {"MASTER_ADDR": "n99"}).meeting == Meeting("tcp", "n99", first.port)


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2(x2),3", [1, 2, 2, 3]), ("16(x2)", [16, 16])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert slurm.expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n[01-03,07]", "n01"),
        ("n[01-03,07],m5", "n01"),
        ("n7", "n7"),
        ("a,b", "a"),
        ("rack[2,5]node[08-10]", "rack2node08"),
        ("n[1-2]-ib", "n1-ib"),
        ("gpu-a[9]", "gpu-a9"),
    ],
)
def test_first_host(text: str, host: str) -> None:
    assert slurm.first_host(text) == host


@pytest.mark.parametrize("text", ["", "n[01-03", ",n1"])
def test_first_host_refuses(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST"):
        slurm.first_host(text)


def test_flags_go_before_every_launcher() -> None:
    flags = ManualFlags("tcp://10.0.0.1:29500", rank=1, world_size=3)
    for path in ENVIRONMENTS:
        detected = detect(json.loads(path.read_text())["environ"], flags)
        assert detected == Detected("manual", 1, 3, meeting=Meeting("tcp", "10.0.0.1", 29500))


@pytest.mark.parametrize(
    ("url", "meeting"),
    [
        ("tcp://10.0.0.1:29500", Meeting("tcp", "10.0.0.1", 29500)),
        ("tcp://[fd00::2]:29500", Meeting("tcp", "fd00::2", 29500)),
        ("file:///shared/meet", Meeting("file", path="/shared/meet")),
        ("env://", Meeting("tcp", "node1", 1234)),
        (None, Meeting("tcp", "node1", 1234)),
    ],
)
def test_flag_urls(url: str | None, meeting: Meeting) -> None:
    environ = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
    detected = detect(environ, ManualFlags(url, rank=0, world_size=2, local_rank=0))
    assert detected == Detected("manual", 0, 2, local_rank=0, meeting=meeting)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (ManualFlags("tcp://h:1", rank=0), "--rank is given without --world-size"),
        (ManualFlags("tcp://h:1", world_size=2), "--world-size is given without --rank"),
        (ManualFlags("tcp://h", rank=0, world_size=2), "write tcp://HOST:PORT"),
        (ManualFlags("tcp://h:x", rank=0, world_size=2), "write tcp://HOST:PORT"),
        (ManualFlags("tcp://h:99999", rank=0, world_size=2), "write tcp://HOST:PORT"),
        (ManualFlags("file://meet", rank=0, world_size=2), "three slashes"),
        (ManualFlags("udp://h:1", rank=0, world_size=2), "use tcp://HOST:PORT, file:///PATH or env://"),
        (ManualFlags("env://", rank=0, world_size=2), "needs MASTER_ADDR and MASTER_PORT"),
        (ManualFlags(rank=0, world_size=2), "needs MASTER_ADDR and MASTER_PORT"),
        (ManualFlags("tcp://h:1"), "pass --rank and --world-size"),
        (ManualFlags("env://"), "RANK is not set"),
        (ManualFlags("tcp://h:1", rank=2, world_size=2), "rank 2 of 2"),
    ],
)
def test_flag_errors(flags: ManualFlags, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        detect({}, flags)


def test_init_method_alone_keeps_the_launchers_ranks() -> None:
    detected = detect(load("openmpi_two_hosts"), ManualFlags("tcp://node1:29500"))
    assert (detected.launcher, detected.rank, detected.size) == ("mpirun", 3, 4)
    assert detected.meeting == Meeting("tcp", "node1", 29500)


def test_local_rank_argument_of_torch_distributed_launch_changes_nothing() -> None:
    environ = load("torch_distributed_launch")
    assert detect(environ, ManualFlags(local_rank=1)) == detect(environ)


def test_one_rank_by_hand_needs_no_address() -> None:
    detected = detect({}, ManualFlags(rank=0, world_size=1))
    assert (detected.world, detected.meeting.kind) == (World(), "single")


def test_jobs_are_told_apart() -> None:
    environ = load("torchrun")
    assert detect(environ).job != detect(environ | {"TORCHELASTIC_RESTART_COUNT": "1"}).job
    environ = load("openmpi")
    assert detect(environ).job != detect(environ | {"PMIX_NAMESPACE": "1"}).job
    assert detect(load("bare")).job == ""
