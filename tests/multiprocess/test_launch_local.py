"""`hvdtrain launch` on this machine: real agents, real ranks, no ssh."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hvdtrain.launch import free_port
from hvdtrain.launch.remote import worker
from hvdtrain.launch.remote.connection import Connection, drop
from hvdtrain.launch.remote.hosts import Host, Share
from hvdtrain.launch.remote.protocol import Job
from hvdtrain.launch.remote.relay import Relay

LIMIT_S = 60


def launch(*words, env=None, **more):
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **(env or {})},
        **more,
    )


def last_line(text):
    return text.strip().splitlines()[-1]


def test_every_rank_runs_with_its_place_and_prefix():
    done = launch("-np", "2", "sh", "-c", "echo $RANK/$WORLD_SIZE $LOCAL_RANK; echo noise >&2")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] 0/2 0", "[1] 1/2 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] noise", "[1] noise"]


def test_the_separator_and_the_backend():
    done = launch("--backend", "horovod", "-np", "1", "--", "sh", "-c", "echo $HVDTRAIN_BACKEND")
    assert done.stdout == "[0] horovod\n"


def test_values_and_words_arrive_as_they_are():
    hard = 'it\'s "quoted" $HOME `date` \\ \n second line'
    show = "import os, sys; print(repr((os.environ['TOKEN'], sys.argv[1:])))"
    words = ["$$", "${local_rank}", "a b", ""]
    done = launch("-x", "TOKEN", "-np", "1", sys.executable, "-c", show, *words, env={"TOKEN": hard})
    assert done.stdout == f"[0] {(hard, words)!r}\n"


def test_secrets_are_in_no_command_line():
    # The rank looks at every process of this machine while it runs.
    look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    done = launch("-x", "TOKEN", "-np", "1", "sh", "-c", f'{look}; test -n "$TOKEN"', env={"TOKEN": "s3cret-7f"})
    assert done.returncode == 0
    assert "hvdtrain.launch.remote.agent" in done.stdout
    assert "s3cret-7f" not in done.stdout


def test_output_goes_to_files_too(tmp_path):
    done = launch("--output-filename", str(tmp_path), "-np", "2", "sh", "-c", "echo out $RANK; echo err $RANK >&2")
    assert done.returncode == 0
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {
        "rank.0/stdout": "out 0\n",
        "rank.0/stderr": "err 0\n",
        "rank.1/stdout": "out 1\n",
        "rank.1/stderr": "err 1\n",
    }


@pytest.mark.parametrize(
    ("what", "status", "sentence"),
    [
        ("exit 3", 1, "rank 1 on localhost failed first: exit status 3; the job was ended"),
        ("exit 2", 2, "rank 1 on localhost failed first: exit status 2; the job was ended"),
        ("kill -SEGV $$", 1, "rank 1 on localhost failed first: killed by SIGSEGV; the job was ended"),
        ("exit 75", 75, "stopped on request; start it again with --resume auto"),
    ],
)
def test_the_first_failure_ends_all_and_comes_last(what, status, sentence):
    # Rank 0 would run on, with a child of its own in another session.
    rest = "echo before >&2; setsid sleep 54321 & sleep 54321" if status != 75 else "sleep 0.5; exit 75"
    done = launch("-np", "2", "bash", "-c", f"if test $RANK = 1; then sleep 0.3; echo why >&2; {what}; fi; {rest}")
    assert done.returncode == status
    assert last_line(done.stderr) == f"hvdtrain launch: {sentence}"
    assert "[1] why" in done.stderr
    assert processes_with("54321") == []


def test_a_command_that_is_not_there():
    done = launch("-np", "1", "no-such-command")
    assert done.returncode == 2
    assert "[0] hvdtrain launch: no-such-command: No such file or directory" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_reaches_every_rank(number):
    stop = "trap 'echo stopping; exit 75' TERM; echo ready; while true; do sleep 0.1; done"
    status, out, err = launch_and_signal(number, 1, "bash", "-c", stop)
    assert status == 75
    assert sorted(line for line in out.splitlines() if "stopping" in line) == ["[0] stopping", "[1] stopping"]
    assert last_line(err) == "hvdtrain launch: stopped on request; start it again with --resume auto"


def test_a_second_request_ends_ranks_that_ignore_the_first():
    deaf = "trap '' TERM INT; echo ready; while true; do sleep 0.1; done; : 54322"
    status, _, err = launch_and_signal(signal.SIGINT, 2, "bash", "-c", deaf)
    assert status == 1
    assert last_line(err) == "hvdtrain launch: ended by SIGINT"
    assert processes_with("54322") == []


def test_a_stop_is_not_lost_while_nothing_runs_yet(tmp_path):
    """The agent still imports torch when it comes: no rank starts any more."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "bash", "-c", f"touch {tmp_path}/began; sleep 54327"],
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: agents_of(process))
    process.terminate()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert last_line(err) == "hvdtrain launch: SIGTERM before a rank had started; the job was ended"
    assert list(tmp_path.iterdir()) == []
    assert processes_with("54327") == []


def test_a_rank_that_starts_after_the_stop_gets_it_too(tmp_path):
    relay = Relay(tmp_path, 0, 1, lambda line: None)
    relay.start()
    relay.signal(signal.SIGTERM)
    (tmp_path / "command").write_text('["sleep", "54328"]')
    rank = subprocess.Popen([sys.executable, "-I", "-S", worker.__file__, tmp_path], env={"LOCAL_RANK": "0"})
    assert rank.wait(LIMIT_S) == -signal.SIGTERM
    relay.finish(1.0)


