"""The arithmetic of `bench network` and `bench scaling`, by hand, and what people read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.bench.hosts.counters import Traffic, traffic_in
from hvdtrain.bench.hosts.rates import format_rate, parse_rate
from hvdtrain.bench.hosts.tbf import shape_line
from hvdtrain.bench.network.bound import payload_bytes, wire_bytes, wire_s
from hvdtrain.bench.network.measure import Effort, Grid, Link, measure
from hvdtrain.bench.network.plots import rate_over_time
from hvdtrain.bench.network.table import cuts, document
from hvdtrain.bench.placed import Place, Spread
from hvdtrain.bench.placed.own_processes import divided
from hvdtrain.bench.placed.specification import decode, encode
from hvdtrain.bench.scaling.measure import counts_up_to, spreads_of
from hvdtrain.bench.scaling.measure import measure as measure_scaling
from hvdtrain.bench.scaling.table import document as scaling_document
from hvdtrain.bench.timing import Variant
from hvdtrain.cli.bench_network import links_of
from hvdtrain.errors import LaunchError, TrainingFailed, UserError

# ---- rates, counters, limits ----


@pytest.mark.parametrize(
    ("text", "bits_per_s"), [("1gbit", 1e9), ("2.5Gbit", 2.5e9), (" 100 mbit", 1e8), ("64kbit", 64e3), ("8bit", 8.0)]
)
def test_a_rate_is_read_as_tc_reads_it(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "1", "gbit", "0gbit", "1 GB/s", "1gbps", "-1gbit"])
def test_another_spelling_of_a_rate_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a rate"):
        parse_rate(text)


def test_a_rate_for_people() -> None:
    shown = [format_rate(rate) for rate in (1e9, 1e10, 2.5e9, 1e8, 64e3, 8)]
    assert shown == ["1 Gbit/s", "10 Gbit/s", "2.5 Gbit/s", "100 Mbit/s", "64 kbit/s", "8 bit/s"]


_TABLE = """Inter-|   Receive          |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:     10   1    0    0    0     0          0         0    20    2    0    0    0     0       0          0
  eth0:5000000000 7   0    0    0     0          0         0   400    8    0    0    0     0       0          0
