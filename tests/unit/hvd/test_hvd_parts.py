"""Layout of buckets, wire format, arithmetic, settings, timeline, import hook."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
import torch

from hvdtrain.hvd.buckets import Bucket, Description, assign_buckets, dense_stride
from hvdtrain.hvd.engine.adasum import adasum_pair, adasum_tree
from hvdtrain.hvd.engine.executor import split_rows
from hvdtrain.hvd.engine.reduction import reduce_list
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.engine.wire import Connection, encode

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)


def described(numel, dtype="float32", group=-1, device="cpu"):
    return Description("p", dtype, (numel,), (1,), device, group)


def test_buckets_keep_order_and_limit_and_the_first_is_small():
    mebi = 1024 * 1024 // 4
    sizes = [described(n * mebi) for n in (1, 1, 10, 10, 10, 30)]
    assert assign_buckets(sizes, range(6), 25 * 1024 * 1024) == [[0], [1, 2, 3], [4], [5]]


def test_each_gradient_has_its_own_bucket_where_fusion_is_off():
    assert assign_buckets([described(1)] * 3, [2, 0, 1], 0) == [[2], [0], [1]]


def test_dtypes_and_groups_do_not_share_a_bucket():
    parameters = [described(1), described(1, "float64"), described(1), described(1, group=0), described(1, group=0)]
    assert assign_buckets(parameters, range(5), 1000) == [[1], [0, 2], [3, 4]]


def test_a_bucket_has_views_in_the_layout_of_the_parameters():
    parameter = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    description = Description("p", "float32", (2, 3, 4, 5), dense_stride(parameter), "cpu", -1)
    bucket = Bucket([0], [description], torch.float32, torch.device("cpu"), True, 1.0, 1.0)
    assert bucket.views[0].stride() == parameter.stride()
    assert bucket.buffer.numel() == 120 + 17


def test_strides_with_gaps_become_contiguous():
    assert dense_stride(torch.empty(4, 4)[:, :2]) == (2, 1)
    assert dense_stride(torch.empty(3, 4).t()) == (1, 4)
    assert dense_stride(torch.empty(2, 1, 3).expand(2, 5, 3)) == (15, 3, 1)


def test_messages_arrive_whole_in_whatever_pieces():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection = Connection.__new__(Connection)
    connection.sock, connection._buffer, connection.closed = theirs, bytearray(), False
    data = encode(["q", [1, None]], b"abc") + encode({"s": 0})
    for start in range(0, len(data), 5):
        ours.sendall(data[start : start + 5])
    received = []
    while len(received) < 2:
        received += connection.receive()
    assert received == [(["q", [1, None]], b"abc"), ({"s": 0}, b"")]
    ours.close()
    assert connection.receive() == []
    assert connection.closed
    theirs.close()


@pytest.mark.parametrize(
    ("op", "expected"), [(SUM, [5, -8]), (AVERAGE, [2, -4]), (MIN, [1, -5]), (MAX, [4, -3]), (PRODUCT, [4, 15])]
)
def test_integers_are_reduced_exactly_and_averages_truncated(op, expected):
    tensors = [torch.tensor([1, -3]), torch.tensor([4, -5])]
    assert reduce_list(tensors, op, 1.0, 1.0, 2).tolist() == expected


def test_integers_are_scaled_in_float64_and_truncated():
    big = 2**53 - 1
    assert reduce_list([torch.tensor([big, -3])], SUM, 0.5, 1.0, 1).tolist() == [big // 2, -1]


def test_half_precision_is_summed_as_float32():
    tensors = [torch.tensor([2048.0]).half(), torch.tensor([1.0]).half(), torch.tensor([1.0]).half()]
    assert reduce_list(tensors, SUM, 1.0, 1.0, 3).tolist() == [2050.0]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]),
        ([1.0, 0.0], [1.0, 0.0], [1.0, 0.0]),
        ([2.0, 0.0], [1.0, 0.0], [1.5, 0.0]),
        ([0.0, 0.0], [1.0, 2.0], [1.0, 2.0]),
        ([1e-30, 0.0], [1e-30, 0.0], [1e-30, 0.0]),
    ],
)
def test_adasum_of_two(a, b, expected):
    assert adasum_pair(torch.tensor(a), torch.tensor(b)).tolist() == torch.tensor(expected).tolist()


def test_adasum_pairs_neighbours_first():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert adasum_tree([a, b, a, b]).tolist() == [1.0, 1.0]
    assert adasum_tree([a, a, b, b]).tolist() == [1.0, 1.0]


def test_rows_left_over_go_to_the_first_ranks():
    assert split_rows(7, 3) == [3, 2, 2]
    assert split_rows(2, 3) == [1, 1, 0]


def test_settings_are_horovods_variables():
    environ = {
        "HOROVOD_FUSION_THRESHOLD": "1000",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_TIMELINE": "/tmp/t",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }
    settings = Settings.from_environ(environ)
    assert (settings.fusion_threshold_bytes, settings.bucket_bytes) == (1000, 1000)
    assert (settings.stall_warning_s, settings.stall_abort_s, settings.cache_capacity) == (5.0, 9.0, 0)
    assert (settings.timeline, settings.timeline_cycles) == ("/tmp/t", True)


def test_settings_without_variables():
    settings = Settings.from_environ({})
    assert (settings.fusion_threshold_bytes, settings.bucket_bytes) == (128 * 2**20, 25 * 2**20)
    assert (settings.stall_warning_s, settings.stall_abort_s) == (60.0, None)


def test_the_stall_check_can_be_turned_off():
    environ = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}
    settings = Settings.from_environ(environ)
    assert (settings.stall_warning_s, settings.stall_abort_s) == (None, None)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"^HOROVOD_FUSION_THRESHOLD='many': a number was expected$"):
        Settings.from_environ({"HOROVOD_FUSION_THRESHOLD": "many"})


def test_a_timeline_is_a_chrome_trace(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline()
    timeline.start(str(path), mark_cycles=True)
    timeline.negotiation_starts("allreduce", "allreduce.x", 1)
    timeline.negotiation_ends("allreduce.x")
    timeline.agreed("allreduce", ["allreduce.x"])
    timeline.executed("allreduce", ["allreduce.x"], 0.0)
    timeline.stop()
    events = json.loads(path.read_text())
    assert [event["name"] for event in events if event["ph"] == "B"] == ["NEGOTIATE_ALLREDUCE"]
    assert [event["ph"] for event in events if event.get("name") == "CYCLE_START"] == ["i"]
    assert {event["args"].get("name") for event in events if event["ph"] == "M"} >= {"allreduce.x", "cycles"}


def run_python(code, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_import_hook_gives_ours_under_every_name():
    code = """