def test_nobody_reads_what_the_ranks_write(tmp_path):
    """As with Ctrl-S or `| less`: the ranks wait, the launcher's memory does not grow, a stop gets through."""
    flood = f"trap 'touch {tmp_path}/$RANK; exit 75' TERM; echo ready; sleep 1; while :; do echo {'x' * 4000}; done"
    process = started("bash", "-c", flood)
    launcher = psutil.Process(process.pid)
    before = launcher.memory_info().rss
    until(lambda: launcher.memory_info().rss > before + 1e6)
    time.sleep(2)
    assert launcher.memory_info().rss < before + 30e6
    process.terminate()
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75
    assert last_line(err) == "hvdtrain launch: stopped on request; start it again with --resume auto"
    assert set(out.splitlines()) == {f"[{rank}] {'x' * 4000}" for rank in range(2)}


def test_the_reader_leaves(tmp_path):
    """As with `| head`: the job ends as after any failure, down to what the ranks have started."""
    process = started(
        "bash", "-c", "sleep 54329 & echo ready; sleep 1; while sleep 0.05; do echo more; done", tmp=tmp_path
    )
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(LIMIT_S) == 1
    assert last_line(err) == "hvdtrain launch: stdout: Broken pipe; the job was ended"
    assert processes_with("54329") == []
    assert list(tmp_path.iterdir()) == []


def test_the_reader_leaves_when_the_ranks_are_to_stop():
    """Ctrl-C also ends a `| tee`: the ranks still save."""
    save = "trap 'echo saving; sleep 1; echo saved >&2; exit 75' TERM"
    process = started("bash", "-c", f"{save}; echo ready; sleep 0.5; while sleep 0.05; do echo more; done")
    process.terminate()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(LIMIT_S) == 75
    assert sorted(line for line in err.splitlines() if "saved" in line) == ["[0] saved", "[1] saved"]


def test_the_disk_of_the_output_files_is_full(tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0/stdout").symlink_to("/dev/full")
    done = launch("--output-filename", str(tmp_path), "-np", "1", "sh", "-c", "echo more; sleep 54330")
    assert done.returncode == 1
    assert done.stdout == "[0] more\n"
    assert last_line(done.stderr) == (
        f"hvdtrain launch: {tmp_path}/rank.0/stdout: No space left on device; the job was ended"
    )
    assert processes_with("54330") == []


def test_agents_that_are_dropped_end_what_they_started(tmp_path):
    """What an error in the launcher itself comes to."""
    share = Share(Host("localhost", 1), 0, 0, 1)
    command = ["bash", "-c", "sleep 54331 & echo ready; sleep 54331"]
    job = Job("id", 1, 0, 0, 1, "127.0.0.1", free_port(), str(tmp_path), {}, command, 30.0)
    agent = Connection(share, [sys.executable, "-m", "hvdtrain.launch.remote.agent"], job)
    said = []
    while b"o 0 ready" not in said:
        said += agent.read(agent.stdout)
        assert agent.open, said
    drop([agent], 15.0)
    assert agent.status() == 1
    assert processes_with("54331") == []


def test_a_launcher_that_is_killed_leaves_nothing():
    process = started("bash", "-c", "echo ready; sleep 54323; : 54323")
    process.kill()
    process.wait(LIMIT_S)
    deadline = time.monotonic() + 15
    while processes_with("54323") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with("54323") == []


def test_an_agent_that_is_killed_takes_its_ranks_along():
    process = started("bash", "-c", "echo ready; sleep 54324; : 54324")
    agents_of(process)[0].kill()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert last_line(err).startswith("hvdtrain launch: localhost failed first: the connection to its agent broke")
    left = {p: p.cmdline() for p in processes_with("54324")}
    for orphan in left:
        orphan.kill()
    # The rank is gone; what it had started itself nobody was left to find.
    assert [line for line in left.values() if line[0] == "bash"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-H", "a:2", "b:2", "true"], "b:2 would be the command; hosts are separated by commas"),
        (["-np", "4", "-H", "a:2", "b:2", "true"], "b:2 would be the command; hosts are separated by commas"),
        (["-H", "localhost:0", "true"], "localhost with 0 slots"),
        (["-np", "9", "-H", "a:2,b:2", "true"], "-np 9: the hosts have 4 slots"),
        (["-H", "a:2,a:2", "true"], "a is named twice"),
        (["--hostfile", "/none", "true"], "--hostfile /none: No such file"),
        (["-H", "a:1", "--hostfile", "/none", "true"], "both name the hosts"),
        (["-np", "2"], "no command to start"),
        (
            ["--output-filename", "/dev/null/x", "-np", "1", "true"],
            "--output-filename /dev/null/x: cannot be made: Not a",
        ),
        (["-i", "/none", "-np", "1", "true"], "-i /none: there is no such file"),
        (["-H", "no-such-host.invalid:2", "true"], "the name does not resolve"),
    ],
)
def test_wrong_input_starts_nothing(words, sentence):
    done = launch(*words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_other_launchers_commands_are_printed(launcher):
    done = launch("--launcher", launcher, "-np", "2", "-H", "h1:1,h2:1", "-p", "12345", "hvdtrain", "world")
    assert done.returncode == 0
    assert done.stdout.startswith(launcher)
    assert done.stdout.rstrip().endswith("hvdtrain world")
    assert "12345" in done.stdout


def agents_of(process):
    return [p for p in psutil.Process(process.pid).children() if "hvdtrain.launch.remote.agent" in p.cmdline()]


def until(reached):
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started(*command, tmp=None):
    """A launcher whose two ranks have said that they are ready. `tmp`: where its agent puts what it needs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp)} if tmp else None,
    )
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    return process


def launch_and_signal(number, times, *command):
    process = started(*command)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.5)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def processes_with(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(mark in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found
