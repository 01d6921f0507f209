"""Each check turns what was seen into findings: the fault is named, and so is its cure."""

import dataclasses

import pytest

from hvdtrain.doctor.all_reduce_check import check_all_reduce
from hvdtrain.doctor.cpu_check import CpuSeen, check_cpu
from hvdtrain.doctor.finding import Status
from hvdtrain.doctor.horovod_check import HorovodSeen, check_horovod
from hvdtrain.doctor.limits_check import LimitsSeen, check_limits, size
from hvdtrain.doctor.mpi_check import MpiSeen, check_mpi
from hvdtrain.doctor.network_check import NetworkSeen, Nic, check_network
from hvdtrain.doctor.ssh_check import SshSeen, check_ssh
from hvdtrain.doctor.torch_check import TorchSeen, check_torch

TORCH = TorchSeen(python="3.11.2", numpy="2.1.0", torch="2.13.0+cpu", transports=("gloo",))
CUDA = dataclasses.replace(TORCH, torch="2.13.0+cu128", transports=("gloo", "nccl"), cuda="12.8", nccl="2.27.3")


def rows(findings):
    return [(finding.subject, finding.status.value) for finding in findings]


def only(findings, subject):
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1, findings
    return found[0]


def test_a_cpu_torch_without_gpu_is_all_right():
    assert rows(check_torch(TORCH, gpu=False)) == [("torch", "ok"), ("numpy", "ok"), ("cuda", "absent")]


def test_torch_that_does_not_import():
    findings = check_torch(TorchSeen(error="ModuleNotFoundError: No module named 'torch'"), gpu=False)
    assert rows(findings) == [("torch", "fault")]
    assert "No module named 'torch'" in findings[0].found
    assert "https://pytorch.org/get-started" in findings[0].cure


def test_numpy_missing():
    seen = dataclasses.replace(TORCH, numpy=None, numpy_error="ModuleNotFoundError: No module named 'numpy'")
    finding = only(check_torch(seen, gpu=False), "numpy")
    assert finding.status is Status.FAULT
    assert "No module named 'numpy'" in finding.found
    assert finding.cure.startswith("python -m pip install numpy")


@pytest.mark.parametrize(
    ("seen", "gpu", "status", "found"),
    [
        (TORCH, True, "warn", "built without CUDA"),
        (CUDA, True, "fault", "cannot use the NVIDIA device (the driver is too old)"),
        (CUDA, False, "absent", "there is no NVIDIA device here"),
        (dataclasses.replace(CUDA, cuda_available=True, devices=("H200", "H200")), True, "ok", "CUDA 12.8, 2 x H200"),
    ],
)
def test_cuda(seen, gpu, status, found):
    finding = only(check_torch(dataclasses.replace(seen, said="the driver is too old"), gpu=gpu), "cuda")
    assert finding.status.value == status
    assert found in finding.found


def test_horovod_that_fits():
    seen = HorovodSeen("/x/horovod", "0.28.1", "2.13.0+cpu", "", ("gloo", "mpi"))
    (finding,) = check_horovod(seen, "2.13.0+cpu")
    assert finding.status is Status.OK
    assert finding.found == "0.28.1, built for torch 2.13.0+cpu, with gloo, mpi"
    (finding,) = check_horovod(dataclasses.replace(seen, fast_fp16=True), "2.13.0+cpu")
    assert finding.found == "0.28.1, built for torch 2.13.0+cpu, with gloo, mpi, fast fp16 sums"


@pytest.mark.parametrize(
    ("seen", "status", "found", "cure"),
    [
        (HorovodSeen(), "absent", "not installed", "hvdtrain build-horovod"),
        (
            HorovodSeen("/x", "0.28.1", "2.1.0", "", ("gloo",)),
            "fault",
            "built for torch 2.1.0, with gloo; the installed torch is 2.13.0+cpu",
            "hvdtrain build-horovod --force",
        ),
        (
            HorovodSeen("/x", "", "2.1.0", "ImportError: /x/mpi_lib_v2.so: undefined symbol: _ZN2at1x"),
            "fault",
            "does not load: ImportError: /x/mpi_lib_v2.so: undefined symbol",
            "hvdtrain build-horovod --force",
        ),
        (
            HorovodSeen("/x", "", "2.13.0+cpu", "ImportError: libmpi.so.40: cannot open shared object file: No such"),
            "fault",
            "libmpi.so.40",
            "apt-get install -y openmpi-bin",
        ),
        (HorovodSeen("/x", "0.28.1", "2.13.0+cpu", "", ("mpi",)), "fault", "it has no gloo", "build-horovod --force"),
        (HorovodSeen("?", error="killed by SIGSEGV"), "fault", "killed by SIGSEGV", "hvdtrain build-horovod --force"),
    ],
)
def test_horovod(seen, status, found, cure):
    (finding,) = check_horovod(seen, "2.13.0+cpu")
    assert finding.status.value == status
    assert found in finding.found
    assert cure in finding.cure


