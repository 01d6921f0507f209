"""Shards on four file servers are read four times as fast as on one: each server a host of its own behind a slow link.

The hosts are network namespaces, and the file server is OpenSSH's, mounted with sshfs: this kernel has neither an NFS
server nor an NFS client, and what is measured, the links, does not care.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from cluster_hosts import ROOT, Namespaces, ip, namespaces_are_usable

SERVERS = ["host1", "host2", "host3", "host4"]
SHARDS_PER_SERVER, SHARD_BYTES = 2, 3 << 20
LINK = "20mbit"

READ = """
import json, os, sys, time
from hvdtrain.data.shards import Shards
patterns, size = json.loads(sys.argv[1]), 4
datasets = [Shards(patterns, rank=rank, size=size) for rank in range(size)]
begin = time.monotonic()
pids = []
for dataset in datasets:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if sum(len(sample["bin"]) for sample in dataset) > 0 else 1)
    pids.append(pid)
statuses = [os.waitpid(pid, 0)[1] for pid in pids]
print(json.dumps({"seconds": time.monotonic() - begin, "statuses": statuses}))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = namespaces_are_usable()
    if reason is None and shutil.which("sshfs") is None:
        reason = "there is no sshfs"
    if reason is None and not Path("/dev/fuse").exists():
        reason = "there is no /dev/fuse"
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("servers")
    hosts = Namespaces(5, folder)
    try:
        hosts.up()
        for host in SERVERS:
            ip("netns", "exec", hosts.space(host), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
               "rate", LINK, "burst", "64kb", "latency", "100ms")  # fmt: skip
        yield hosts
    finally:
        subprocess.run(["umount", "-l", *map(str, (folder / "mnt").glob("*"))], check=False, capture_output=True)
        hosts.down()


@pytest.mark.timeout(200)
def test_four_servers_are_faster_than_one(cluster, capsys):
    one, served_by_one = read_from(cluster, "one", {"host1": SHARDS_PER_SERVER * len(SERVERS)})
    four, served_by_four = read_from(cluster, "four", dict.fromkeys(SERVERS, SHARDS_PER_SERVER))
    with capsys.disabled():
        print(f" one server {one:.2f} s, four {four:.2f} s, {one / four:.2f} times as fast ", end="")
    assert served_by_one["host1"] > SHARD_BYTES * SHARDS_PER_SERVER * len(SERVERS)
    assert one / four >= 3
    assert min(served_by_four.values()) > SHARD_BYTES * SHARDS_PER_SERVER
    assert max(served_by_four.values()) <= 1.1 * min(served_by_four.values())


def read_from(cluster, name, shards):
    """Seconds that four ranks on host5 take to read all shards, and the bytes that each server sent meanwhile."""
    patterns = []
    for host, number in shards.items():
        disk = cluster.folder / "disk" / name / host
        disk.mkdir(parents=True)
        for shard in range(number):
            write_shard(disk / f"train-{shard}.tar")
        mounted = cluster.folder / "mnt" / f"{name}-{host}"
        mounted.mkdir(parents=True)
        mount = cluster.run(
            f"sshfs -p 12345 -o sftp_server=/usr/lib/openssh/sftp-server -o ssh_command={ROOT}/docker/ssh/ssh "
            f"{host}:{disk} {mounted}",
            host="host5",
        )
        assert mount.status == 0, mount.text
        patterns.append(f"{mounted}/train-*.tar")
    before = sent_bytes(cluster)
    script = cluster.folder / "read.py"
    script.write_text(READ)
    done = cluster.run(
        f"{cluster.python} {script} '{json.dumps(patterns)}'", host="host5", limit_s=120, PYTHONPATH=str(ROOT)
    )
    assert done.status == 0, done.text
    time.sleep(0.2)
    after = sent_bytes(cluster)
    result = json.loads(done.last_line)
    assert result["statuses"] == [0, 0, 0, 0]
    return result["seconds"], {host: after[host] - before[host] for host in shards}


def sent_bytes(cluster):
    """What each server has sent so far, by the counter at this end of its link."""
    return {
        host: int(Path(f"/sys/class/net/{cluster.mark}v{host[4:]}/statistics/rx_bytes").read_text()) for host in SERVERS
    }


def write_shard(path):
    with tarfile.open(path, "w") as tar:
        for sample in range(3):
            content = bytes(SHARD_BYTES // 3)
            member = tarfile.TarInfo(f"{sample:04d}.bin")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
