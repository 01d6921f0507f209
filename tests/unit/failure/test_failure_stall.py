from __future__ import annotations

import threading

import pytest

from hvdtrain.failure.stall import OperationWatch, Whereabouts, missing_ranks, stall_failure, stall_warning

LOSS = "all_reduce 'loss'"


def in_operation(rank: int, name: str = LOSS) -> Whereabouts:
    return Whereabouts(rank, "h", 100 + rank, "here", [{"name": name, "age_s": 61.0, "stack": f"  stack of {rank}"}])


def elsewhere(rank: int) -> Whereabouts:
    stack = '  File "task.py", line 3, in __getitem__\n    time.sleep(100)'
    return Whereabouts(rank, "h", 100 + rank, "here", stack=stack)


def test_only_running_operations_age() -> None:
    watch = OperationWatch()
    with watch.operation("outer"):
        watch.advance(2.0)
        with watch.operation("inner"):
            longest = watch.advance(1.0)
            assert longest is not None
            assert (longest.name, longest.age_s) == ("outer", 3.0)
            assert [(each["name"], each["age_s"]) for each in watch.whereabouts()["operations"]] == [
                ("outer", 3.0),
                ("inner", 1.0),
            ]
    assert watch.advance(100.0) is None


def test_operations_of_several_threads_do_not_mix() -> None:
    watch = OperationWatch()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with watch.operation("other"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with watch.operation("main"):
        thread.start()
        assert inside.wait(10)
    here = watch.whereabouts()
    leave.set()
    thread.join()
    assert [each["name"] for each in here["operations"]] == ["other"]
    assert "leave.wait(10)" in here["operations"][0]["stack"]
    assert "test_operations_of_several_threads_do_not_mix" in here["stack"]


def test_the_innermost_operation_of_an_error_is_remembered() -> None:
    watch = OperationWatch()
    with pytest.raises(ValueError) as caught, watch.operation("outer"), watch.operation("inner"):
        raise ValueError
    assert watch.operation_of(caught.value) == "inner"
    assert watch.operation_of(KeyError()) == ""


def test_a_warning_names_who_waits_who_is_missing_and_where() -> None:
    everyone = [in_operation(0), elsewhere(1), in_operation(2), in_operation(3)]
    assert missing_ranks(LOSS, everyone) == [1]
    assert stall_warning(LOSS, 61.2, 0, everyone, 600.0) == (
        "hvdtrain: warning: rank 0 has waited 61 s in all_reduce 'loss'; rank 1 is not there; "
        "the job ends after 600 s (stall_abort_s)\n"
        "  rank 0 (h, pid 100) is in all_reduce 'loss' for 61 s\n"
        "    stack of 0\n"
        "  rank 1 (h, pid 101) is in no operation\n"
        '    File "task.py", line 3, in __getitem__\n'
        "      time.sleep(100)\n"
        "  ranks 2-3: in all_reduce 'loss' too\n"
    )


def test_a_long_list_of_missing_ranks_stays_on_one_screen() -> None:
    everyone = [in_operation(0)] + [elsewhere(rank) for rank in range(1, 64)]
    lines = stall_warning(LOSS, 60, 0, everyone, 0).splitlines()
    assert lines[0].endswith("ranks 1-63 are not there")
    assert lines[-1] == "  ranks 4-63: not there"
    assert len(lines) < 20


def test_a_stall_that_everybody_shares_blames_the_network_or_a_mismatch() -> None:
    everyone = [in_operation(0), in_operation(1)]
    assert "every rank is in it" in stall_warning(LOSS, 60, 1, everyone, 0)
    assert stall_failure(LOSS, 60, 1, everyone).sentence() == (
        "rank 1 (h, pid 101) waited 60 s in all_reduce 'loss' with every other rank in it too: "
        "a slow or cut network, or a mismatch"
    )


@pytest.mark.parametrize(
    ("missing", "doing"),
    [
        (elsewhere(1), "it is in __getitem__ (task.py:3)"),
        (in_operation(1, "barrier 'end'"), "it is in barrier 'end' for 61 s"),
        (Whereabouts(1, "h", 101, "finished"), "it has finished its part and left"),
        (
            Whereabouts(1, "h", 101, "mute"),
            "it gives no answer (stopped, or busy in native code that holds the interpreter)",
        ),
        (Whereabouts(1, "", 0, "absent"), "it has never connected"),
    ],
)
def test_a_stall_blames_the_first_rank_that_is_missing(missing: Whereabouts, doing: str) -> None:
    failure = stall_failure(LOSS, 600, 0, [in_operation(0), missing, elsewhere(2)])
    assert failure.rank == 1
    assert failure.message == (
        f"did not come to all_reduce 'loss', in which rank 0 waited 600 s; {doing}; rank 2 did not come either"
    )