@pytest.mark.parametrize(
    ("seen", "needed", "status", "found"),
    [
        (MpiSeen("mpirun (Open MPI) 4.1.4", "libmpi.so.40"), True, "ok", "libmpi.so.40 loads"),
        (MpiSeen(), False, "absent", "neither mpirun nor libmpi"),
        (MpiSeen(), True, "fault", "the installed Horovod was built with MPI"),
        (
            MpiSeen("mpirun (Open MPI) 4.1.4", None, "libmpi.so: no"),
            False,
            "fault",
            "libmpi does not load: libmpi.so: no",
        ),
        (MpiSeen(None, "libmpi.so.40"), True, "absent", "no mpirun"),
        (MpiSeen("does not run: exit status 1", "libmpi.so.40"), False, "fault", "mpirun does not run"),
        (MpiSeen("mpirun (Open MPI) 5.0.0", "libmpi.so.40"), False, "warn", "horovodrun -p fails on 5.0.0"),
    ],
)
def test_mpi(seen, needed, status, found):
    (finding,) = check_mpi(seen, needed=needed)
    assert finding.status.value == status
    assert found in finding.found


LO = Nic("lo", True, ("127.0.0.1", "::1"))
ETH0 = Nic("eth0", True, ("10.0.0.5",), 25000)
ETH1 = Nic("eth1", False, ("10.0.1.5",))
IB0 = Nic("ib0", True, ())
HOST = {"host": "node1", "host_addresses": ("10.0.0.5",)}


def test_the_network_names_what_would_be_chosen():
    findings = check_network(NetworkSeen((LO, ETH0, ETH1), "eth0", **HOST), {})
    assert rows(findings) == [("network", "ok"), ("host name", "ok")]
    assert findings[0].found == "eth0 10.0.0.5 25 Gb/s would be chosen; not usable: eth1 down 10.0.1.5"


@pytest.mark.parametrize(
    ("environ", "found", "cure"),
    [
        (
            {"GLOO_SOCKET_IFNAME": "eth1"},
            "GLOO_SOCKET_IFNAME=eth1: the interface is down",
            "unset GLOO_SOCKET_IFNAME, or name one that is alive: lo, eth0; or ip link set eth1 up",
        ),
        ({"HOROVOD_GLOO_IFACE": "ib0"}, "HOROVOD_GLOO_IFACE=ib0: the interface has no address", "alive: lo, eth0"),
        ({"NCCL_SOCKET_IFNAME": "ens"}, "NCCL_SOCKET_IFNAME=ens: this host has no such interface", "alive: lo, eth0"),
    ],
)
def test_a_dead_interface_that_was_asked_for(environ, found, cure):
    findings = check_network(NetworkSeen((LO, ETH0, ETH1, IB0), "eth0", **HOST), environ)
    assert findings[0].status is Status.FAULT
    assert findings[0].found == found
    assert cure in findings[0].cure


@pytest.mark.parametrize("value", ["eth", "eth0", "=eth0", "^docker0,lo", "eth1,eth0:1", ""])
def test_nccls_spellings_of_a_living_interface(value):
    seen = NetworkSeen((LO, ETH0), "eth0", **HOST)
    environ = {"NCCL_SOCKET_IFNAME": value.replace("eth1,", "")}
    assert rows(check_network(seen, environ)) == [("network", "ok"), ("host name", "ok")]


def test_the_only_interface_is_dead():
    findings = check_network(NetworkSeen((LO, ETH1), None, **HOST), {})
    finding = only(findings, "network")
    assert finding.status is Status.FAULT
    assert finding.found == "eth1 down 10.0.1.5: no interface is up"
    assert finding.cure.startswith("ip link set eth1 up")


def test_loopback_down():
    findings = check_network(NetworkSeen((Nic("lo", False),), None, **HOST), {})
    finding = only(findings, "loopback")
    assert finding.status is Status.FAULT
    assert finding.cure.startswith("ip link set lo up")


def test_one_host_without_a_network_is_no_fault():
    assert rows(check_network(NetworkSeen((LO,), None, **HOST), {})) == [("network", "absent"), ("host name", "ok")]


def test_a_host_name_that_nobody_knows():
    findings = check_network(NetworkSeen((LO, ETH0), "eth0", "node1", ()), {})
    finding = only(findings, "host name")
    assert finding.status is Status.WARN
    assert "/etc/hosts" in finding.cure


