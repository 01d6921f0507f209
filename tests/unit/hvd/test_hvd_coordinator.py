"""The negotiation, without ranks: messages of ranks in, what they are told out."""

from __future__ import annotations

import pytest

from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.reduction import combine_inline, tensor_bytes
from hvdtrain.hvd.engine.settings import Settings

SUM, AVERAGE, MIN = 1, 0, 3


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def allreduce(name, shape=(4,), dtype="float32", op=SUM, pre=1.0, set_id=0):
    return [set_id, f"allreduce.{name}", [[dtype], [list(shape)], "cpu", op, pre, 1.0], None, -1]


def make(size=2, **settings):
    warnings = []
    clock = Clock()
    coordinator = Coordinator(size, Settings(**settings), combine_inline, warnings.append, clock)
    return coordinator, warnings, clock


def tell(coordinator, rank, *items, blob=b""):
    return coordinator.handle(rank, ["q", list(items)], blob)


def test_nothing_is_said_before_every_rank_has_announced():
    coordinator, _, _ = make(3)
    assert tell(coordinator, 0, allreduce("a")) == []
    assert tell(coordinator, 2, allreduce("a")) == []
    ((ranks, document, blob),) = tell(coordinator, 1, allreduce("a"))
    assert (ranks, blob) == ((0, 1, 2), b"")
    assert document == {"s": 0, "k": "allreduce", "n": ["allreduce.a"], "c": [0]}


def test_order_is_that_of_completion_whatever_the_ranks_order():
    coordinator, _, _ = make(2, fusion_threshold_bytes=0)
    tell(coordinator, 0, allreduce("a"), allreduce("b"))
    answers = tell(coordinator, 1, allreduce("b"), allreduce("a"))
    assert [document["n"] for _, document, _ in answers] == [["allreduce.b"], ["allreduce.a"]]


def test_equal_kinds_are_fused_up_to_the_threshold_and_different_ones_are_not():
    coordinator, _, _ = make(2, fusion_threshold_bytes=40)
    items = [allreduce("a"), allreduce("b"), allreduce("c"), allreduce("d", op=MIN), allreduce("e", dtype="float64")]
    tell(coordinator, 0, *items)
    answers = tell(coordinator, 1, *items)
    names = sorted([name.removeprefix("allreduce.") for name in document["n"]] for _, document, _ in answers)
    # 16 bytes each: two fit into 40.
    assert names == [["a", "b"], ["c"], ["d"], ["e"]]


def test_what_was_agreed_once_is_a_number_from_then_on():
    coordinator, _, _ = make(2)
    for rank in range(2):
        answers = tell(coordinator, rank, allreduce("a"))
    assert answers[0][1]["c"] == [0]
    tell(coordinator, 0, [0, None, -1])
    ((_, document, _),) = tell(coordinator, 1, [0, None, -1])
    assert document == {"s": 0, "k": "allreduce", "n": [0]}


def test_unnamed_operations_are_not_cached():
    coordinator, _, _ = make(2)
    tell(coordinator, 0, allreduce("noname.0.1"))
    ((_, document, _),) = tell(coordinator, 1, allreduce("noname.0.1"))
    assert "c" not in document


def test_the_cache_has_a_limit():
    coordinator, _, _ = make(1, cache_capacity=1)
    assert tell(coordinator, 0, allreduce("a"))[0][1]["c"] == [0]
    assert "c" not in tell(coordinator, 0, allreduce("b"))[0][1]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"shape": (5,)}, "allreduce.a: the ranks disagree on the shape: rank 0: [4], rank 1: [5]"),
        ({"dtype": "int32"}, "allreduce.a: the ranks disagree on the dtype: rank 0: float32, rank 1: int32"),
        ({"op": MIN}, "allreduce.a: the ranks disagree on the op: rank 0: Sum, rank 1: Min"),
        ({"pre": 2.0}, "allreduce.a: the ranks disagree on the prescale_factor: rank 0: 1.0, rank 1: 2.0"),
    ],
)
def test_disagreement_is_told_to_every_rank_with_names_and_values(theirs, text):
    coordinator, _, _ = make(2)
    tell(coordinator, 0, allreduce("a"))
    ((ranks, document, _),) = tell(coordinator, 1, allreduce("a", **theirs))
    assert ranks == (0, 1)
    assert document == {"s": 0, "n": ["allreduce.a"], "e": text}


def test_disagreement_names_the_groups_of_ranks():
    coordinator, _, _ = make(4)
    for rank in range(4):
        answers = tell(coordinator, rank, allreduce("a", shape=(4 if rank in (0, 2) else 5,)))
    assert answers[0][1]["e"].endswith("ranks 0, 2: [4], ranks 1, 3: [5]")


def test_small_tensors_are_reduced_on_the_way():
    import torch

    coordinator, _, _ = make(2)
    payloads = [tensor_bytes(torch.tensor([1.0, 2.0])), tensor_bytes(torch.tensor([3.0, 5.0]))]
    item = [*allreduce("a", shape=(2,), op=AVERAGE)[:-1], 8]
    tell(coordinator, 0, item, blob=payloads[0])
    ((_, document, blob),) = tell(coordinator, 1, item, blob=payloads[1])
    assert document["b"] == [8]
    assert blob == tensor_bytes(torch.tensor([2.0, 3.5]))


def test_a_joined_rank_is_not_waited_for_and_gets_what_it_needs_to_make_zeros():
    coordinator, _, _ = make(3)
    assert coordinator.handle(2, ["j", {}], b"") == []
    tell(coordinator, 0, allreduce("a"))
    ((ranks, document, _),) = tell(coordinator, 1, allreduce("a"))
    assert ranks == (0, 1, 2)
    assert document["j"] == [2]
    assert document["m"] == [[["float32"], [[4]], "cpu", SUM, 1.0, 1.0]]


