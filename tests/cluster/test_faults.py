"""What goes wrong on real clusters: the job ends in time, everywhere, and says who was first."""

from __future__ import annotations

import contextlib
import re
import time

import pytest

# A job that would run for hours, one rank on each of host1, host2, host3.
JOB = "hvdtrain train tiny.yaml --set task_options.delay_s=0.1 --set epochs=100000 --set log_every_steps=1000"
LAUNCHERS = {
    "launch": "hvdtrain launch -np 3 -H host1:1,host2:1,host3:1 -p {port} --start-timeout {start_s}",
    "horovodrun": "horovodrun --gloo -np 3 -H host1:1,host2:1,host3:1 -p {port} --start-timeout {start_s}",
    "mpirun": "mpirun --allow-run-as-root -np 3 -H host1:1,host2:1,host3:1 -x MASTER_ADDR=host1 -x MASTER_PORT=29520 "
    "-mca plm_rsh_args '-p {port}' -mca btl_tcp_if_include eth0",
}
LATE_PORT = 12346


def line(launcher: str, port: int = 12345, start_s: int = 60) -> str:
    return LAUNCHERS[launcher].format(port=port, start_s=start_s)


every_launcher = pytest.mark.parametrize("launcher", list(LAUNCHERS))


@every_launcher
def test_a_remote_rank_is_killed(hosts, output, summary_of, launcher):
    job = hosts.start(f"{line(launcher)} {JOB} --output {output}")
    job.wait_for("ready", 3)
    hosts.run("pkill -KILL -f '[h]vdtrain train'", host="host2")
    done = job.finish(15)
    assert done.status != 0
    assert re.search(r"rank 1 \(host2, pid \d+\) was killed.*SIGKILL", done.text), done.text
    assert summary_of(output)["status"] == "failed"
    if launcher == "launch":
        assert "rank 1 on host2 failed first: killed by SIGKILL" in done.last_line


@every_launcher
def test_a_host_stands_still(containers, output, launcher):
    job = containers.start(f"{line(launcher)} {JOB} --output {output}")
    job.wait_for("ready", 3)
    with frozen(containers, "host2"):
        done = job.finish(30)
    assert done.status != 0
    assert "host2" in "\n".join(done.text.splitlines()[-40:])


@every_launcher
def test_a_host_is_cut_off(hosts, output, launcher):
    job = hosts.start(f"{line(launcher)} {JOB} --set stall_warning_s=5 --set stall_abort_s=10 --output {output}")
    job.wait_for("ready", 3)
    hosts.cut("host3")
    try:
        # 10 s of waiting, then the same few seconds as any other end; mpirun also waits for its ssh to host3.
        done = job.finish(10 + (30 if launcher == "mpirun" else 15))
        assert done.status != 0
        assert "host3" in done.text
        # The host that is cut off ends by itself, too.
        assert hosts.leftovers(30) == {}
    finally:
        hosts.join("host3")


@every_launcher
def test_one_sshd_is_late(hosts, output, summary_of, launcher):
    """Every host gets a second sshd, host3 15 s after the others."""
    short = "hvdtrain train tiny.yaml --set epochs=1"
    # mpirun and horovodrun do not wait; the check before them does.
    check = "" if launcher == "launch" else f"{check_line(60)} && "
    with second_sshd(hosts, "host1", "host2"):
        job = hosts.start(f"{check}{line(launcher, LATE_PORT)} {short} --output {output}")
        time.sleep(15)
        with second_sshd(hosts, "host3"):
            done = job.finish(150)
    assert done.status == 0, done.text
    assert summary_of(output)["status"] == "done"


@every_launcher
def test_one_sshd_never_comes(hosts, output, launcher):
    check = "" if launcher == "launch" else f"{check_line(8)} && "
    with second_sshd(hosts, "host1", "host2"):
        done = hosts.run(f"{check}{line(launcher, LATE_PORT, 8)} {JOB} --output {output}", limit_s=30)
    assert done.status == 2
    assert f"host3:{LATE_PORT}: refused" in done.text
    assert "ready" not in done.text


@every_launcher
def test_a_wrong_key(hosts, output, launcher):
    """host1's key is not the cluster's. docker/cluster checks before every launcher; so do we for those that do not."""
    key = "$HVDTRAIN_SSH_STATE/id"
    hosts.run(f"mv {key} {key}.right && ssh-keygen -q -t ed25519 -N '' -f {key}.wrong && mv {key}.wrong {key}")
    check = "" if launcher == "launch" else f"{check_line(60, 12345)} && "
    try:
        done = hosts.run(f"{check}{line(launcher)} {JOB} --output {output}", limit_s=15)
    finally:
        hosts.run(f"mv {key}.right {key}")
    assert done.status == 2
    path = hosts.run(f"echo {key}").text.strip()
    assert f"host2:12345: authentication failed with {path}" in done.text
    assert "ready" not in done.text


@every_launcher
def test_a_changed_host_key(hosts, output, launcher):
    known = "${HVDTRAIN_SSH_STATE}/known_hosts"
    # The user key is certainly not host3's.
    other = "$(cut -d' ' -f2 $HVDTRAIN_SSH_STATE/id.pub)"
    hosts.run(f'cp {known} {known}.right && sed -i "/^host3,/s|AAAA.*|{other}|" {known}')
    try:
        done = hosts.run(f"{line(launcher)} {JOB} --output {output}", limit_s=30)
    finally:
        hosts.run(f"mv {known}.right {known}")
    assert done.status != 0
    assert re.search(r"known_hosts:3\b", done.text), done.text
    assert "ready" not in done.text


@every_launcher
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_a_dead_bridge_interface(hosts, output, summary_of, launcher, backend):
    """The same address on every host, on an interface that leads nowhere: what docker0 is on real machines."""
    for host in ("host1", "host2", "host3"):
        hosts.add_interface(host, "docker0", "172.31.255.1/24")
    try:
        done = hosts.run(f"{line(launcher)} hvdtrain train tiny.yaml --backend {backend} --output {output}")
    finally:
        for host in ("host1", "host2", "host3"):
            hosts.remove_interface(host, "docker0")
    assert done.status == 0, done.text
    assert summary_of(output)["ranks_agree"] is True


def check_line(start_s: int, port: int = LATE_PORT) -> str:
    return f"hvdtrain launch --check-only --start-timeout {start_s} -p {port} -H host1,host2,host3"


@contextlib.contextmanager
def second_sshd(hosts, *names):
    """Another sshd, on another port, on some hosts."""
    config = "/etc/ssh/sshd_config" if hosts.kind == "containers" else "$HVDTRAIN_SSH_STATE/sshd_config"
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
