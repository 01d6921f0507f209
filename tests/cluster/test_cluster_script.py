"""docker/cluster: the only thing a person needs."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from cluster_hosts import ROOT, Containers, docker


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--help"], 0, "usage: docker/cluster COMMAND"),
        ([], 2, "usage: docker/cluster COMMAND"),
        (["fly"], 2, "docker/cluster: unknown command fly; see docker/cluster --help"),
        (["up", "--hosts", "0"], 2, "--hosts 0: a number from 1 up"),
        (["up", "--image", "no-such-image"], 1, "there is no image no-such-image; make it with: docker/build"),
        (["run", "true"], 1, "the cluster is not up; start it with: docker/cluster up"),
        (["ssh", "host1"], 1, "the cluster is not up"),
    ],
)
def test_what_it_says(containers, words, status, sentence):
    other = Containers(1, f"{containers.project}none")
    done = other.script(*words)
    assert done.returncode == status
    assert sentence in done.stdout + done.stderr


def test_a_job_by_one_line(containers):
    done = containers.script(
        "run", "echo $HOSTS $NP $PORT; hvdtrain launch -np 2 -H host1:1,host3:1 -p $PORT hostname; exit 7"
    )
    assert done.returncode == 7, done.stdout + done.stderr
    lines = done.stdout.split("\n")
    assert lines[0] == "host1:4,host2:4,host3:4,host4:4 16 12345"
    assert sorted(line for line in lines[1:] if line) == ["[0] host1", "[1] host3"]


def test_words_are_kept_as_they_are(containers):
    done = containers.script("run", "--no-check", "--host", "host2", "printf", "%s|", "a b", "$HOME", "it's")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a b|$HOME|it's|"


def test_status_and_ssh(containers):
    status = containers.script("status").stdout.splitlines()
    assert [line.split()[0] for line in status] == ["host", "host1", "host2", "host3", "host4"]
    assert [line.split()[2] for line in status[1:]] == ["healthy"] * 4
    assert containers.script("ssh", "host4", "hostname").stdout == "host4\n"
    assert "Server listening" in containers.script("logs", "host1").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_job(containers, number):
    job = "trap 'echo stopping; exit 75' TERM; echo ready; while true; do sleep 0.1; done"
    containers.write(f"{containers.shared}/stop.sh", job)
    process = subprocess.Popen(
        [ROOT / "docker/cluster", "run", "hvdtrain launch -np 2 -H host1:1,host2:1 -p $PORT bash stop.sh"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=containers.environ,
    )  # fmt: skip
    said = [process.stdout.readline() for _ in range(2)]
    assert sorted(said) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert text.count("stopping") == 2


@pytest.mark.timeout(400)
def test_other_sizes_and_nothing_left(containers):
    """Six hosts of one slot, on their own network; after `down` no container, network or volume of theirs exists."""
    other = Containers(6, f"{containers.project}b")
    try:
        done = other.script("up", "--hosts", "6", "--slots", "1", "--image", "hvdtrain:ddp")
        assert done.stdout.strip() == "up: " + ",".join(f"host{n}:1" for n in range(1, 7)) + ", ssh port 12345", (
            done.stderr
        )
        done = other.script("run", "hvdtrain launch --check-only -H $HOSTS -p $PORT")
        assert done.stdout.count(": ok (") == 6
    finally:
        down = other.script("down")
    assert down.returncode == 0, down.stderr
    mine = ["--filter", f"label=com.docker.compose.project={other.project}", "-q"]
    assert docker("ps", "-a", *mine) + docker("network", "ls", *mine) + docker("volume", "ls", *mine) == ""


def test_a_person_without_docker(tmp_path):
    """The message, with a PATH that has no docker."""
    for program in ("bash", "dirname", "env", "seq"):
        (tmp_path / program).symlink_to(f"/usr/bin/{program}")
    done = subprocess.run(
        [ROOT / "docker/cluster", "up"], capture_output=True, text=True, check=False,
        env={"PATH": str(tmp_path), "HOME": os.environ["HOME"]},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "docker/cluster: there is no docker; install it (docker/README.md, step 1)\n"


def test_time_from_launch_to_first_step(containers, output, capsys):
    """Measured and shown, not judged."""
    begin = time.monotonic()
    job = containers.start(
        f"hvdtrain launch -np 4 -H host1:2,host2:2 -p 12345 hvdtrain train tiny.yaml --output {output} "
        "--set task_options.delay_s=0.01"
    )
    job.wait_for("ready", 4)
    first = time.monotonic() - begin
    assert job.finish(60).status == 0
    with capsys.disabled():
        print(f" launch to first step: {first:.1f} s ", end="")
