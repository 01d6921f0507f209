"""`hvdtrain bench hvd` in small: it runs, and its numbers are sane. How large they are is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hvdtrain.bench.hosts.namespaces import why_not


def measured(*options):
    command = [sys.executable, "-m", "hvdtrain", "bench", "hvd", "--rounds", "1", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(result, bounded):
    names = [name for name in ("ours", "gloo", "mpi", "ddp") if name not in result["left_out"]]
    (row,) = result["rows"]
    assert all(0 < row[f"{name}_ms"] < 10_000 for name in names)
    for base in names[1:]:
        key = f"ratio_to_{base}" if base in bounded else f"reported_to_{base}"
        assert row[key] == pytest.approx(row["ours_ms"] / row[f"{base}_ms"])
    return row


def test_one_host():
    result = measured("--work", "small", "--compression", "fp16")
    assert (result["rounds"], result["ranks"], result["hosts"]) == (1, 2, 1)
    row = check(result, bounded=("gloo", "ddp"))
    assert (row["work"], row["compression"], row["limit_to_ddp"]) == ("small", "fp16", 1.15)


@pytest.mark.skipif(why_not() is not None, reason="network namespaces cannot be made here")
def test_two_hosts():
    result = measured("--work", "latency", "--two-hosts")
    assert (result["hosts"], result["gbit_per_s"]) == (2, 10.0)
    check(result, bounded=())