"""


def test_bytes_are_read_from_the_kernels_table() -> None:
    assert traffic_in(_TABLE, "eth0") == Traffic(sent_bytes=400, received_bytes=5_000_000_000)
    assert traffic_in(_TABLE, "eth0") - Traffic(100, 1) == Traffic(300, 4_999_999_999)
    with pytest.raises(LaunchError, match="no interface eth1 on this host; it has lo, eth0"):
        traffic_in(_TABLE, "eth1")


def test_the_burst_of_a_limit_is_a_millisecond_but_holds_a_large_frame() -> None:
    assert "1250000b" in shape_line("eth0", 1e10)
    assert "131072b" in shape_line("eth0", 1e8)
    assert shape_line("eth0", 1e9)[:8] == ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate"]


# ---- bounds ----

# A layer 784 -> 2048 with its bias, float32.
_LAYER = [[[2048, 784], 4], [[2048], 4]]


def test_payload() -> None:
    assert payload_bytes(_LAYER, "none") == (2048 * 784 + 2048) * 4 == 6_430_720
    assert payload_bytes(_LAYER, "fp16") == payload_bytes(_LAYER, "bf16") == 3_215_360
    # Gradients that are float16 already do not grow.
    assert payload_bytes([[[10], 2]], "bf16") == 20
    # Rank 1: 2048 + 784 numbers for the matrix, the bias as it is.
    assert payload_bytes(_LAYER, "powersgd") == (2048 + 784 + 2048) * 4
    # A kernel [8, 3, 2, 2] is a matrix [8, 12]; 20 numbers are less than half of 96. [2, 3] is left alone: 5 of 6.
    assert payload_bytes([[[8, 3, 2, 2], 4], [[2, 3], 4]], "powersgd") == (20 + 6) * 4


def test_the_wires_bound() -> None:
    assert [wire_bytes(100, hosts) for hosts in (1, 2, 4)] == [0, 100, 150]
    # 40 MB between two hosts at 1 Gbit/s: 320 ms.
    assert wire_s(40e6, 2, 1e9) == pytest.approx(0.32)


def test_horovod_is_not_asked_for_what_it_lacks_and_no_sync_not_where_nothing_differs() -> None:
    grid = Grid(links=[], compressions=("none", "bf16"), accumulates=(1, 2))
    assert grid.variants("horovod") == [Variant("none", 1, True), Variant("none", 2, False), Variant("none", 2, True)]
    assert [v.compression for v in grid.variants("ddp")] == ["none", "bf16", "none", "none", "bf16", "bf16"]


# ---- tables, from made-up ranks ----


class MadeUpPlace(Place):
    """Two hosts whose ranks answer what a formula says: 100 ms to compute, 8 ms per MB on the wire."""

    def __init__(self, ranks: tuple[int, ...] = (1, 1)) -> None:
        self.full = Spread(ranks)
        self.shapes: list[Any] = []

    def run(
        self, target: str, arguments: dict[str, Any], *, spread: Spread, limit_s: float, apart: bool = False
    ) -> list[Any]:
        if target.endswith("link:rank"):
            return [{"node_rank": 0, "received_bits_per_s": 2e9}, {"node_rank": 1, "received_bits_per_s": 1e9}]
        if spread.num_hosts > 1 and not apart:
            self.shapes.append(arguments.get("shape"))
        else:
            assert arguments.get("shape") is None
        measured = []
        for variant in arguments["variants"]:
            sent = 0.0
            if spread.num_hosts > 1 and not apart:
                sent = 4e6 / (2 if variant["compression"] == "fp16" else 1)
                sent *= 1 if variant["no_sync"] else variant["accumulate"]
            step_s = 0.1 + sent * 8e-9
            counts = {"sent_bytes": [sent] * 3, "received_bytes": [sent] * 3}
            measured.append({"steps": 2, "step_s": [step_s, step_s, 9.0], **counts})
        common = {
            "interface": "eth0",
            "transport": "gloo",
            "device": "cpu",
            "threads": 1,
            "items": 1280,
            "gradients": [[[1000, 1000], 4]],
            "variants": measured,
            "traces": {str(i): {"at_s": [0.1, 0.2], "sent_bytes": [0, 5]} for i in arguments.get("traced", ())},
        }
        places = [(node, local) for node, count in enumerate(spread.ranks) for local in range(count)]
        return [{**common, "rank": r, "node_rank": n, "local_rank": k} for r, (n, k) in enumerate(places)]


_JOB = {
    "task": "module:Task",
    "task_options": {},
    "batch_size": 16,
    "accumulate": 1,
    "compression": "none",
    "sync_every_microbatch": False,
}


@pytest.fixture
def result() -> dict[str, Any]:
    return measure(MadeUpPlace(), _JOB, Grid(links=[Link(1e9)], backends=("ddp",)), Effort())


def row_of(result: dict[str, Any], compression: str, no_sync: bool) -> dict[str, Any]:
    return next(row for row in result["rows"] if (row["compression"], row["no_sync"]) == (compression, no_sync))


def test_rows(result: dict[str, Any]) -> None:
    assert len(result["rows"]) == 4
    row = row_of(result, "none", True)
    # 4 MB: 32 ms on the wire at 1 Gbit/s, 100 ms to compute; the median ignores the third round.
    assert row["step_ms"] == pytest.approx(132)
    assert row["wire_ms"] == pytest.approx(32)
    assert row["ratio_to_wire"] == pytest.approx(132 / 32)
    assert row["computation_ms"] == pytest.approx(100)
    assert row["ratio_to_wire_and_computation"] == pytest.approx(1.0)
    # Two ranks, 16 samples, 4 microbatches: 128 samples a step, 10 steps an epoch of 1280.
    assert row["samples_per_s"] == pytest.approx(128 / 0.132)
    assert row["epoch_s"] == pytest.approx(1.32)
    # One host takes 64 samples in 100 ms.
    assert result["one_host"][0]["epoch_s"] == pytest.approx(2.0)
    assert row["speed_up"] == pytest.approx(2.0 / 1.32)
    assert row_of(result, "none", False)["wire_ms"] == pytest.approx(4 * 32)
    assert row_of(result, "fp16", True)["wire_ms"] == pytest.approx(16)


def test_what_others_are_compared_with_is_started_several_times() -> None:
    result = measure(MadeUpPlace(), _JOB, Grid(links=[Link(1e9)], backends=("ddp",)), Effort(rounds=5, starts=3))
    # Two rounds a start were asked for; the made-up ranks always answer with three.
    assert len(result["one_host"][0]["step_ms_rounds"]) == 9
    assert len(result["rows"][0]["step_ms_rounds"]) == 3


def test_more_microbatches_are_another_run_and_the_longest_is_recorded() -> None:
    place = MadeUpPlace()
    result = measure(place, _JOB, Grid(links=[Link(1e9)], backends=("ddp",), accumulates=(1, 4)), Effort())
    assert len(place.shapes) == 2
    assert [(row["accumulate"], row["no_sync"]) for row in result["rows"]] == [
        (1, True), (1, True), (4, False), (4, True), (4, False), (4, True),
    ]  # fmt: skip
    assert {trace["accumulate"] for trace in result["traces"]} == {4}
    text = document(result)
    assert text.index("## 1 Gbit/s, accumulate 1") < text.index("## 1 Gbit/s, accumulate 4")


def test_cuts(result: dict[str, Any]) -> None:
    found = {cut["what"]: (cut["expected"], cut["measured"], cut["ratio"]) for cut in cuts(result)}
    assert found == {
        "no_sync, compression none": (4, 4.0, 1.0),
        "no_sync, compression fp16": (4, 4.0, 1.0),
        "fp16, no_sync off": (2.0, 2.0, 1.0),
        "fp16, no_sync on": (2.0, 2.0, 1.0),
    }


def test_the_document_reads_well_and_json_is_plain(result: dict[str, Any]) -> None:
    text = document(result, ["time.png"])
    assert "## 1 Gbit/s, accumulate 4" in text
    assert "| ddp | one host | | 100 | 2.0 | 640 | 1 | | | | |" in text
    assert "| ddp | none | on | 132 | 1.3 | 970 | 1.52 | 4.00 | 32 | 4.12 | 1.00 |" in text
    assert "| 1 Gbit/s | ddp | 4 | fp16, no_sync on | 2 | 2 |" in text
    assert "![time.png](time.png)" in text
    json.dumps(result, allow_nan=False)


def test_a_link_that_is_not_limited_is_as_fast_as_its_slowest_host() -> None:
    result = measure(MadeUpPlace(), _JOB, Grid(links=[Link(None)], backends=("ddp",)), Effort())
    assert {row["bits_per_s"] for row in result["rows"]} == {1e9}
    assert "## 1 Gbit/s (measured), accumulate 4" in document(result)


def test_a_real_interface_is_limited_only_where_hosts_talk() -> None:
    place = MadeUpPlace()
    measure(place, _JOB, Grid(links=[Link(1e9, "eth0")], backends=("ddp",)), Effort())
    assert place.shapes == [["eth0", 1e9]]


def test_a_table_of_a_limit_that_the_bytes_went_past_is_refused() -> None:
    grid = Grid(links=[Link(1e9, "eth7")], backends=("ddp",))
    with pytest.raises(TrainingFailed, match="interface eth7 was limited, and the ranks sent over eth0: limit that"):
        measure(MadeUpPlace(), _JOB, grid, Effort())


def test_a_backend_that_has_none_of_the_compressions_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(MadeUpPlace(), _JOB, Grid(links=[Link(1e9)], compressions=("bf16",)), Effort())
    assert {row["backend"] for row in result["rows"] + result["one_host"]} == {"ddp"}
    assert "horovod is left out: it has no compression bf16" in capsys.readouterr().err
    with pytest.raises(UserError, match="horovod: nothing to measure with bf16"):
        measure(MadeUpPlace(), _JOB, Grid(links=[Link(1e9)], backends=("horovod",), compressions=("bf16",)), Effort())


def test_no_row_is_left_without_no_sync_where_nothing_differs() -> None:
    grid = Grid(links=[Link(1e9)], backends=("ddp",), accumulates=(1, 4), no_sync=(False,))
    rows = measure(MadeUpPlace(), _JOB, grid, Effort())["rows"]
    assert {(row["accumulate"], row["no_sync"]) for row in rows} == {(4, False)}


def test_a_data_set_of_unknown_length_and_dynamic_batches_leave_dashes() -> None:
    class Iterable(MadeUpPlace):
        def run(self, *arguments: Any, **options: Any) -> list[Any]:
            return [{**rank, "items": None} for rank in super().run(*arguments, **options)]

    job = {**_JOB, "batch_size": None}
    result = measure(Iterable(), job, Grid(links=[Link(1e9)], backends=("ddp",)), Effort())
    assert "| ddp | none | on | 132 | - | - | 1.52 |" in document(result)


def test_traces_become_rates() -> None:
    at_s = [0.02 * i for i in range(1, 12)]
    times, gbit = rate_over_time(at_s, [2.5e6 * i for i in range(11)])
    assert gbit == pytest.approx([1.0] * 10)
    assert len(times) == 10
    assert rate_over_time([], []) == ([], [])


def test_pictures_are_written(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hvdtrain.bench.network.plots import draw
    from hvdtrain.bench.scaling.plots import curve

    names = [path.name for path in draw(result, tmp_path)]
    assert names == ["time.png", "rate-ddp.png"]
    scaled = measure_scaling(MadeUpPlace(), _JOB, [Spread((1,)), Spread((1, 1))], ["ddp"], rounds=1, block_s=0)
    curve(scaled, tmp_path / "scaling.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


# ---- where ranks go ----


def test_ranks_fill_one_host_after_the_other() -> None:
    place = MadeUpPlace((2, 4))
    assert [place.hosts_first(count).ranks for count in (1, 2, 3, 6)] == [(1,), (2,), (2, 1), (2, 4)]
    assert [spread.size for spread in spreads_of(place, None)] == [1, 2, 4, 6]
    assert [spread.size for spread in spreads_of(place, [6, 2])] == [2, 6]
    with pytest.raises(LaunchError, match="7 ranks: the hosts take 6"):
        spreads_of(place, [7])


def test_counts() -> None:
    assert [counts_up_to(total) for total in (1, 2, 3, 4, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 12]]


def test_hosts_share_the_cores() -> None:
    assert divided([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    assert divided([0, 1], 3) == []


def test_what_a_rank_is_told_is_one_word() -> None:
    specification = {"target": "a:b", "arguments": {"text": "spaces, $variables and 'quotes'"}}
    word = encode(specification)
    assert decode(word) == specification
    assert word.replace("-", "").replace("_", "").replace("=", "").isalnum()


# ---- scaling ----


def test_scaling_rows() -> None:
    result = measure_scaling(MadeUpPlace(), _JOB, [Spread((1,)), Spread((1, 1))], ["ddp"], rounds=3, block_s=1.0)
    alone, two = result["rows"]
    assert (alone["num_steps_per_gpu"], alone["avg_step_time"], alone["efficiency"]) == (80, 0.1, 1.0)
    assert (two["num_steps_per_gpu"], two["ranks"], two["hosts"]) == (40, 2, 2)
    assert two["speed_up"] == pytest.approx(2 * 0.1 / 0.132)
    assert two["efficiency"] == pytest.approx(0.1 / 0.132)
    assert "| ddp | 2 | 2 | 40 | 0.1320 | 242 | 1.52 | 76% |" in scaling_document(result)


def test_scaling_from_more_than_one_rank_counts_in_ranks() -> None:
    spreads = [Spread((2,)), Spread((2, 2))]
    result = measure_scaling(MadeUpPlace((2, 2)), _JOB, spreads, ["ddp"], rounds=1, block_s=0)
    assert result["rows"][0]["speed_up"] == pytest.approx(2.0)


# ---- real hosts are not limited unasked ----


def test_real_hosts_are_measured_as_they_are_unless_an_interface_is_named() -> None:
    place = MadeUpPlace()
    assert links_of(place, (), None, None) == [Link(None)]
    assert links_of(place, (), None, "25gbit") == [Link(25e9)]
    assert links_of(place, ("1gbit",), "eth1", None) == [Link(1e9, "eth1")]
    with pytest.raises(LaunchError, match="--shape-shared-interface"):
        links_of(place, ("1gbit",), None, None)
    with pytest.raises(LaunchError, match="give that, and no --link"):
        links_of(place, (), "eth1", None)
