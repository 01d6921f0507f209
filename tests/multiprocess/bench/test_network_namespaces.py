"""Hosts as network namespaces: real links, real ranks, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.bench.hosts import namespace_hosts
from hvdtrain.bench.hosts.namespaces import why_not

_PROBLEM = why_not()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=f"no network namespaces here: {_PROBLEM}")

_HOLD = """
import subprocess, sys, time
from hvdtrain.bench.hosts import namespace_hosts
with namespace_hosts(2, 1e9) as hosts:
    inside = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    child = subprocess.Popen(hosts[1].command([sys.executable, "-c", inside]))
    time.sleep(60)
"""


def namespaces_of_processes() -> set[str]:
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found.add(str((process / "ns/net").readlink()))
            except OSError:
                continue
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_links_have_the_rate_and_count_bytes() -> None:
    receive = "import socket,sys; s = socket.create_server((sys.argv[1], 5000)); c, _ = s.accept(); n = 0\n"
    receive += "while b := c.recv(1 << 20): n += len(b)\nprint(n)"
    send = (
        "import socket,sys,time\nfor _ in range(100):\n try: c = socket.create_connection((sys.argv[1], 5000)); break\n"
    )
    send += " except OSError: time.sleep(0.1)\nc.sendall(bytes(5_000_000))"
    with namespace_hosts(3, 100e6) as hosts:
        before = hosts[2].traffic()
        receiver = subprocess.Popen(
            hosts[0].command([sys.executable, "-c", receive, hosts[0].address]), stdout=subprocess.PIPE, text=True
        )
        start_s = time.monotonic()
        subprocess.run(hosts[2].command([sys.executable, "-c", send, hosts[0].address]), check=True, timeout=60)
        output, _ = receiver.communicate(timeout=60)
        seconds = time.monotonic() - start_s
        assert int(output) == 5_000_000
        # 40 Mbit at 100 Mbit/s, less what the filter lets through at once.
        assert seconds > 0.38
        sent = (hosts[2].traffic() - before).sent_bytes
        assert 5_000_000 < sent < 5_000_000 * 1.06
        hosts.shape(None)
        assert "tbf" not in hosts[0].namespace.run("tc", "qdisc", "show")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_however_the_process_ends(number: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        namespace = str(Path(f"/proc/{child}/ns/net").readlink())
        assert namespace != str(Path("/proc/self/ns/net").readlink())
        # Nothing of it is among the machine's own interfaces.
        table = Path("/proc/net/dev").read_text()
        assert not any(name in table for name in ("port0", "port1", "bridge0"))
    finally:
        holder.send_signal(number)
        holder.communicate(timeout=20)
    assert eventually(lambda: namespace not in namespaces_of_processes())
    assert not Path(f"/proc/{child}").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()


_SHAPE = """
import os, sys, time
from hvdtrain.bench.hosts.shaping import shaped
with shaped(("eth0", 1e8)):
    print("shaped", flush=True)
    if len(sys.argv) > 1:
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGTERM])
def test_the_limit_of_a_real_interface_goes_however_the_process_ends(number: signal.Signals | None) -> None:
    with namespace_hosts(1) as hosts:
        line = [sys.executable, "-c", _SHAPE, *([] if number is None else [str(int(number))])]
        done = subprocess.run(hosts[0].command(line), capture_output=True, text=True, check=False, timeout=60)
        assert done.stdout == "shaped\n"
        assert done.returncode == (0 if number is None else -number)
        assert eventually(lambda: "tbf" not in hosts[0].namespace.run("tc", "qdisc", "show"))


def test_a_queue_that_somebody_else_set_up_is_left_alone() -> None:
    with namespace_hosts(1, 5e7) as hosts:
        line = hosts[0].command([sys.executable, "-c", _SHAPE])
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
        assert "eth0 already has a queue that somebody has set up (qdisc tbf" in done.stderr
        assert "rate 50Mbit" in hosts[0].namespace.run("tc", "qdisc", "show")


def test_bench_network_counts_what_no_sync_and_fp16_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "hvdtrain", "bench", "network", "--bandwidth", "1gbit", "--backend", "ddp",
            "--rounds", "1", "--starts", "1", "--block-seconds", "0", "--set", "task_options.widths=[784, 512, 10]",
            "--no-plots", "--json", "--output", str(tmp_path),
        ],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [round(cut["measured"] / cut["expected"], 1) for cut in result["cuts"]] == [1.0] * 4
    row = next(row for row in result["rows"] if row["no_sync"] and row["compression"] == "none")
    assert row["payload_bytes"] == (784 * 512 + 512 + 512 * 10 + 10) * 4
    assert row["sent_bytes"] == pytest.approx([row["payload_bytes"]] * 2, rel=0.03)
    assert row["interfaces"] == ["eth0", "eth0"]
    assert "## 1 Gbit/s, accumulate 4" in (tmp_path / "network.md").read_text()


def test_bench_network_stops_on_sigterm_with_all_its_ranks(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "hvdtrain", "bench", "network", "--no-plots", "--backend", "ddp"]
    bench = subprocess.Popen([*line, "--output", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        assert bench.stderr is not None
        bench.stderr.readline()
        assert eventually(lambda: bool(children_of(bench.pid)))
        children = children_of(bench.pid)
    finally:
        bench.terminate()
        bench.communicate(timeout=30)
    assert bench.returncode not in (0, None)
    assert eventually(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))  # noqa: PTH110


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
