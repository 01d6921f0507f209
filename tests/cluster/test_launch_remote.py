"""`hvdtrain launch` over ssh: what crosses the wire arrives as it was, and nothing stays behind."""

from __future__ import annotations

import re
import signal

LAUNCH = "hvdtrain launch -p 12345"


def test_values_cross_the_wire_unharmed_and_unseen(hosts):
    """A secret with quotes, dollars and a newline reaches both hosts and no command line on either."""
    value = "s3cret '\"$HOME`id`\\ \nsecond=line"
    script = """
import os, pathlib
print("value", repr(os.environ["TOKEN"]))
lines = [p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
print("seen", sum(b"s3cret" in line for line in lines))
"""
    hosts.write(f"{hosts.shared}/show.py", script)
    done = hosts.run(f"{LAUNCH} -x TOKEN -H host1:1,host2:1 python show.py", TOKEN=value)
    assert done.status == 0, done.text
    for rank in (0, 1):
        assert f"[{rank}] value {value!r}\n" in done.text
        assert f"[{rank}] seen 0\n" in done.text


def test_shell_functions_stay_at_home(hosts):
    line = "f() { echo code; }; export -f f; " + f"{LAUNCH} -H host1:1,host2:1 bash -c 'declare -F f || echo no f'"
    done = hosts.run(line)
    assert done.status == 0, done.text
    assert sorted(done.text.splitlines()) == ["[0] no f", "[1] no f"]


def test_hostfile_output_files_and_interface(hosts, output):
    hosts.write(f"{hosts.shared}/hostfile", "host2 slots=1\nhost1 slots=1 # ours\n")
    done = hosts.run(
        f"{LAUNCH} -v --hostfile hostfile --network-interfaces eth0 --output-filename {output} "
        "bash -c 'echo $(hostname) $RANK $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME'"
    )
    assert done.status == 0, done.text
    assert "hvdtrain launch: host2: ranks 0 to 0, eth0 " in done.text
    assert hosts.read(f"{output}/rank.0/stdout") == "host2 0 eth0 eth0\n"
    assert hosts.read(f"{output}/rank.1/stdout") == "host1 1 eth0 eth0\n"


def test_ranks_on_other_hosts_alone(hosts):
    """The launcher's own host takes no rank: a login node."""
    done = hosts.run(f"{LAUNCH} -H host2:1,host3:1 bash -c 'echo $(hostname) $RANK/$WORLD_SIZE'")
    assert done.status == 0, done.text
    assert sorted(done.text.splitlines()) == ["[0] host2 0/2", "[1] host3 1/2"]


def test_the_machine_itself_by_its_other_name(hosts):
    """`localhost` first: the others must be told an address that leads here from there."""
    done = hosts.run(
        f"{LAUNCH} -H localhost:1,host2:1 hvdtrain train tiny.yaml --set epochs=1 --output /tmp/localhost-$$"
    )
    assert done.status == 0, done.text
    done = hosts.run(f"{LAUNCH} --check-only -H localhost,host1")
    assert done.status == 2
    assert "host1: is the same machine as localhost; name it once, with all its slots" in done.text


def test_a_folder_that_is_not_everywhere(containers):
    done = containers.run("mkdir -p /tmp/only-here && cd /tmp/only-here && " + f"{LAUNCH} -H host1:1,host2:1 true")
    assert done.status == 2
    assert "host2: there is no folder /tmp/only-here" in done.text


def test_ctrl_c_saves_and_ends_everywhere(hosts, output, summary_of):
    job = "hvdtrain train tiny.yaml --set task_options.delay_s=0.1 --set epochs=100000"
    running = hosts.start(f"{LAUNCH} -H host1:1,host2:1 {job} --output {output}")
    running.wait_for("ready", 2)
    hosts.run("pkill -INT -f '[h]vdtrain launch'")
    done = running.finish(60)
    assert done.status == 75, done.text
    assert done.last_line == "hvdtrain launch: stopped on request; start it again with --resume auto"
    assert summary_of(output)["status"] == "stopped"


def test_ctrl_c_while_a_host_is_waited_for(hosts):
    running = hosts.start("hvdtrain launch -p 1 --start-timeout 60 -H host1:1,host2:1 true")
    running.wait_for("waiting for host2:1 (refused)")
    hosts.run("pkill -INT -f '[h]vdtrain launch'")
    done = running.finish(10)
    assert done.status == 1
    assert done.last_line == "hvdtrain: interrupted"


def test_a_launcher_that_dies_takes_everything_along(hosts):
    running = hosts.start(f"{LAUNCH} -H host1:1,host2:1 bash -c 'echo ready; sleep 4321'")
    running.wait_for("ready", 2)
    hosts.run("pkill -KILL -f '[h]vdtrain launch'")
    # docker exec tells it in its own way.
    assert running.finish(15).status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert hosts.leftovers(15) == {}


def test_a_failure_on_another_host_is_the_last_line(hosts):
    done = hosts.run(
        f"{LAUNCH} -H host1:2,host2:2 bash -c 'if test $RANK = 3; then echo why >&2; exit 9; fi; sleep 600'", limit_s=60
    )
    assert done.status == 1
    assert done.last_line == "hvdtrain launch: rank 3 on host2 failed first: exit status 9; the job was ended"
    assert re.search(r"^\[3\] why$", done.text, re.MULTILINE)
