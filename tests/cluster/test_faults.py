"""What goes wrong on real clusters: the job ends in time, everywhere, and says who was first."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from cluster_hosts import Ended

# A job that would run for hours, one rank on each of host1, host2, host3.
JOB = "hvdtrain train tiny.yaml --set task_options.delay_s=0.1 --set epochs=100000 --set log_every_steps=1000"
SHORT = "hvdtrain train tiny.yaml --set epochs=1"
MPIRUN = (
    "mpirun --allow-run-as-root -np 3 -H {hosts} -x MASTER_ADDR={root} -x MASTER_PORT={master_port} "
    "-mca plm_rsh_args '-p {port}' -mca btl_tcp_if_include eth0"
)
HOSTS = "host1:1,host2:1,host3:1"
LAUNCHERS = {
    "launch": "hvdtrain launch -np 3 -H {hosts} -p {port} --start-timeout {start_s}",
    "horovodrun": "horovodrun --gloo -np 3 -H {hosts} -p {port} --start-timeout {start_s}",
    "mpirun": MPIRUN,
}
LATE_PORT = 12346


def line(launcher: str, port: int = 12345, start_s: int = 60) -> str:
    return LAUNCHERS[launcher].format(hosts=HOSTS, root="host1", master_port=29520, port=port, start_s=start_s)


class Jobs:
    """One job under each launcher, all at the same time: one fault meets them all. Each has its own output."""

    def __init__(self, hosts, output: str, command: str, **lines: str) -> None:
        hosts.run(f"mkdir -p {output}")
        self.output = output
        self.running = {
            name: hosts.start(f"{words} {command} --output {output}/{name}") for name, words in lines.items()
        }

    def until_ready(self) -> None:
        for job in self.running.values():
            job.wait_for("ready", 3)

    def finish(self, **limits_s: float) -> dict[str, Ended]:
        """How each ended; `limits_s` by launcher, counted from now, `others` for the rest."""
        begin = time.monotonic()
        ended = {}
        for name in sorted(self.running, key=lambda name: limits_s.get(name, limits_s["others"])):
            limit_s = limits_s.get(name, limits_s["others"])
            ended[name] = self.running[name].finish(max(0.1, begin + limit_s - time.monotonic()))
        return ended


def start_all(hosts, output: str, command: str = JOB) -> Jobs:
    return Jobs(hosts, output, command, **{name: line(name) for name in LAUNCHERS})


def test_a_remote_rank_is_killed(hosts, output, summary_of):
    jobs = start_all(hosts, output)
    jobs.until_ready()
    hosts.run("pkill -KILL -f '[h]vdtrain train'", host="host2")
    for name, done in jobs.finish(others=15).items():
        assert done.status != 0, name
        assert re.search(r"rank 1 \(host2, pid \d+\) was killed.*SIGKILL", done.text), done.text
        assert summary_of(f"{output}/{name}")["status"] == "failed"
        if name == "launch":
            assert "rank 1 on host2 failed first: killed by SIGKILL" in done.last_line


def test_a_host_stands_still(containers, output):
    # mpirun begins with its own host, where that has slots.
    root_there = MPIRUN.format(hosts="host2:1,host3:1,host4:1", root="host2", master_port=29521, port=12345)
    lines = {name: line(name) for name in LAUNCHERS}
    jobs = Jobs(containers, output, JOB, **lines, mpirun_with_rank_0_there=root_there)
    jobs.until_ready()
    with frozen(containers, "host2"):
        ended = jobs.finish(others=30)
    for name, done in ended.items():
        assert done.status != 0, name
        assert "host2" in "\n".join(done.text.splitlines()[-40:])


def test_a_host_is_cut_off(hosts, output):
    jobs = start_all(hosts, output, f"{JOB} --set stall_warning_s=5 --set stall_abort_s=10")
    jobs.until_ready()
    hosts.cut("host3")
    try:
        # 10 s of waiting, then the same few seconds as any other end; mpirun also waits for its ssh to host3.
        for name, done in jobs.finish(mpirun=40, others=25).items():
            assert done.status != 0, name
            assert "host3" in done.text
        # The host that is cut off ends by itself, too.
        assert hosts.leftovers(30) == {}
    finally:
        hosts.join("host3")


def test_one_sshd_is_late(hosts, output, summary_of):
    """Every host gets a second sshd, host3 15 s after the others."""
    lines = checked(LATE_PORT, 60)
    with second_sshd(hosts, "host1", "host2"):
        jobs = Jobs(hosts, output, SHORT, **lines)
        time.sleep(15)
        with second_sshd(hosts, "host3"):
            ended = jobs.finish(others=150)
    for name, done in ended.items():
        assert done.status == 0, done.text
        assert summary_of(f"{output}/{name}")["status"] == "done"


def test_one_sshd_never_comes(hosts, output):
    lines = checked(LATE_PORT, 8)
    with second_sshd(hosts, "host1", "host2"):
        ended = Jobs(hosts, output, JOB, **lines).finish(others=30)
    for name, done in ended.items():
        assert done.status == 2, name
        assert f"host3:{LATE_PORT}: refused" in done.text
        assert "ready" not in done.text


def test_a_wrong_key(hosts, output):
    """host1's key is not the cluster's."""
    key = f"{hosts.ssh_state}/id"
    hosts.run(f"mv {key} {key}.right && ssh-keygen -q -t ed25519 -N '' -f {key}.wrong && mv {key}.wrong {key}")
    lines = checked(12345, 60)
    try:
        ended = Jobs(hosts, output, JOB, **lines).finish(others=15)
    finally:
        hosts.run(f"mv {key}.right {key}")
    path = hosts.run(f"echo {key}").text.strip()
    for name, done in ended.items():
        assert done.status == 2, name
        assert f"host2:12345: authentication failed with {path}" in done.text
        assert "ready" not in done.text


def test_a_changed_host_key(hosts, output):
    known = f"{hosts.ssh_state}/known_hosts"
    # The user key is certainly not host3's.
    other = f"$(cut -d' ' -f2 {hosts.ssh_state}/id.pub)"
    hosts.run(f'cp {known} {known}.right && sed -i "/^host3,/s|AAAA.*|{other}|" {known}')
    try:
        ended = start_all(hosts, output).finish(others=15)
    finally:
        hosts.run(f"mv {known}.right {known}")
    for name, done in ended.items():
        assert done.status != 0, name
        assert re.search(r"known_hosts:3\b", done.text), done.text
        assert "ready" not in done.text


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_a_dead_bridge_interface(hosts, output, summary_of, backend):
    """The same address on every host, on an interface that leads nowhere: what docker0 is on real machines."""
    for host in ("host1", "host2", "host3"):
        hosts.add_interface(host, "docker0", "172.31.255.1/24")
    try:
        ended = start_all(hosts, output, f"hvdtrain train tiny.yaml --backend {backend}").finish(others=200)
    finally:
        for host in ("host1", "host2", "host3"):
            hosts.remove_interface(host, "docker0")
    for name, done in ended.items():
        assert done.status == 0, done.text
        assert summary_of(f"{output}/{name}")["ranks_agree"] is True


def checked(port: int, start_s: int) -> dict[str, str]:
    """Every launcher's line behind the check that docker/cluster does first; mpirun and horovodrun do not wait.

    `hvdtrain launch` checks anyway.
    """
    check = f"hvdtrain launch --check-only --start-timeout {start_s} -p {port} -H host1,host2,host3 && "
    return {name: ("" if name == "launch" else check) + line(name, port, start_s) for name in LAUNCHERS}


@contextlib.contextmanager
def second_sshd(hosts, *names):
    """Another sshd, on another port, on some hosts."""
    config = "/etc/ssh/sshd_config" if hosts.kind == "containers" else f"{hosts.ssh_state}/sshd_config"
    for host in names:
        started = hosts.run(f"/usr/sbin/sshd -f {config} -o PidFile=none -p {LATE_PORT}", host=host)
        assert started.status == 0, started.text
    try:
        yield
    finally:
        for host in names:
            hosts.run(f"pkill -f '[s]shd.* -p {LATE_PORT}'", host=host)


@contextlib.contextmanager
def frozen(containers, host):
    containers.stop_clock(host)
    try:
        yield
    finally:
        containers.start_clock(host)
