"""`hvdtrain bench network` and `bench scaling` on hosts that are reached over ssh."""

from __future__ import annotations

import json
import statistics

import pytest

SMALL = "--set 'task_options.widths=[784, 512, 10]' --rounds 1 --block-seconds 0 --no-plots --json --backend ddp"
ONCE = f"{SMALL} --starts 1"


@pytest.fixture
def log(hosts, output):
    """Where a test sends standard error, so that JSON alone is left."""
    assert hosts.run(f"mkdir -p {output}").status == 0
    return f"{output}/log"


PAYLOAD = (784 * 512 + 512 + 512 * 10 + 10) * 4


def test_bench_network_over_the_network_as_it_is(hosts, output, log):
    done = hosts.run(f"hvdtrain bench network -p 12345 -H host1:1,host2:1 {ONCE} --output {output} 2>{log}")
    assert done.status == 0, done.text + hosts.read(log)
    result = json.loads(done.text)
    assert result["hosts"] == 2
    for row in result["rows"]:
        assert row["bits_per_s_from"] == "measured"
        assert row["bits_per_s"] > 1e7
    row = next(row for row in result["rows"] if row["no_sync"] and row["compression"] == "none")
    # Over the interface goes what `hvdtrain launch` says, too, and on containers a header per frame.
    assert statistics.mean(row["sent_bytes"]) == pytest.approx(PAYLOAD, rel=0.1)
    assert "(measured), accumulate 4" in hosts.read(f"{output}/network.md")


def test_bench_network_limits_the_interface_that_it_is_given_and_undoes_it(hosts, output, log):
    line = f"hvdtrain bench network -p 12345 -H host1:1,host2:1 {ONCE} --output {output} --bandwidth 50mbit"
    refused = hosts.run(line)
    assert refused.status == 2
    assert "--shape-shared-interface" in refused.text
    if hosts.kind != "namespaces":
        pytest.skip("the containers are not allowed to set up their network")
    done = hosts.run(f"{line} --shape-shared-interface eth0 2>{log}")
    assert done.status == 0, done.text + hosts.read(log)
    row = next(row for row in json.loads(done.text)["rows"] if not row["no_sync"] and row["compression"] == "none")
    # Four reductions of 1.6 MB at 50 Mbit/s, less the burst of each.
    assert row["wire_ms"] == pytest.approx(4 * PAYLOAD * 8 / 50e6 * 1000)
    assert row["step_ms"] > 0.8 * row["wire_ms"]
    for host in ("host1", "host2"):
        assert "tbf" not in hosts.run("tc qdisc show dev eth0", host=host).text


def test_bench_scaling_over_hosts(hosts, output, log):
    line = f"hvdtrain bench scaling -p 12345 -H host1:1,host2:1 {SMALL} --output {output}"
    done = hosts.run(f"{line} 2>{log}")
    assert done.status == 0, done.text + hosts.read(log)
    assert [(row["ranks"], row["hosts"]) for row in json.loads(done.text)["rows"]] == [(1, 1), (2, 2)]
    log = hosts.read(log)
    assert "ddp, 2 rank(s) on 2 host(s): num_steps_per_gpu: 256, avg_step_time: 0." in log
