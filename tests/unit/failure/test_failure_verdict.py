from __future__ import annotations

from hvdtrain.failure.record import EXCEPTION, SIGNAL, Failure
from hvdtrain.failure.verdict import Verdict


def failure(rank: int, kind: str = EXCEPTION, message: str = "", *, secondary: bool = False) -> Failure:
    return Failure(rank, "h", 100 + rank, kind, message or f"of {rank}", secondary=secondary)


def decide_at_deadline(verdict: Verdict) -> Failure:
    deadline = verdict.deadline()
    assert deadline is not None
    assert verdict.decide(deadline - 0.01) is None
    decided = verdict.decide(deadline)
    assert decided is not None
    return decided


def test_nothing_to_decide() -> None:
    assert Verdict().deadline() is None
    assert Verdict().decide(1e9) is None


def test_a_death_that_is_heard_of_after_its_echo_is_to_blame() -> None:
    verdict = Verdict()
    verdict.add(failure(0, secondary=True), 10.0)
    verdict.add(failure(2, SIGNAL, "died: SIGABRT", secondary=True), 10.1)
    verdict.add(failure(1, SIGNAL, "was killed"), 10.5)
    assert decide_at_deadline(verdict).rank == 1


def test_an_abort_outweighs_a_collective_error() -> None:
    verdict = Verdict()
    verdict.add(failure(0, secondary=True), 10.0)
    verdict.add(failure(2, SIGNAL, "died: SIGABRT", secondary=True), 10.1)
    assert decide_at_deadline(verdict).rank == 2


def test_a_collective_error_alone_is_reported_after_a_while() -> None:
    verdict = Verdict()
    verdict.add(failure(1, secondary=True), 10.0)
    assert decide_at_deadline(verdict).rank == 1


def test_of_two_certain_ones_the_first_counts() -> None:
    verdict = Verdict()
    verdict.add(failure(3), 10.0)
    verdict.add(failure(1), 10.1)
    decided = decide_at_deadline(verdict)
    assert (decided.rank, decided.also_ranks) == (3, ())


def test_the_same_error_on_several_ranks_is_told_once() -> None:
    verdict = Verdict()
    for rank, moment in ((2, 10.0), (0, 10.05), (1, 10.1)):
        verdict.add(failure(rank, message="ValueError: x"), moment)
    decided = decide_at_deadline(verdict)
    assert (decided.rank, decided.also_ranks) == (0, (1, 2))


def test_nobody_is_waited_for_when_all_have_spoken() -> None:
    verdict = Verdict()
    verdict.add(failure(0, secondary=True), 10.0)
    assert verdict.decide(10.0, num_alive=1) is None
    decided = verdict.decide(10.0, num_alive=0)
    assert decided is not None
    assert decided.rank == 0


def test_only_the_first_report_of_a_rank_counts() -> None:
    verdict = Verdict()
    verdict.add(failure(1, message="first"), 10.0)
    verdict.add(failure(1, message="second"), 10.1)
    assert decide_at_deadline(verdict).message == "first"
