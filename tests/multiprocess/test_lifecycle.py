"""Connecting and leaving: misuse, errors inside, a second connection in the same process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from script_ranks import run_commands, run_script
from torch import nn

import hvdtrain
from hvdtrain.backends import make_backend
from hvdtrain.errors import ContractError, LaunchError, UserError

BACKENDS = ["ddp", "horovod"]


def connect(name, **options):
    return hvdtrain.connect(name, device="cpu", keep_threads=True, **options)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


# ---- one process, alone ----


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_works_between_start_and_close_only(name: str) -> None:
    backend = connect(name)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = {
        "all_reduce": lambda: backend.all_reduce(torch.ones(1)),
        "all_gather": lambda: backend.all_gather(torch.ones(1)),
        "broadcast": lambda: backend.broadcast(torch.ones(1)),
        "broadcast_object": lambda: backend.broadcast_object(1),
        "all_gather_object": lambda: backend.all_gather_object(1),
        "barrier": backend.barrier,
        "group": lambda: backend.group([0]),
        "start_sum": lambda: backend.start_sum(torch.ones(1, dtype=torch.float64), "x"),
        "wrap": lambda: backend.wrap(model, optimizer),
    }

    def refused(state):
        for call, function in calls.items():
            with pytest.raises(ContractError) as error:
                function()
            assert str(error.value) == f"{call}() on a backend that is {state}: it works between start() and close()"

    refused("new")
    for attribute in ("world", "device", "host", "launcher", "interface"):
        with pytest.raises(ContractError, match="the backend is not started"):
            getattr(backend, attribute)
    backend.start()
    with pytest.raises(ContractError, match="already started; make a new one"):
        backend.start()
    assert (backend.world.rank, backend.world.size, backend.launcher, backend.device.type) == (0, 1, "none", "cpu")
    for call, function in calls.items():
        if call != "wrap":
            function()
    replica = backend.wrap(model, optimizer)
    with replica.microbatch(0, 1):
        replica.model(torch.ones(1, 1)).sum().backward()
    replica.finish_gradients()
    replica.step()
    replica.broadcast_state()
    backend.close()
    backend.close()
    refused("closed")
    with pytest.raises(ContractError, match="already closed; make a new one"):
        backend.start()
    with pytest.raises(ContractError, match="on a replica whose backend is closed"):
        replica.finish_gradients()
    # model and optimizer are the user's, and go on
    optimizer.zero_grad()
    replica.model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert list(replica.state_dict()["model"]) == ["weight", "bias"]


@pytest.mark.parametrize("name", BACKENDS)
def test_an_error_inside_leaves_the_process_ready_for_another_try(name: str) -> None:
    def attempt() -> None:
        with connect(name) as backend:
            model = nn.Linear(1, 1)
            replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with replica.microbatch(0, 1):
                replica.model(torch.ones(1, 1)).sum().backward()
            raise ValueError("bad batch")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad batch") as caught:
            attempt()
        assert caught.value.__cause__ is None
    with connect(name) as backend:
        assert backend.all_reduce(torch.tensor(3)).item() == 3


@pytest.mark.parametrize("name", BACKENDS)
def test_a_closed_connection_leaves_the_environment_as_it_was(name: str) -> None:
    """A loopback interface left over from a connection of one rank would be the next job's, whose ranks are far."""
    before = dict(os.environ)
    with hvdtrain.connect(name, device="cpu"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert dict(os.environ) == before
    with pytest.raises(LaunchError), hvdtrain.connect(name, device="cpu", transport="nccl"):
        pytest.fail("connected")
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", BACKENDS)
def test_a_connection_without_groups(name: str) -> None:
    with connect(name, groups=False) as backend:
        assert "HOROVOD_DYNAMIC_PROCESS_SETS" not in os.environ
        with pytest.raises(ContractError, match=r"opened with groups=False; connect with groups=True"):
            backend.group([0])


@pytest.mark.parametrize("name", BACKENDS)
def test_results_alone_are_copies(name: str) -> None:
    with connect(name) as backend:
        tensor = torch.ones(2)
        for result in (backend.all_reduce(tensor), backend.all_gather(tensor), backend.broadcast(tensor)):
            result.zero_()
        assert tensor.tolist() == [1.0, 1.0]
        assert backend.all_reduce(torch.tensor([True, True]), "mean").tolist() == [1.0, 1.0]


def test_unknown_backends_and_transports_in_their_place() -> None:
    with pytest.raises(UserError, match=r"backend 'nccl': choose one of ddp, horovod\. nccl is a transport"):
        make_backend("nccl")
    with pytest.raises(UserError, match=r"backend 'deepspeed': choose one of ddp, horovod\.$"):
        make_backend("deepspeed")


@pytest.mark.parametrize(
    ("name", "transport", "message"),
    [
        ("ddp", "nccl", "transport nccl needs CUDA devices"),
        ("ddp", "mpi", "this torch was built without MPI"),
        ("horovod", "nccl", "transport nccl needs CUDA devices"),
        ("horovod", "mpi", "the launcher is none. Start the job with mpirun"),
    ],
)
def test_transports_that_are_not_there(name: str, transport: str, message: str) -> None:
    for _ in range(2):  # the failed start leaves nothing behind
        with pytest.raises(LaunchError, match=message), connect(name, transport=transport):
            pytest.fail("connected")
    with connect(name, transport="gloo") as backend:
        assert backend.transport == "gloo"


def test_a_process_group_of_the_user_s_own_is_refused(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(ContractError, match=r"torch\.distributed is already initialised"), connect("ddp"):
            pytest.fail("connected")
        with connect("horovod") as backend:  # does not mind
            assert backend.all_reduce(torch.tensor(1)).item() == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


# ---- two processes ----

TWICE = """
import torch
for count in range(3):
    with hvdtrain.connect({name!r}, **options()) as backend:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with replica.microbatch(0, 1):
            replica.model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
        replica.finish_gradients()
        replica.step()
        group = backend.group([1])
        print(count, backend.all_reduce(torch.tensor(rank + 1)).item(), round(model.weight.item(), 3))
    # the user's model and DDP module outlive the connection
    model(torch.ones(1, 1)).sum().backward()
import os
left = {{name for name in os.environ if name.startswith("HOROVOD")}} - {{"HOROVOD_GLOO_IFACE"}}
print(sorted(left), hvdtrain.world().size)
"""


@pytest.mark.parametrize("name", BACKENDS)
def test_several_connections_one_after_the_other(tmp_path: Path, name: str) -> None:
    for rank in run_script(TWICE.format(name=name), tmp_path):
        assert rank.status == 0, rank.err
        assert rank.out == "0 3 -0.2\n1 3 -0.2\n2 3 -0.2\n[] 1\n"


def test_one_backend_after_the_other_and_both_at_once(tmp_path: Path) -> None:
    body = """
    import torch
    def show(backend):
        print(backend.name, backend.all_reduce(torch.tensor(rank + 1)).item())
    for name in ("ddp", "horovod", "ddp"):
        with hvdtrain.connect(name, **options()) as backend:
            show(backend)
    """
    for rank in run_script(body, tmp_path):
        assert rank.status == 0, rank.err
        assert rank.out == "ddp 3\nhorovod 3\nddp 3\n"


def horovodrun(tmp_path: Path, *flags: str, body: str):
    script = tmp_path / "script.py"
    script.write_text("import hvdtrain, torch\n" + body)
    command = ["horovodrun", *flags, "-np", "2", "python", str(script)]
    return run_commands(
        [command],
        tmp_path,
        environs=[{"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}],
        limit_s=120,
    )[0]


THRICE = """
import os
for count in range(3):
    with hvdtrain.connect("horovod", device="cpu", start_timeout_s=60) as backend:
        total = backend.all_reduce(torch.tensor(backend.world.rank + 1)).item()
        # In one piece, since the ranks share a pipe.
        os.write(1, f"sum {backend.transport} {total}\\n".encode())
"""


def test_several_connections_under_horovodrun_gloo(tmp_path: Path) -> None:
    ended = horovodrun(tmp_path, "--gloo", body=THRICE)
    assert ended.status == 0, ended.err
    assert ended.out.count("sum gloo 3") == 6


def test_horovod_over_mpi_connects_once_and_says_so(tmp_path: Path) -> None:
    ended = horovodrun(tmp_path, "--mpi", body=THRICE)
    assert ended.out.count("sum mpi 3") == 2
    assert ended.status != 0
    assert "Horovod over MPI connects once in a process" in ended.out + ended.err


SINGLETONS = """
import torch
with hvdtrain.connect({name!r}, device="cpu", start_timeout_s=60) as backend:
    print("trains alone")
"""


def test_silent_jobs_of_size_one_are_an_error(tmp_path: Path) -> None:
    """Intel MPI's variables, and a Horovod that was built with Open MPI and does not see them."""
    script = tmp_path / "script.py"
    script.write_text("import hvdtrain\n" + SINGLETONS.format(name="horovod"))
    port = str(free_port())
    environs = [
        {
            "PMI_RANK": str(rank),
            "PMI_SIZE": "2",
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(2)
    ]
    ranks = run_commands([["python", str(script)]] * 2, tmp_path, environs=environs, limit_s=120)
    assert [rank.status for rank in ranks] == [2, 2]
    assert "trains alone" not in ranks[0].out + ranks[1].out
    said = ranks[0].err + ranks[1].err
    assert "horovod sees rank 0 of 1, the launcher (hydra) says rank" in said
    assert ": 2 processes would each train alone. Start the job with a launcher that horovod knows" in said


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("name", BACKENDS)
def test_an_error_in_one_rank_s_start_ends_the_other(tmp_path: Path, name: str) -> None:
    body = f"""
    transport = "nccl" if rank == 1 else "auto"
    with hvdtrain.connect({name!r}, **options(transport=transport)) as backend:
        print("connected")
    """
    ranks = run_script(body, tmp_path, limit_s=60)
    assert [rank.status for rank in ranks] == [2, 2]
    assert "transport nccl needs CUDA devices" in ranks[0].err
    assert "connected" not in ranks[0].out


@pytest.mark.parametrize("name", BACKENDS)
def test_leaving_while_another_rank_works_on_is_named(tmp_path: Path, name: str) -> None:
    body = f"""
    import torch
    with hvdtrain.connect({name!r}, **options()) as backend:
        if rank == 1:
            backend.all_reduce(torch.ones(3))
    """
    ranks = run_script(body, tmp_path, limit_s=60)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "rank 0: close(); rank 1: all_reduce(float32[3], op=sum)" in ranks[0].err
