"""Hosts and slots: every spelling, every mistake with the sentence that helps."""

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.remote.hosts import Host, allot, looks_like_hosts, parse_hosts, read_hostfile


def test_hosts_as_horovodrun_spells_them():
    assert parse_hosts("host1:4,host2:2") == [Host("host1", 4), Host("host2", 2)]
    assert parse_hosts("10.0.0.1:4, node-7.example.org") == [Host("10.0.0.1", 4), Host("node-7.example.org", 1)]
    assert parse_hosts("[fe80::1]:2") == [Host("fe80::1", 2)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("localhost:0", "localhost with 0 slots: slots are the ranks it takes, a number from 1 up"),
        ("host1:", "host1 with no slots"),
        ("host1:-2", "host1 with -2 slots"),
        ("host1:four", "host1 with four slots"),
        ("host1:4,host1:2", "host1 is named twice; name it once, with all its slots: host1:6"),
        ("", "no hosts; write them as -H host1:4,host2:4"),
        ("host1:4 host2:4", "'host1:4 host2:4' is not a host|host1 with 4 host2:4 slots"),
        ("-oProxyCommand=x:1", "is not a host"),
    ],
)
def test_wrong_hosts(text, sentence):
    with pytest.raises(LaunchError, match=sentence):
        parse_hosts(text)


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nhost1 slots=4 max_slots=8\n\nhost2:2   # MPICH's way\nhost3\n")
    assert read_hostfile(str(file)) == [Host("host1", 4), Host("host2", 2), Host("host3", 1)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("host1 slots=4\nhost2 slot=2\n", r"hosts, line 2: 'slot=2' is not understood; write: host2 slots=4"),
        ("host1 slots=x\n", r"hosts, line 1: host1 with x slots"),
        ("# nobody\n", "names no host"),
        ("host1\nhost1\n", "host1 is named twice"),
    ],
)
def test_wrong_hostfile(tmp_path, content, sentence):
    file = tmp_path / "hosts"
    file.write_text(content)
    with pytest.raises(LaunchError, match=sentence):
        read_hostfile(str(file))


def test_missing_hostfile(tmp_path):
    with pytest.raises(LaunchError, match=r"--hostfile .*/none: No such file or directory"):
        read_hostfile(str(tmp_path / "none"))


def test_ranks_fill_the_hosts_in_order():
    hosts = [Host("host2", 4), Host("host1", 2), Host("host3", 4)]
    shares = allot(hosts, 6)
    assert [(s.host.name, s.node_rank, s.first_rank, s.num_ranks) for s in shares] == [
        ("host2", 0, 0, 4),
        ("host1", 1, 4, 2),
    ]
    assert sum(share.num_ranks for share in allot(hosts, None)) == 10
    assert [share.num_ranks for share in allot(hosts, 5)] == [4, 1]


@pytest.mark.parametrize(
    ("num_ranks", "sentence"),
    [
        (5, r"-np 5: the hosts have 4 slots \(a:2, b:2\); add hosts or slots, or ask for -np 4"),
        (0, "-np 0: a job has at least one rank"),
        (-1, "-np -1"),
    ],
)
def test_wrong_number_of_ranks(num_ranks, sentence):
    with pytest.raises(LaunchError, match=sentence):
        allot([Host("a", 2), Host("b", 2)], num_ranks)


@pytest.mark.parametrize(("word", "answer"), [("b:2", True), ("train.py", False), ("host2", False), ("a:b", False)])
def test_a_second_host_after_a_space_is_recognised(word, answer):
    assert looks_like_hosts(word) is answer
