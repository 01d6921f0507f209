"""`hvdtrain bench collectives`: what the kernel counts is what the arithmetic says; the server's share grows with N."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.bench.hosts.namespaces import why_not

REPOSITORY = Path(__file__).parents[3]
REASON = why_not()


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", "bench", "collectives", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")
def test_the_servers_traffic_grows_with_the_ranks_and_the_rings_hardly(tmp_path):
    one = ["--ranks", "2", "--ranks", "4", "--size", "2", "--rounds", "2", "--backend", "ddp", "--bandwidth", "none"]
    ended = bench(*one, "--output", str(tmp_path), "--json")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    sent = {(row["way"], row["ranks"]): max(row["sent_bytes"]) for row in result["rows"]}
    assert sorted(sent) == [(way, n) for way in ("ddp (gloo)", "parameter server", "ring") for n in (2, 4)]
    size = 2e6
    # Payload of one all-reduce; headers, barriers and acknowledgements come on top.
    for key, payload in (
        (("parameter server", 2), 1.0), (("parameter server", 4), 3.0), (("ring", 2), 1.0), (("ring", 4), 1.5),
    ):  # fmt: skip
        assert 1.0 <= sent[key] / (payload * size) < 1.04, key
    assert sent["parameter server", 4] / sent["parameter server", 2] == pytest.approx(3, rel=0.03)
    assert sent["ring", 4] / sent["ring", 2] == pytest.approx(1.5, rel=0.03)
    assert sent["ddp (gloo)", 4] == pytest.approx(sent["ring", 4], rel=0.03)
    server = next(row for row in result["rows"] if (row["way"], row["ranks"]) == ("parameter server", 4))
    # Only the server is busy.
    assert [round(sent / size) for sent in server["sent_bytes"]] == [3, 1, 1, 1]
    assert [round(received / size) for received in server["received_bytes"]] == [3, 1, 1, 1]
    assert (tmp_path / "collectives.png").stat().st_size > 10_000
    assert "| 4 | parameter server |" in (tmp_path / "collectives.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "--ranks"),
        (["--ranks-per-host", "2"], "--ranks-per-host"),
        (["--bandwidth", "fast"], "fast"),
    ],
)
def test_wrong_input_is_status_2(arguments, said, tmp_path):
    ended = bench(*arguments, "--output", str(tmp_path))
    assert ended.returncode == 2
    assert said in ended.stderr
