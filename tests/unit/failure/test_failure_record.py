from __future__ import annotations

import json

import pytest

from hvdtrain.errors import CollectiveError, ConfigError
from hvdtrain.failure.record import EARLY_EXIT, EXCEPTION, SIGNAL, Failure, is_consequence, name_ranks


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as same:
        return same


def test_an_exception_becomes_a_record_that_survives_the_wire() -> None:
    failure = Failure.from_exception(caught(ValueError("bad batch\ndetails")), 3, "node-2", "all_reduce 'loss'")
    assert (failure.rank, failure.host, failure.kind, failure.exit_status) == (3, "node-2", EXCEPTION, 1)
    assert failure.message == "ValueError: bad batch\ndetails"
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert not failure.secondary
    assert Failure.from_dict(json.loads(json.dumps(failure.to_dict()))) == failure


def test_the_report_ends_with_one_sentence() -> None:
    failure = Failure(
        1, "h", 7, EXCEPTION, "ValueError: bad\nmore", traceback="Traceback:\n  x\nValueError: bad\nmore\n"
    )
    assert failure.report() == (
        "hvdtrain: rank 1 (h, pid 7):\nTraceback:\n  x\nValueError: bad\nmore\n"
        "hvdtrain: rank 1 (h, pid 7) failed: ValueError: bad\n"
    )


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (Failure(0, "h", 7, EXCEPTION, ""), "rank 0 (h, pid 7) failed: no message"),
        (
            Failure(0, "h", 7, EXCEPTION, "E: x", operation="barrier 'end'", also_ranks=(1, 2, 3)),
            "rank 0 (h, pid 7) failed: E: x [in barrier 'end'] (ranks 1-3 likewise)",
        ),
        (
            Failure(0, "h", 7, SIGNAL, "was killed: SIGTERM (signal 15)"),
            "rank 0 (h, pid 7) was killed: SIGTERM (signal 15)",
        ),
    ],
)
def test_sentences(failure: Failure, sentence: str) -> None:
    assert failure.sentence() == sentence


@pytest.mark.parametrize(("code", "shown"), [(None, "0"), (0, "0"), (3, "3"), ("bye", "'bye'")])
def test_an_exit_is_early_and_never_a_success(code: object, shown: str) -> None:
    failure = Failure.from_exception(caught(SystemExit(code)), 0, "h")
    assert failure.kind == EARLY_EXIT
    assert failure.message == f"exited early, before the job's end: exit({shown})"
    assert failure.exit_status == 1


def test_wrong_input_keeps_its_status_and_has_no_traceback() -> None:
    failure = Failure.from_exception(caught(ConfigError("job.yaml, line 3: no such key")), 0, "h")
    assert failure.exit_status == 2
    assert (
        failure.report()
        == f"hvdtrain: rank 0 (h, pid {failure.pid}) failed: ConfigError: job.yaml, line 3: no such key\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"),
        RuntimeError("[1] is setting up NCCL communicator and retrieving ncclUniqueId"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        CollectiveError("all_reduce failed"),
        ConnectionResetError("reset"),
        type("HorovodInternalError", (RuntimeError,), {})("Horovod has been shut down"),
        type("DistBackendError", (RuntimeError,), {})("x"),
    ],
)
def test_errors_of_the_wire_are_consequences(error: Exception) -> None:
    assert is_consequence(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
        RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one"),
        KeyError("x"),
    ],
)
def test_errors_of_the_task_are_not(error: Exception) -> None:
    assert not is_consequence(error)


FAULT = """Fatal Python error: Segmentation fault

Current thread 0x00007f6d (most recent call first):
  File "/job/task.py", line 21 in loss
  File "/job/train.py", line 5 in <module>

Thread 0x00007f7a (most recent call first):
  File "/x/hvdtrain/failure/monitor.py", line 168 in _attend

Thread 0x00007f7b (most recent call first):
  File "/job/reader.py", line 3 in read

Extension modules: numpy.core, torch._C (total: 2)
"""


def test_a_crash_names_signal_and_place_and_shows_the_crashed_thread_last() -> None:
    failure = Failure.from_fault(FAULT, 1, "h", 7)
    assert failure.sentence() == "rank 1 (h, pid 7) died: SIGSEGV (signal 11) in loss (/job/task.py:21)"
    assert failure.traceback == (
        'Thread 0x00007f7b (most recent call first):\n  File "/job/reader.py", line 3 in read\n\n'
        'Current thread 0x00007f6d (most recent call first):\n  File "/job/task.py", line 21 in loss\n'
        '  File "/job/train.py", line 5 in <module>'
    )
    assert not failure.secondary


def test_an_abort_may_be_a_consequence() -> None:
    failure = Failure.from_fault("Fatal Python error: Aborted\n\n", 1, "h", 7)
    assert failure.secondary
    assert failure.message.startswith("died: SIGABRT (signal 6); a library gave up")


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 1, 5, 7, 8], "ranks 0-1, 5, 7-8")]
)
def test_name_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
