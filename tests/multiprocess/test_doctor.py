"""`hvdtrain doctor` on this machine, and on this machine with a fault planted for real."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from shadow_environment import make_environment

from hvdtrain.horovod_build.explain import explain_import_failure
from hvdtrain.horovod_build.installed import find_installed

LIMIT_S = 200
PLAIN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
}


def run(command, environ=None):
    environ = {**PLAIN, **(environ or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ, check=False)


def doctor(*options, python=sys.executable, environ=None, prelude=None):
    """Run the doctor; returns its exit status and {subject: finding}.

    Args:
        prelude: shell commands that plant a fault, run as root in namespaces of their own.
    """
    command = [python, "-m", "hvdtrain", "doctor", "--json", *options]
    if prelude is not None:
        command = [*namespaces(), "sh", "-ec", f'{prelude}\nexec "$@"', "sh", *map(str, command)]
    done = run(command, environ)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["ok"] == (done.returncode == 0)
    assert done.returncode == (1 if any(f["status"] == "fault" for f in seen["findings"]) else 0)
    findings = {}
    for finding in seen["findings"]:
        # Several rows of one subject: the worst comes first.
        findings.setdefault(finding["subject"], finding)
    return done.returncode, findings


def namespaces():
    """A command that runs another as root in a mount and a network namespace of its own; skips where it may not."""
    for command in (["unshare", "-m", "-n"], ["unshare", "-r", "-m", "-n"]):
        if shutil.which("unshare") and run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode == 0:
            return command
    pytest.skip("needs root or user namespaces, to plant the fault for real")


@pytest.fixture(scope="module")
def installed():
    found = find_installed()
    if found is None or found.extension is None:
        pytest.skip("Horovod is not installed: run `hvdtrain build-horovod`")
    return found


@pytest.fixture
def damaged(installed, tmp_path):
    """A function: an environment with a copy of the installed Horovod, one string of its library replaced."""

    def damage(pattern, replacement):
        python, site_packages = make_environment(tmp_path / "env", without=("horovod",))
        shutil.copytree(installed.folder, site_packages / "horovod")
        library = site_packages / "horovod" / "torch" / installed.extension.name
        original = library.read_bytes()
        found = re.search(pattern, original)
        if found is None:
            pytest.skip(f"the installed Horovod has no {pattern!r}")
        assert len(found.group()) == len(replacement(found.group()))
        library.write_bytes(original.replace(found.group(), replacement(found.group())))
        return python, site_packages

    return damage


def import_error(python):
    done = run([python, "-c", "import horovod.torch"])
    assert done.returncode == 1
    return done.stderr


def test_this_machine():
    done = run([sys.executable, "-m", "hvdtrain", "doctor"])
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in done.stdout
    rows = {line[7:25].strip(): line for line in lines if line[:1].strip() and line[6:7] == " " and line[25:]}
    assert rows["torch"].startswith("ok ")
    assert rows["numpy"].startswith("ok ")
    assert rows["ddp gloo"] == f"{'ok':<7}{'ddp gloo':<18}two-process all-reduce: right sum on both"
    assert {"horovod", "mpi", "network", "/dev/shm", "open files", "locked memory", "disk", "cpu", "ssh"} <= set(rows)
    if find_installed() is not None:
        assert rows["horovod gloo"].endswith("two-process all-reduce: right sum on both")
    assert done.returncode == (1 if "FAULT" in done.stdout else 0)
    assert ("no faults" in lines[-1]) == (done.returncode == 0)


def test_it_looks_at_the_machine_and_not_at_the_job_it_is_started_in():
    """Inside a launcher's environment the all-reduces are still two ranks of their own."""
    environ = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.77", "MASTER_PORT": "1", "HOROVOD_SIZE": "8"}
    environ |= {"HOROVOD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}
    _, findings = doctor(environ=environ)
    assert findings["ddp gloo"]["status"] == "ok"
    if find_installed() is not None:
        assert findings["horovod gloo"]["status"] == "ok"


def test_numpy_missing(tmp_path):
    python, _ = make_environment(tmp_path / "env", without=("numpy",))
    status, findings = doctor("--quick", python=python)
    assert status == 1
    assert findings["numpy"] == {
        "status": "fault",
        "subject": "numpy",
        "found": "does not import: ModuleNotFoundError: No module named 'numpy'",
        "cure": "python -m pip install numpy (torch's data loader, TensorBoard and Horovod need it)",
    }


def test_horovod_not_installed_is_no_fault(tmp_path):
    python, _ = make_environment(tmp_path / "env", without=("horovod",))
    _, findings = doctor("--quick", python=python)
    assert findings["horovod"]["status"] == "absent"
    assert "hvdtrain build-horovod" in findings["horovod"]["cure"]
    assert "Horovod is not installed" in explain_import_failure(import_error(python))


def test_horovod_built_for_another_torch_does_not_load(damaged):
    """The library asks for a symbol that this torch does not have: the dynamic loader says so itself."""
    python, site_packages = damaged(rb"_ZN2at4_ops\w+", lambda symbol: symbol[:-1] + b"9")
    (site_packages / "horovod" / "metadata.json").write_text('{"pytorch": "2.1.0"}')
    status, findings = doctor("--quick", python=python)
    assert status == 1
    finding = findings["horovod"]
    assert finding["status"] == "fault"
    assert "built for torch 2.1.0; does not load" in finding["found"]
    assert "undefined symbol: _ZN2at4_ops" in finding["found"]
    assert finding["cure"].startswith("The installed Horovod was built for another torch than the installed one")
    assert "`hvdtrain build-horovod --force`" in finding["cure"]
    assert "`hvdtrain build-horovod --force`" in explain_import_failure(import_error(python))


def test_horovod_built_for_another_torch_that_loads_by_luck(installed, tmp_path):
    python, site_packages = make_environment(tmp_path / "env", without=("horovod",))
    shutil.copytree(installed.folder, site_packages / "horovod")
    (site_packages / "horovod" / "metadata.json").write_text('{"pytorch": "2.12.1"}')
    status, findings = doctor("--quick", python=python)
    assert status == 1
    assert findings["horovod"]["status"] == "fault"
    assert "built for torch 2.12.1" in findings["horovod"]["found"]
    assert findings["horovod"]["cure"].startswith("hvdtrain build-horovod --force")


def test_the_mpi_library_of_the_wheel_is_missing(damaged):
    """The wheel asks for an MPI that is not here, as on a host with another one or none."""
    python, _ = damaged(rb"libmpi\.so\.\d\d\0", lambda _: b"libmpi.so.99\0")
    status, findings = doctor("--quick", python=python)
    assert status == 1
    assert "libmpi.so.99: cannot open shared object file" in findings["horovod"]["found"]
    assert "apt-get install -y openmpi-bin" in findings["horovod"]["cure"]
    assert "--without-mpi" in findings["horovod"]["cure"]
    assert "the MPI library is missing here" in explain_import_failure(import_error(python))


def test_libmpi_removed_from_the_system(installed):
    """A copy of the library folder without libmpi is laid over it, in a namespace of its own."""
    linked = run(["ldd", installed.extension]).stdout
    found = re.search(r"libmpi\.so\.\d+ => (\S+)", linked)
    if found is None:
        pytest.skip("the installed Horovod was built without MPI")
    folder, library = os.path.split(found.group(1))
    folder = os.path.realpath(folder)
    prelude = (
        "ip link set lo up; mount -t tmpfs tmpfs /mnt; mkdir /mnt/upper /mnt/work\n"
        f"mount -t overlay overlay -o lowerdir={folder},upperdir=/mnt/upper,workdir=/mnt/work {folder}\n"
        f"rm {folder}/libmpi.so*"
    )
    if run([*namespaces(), "sh", "-ec", prelude]).returncode != 0:
        pytest.skip("overlay mounts are not possible here")
    status, findings = doctor(prelude=prelude)
    assert status == 1
    assert f"{library}: cannot open shared object file" in findings["horovod"]["found"]
    assert "apt-get install -y openmpi-bin" in findings["horovod"]["cure"]
    assert findings["mpi"]["status"] == "fault"
    assert findings["mpi"]["cure"] == "apt-get install -y openmpi-bin"
    assert findings["ddp gloo"]["status"] == "ok"


def test_a_shared_memory_of_one_megabyte():
    status, findings = doctor("--quick", prelude="ip link set lo up; mount -t tmpfs -o size=1m tmpfs /dev/shm")
    assert status == 1
    finding = findings["/dev/shm"]
    assert finding["status"] == "fault"
    assert finding["found"].startswith("1.0 MB, 1.0 MB free: data-loader workers and NCCL die of it")
    assert finding["cure"].startswith("docker run --shm-size=2g")


# A pair of virtual ethernet ends is the one kind of interface that every kernel with namespaces can make.
PAIR = "ip link set lo up; ip link add nic0 type veth peer name nic1; ip address add 10.9.9.1/24 dev nic0\n"


def test_a_dead_interface_that_the_user_asked_for():
    prelude = PAIR + "ip link set nic1 up"
    if run([*namespaces(), "sh", "-ec", prelude]).returncode != 0:
        pytest.skip("this kernel has no veth interfaces")
    status, findings = doctor(environ={"GLOO_SOCKET_IFNAME": "nic0"}, prelude=prelude)
    assert status == 1
    assert findings["network"]["status"] == "fault"
    assert findings["network"]["found"] == "GLOO_SOCKET_IFNAME=nic0: the interface is down"
    assert findings["network"]["cure"].endswith("or ip link set nic0 up")
    # One host needs no network: the all-reduce goes over loopback.
    assert findings["ddp gloo"]["status"] == "ok"


def test_the_only_interface_is_dead():
    if run([*namespaces(), "sh", "-ec", PAIR]).returncode != 0:
        pytest.skip("this kernel has no veth interfaces")
    status, findings = doctor("--quick", prelude=PAIR)
    assert status == 1
    assert findings["network"]["found"] == "nic0 down 10.9.9.1: no interface is up"
    assert findings["network"]["cure"].startswith("ip link set nic0 up")


def test_loopback_is_down():
    status, findings = doctor(prelude="true")
    assert status == 1
    assert findings["loopback"]["status"] == "fault"
    assert findings["loopback"]["cure"].startswith("ip link set lo up")
    assert findings["ddp gloo"]["status"] == "fault"
    assert "two-process all-reduce failed: " in findings["ddp gloo"]["found"]
