"""Ranks meet under every real launcher and by hand; every way to get it wrong is an error with a name."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import meet
import pytest

from hvdtrain.launch import free_port
from hvdtrain.launch.network import listening_socket, loopback_interface

MEET = str(Path(__file__).parent / "meet.py")
LIMIT_S = 120
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not built")


def clean_environment() -> dict[str, str]:
    """This process's environment, without what a launcher or a user may have set."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "HOROVOD_", "TORCHELASTIC_", "GLOO_", "NCCL_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}
    return environ | {"PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', '')}"}


def start(*command: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command], env=clean_environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


class Rank:
    """A rank that is not started by a real launcher: a fork of a process that has torch imported, so quick to start."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hvdtrain.launch.rendezvous", "hvdtrain.launch.devices"])

    def __init__(self, **variables: str) -> None:
        handle, self.output = tempfile.mkstemp()
        os.close(handle)
        self.process = self.context.Process(target=meet.run, args=(clean_environment() | variables, self.output))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.join()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.process.join(timeout)
        path = Path(self.output)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("meet.py", timeout or 0, path.read_text())
        text = path.read_text()
        path.unlink()
        return text, None


def by_hand(rank: int, size: int, init_method: str, **variables: str) -> Rank:
    flags = {"init_method": init_method, "rank": rank, "world_size": size}
    return Rank(FLAGS=json.dumps(flags), **variables)


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str] | Rank) -> Iterator[list[str]]:
    """The outputs of processes that were started; whatever happens, none is left."""
    try:
        yield [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def results(text: str) -> list[dict[str, object]]:
    """The RESULT lines in rank order, whatever a launcher puts before them."""
    found = [json.loads(line.partition("RESULT ")[2]) for line in text.splitlines() if "RESULT " in line]
    return sorted(found, key=lambda result: result["place"][0])


def errors(text: str) -> list[str]:
    return [line.partition("ERROR ")[2] for line in text.splitlines() if "ERROR " in line]


def check_two(found: list[dict[str, object]], launcher: str, meeting: int = 0) -> None:
    """Two ranks on this host agree about everything."""
    assert [result["place"] for result in found] == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]
    for result in found:
        assert result["launcher"] == launcher
        assert result["texts"] == [f"{meeting}.0", f"{meeting}.1"]
        assert result["keys"] == [str(meeting)] * 2
        assert result["interface"] == loopback_interface()
        assert result["address"] == found[0]["address"]
        assert result["port"] == found[0]["port"]


LAUNCHERS = [
    pytest.param(["torchrun", "--standalone", "--nproc_per_node", "2"], "torchrun", id="torchrun"),
    pytest.param(
        [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2"],
        "torchrun",
        id="torch.distributed.launch",
    ),
    pytest.param(
        ["horovodrun", "--gloo", "-np", "2", sys.executable],
        "horovodrun",
        id="horovodrun-gloo",
        marks=needs_horovod,
    ),
    pytest.param(
        ["horovodrun", "--mpi", "-np", "2", sys.executable],
        "mpirun",
        id="horovodrun-mpi",
        marks=[needs_horovod, needs_mpi],
    ),
    pytest.param(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
        "mpirun",
        id="mpirun",
        marks=needs_mpi,
    ),
]


@pytest.mark.parametrize(("command", "launcher"), LAUNCHERS)
def test_real_launcher(command: list[str], launcher: str) -> None:
    """Three meetings one after another in the same processes: none sees the keys of another."""
    process = start(*command, MEET, MEETINGS="3")
    with ended(process) as (output,):
        found = results(output)
        assert process.returncode == 0, output
    check_two(found, launcher, meeting=2)
    cores = len(os.sched_getaffinity(0))
    if "mpirun" not in command:  # mpirun binds each of two ranks to a core of its own
        assert [result["threads"] for result in found] == [max(1, cores // 2)] * 2


def test_torchrun_starts_again_after_a_failure(tmp_path: Path) -> None:
    """The agent's store outlives the first attempt, whose keys must not answer in the second."""
    marker = tmp_path / "failed"
    script = tmp_path / "fail_once.py"
    script.write_text(
        "import os, pathlib, runpy, sys\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        f"sys.path.insert(0, {str(Path(MEET).parent)!r})\n"
        "import meet\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "status = meet.main()\n"
        "sys.exit(3 if first else status)\n"
    )
    process = start("torchrun", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1", str(script))
    with ended(process) as (output,):
        assert process.returncode == 0, output
        assert len(results(output)) == 4
        assert errors(output) == []


def test_two_torchruns_as_two_nodes() -> None:
    port = str(free_port())
    common = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port, MEET]
    nodes = [start("torchrun", "--node_rank", str(node), *common) for node in range(2)]
    with ended(*nodes) as outputs:
        found = results("".join(outputs))
    assert [result["place"] for result in found] == [[0, 2, 0, 1, 0, 2], [1, 2, 0, 1, 1, 2]]


