"""Small sums by recursive doubling: ranks are threads of this process, their connections real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from hvdtrain.hvd.engine.doubling import LIMIT_BYTES, DoublingGroup, SmallSums, serves


class Large:
    """Stands where gloo's group is."""

    def allreduce(self, tensors, options=None):
        return "gloo", tensors[0].numel(), options


def on_ranks(size: int, work: Callable[[int, list[DoublingGroup]], None], groups: int = 1, limit_s: float = 20.0):
    """Run `work(rank, groups)` as `size` ranks; raises what one of them raised."""
    store, failed = HashStore(), []
    all_done = threading.Barrier(size)

    def rank_main(rank: int) -> None:
        sums = SmallSums(limit_s, spin=False)
        mine = [
            DoublingGroup(Large(), sums, PrefixStore(f"{number}", store), rank, size, "127.0.0.1")
            for number in range(groups)
        ]
        try:
            work(rank, mine)
        except BaseException as error:
            failed.append(error)
        all_done.wait(30)
        for group in mine:
            sums.remove(group)
        sums.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_which_sizes_are_served():
    assert [size for size in range(1, 17) if serves(size)] == [2, 4, 8, 16]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_the_sum_over_the_ranks(size, dtype):
    def work(rank, groups):
        for step in range(3):
            tensor = (torch.arange(1000) % 16 + rank + step).to(dtype)
            assert groups[0].allreduce([tensor]).wait()
            expected = (torch.arange(1000) % 16 + step) * size + size * (size - 1) // 2
            assert torch.equal(tensor, expected.to(dtype))

    on_ranks(size, work)


def test_all_ranks_have_the_same_bits():
    results = {}

    def work(rank, groups):
        torch.manual_seed(rank)
        tensor = torch.randn(5000)
        groups[0].allreduce([tensor]).wait()
        results[rank] = tensor

    on_ranks(8, work)
    assert all(torch.equal(results[0], results[rank]) for rank in range(1, 8))


def test_several_sums_under_way_at_once():
    def work(rank, groups):
        tensors = [torch.full((100_000,), float(rank + 10 * number)) for number in range(12)]
        started = [groups[0].allreduce([tensor]) for tensor in tensors]
        for one in reversed(started):
            one.wait()
        for number, tensor in enumerate(tensors):
            assert tensor.unique().tolist() == [4.0 * 10 * number + 6]

    on_ranks(4, work)


def test_ranks_may_wait_for_two_groups_in_different_orders():
    """As with two optimizers whose steps end in another order on another rank; more than the kernel keeps unread."""

    def work(rank, groups):
        tensors = [[torch.full((60_000,), 1.0 + rank) for _ in range(40)] for _ in groups]
        started = [[group.allreduce([t]) for t in mine] for group, mine in zip(groups, tensors, strict=True)]
        for number in (0, 1) if rank % 2 else (1, 0):
            for one in started[number]:
                one.wait()
        assert all(t.unique().tolist() == [10.0] for mine in tensors for t in mine)

    on_ranks(4, work, groups=2)


def test_a_rank_that_waits_for_something_else_takes_part():
    """The second round needs what it has received, though nobody there asks for the sum yet."""
    others_done = threading.Barrier(4)

    def work(rank, groups):
        tensor = torch.full((1000,), float(rank))
        started = groups[0].allreduce([tensor])
        if rank == 1:
            others_done.wait(15)
            started.wait()
        else:
            started.wait()
            others_done.wait(15)
        assert tensor.unique().tolist() == [6.0]

    on_ranks(4, work)


def test_large_buffers_are_gloos():
    def work(rank, groups):
        number = LIMIT_BYTES // 4 // 2  # two rounds
        assert groups[0].allreduce([torch.ones(number + 1)], "options") == ("gloo", number + 1, "options")
        tensor = torch.ones(number)
        groups[0].allreduce([tensor]).wait()
        assert tensor.unique().tolist() == [4.0]

    on_ranks(4, work)


def test_a_silent_rank_is_an_error_after_the_limit():
    def work(rank, groups):
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="timed out after 1 s: another rank does not take part"):
                groups[0].allreduce([torch.ones(10)]).wait()
            assert time.monotonic() - begin >= 1.0

    on_ranks(2, work, limit_s=1.0)


def test_a_rank_that_has_gone_is_an_error_at_once():
    def work(rank, groups):
        if rank == 1:
            groups[0].partners[0].close()
            groups[0].partners = []
        else:
            with pytest.raises(RuntimeError, match="the connection to another rank broke"):
                groups[0].allreduce([torch.ones(10)]).wait()

    on_ranks(2, work)
