"""`hvdtrain bench hvd` without ranks: limits, rows, the table."""

from __future__ import annotations

import pytest

from hvdtrain.bench import hvd
from hvdtrain.bench.blocks import Blocks, split_evenly
from hvdtrain.bench.hvd_contestants import Place, commands


def test_limits_of_the_ratios():
    assert hvd.limit("large", "fp16", "gloo", 1) == 0.6
    assert hvd.limit("large", "none", "gloo", 1) == 0.8
    assert hvd.limit("small", "fp16", "gloo", 1) == 1.05
    assert hvd.limit("latency", "none", "gloo", 1) == 0.5
    assert hvd.limit("large", "none", "mpi", 1) is None  # through shared memory: reported
    assert hvd.limit("large", "none", "mpi", 2) == 1.0
    assert hvd.limit("resnet", "fp16", "ddp", 1) == 1.15
    assert hvd.limit("throughput", "none", "ddp", 2) is None


def test_a_row_has_medians_and_the_medians_of_the_ratios():
    blocks = Blocks({"ours": [1.0, 2.0, 6.0], "gloo": [2.0, 8.0, 6.0], "mpi": [4.0, 4.0, 4.0]})
    row = hvd._row("large", "fp16", blocks, 1)
    assert row == {
        "work": "large",
        "compression": "fp16",
        "ours_ms": 2.0,
        "gloo_ms": 6.0,
        "mpi_ms": 4.0,
        "ratio_to_gloo": 0.5,
        "limit_to_gloo": 0.6,
        "reported_to_mpi": 0.5,
    }
    lines = hvd.table({"left_out": {"ddp": "not asked for"}, "rows": [row]}).splitlines()
    assert lines[0].count("|") == lines[2].count("|") == 8
    assert lines[2].endswith("| fp16 | 2.00 | 6.00 | 4.00 | 0.50 (at most 0.6) | 0.50 |")


def test_launchers_variables_do_not_answer_for_the_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setenv("LOCAL_RANK", "7")
    ranks = commands("gloo", "small", "fp16", [Place(), Place()], tmp_path)
    assert [rank.environ["RANK"] for rank in ranks] == ["0", "1"]
    for rank in ranks:
        assert not {"HOROVOD_RANK", "LOCAL_RANK"} & set(rank.environ)
        assert rank.argv[-3:] == ["small", "--compression", "fp16"]


def test_mpirun_reaches_another_host_through_our_stand_in_for_ssh(tmp_path):
    places = [Place(lambda line, n=n: ["on", str(n), *line], f"198.18.0.{n + 1}", "eth0") for n in range(2)]
    (started,) = commands("mpi", "small", "none", places, tmp_path)
    assert started.argv[:3] == ["on", "0", "mpirun"]
    assert "198.18.0.1:1,198.18.0.2:1" in started.argv
    assert 'case "$host" in\n198.18.0.1) exec on 0 sh -c "$*" ;;' in (tmp_path / "agent").read_text()


def test_contests_of_the_same_contestants_add_up():
    both = Blocks({}) + Blocks({"a": [1.0, 2.0], "b": [1.0, 1.0]}) + Blocks({"a": [9.0], "b": [3.0]})
    assert both == Blocks({"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 3.0]})
    assert both.ratio("a", "b") == 2.0


@pytest.mark.parametrize(("total", "expected"), [(6, [2, 2, 2]), (5, [2, 2, 1]), (2, [1, 1]), (60, [20, 20, 20])])
def test_split_evenly(total, expected):
    assert split_evenly(total, 3) == expected
