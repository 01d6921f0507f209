"""Keys, modes and sshd: one command per host, whatever the mounts look like; and a check that tells faults apart."""

from __future__ import annotations

import subprocess

import pytest
from cluster_hosts import docker

PYTHON = "/opt/hvdtrain/bin/python"


def test_the_bootstrap_may_be_repeated(hosts):
    """Nothing is made anew: neither keys nor a second sshd."""
    state = hosts.ssh_state
    before = hosts.run(f"sha256sum {state}/id {state}/host_key {state}/known_hosts {state}/authorized_keys")
    keys = "/ssh" if hosts.kind == "containers" else str(hosts.folder / "keys")
    again = hosts.run(f"hvdtrain-ssh up {keys} --port 12345 {' '.join(hosts.names)}")
    assert again.status == 0, again.text
    assert "sshd: runs already" in again.text
    after = hosts.run(f"sha256sum {state}/id {state}/host_key {state}/known_hosts {state}/authorized_keys")
    assert after.text == before.text


def test_stop_ends_no_process_but_our_sshd(hosts):
    """A process id that was ours before the machine was started anew."""
    mine = f"cd {hosts.ssh_state} && cp sshd.pid kept; sleep 60 & other=$!"
    done = hosts.run(
        f"{mine}; echo $other >sshd.pid; hvdtrain-ssh stop; kill $other && echo it ran; mv kept sshd.pid; "
        "kill -0 $(cat sshd.pid) && echo sshd runs"
    )
    assert done.text == "it ran\nsshd runs\n"


def test_every_host_reaches_every_other_with_verified_keys(hosts):
    for host in hosts.names:
        done = hosts.run(f"hvdtrain-ssh check -p 12345 {' '.join(hosts.names)}", host=host)
        assert done.status == 0, done.text
        assert done.text.count(": ok (") == len(hosts.names)


def test_passwords_are_off(hosts):
    """What the server offers, asked by a client without a key."""
    done = hosts.run(
        "ssh -v -p 12345 -o IdentityFile=none -o IdentitiesOnly=yes -F /dev/null "
        f"-o UserKnownHostsFile={hosts.ssh_state}/known_hosts -o BatchMode=yes host2 true"
    )
    assert done.status == 255
    assert "Authentications that can continue: publickey\n" in done.text.replace("\r", "")
    assert "keyboard-interactive" not in done.text.split("Authentications that can continue")[1].splitlines()[0]


LOSE_KNOWN_HOSTS = "mv $S/known_hosts $S/k && : >$S/known_hosts"
CHANGE_IDENTITY = "mv $S/identity $S/i && echo SHA256:ours host1 >$S/identity"


@pytest.mark.parametrize(
    ("break_it", "mend_it", "names", "kind", "part"),
    [
        ("", "", "host1,nobody.invalid", "name", "nobody.invalid: the name does not resolve"),
        ("", "", "host1,host2 -p 1", "refused", "host2:1: refused"),
        (LOSE_KNOWN_HOSTS, "mv $S/k $S/known_hosts", "host2", "host key unknown", "host2:12345"),
        (CHANGE_IDENTITY, "mv $S/i $S/identity", "host2", "another sshd", "of another cluster"),
        ("", "", "host2 --python /no/python", "interpreter", "there is no /no/python"),
    ],
    ids=["name", "refused", "unknown key", "another sshd", "interpreter"],
)  # fmt: skip
def test_faults_are_told_apart(hosts, break_it, mend_it, names, kind, part):
    port = "" if " -p " in names else "-p 12345"
    hosts.run(f"S={hosts.ssh_state}; {break_it or 'true'}")
    try:
        done = hosts.run(f"hvdtrain launch --check-only {port} -H {names}", limit_s=30)
    finally:
        hosts.run(f"S={hosts.ssh_state}; {mend_it or 'true'}")
    assert done.status == 2
    assert f": {kind}: " in done.text
    assert part in done.text


def test_another_version_is_named(containers):
    """host2's torch says another version: the file that pip reads is changed there."""
    folder = f"$(dirname $({PYTHON} -c 'import torch.version as v; print(v.__file__)'))/../torch-*.dist-info"
    edit = f"sed -i.right 's/^Version: .*/Version: 1.0/' {folder}/METADATA"
    as_root(containers, "host2", edit)
    try:
        done = containers.run("hvdtrain launch --check-only -p 12345 -H host1,host2")
    finally:
        as_root(containers, "host2", f"mv {folder}/METADATA.right {folder}/METADATA")
    assert done.status == 2
    assert "host2: version: host2: has torch 1.0, this host 2." in done.text


def test_a_missing_package_is_named(containers):
    folder = f"$(dirname $({PYTHON} -c 'import hvdtrain; print(hvdtrain.__file__)'))/.."
    as_root(containers, "host2", f"cd {folder} && mkdir aside && mv hvdtrain-*.dist-info aside/")
    try:
        done = containers.run("hvdtrain launch --check-only -p 12345 -H host1,host2")
    finally:
        as_root(containers, "host2", f"cd {folder} && mv aside/* . && rmdir aside")
    assert done.status == 2
    assert "host2: package: host2: hvdtrain is not installed there" in done.text


def test_a_silent_host_times_out(hosts):
    hosts.cut("host4")
    try:
        done = hosts.run("hvdtrain launch --check-only -p 12345 -H host1,host4", limit_s=40)
    finally:
        hosts.join("host4")
    assert done.status == 2
    assert "host4:12345: no answer within" in done.text


def as_root(containers, host, line):
    docker("exec", "--user", "root", containers.container(host), "bash", "-c", line)


@pytest.fixture
def network():
    """A network of its own for plain `docker run` containers; everything in it goes with it."""
    name = "hvdtraintest-plain"
    docker("network", "create", name)
    yield name
    ids = docker("ps", "-aq", "--filter", f"network={name}").split()
    if ids:
        docker("rm", "-f", *ids)
    docker("network", "rm", name)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize(("user", "access"), [("root", "ro"), ("hvdtrain", "rw")])
def test_the_original_layout(containers, network, tmp_path, user, access, backend):
    """docker run -v FOLDER:/root/.ssh, sshd by hand, a launcher on the primary; the keys are another user's, 0644."""
    keys = tmp_path / "ssh"
    keys.mkdir(mode=0o755)
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "3072", "-N", "", "-f", keys / "id_rsa"], check=True)
    (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
    subprocess.run(["chown", "-R", "4242", keys], check=True)
    subprocess.run(["chmod", "0644", *keys.iterdir()], check=True)
    tmp_path.parent.chmod(0o755)
    home = "/root" if user == "root" else "/home/hvdtrain"
    common = ["--init", "--network", network, "--user", user, "-v", f"{keys}:{home}/.ssh:{access}"]
    for number in (1, 2):
        docker("run", "-d", *common, "--name", f"{network}-{number}", "--hostname", f"node{number}",
               "--network-alias", f"node{number}", "hvdtrain:horovod", "bash", "-c",
               "/usr/sbin/sshd -p 12345; sleep infinity")  # fmt: skip
    job = "mpirun" if backend == "ddp" else "horovodrun"
    line = {
        "horovodrun": "horovodrun -np 2 -H node1:1,node2:1 -p 12345 --start-timeout 100",
        "mpirun": "mpirun --allow-run-as-root -np 2 -H node1:1,node2:1 -mca plm_rsh_args '-p 12345'",
    }[job]
    done = subprocess.run(
        ["docker", "exec", f"{network}-1", "bash", "-c", f"{line} hvdtrain world --json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"size": 2') == 2
    assert "Read -1, expected" not in done.stdout + done.stderr