def test_join_completes_what_waited_for_that_rank_only():
    coordinator, _, _ = make(2)
    tell(coordinator, 0, allreduce("a"))
    ((_, document, _),) = coordinator.handle(1, ["j", {}], b"")
    assert document["n"] == ["allreduce.a"]


def test_the_last_to_join_and_the_highest_counters_are_told_to_all():
    coordinator, _, _ = make(2)
    coordinator.handle(1, ["j", {"allreduce/0": 3}], b"")
    ((ranks, document, _),) = coordinator.handle(0, ["j", {"allreduce/0": 7, "broadcast/0": 1}], b"")
    assert (ranks, document) == ((0, 1), {"joined": 0, "counters": {"allreduce/0": 7, "broadcast/0": 1}})


def test_gathering_after_a_join_is_an_error():
    coordinator, _, _ = make(2)
    coordinator.handle(1, ["j", {}], b"")
    item = [0, "allgather.g", [["float32"], [[]], "cpu"], [4], -1]
    ((_, document, _),) = tell(coordinator, 0, item)
    assert document["e"] == "allgather.g: allgather is not possible after rank 1 called join()"


def test_a_stall_is_reported_once_with_ranks_and_name_and_given_up_after_the_limit():
    coordinator, warnings, clock = make(3, stall_warning_s=60, stall_abort_s=100)
    tell(coordinator, 0, allreduce("a"))
    tell(coordinator, 2, allreduce("a"))
    clock.now += 59
    assert coordinator.check_stalls() == []
    assert warnings == []
    clock.now += 2
    assert coordinator.next_check_s() == pytest.approx(39)
    coordinator.check_stalls()
    coordinator.check_stalls()
    assert warnings == ["allreduce.a: ranks 0, 2 submitted it 61 s ago, rank 1 did not"]
    clock.now += 39
    ((ranks, document, _),) = coordinator.check_stalls()
    assert ranks == (0, 2)
    assert document["e"] == (
        "allreduce.a: ranks 0, 2 submitted it 100 s ago, rank 1 did not (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
    )


def test_no_timer_runs_while_nothing_is_pending():
    coordinator, _, _ = make(2)
    assert coordinator.next_check_s() is None


def test_what_needs_a_rank_that_has_shut_down_fails_at_once():
    coordinator, _, _ = make(2)
    tell(coordinator, 0, allreduce("a"))
    ((ranks, document, _),) = coordinator.handle(1, ["b"], b"")
    assert (ranks, document["e"]) == ((0,), "allreduce.a: rank 1 has shut down")
    ((ranks, document, _),) = tell(coordinator, 0, allreduce("b"))
    assert (ranks, document["e"]) == ((0,), "allreduce.b: rank 1 has shut down")


def test_a_lost_rank_is_told_to_all_others():
    coordinator, _, _ = make(3)
    ((ranks, document, _),) = coordinator.lose(1, "rank 1 is gone")
    assert (ranks, document) == ((0, 2), {"lost": "rank 1 is gone"})


def test_process_sets_get_numbers_and_equal_ranks_none():
    coordinator, _, _ = make(3)

    def add(name, ranks):
        for rank in range(3):
            answers = tell(coordinator, rank, [0, f"add_process_set.{name}", [ranks], None, -1])
        return answers[0][1]["v"]

    assert add("1", [0, 2]) == [1, [0, 2]]
    assert add("2", [0, 2]) == [-1, [0, 2]]
    assert add("3", [0, 1, 2]) == [-1, [0, 1, 2]]
    tell(coordinator, 0, allreduce("a", set_id=1))
    ((ranks, _, _),) = tell(coordinator, 2, allreduce("a", set_id=1))
    assert ranks == (0, 2)


def plan(name, order=(0,)):
    parameters = [["w", "float32", [1], [1], "cpu", -1]]
    return [0, f"plan.{name}", [parameters, [SUM, 1.0, False, 1024]], {"order": list(order), "sparse": []}, -1]


def test_a_plan_is_dropped_when_no_rank_needs_it_any_more():
    coordinator, _, _ = make(3)
    for rank in range(3):
        tell(coordinator, rank, plan("a"))
    assert coordinator.handle(2, ["d", "plan.a"], b"") == []
    assert coordinator.handle(2, ["d", "plan.a"], b"") == []
    assert coordinator.handle(0, ["d", "plan.a"], b"") == []
    assert coordinator.handle(1, ["d", "plan.a"], b"") == [((0, 1, 2), {"dropped": "plan.a"}, b"")]


def test_a_plan_that_is_given_up_before_it_is_agreed_on_is_dropped_after_it():
    coordinator, _, _ = make(2)
    tell(coordinator, 0, plan("a"))
    assert coordinator.handle(0, ["d", "plan.a"], b"") == []
    ((_, agreed, _),) = tell(coordinator, 1, plan("a"))
    assert agreed["k"] == "plan"
    assert coordinator.handle(1, ["d", "plan.a"], b"") == [((0, 1), {"dropped": "plan.a"}, b"")]


def test_ranks_that_had_joined_need_no_word_of_theirs_for_a_plan_to_go():
    coordinator, _, _ = make(3)
    coordinator.handle(2, ["j", {}], b"")
    tell(coordinator, 0, plan("a"))
    tell(coordinator, 1, plan("a"))
    coordinator.handle(0, ["d", "plan.a"], b"")
    assert coordinator.handle(1, ["d", "plan.a"], b"") == [((0, 1, 2), {"dropped": "plan.a"}, b"")]
