"""The cluster that all tests of this folder share: containers where an engine is usable, else network namespaces."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cluster_hosts import Containers, Namespaces, engine_is_usable, namespaces_are_usable

# Bracketed, so that it does not match the command line that it is itself part of.
ANYTHING_OF_A_JOB = "[h]vdtrain (t|l|w)|[h]vdtrain.launch|[h]orovod|[o]rted|[m]pirun|[t]orchrun|[s]leep"
HERE = Path(__file__).parent
# What the hosts are, said at the end.
HOSTS = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter, config):
    if HOSTS in config.stash:
        terminalreporter.write_line(f"tests/cluster ran on {config.stash[HOSTS]}")


@pytest.fixture(scope="session")
def hosts(tmp_path_factory, request):
    """host1 to host4. HVDTRAIN_TEST_HOSTS=containers|namespaces asks for one kind."""
    wanted = os.environ.get("HVDTRAIN_TEST_HOSTS")
    no_containers = engine_is_usable() if wanted != "namespaces" else "namespaces were asked for"
    if no_containers is None:
        request.config.stash[HOSTS] = "containers"
        cluster = Containers(4, f"hvdtraintest{os.getpid()}")
        done = cluster.script("up", "--hosts", "4", "--slots", "4")
        assert done.returncode == 0, done.stdout + done.stderr
        stop = lambda: cluster.script("down")  # noqa: E731
    else:
        if wanted == "containers":
            pytest.fail(no_containers)
        no_namespaces = namespaces_are_usable()
        if no_namespaces is not None:
            pytest.skip(f"no hosts: {no_containers}, and {no_namespaces}")
        request.config.stash[HOSTS] = f"network namespaces, because {no_containers}"
        # Not below pytest's own folder, which only its user may enter: sshd refuses keys there.
        cluster = Namespaces(4, Path(tmp_path_factory.mktemp("cluster")))
        stop = cluster.down
    try:
        if isinstance(cluster, Namespaces):
            cluster.up()
        for name in ("tiny_task.py", "tiny.yaml"):
            cluster.write(f"{cluster.shared}/{name}", (HERE / name).read_text())
        yield cluster
    finally:
        stop()


@pytest.fixture
def containers(hosts):
    """The cluster, where it is one of containers."""
    if hosts.kind != "containers":
        pytest.skip("needs containers: images, mounts and a file system of each host's own")
    return hosts


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test nothing of its job runs on any host."""
    yield
    if "hosts" in request.fixturenames or "containers" in request.fixturenames:
        cluster = request.getfixturevalue("hosts")
        left = cluster.leftovers(15)
        for host in left:
            cluster.run(f"pkill -KILL -f '{ANYTHING_OF_A_JOB}'", host=host)
        assert left == {}


@pytest.fixture
def output(hosts, request):
    """A folder of this test's own for output, on the shared folder, as the hosts see it."""
    return f"{hosts.shared}/out/{request.node.name.replace('/', '_')}"


@pytest.fixture
def summary_of(hosts):
    """Reads a run's summary.json."""

    def read(folder: str) -> dict:
        return json.loads(hosts.read(f"{folder}/summary.json"))

    return read