GOOD = LimitsSeen(2**33, 2**33, 65536, None, False, "/data", 2**40)


def test_good_limits():
    assert {status for _, status in rows(check_limits(GOOD))} == {"ok"}


@pytest.mark.parametrize(
    ("change", "subject", "status", "found", "cure"),
    [
        (
            {"shm_bytes": 2**20, "shm_free_bytes": 2**20},
            "/dev/shm",
            "fault",
            "1.0 MB, 1.0 MB free: data-loader workers and NCCL die of it with `Bus error`",
            "docker run --shm-size=2g",
        ),
        ({"shm_bytes": None}, "/dev/shm", "fault", "there is none", "--shm-size"),
        ({"shm_bytes": 64 * 2**20, "shm_free_bytes": 2**20}, "/dev/shm", "warn", "64.0 MB, 1.0 MB free", "--shm-size"),
        ({"shm_free_bytes": 2**20}, "/dev/shm", "fault", "8.0 GB, 1.0 MB free: it is full", "ls -l /dev/shm"),
        ({"open_files": 64}, "open files", "fault", "at most 64 open files", "ulimit -n 65536"),
        (
            {"memlock_bytes": 65536, "infiniband": True},
            "locked memory",
            "fault",
            "at most 64.0 KB per process: InfiniBand registers more",
            "ulimit -l unlimited",
        ),
        ({"memlock_bytes": 65536}, "locked memory", "absent", "there is none here", ""),
        ({"disk_free_bytes": 2**20}, "disk", "fault", "1.0 MB free in /data", "--output DIR"),
        ({"disk_free_bytes": 2**30}, "disk", "warn", "1.0 GB free in /data", "--output DIR"),
    ],
)
def test_limits(change, subject, status, found, cure):
    finding = only(check_limits(dataclasses.replace(GOOD, **change)), subject)
    assert finding.status.value == status
    assert found in finding.found
    assert cure in finding.cure


def test_sizes():
    assert [size(n) for n in (0, 1023, 1024, 2**20, 3 * 2**40)] == ["0 B", "1023 B", "1.0 KB", "1.0 MB", "3.0 TB"]


@pytest.mark.parametrize(
    ("seen", "environ", "status", "found"),
    [
        (CpuSeen(8, 8, None, 2**34, None), {}, "ok", "8 cores"),
        (CpuSeen(8, 2, None, 2**34, None), {}, "ok", "8 cores, this process may use 2 (affinity)"),
        (CpuSeen(8, 8, 1.5, 2**34, None), {}, "warn", "8 cores, the container may use 1.5 (cgroup)"),
        (CpuSeen(4, 4, None, 2**34, None), {"OMP_NUM_THREADS": "16"}, "warn", "OMP_NUM_THREADS=16 is more than these"),
        (CpuSeen(4, 4, None, 2**34, None), {"OMP_NUM_THREADS": "2"}, "ok", "4 cores; OMP_NUM_THREADS=2"),
    ],
)
def test_cpu(seen, environ, status, found):
    finding = only(check_cpu(seen, environ), "cpu")
    assert finding.status.value == status
    assert found in finding.found


def test_memory_limit_of_the_container():
    finding = only(check_cpu(CpuSeen(8, 8, None, 2**34, 2**31), {}), "memory")
    assert finding.found == "16.0 GB, the container may use 2.0 GB (cgroup)"


@pytest.mark.parametrize(
    ("seen", "status", "cure"),
    [
        (SshSeen(False, False), "absent", "apt-get install -y openssh-client"),
        (SshSeen(True, False), "absent", "apt-get install -y openssh-server"),
        (SshSeen(True, True, "Permission denied (publickey)"), "warn", "ssh-copy-id"),
        (SshSeen(True, True), "ok", ""),
    ],
)
def test_ssh(seen, status, cure):
    (finding,) = check_ssh(seen)
    assert finding.status.value == status
    assert cure in finding.cure


def test_all_reduces_that_cannot_be_tried_say_why():
    nothing = list(check_all_reduce(TorchSeen(error="no torch"), HorovodSeen(), {}))
    assert rows(nothing) == [("ddp gloo", "absent"), ("horovod gloo", "absent")]
    assert nothing[1].found == "not tried: Horovod not installed"
    one_gpu = TorchSeen(torch="2.13.0+cu128", transports=("nccl",), devices=("H200",))
    findings = list(check_all_reduce(one_gpu, HorovodSeen("/x", error="undefined symbol"), {}))
    assert [finding.found for finding in findings] == [
        "not tried: two ranks need two devices, here are 1",
        "not tried: Horovod does not load",
    ]