@needs_mpi
def test_mpirun_with_an_init_method() -> None:
    flags = json.dumps({"init_method": f"tcp://127.0.0.1:{free_port()}"})
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, MEET]
    process = start(*command, FLAGS=flags)
    with ended(process) as (output,):
        check_two(results(output), "mpirun")


def test_manual_tcp_any_order() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with ended(by_hand(0, 2, url, LATE_S="1", MEETINGS="2"), by_hand(1, 2, url, MEETINGS="2")) as outputs:
        check_two(results("".join(outputs)), "manual", meeting=1)


def test_manual_tcp_own_host_name_and_ipv6() -> None:
    port = free_port()
    for host in (socket.gethostname(), "[::1]"):
        try:
            with listening_socket(0, "::1"):
                pass
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError:
            pytest.skip(f"{host} is not to be had here")
        url = f"tcp://{host}:{port}"
        with ended(by_hand(0, 2, url), by_hand(1, 2, url)) as outputs:
            check_two(results("".join(outputs)), "manual")


def test_manual_file_is_removed_afterwards(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet"
    with ended(by_hand(0, 2, url, MEETINGS="2"), by_hand(1, 2, url, MEETINGS="2")) as outputs:
        check_two(results("".join(outputs)), "manual", meeting=1)
    assert list(tmp_path.iterdir()) == []


def test_environment_by_hand() -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [Rank(RANK=str(rank), **variables) for rank in range(2)]
    with ended(*ranks) as outputs:
        check_two(results("".join(outputs)), "manual")


def test_srun_environment_with_a_derived_port() -> None:
    variables = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": socket.gethostname(),
        "SLURM_NODEID": "0",
    }
    ranks = [Rank(SLURM_PROCID=str(r), SLURM_LOCALID=str(r), **variables) for r in range(2)]
    with ended(*ranks) as outputs:
        check_two(results("".join(outputs)), "srun")


def test_hydra_environment_meets_through_the_parent_process() -> None:
    """Two ranks of one parent, as hydra_pmi_proxy starts them: nothing else names the job."""
    variables = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    ranks = [Rank(PMI_RANK=str(r), MPI_LOCALRANKID=str(r), **variables) for r in range(2)]
    with ended(*ranks) as outputs:
        check_two(results("".join(outputs)), "hydra")


def test_named_interface(tmp_path: Path) -> None:
    lo = loopback_interface()
    url = f"file://{tmp_path}/meet"
    with ended(by_hand(0, 2, url, INTERFACE=lo), by_hand(1, 2, url, INTERFACE=lo)) as outputs:
        check_two(results("".join(outputs)), "manual")
    process = by_hand(0, 2, url, INTERFACE="ib77")
    with ended(process) as (output,):
        assert process.returncode == 2
        assert f"ib77 is not there, or is down or without an address, on host {socket.gethostname()}" in output


# ---------------------------------------------------------------- what goes wrong


def test_missing_ranks_are_listed() -> None:
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    ranks = [by_hand(rank, 6, url, TIMEOUT_S="4") for rank in (0, 2)]
    with ended(*ranks) as outputs:
        assert [process.returncode for process in ranks] == [2, 2]
    for output in outputs:
        (message,) = errors(output)
        assert f"only 2 of 6 ranks came to 127.0.0.1:{port} within 4 s. Missing: ranks 1, 3-5." in message
        assert socket.gethostname().split(".")[0] in message


