"""The lines between launcher and agent."""

from hvdtrain.launch.remote.compose import horovodrun, mpirun
from hvdtrain.launch.remote.hosts import Host
from hvdtrain.launch.remote.job import describe_status
from hvdtrain.launch.remote.protocol import Job, read_report, report
from hvdtrain.launch.remote.ssh import SshOptions


def test_a_job_survives_its_line():
    job = Job("id", 2, 1, 4, 2, "host1", 29500, "/work", {"X": 'a\nb "c" $d \udce9'}, ["sh", "-c", "echo $$"], 30.0)
    line = job.line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert Job.from_line(line) == job


def test_reports_keep_every_byte():
    assert read_report(report("o", 12, b"  two  spaces \xff\r")) == ("o", 12, b"  two  spaces \xff\r")
    assert read_report(report("e", 0, b"")) == ("e", 0, b"")
    assert read_report(b"f TimeoutError: no peer\n") == ("f", -1, b"TimeoutError: no peer")
    assert read_report(b"Welcome to host3!\n") is None
    assert read_report(b"o twelve text\n") is None


def test_statuses_in_words():
    assert describe_status(3) == "exit status 3"
    assert describe_status(-9) == "killed by SIGKILL"


def test_the_same_job_for_other_launchers():
    hosts, ssh = [Host("host1", 2), Host("host2", 2)], SshOptions(12345)
    line = horovodrun(hosts, 4, ssh, ["hvdtrain", "world"], start_timeout_s=60.0, controller="gloo")
    assert " ".join(line) == "horovodrun -np 4 -H host1:2,host2:2 -p 12345 --start-timeout 60 --gloo hvdtrain world"
    line = mpirun(hosts, 4, ssh, ["hvdtrain", "world"], root=True, nics="eth0", names=["X"])
    assert line[:4] == ["mpirun", "--allow-run-as-root", "--tag-output", "-np"]
    assert line[line.index("plm_rsh_args") + 1] == "-p 12345"
    assert line[line.index("btl_tcp_if_include") + 1] == "eth0"
    assert line[-4:] == ["-x", "X", "hvdtrain", "world"]