from hvdtrain.hvd import alias
alias.install(); alias.install()
import horovod, horovod.torch as hvd, horovod.torch.elastic, horovod.common.util
from horovod.torch.mpi_ops import allreduce
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compression
from horovod.runner.util.threads import in_thread
import hvdtrain.hvd
print(hvd is hvdtrain.hvd, horovod.torch is hvd, allreduce is hvd.allreduce, horovod.__version__)
print(HorovodInternalError is hvd.HorovodInternalError, Compression is hvd.Compression)
try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    print(error.name)
alias.uninstall()
import sys
print([name for name in sys.modules if name.startswith("horovod")])
"""
    assert run_python(code) == ["True", "True", "True", "0.28.1", "True", "True", "horovod.tensorflow", "[]"]


def test_python_processes_started_by_a_script_find_ours_too():
    code = """
import subprocess, sys
from hvdtrain.hvd import alias
alias.install(); alias.export_to_children()
child = "import horovod.torch as hvd, horovod; print(hvd.__name__, horovod.__version__)"
subprocess.run([sys.executable, "-c", child], check=True)
"""
    assert run_python(code) == ["hvdtrain.hvd", "0.28.1"]


def test_one_rank_needs_no_launcher_and_no_thread_is_left():
    code = """
import threading, torch, hvdtrain.hvd as hvd
hvd.init(); hvd.init()
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous())
print(*hvd.allreduce(torch.tensor([1.0, 2.0])).tolist(), *hvd.alltoall(torch.arange(3)).tolist(), hvd.join())
print(hvd.allgather_object("x"), hvd.broadcast_object([1]), hvd.reducescatter(torch.ones(3), op=hvd.Sum).sum().item())
hvd.shutdown(); print(hvd.is_initialized(), threading.active_count())
hvd.init(); print(hvd.mpi_enabled(), hvd.gloo_enabled())
"""
    expected = "0 1 0 1 True 1.0 2.0 0 1 2 0 ['x'] [1] 3.0 False 1 False True"
    assert " ".join(run_python(code)) == expected


def test_everything_needs_init():
    import hvdtrain.hvd as hvd

    for call in (hvd.rank, hvd.size, hvd.local_rank, lambda: hvd.allreduce(torch.ones(1)), hvd.stop_timeline):
        with pytest.raises(ValueError, match=r"use hvd\.init"):
            call()
    assert not hvd.is_initialized()