def test_rank_0_missing() -> None:
    port = free_port()
    process = by_hand(1, 2, f"tcp://127.0.0.1:{port}", TIMEOUT_S="2")
    with ended(process) as (output,):
        assert process.returncode == 2
    (message,) = errors(output)
    assert f"rank 0 does not answer on 127.0.0.1:{port} within 2 s (Connection refused). Missing: rank 0." in message
    assert "127.0.0.1 means this same host on every host" in message


def test_duplicate_rank_names_both_processes() -> None:
    port = free_port()
    ranks = [by_hand(rank, 3, f"tcp://127.0.0.1:{port}", TIMEOUT_S="30") for rank in (0, 1, 1)]
    with ended(*ranks) as outputs:
        assert [process.returncode for process in ranks] == [2, 2, 2]
    for output in outputs:
        (message,) = errors(output)
        assert f"rank 1 is claimed twice on 127.0.0.1:{port}: by process " in message
        assert str(ranks[1].pid) in message
        assert str(ranks[2].pid) in message


def test_node_rank_given_twice() -> None:
    """What the ranks of three static torchruns see, two of them with node_rank 1."""
    port = str(free_port())
    variables = {"TIMEOUT_S": "30", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    variables |= {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "3"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [Rank(RANK=str(r), GROUP_RANK=str(r), **variables) for r in (0, 1, 1)]
    with ended(*ranks) as outputs:
        for output in outputs:
            (message,) = errors(output)
            assert "rank 1 is claimed twice" in message
            assert "Was node_rank 1 given to two hosts?" in message


def test_different_world_sizes() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [by_hand(0, 2, url, TIMEOUT_S="30"), by_hand(1, 3, url, TIMEOUT_S="30")]
    with ended(*ranks) as outputs:
        assert [process.returncode for process in ranks] == [2, 2]
    for output in outputs:
        assert "was started for 3 ranks, but rank 0 for 2" in errors(output)[0]


def test_busy_port_names_its_user() -> None:
    with listening_socket(0, "127.0.0.1") as holder:
        port = holder.getsockname()[1]
        process = by_hand(0, 2, f"tcp://127.0.0.1:{port}", TIMEOUT_S="20")
        with ended(process) as (output,):
            assert process.returncode == 2
    (message,) = errors(output)
    assert f"cannot listen on port {port}: it is in use by process {os.getpid()} (" in message


def test_foreign_server_on_the_port() -> None:
    """A server that accepts and says nothing: torch's own store would wait for ever."""
    with listening_socket(0, "127.0.0.1") as holder:
        port = holder.getsockname()[1]
        process = by_hand(1, 2, f"tcp://127.0.0.1:{port}", TIMEOUT_S="3")
        with ended(process) as (output,):
            assert process.returncode == 2
    assert f"what listens on 127.0.0.1:{port} is not the store of rank 0" in errors(output)[0]


def test_address_of_another_host_is_said_at_once() -> None:
    begin = time.monotonic()
    process = by_hand(0, 2, "tcp://203.0.113.9:29500", TIMEOUT_S="100")
    with ended(process) as (output,):
        assert process.returncode == 2
    assert time.monotonic() - begin < 60
    (message,) = errors(output)
    assert f"rank 0 runs on host {socket.gethostname()}, which does not have the address 203.0.113.9" in message
    assert "127.0.0.1 (lo)" in message


def test_unknown_name() -> None:
    process = by_hand(1, 2, "tcp://no-such-host.invalid:29500", TIMEOUT_S="2")
    with ended(process) as (output,):
        assert process.returncode == 2
    assert "the name no-such-host.invalid of rank 0's host does not resolve" in errors(output)[0]


def stale_address(port: int) -> str:
    """What a killed rank 0 of an earlier run leaves behind."""
    fields = {"hvdtrain": "rank 0", "addresses": ["127.0.0.1"], "port": port, "nonce": "ab" * 16, "meeting": 1}
    return json.dumps(fields | {"host": "elsewhere", "host_id": "0" * 16})


@pytest.mark.parametrize("late", [0, 1], ids=["rank 0 late", "rank 1 late"])
def test_stale_file_neither_hangs_nor_mixes_in(tmp_path: Path, late: int) -> None:
    path = tmp_path / "meet"
    path.write_text(stale_address(free_port()))
    ranks = [by_hand(rank, 2, f"file://{path}", LATE_S="2" if rank == late else "0") for rank in range(2)]
    with ended(*ranks) as outputs:
        check_two(results("".join(outputs)), "manual")
    assert not path.exists()


def test_file_of_a_killed_run(tmp_path: Path) -> None:
    """A real one: rank 0 is killed while it waits, its port is then taken by somebody else."""
    path = tmp_path / "meet"
    first = by_hand(0, 2, f"file://{path}")
    while not path.exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.communicate()
    with listening_socket(json.loads(path.read_text())["port"]):
        ranks = [by_hand(rank, 2, f"file://{path}") for rank in (1, 0)]
        with ended(*ranks) as outputs:
            check_two(results("".join(outputs)), "manual")


def test_file_with_something_else_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.write_bytes(b"\x00\x01 my data")
    ranks = [by_hand(rank, 2, f"file://{path}") for rank in range(2)]
    with ended(*ranks) as outputs:
        check_two(results("".join(outputs)), "manual")
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == b"\x00\x01 my data"


def test_file_in_use_by_a_living_rank_0(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    first = by_hand(0, 2, f"file://{path}", TIMEOUT_S="60")
    while not path.exists():
        assert first.poll() is None
        time.sleep(0.05)
    second = by_hand(0, 2, f"file://{path}", TIMEOUT_S="60")
    with ended(second) as (output,):
        assert second.returncode == 2
        assert f"the file {path} is in use by a rank 0 that runs on host" in errors(output)[0]
        peer = by_hand(1, 2, f"file://{path}")
        with ended(first, peer) as outputs:
            check_two(results("".join(outputs)), "manual")


def test_file_without_rank_0(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.write_text(stale_address(free_port()))
    process = by_hand(1, 2, f"file://{path}", TIMEOUT_S="2")
    with ended(process) as (output,):
        assert process.returncode == 2
    (message,) = errors(output)
    assert f"rank 0 has not written its address to {path} within 2 s" in message
    assert "so it is of an earlier run" in message


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    process = by_hand(0, 2, f"file://{tmp_path}/nowhere/meet", TIMEOUT_S="5")
    with ended(process) as (output,):
        assert process.returncode == 2
    assert f"cannot write its address to {tmp_path}/nowhere/meet: No such file or directory" in errors(output)[0]


def test_port_of_another_job() -> None:
    """Rank 1 of one Slurm job comes to the port of another: said at once, and the other job is not disturbed."""
    port = free_port()
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    root = Rank(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_JOB_ID="1", **variables)
    stray = Rank(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_JOB_ID="2", **variables)
    with ended(stray) as (output,):
        assert stray.returncode == 2
        assert f"127.0.0.1:{port} serves another job (srun/1/0, this one is srun/2/0)" in errors(output)[0]
    peer = Rank(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_JOB_ID="1", **variables)
    with ended(root, peer) as outputs:
        check_two(results("".join(outputs)), "srun")


def test_horovodrun_server_gone() -> None:
    variables = {f"HOROVOD_{k}": "1" for k in ("RANK", "LOCAL_RANK")} | {
        f"HOROVOD_{k}": "2" for k in ("SIZE", "LOCAL_SIZE")
    }
    variables |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_port())}
    process = Rank(TIMEOUT_S="2", **variables)
    with ended(process) as (output,):
        assert process.returncode == 2
    assert "no answer from the server of horovodrun on 127.0.0.1:" in errors(output)[0]


def test_mpirun_on_several_hosts_without_an_address_says_what_to_pass() -> None:
    if importlib.util.find_spec("mpi4py") is not None:
        pytest.skip("mpi4py hands the address over")
    variables = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    variables |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    process = Rank(**variables)
    with ended(process) as (output,):
        assert process.returncode == 2
    (message,) = errors(output)
    assert "-x MASTER_ADDR=HOST -x MASTER_PORT=PORT" in message
    assert "pip install 'hvdtrain[mpi]'" in message
