"""Operations of the Horovod API with exact numbers, on real ranks, under hvdtrain.hvd and under the real Horovod."""

from __future__ import annotations

import pytest
import torch


def test_reductions(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        value = torch.tensor([1.0 + rank, 3.0])
        ops = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
        results = [hvd.allreduce(value, op=op).tolist() for op in ops]
        results.append(hvd.allreduce(value, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist())
        results.append(hvd.allreduce(torch.tensor([7 + rank, -3]), op=hvd.Average).tolist())
        return [*results, value.tolist() == [1.0 + rank, 3.0]]

    expected = [[1.5, 3.0], [3.0, 6.0], [1.0, 3.0], [2.0, 3.0], [2.0, 9.0], [6.0, 12.0], [7, -3], True]
    assert two.run(work) == [expected] * 2


def test_average_and_op_together_are_an_error(two):
    def work(backend):
        with pytest.raises(ValueError, match="op parameter supersedes average"):
            backend._hvd.allreduce(torch.ones(1), average=True, op=backend._hvd.Sum)
        return True

    assert two.run(work) == [True, True]


def test_names_match_whatever_the_order(two):
    def work(backend):
        hvd = backend._hvd
        order = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]
        values = {"a": torch.full((50000,), 1.0), "b": torch.full((50000,), 10.0)}
        handles = {name: hvd.allreduce_async(values[name], name=f"order.{name}", op=hvd.Sum) for name in order}
        return [(float(t.min()), float(t.max())) for t in (hvd.synchronize(handles[n]) for n in ("a", "b"))]

    assert two.run(work) == [[(2.0, 2.0), (20.0, 20.0)]] * 2


def test_many_tensors_in_flight_large_and_small(two):
    def work(backend):
        hvd = backend._hvd
        sizes = [1, 3000, 7, 20000, 5] * 6
        for _ in range(2):
            handles = [
                hvd.allreduce_async_(torch.full((n,), float(i)), name=f"many.{i}", op=hvd.Sum)
                for i, n in enumerate(sizes)
            ]
            for i, handle in enumerate(handles):
                result = hvd.synchronize(handle)
                assert torch.equal(result, torch.full((sizes[i],), 2.0 * i))
        return True

    assert two.run(work) == [True, True]


def test_grouped_allreduce_of_mixed_sizes(two):
    def work(backend):
        hvd = backend._hvd
        tensors = [torch.ones(2), torch.ones(30000) * 2, torch.ones(1, 2) * 3]
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="grouped")
        hvd.grouped_allreduce_(tensors, op=hvd.Average)
        return [float(t.sum()) for t in results], [float(t.sum()) for t in tensors]

    assert two.run(work) == [([4.0, 120000.0, 12.0], [2.0, 60000.0, 6.0])] * 2


def test_gathering_ragged_rows(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        small = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
        large = hvd.allgather(torch.full((4000 * (rank + 1), 2), float(rank)))
        none = hvd.allgather(torch.ones(rank, 3))
        grouped = hvd.grouped_allgather([torch.tensor([rank]), torch.full((2 - rank,), 5)])
        return small.tolist(), large.shape, float(large.sum()), none.shape, [t.tolist() for t in grouped]

    expected = ([[0, 0], [1, 1], [1, 1]], (12000, 2), 16000.0, (1, 3), [[0, 1], [5, 5, 5]])
    assert two.run(work) == [expected] * 2


def test_broadcast_in_and_out_of_place(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        value = torch.tensor([float(rank), 2.0 + rank])
        copy = hvd.broadcast(value, 1)
        kept = value.tolist()
        large = torch.full((30000,), rank, dtype=torch.int64)
        hvd.broadcast_(large, 1)
        hvd.broadcast_(value, 0, name="in place")
        return copy.tolist(), kept, int(large.sum()), value.tolist()

    assert two.run(work) == [([1.0, 3.0], [r, 2.0 + r], 30000, [0.0, 2.0]) for r in (0.0, 1.0)]


def test_alltoall_with_and_without_splits(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        equal = hvd.alltoall(torch.arange(4) + 10 * rank)
        splits = torch.tensor([1, 2] if rank == 0 else [0, 3], dtype=torch.int32)
        rows, received = hvd.alltoall(torch.arange(3) + 10 * rank, splits)
        return equal.tolist(), rows.tolist(), received.tolist()

    assert two.run(work) == [([0, 1, 10, 11], [0], [1, 0]), ([2, 3, 12, 13], [1, 2, 10, 11, 12], [2, 3])]


def test_reducescatter(two):
    def work(backend):
        hvd = backend._hvd
        value = torch.arange(6.0).reshape(3, 2) * (hvd.rank() + 1)
        summed = hvd.reducescatter(value, op=hvd.Sum)
        (averaged,) = hvd.grouped_reducescatter([value])
        return summed.tolist(), averaged.tolist()

    first, last = [[0.0, 3.0], [6.0, 9.0]], [[12.0, 15.0]]
    assert two.run(work) == [(first, (torch.tensor(first) / 2).tolist()), (last, (torch.tensor(last) / 2).tolist())]


def test_gradients_of_the_operations(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()

        def gradient(operation):
            x = torch.ones(2, requires_grad=True)
            y = operation(x)
            y.backward(torch.arange(1.0, y.numel() + 1).reshape(y.shape) * (rank + 1))
            return x.grad.tolist()

        return [
            gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)),
            gradient(lambda x: hvd.allreduce(x)),
            gradient(lambda x: hvd.allgather(x)),
            gradient(lambda x: hvd.broadcast(x, 0)),
            gradient(lambda x: hvd.alltoall(x)),
            gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)),
        ]

    # Sum of the ranks' gradients (1, 2) and (2, 4); gathered: (1..4) and (2..8), averaged, this rank's two.
    first = [[3.0, 6.0], [1.5, 3.0], [1.5, 3.0], [1.5, 3.0], [1.0, 2.0], [2.0, 4.0]]
    second = [[3.0, 6.0], [1.5, 3.0], [4.5, 6.0], [0.0, 0.0], [2.0, 4.0], [2.0, 4.0]]
    assert two.run(work) == [first, second]


def test_errors_reach_every_rank(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()

        def kind_of_error(call):
            try:
                call()
            except hvd.HorovodInternalError:
                return "HorovodInternalError"
            return None

        return [
            kind_of_error(lambda: hvd.allreduce(torch.ones(2 + rank), name="shape")),
            kind_of_error(lambda: hvd.allreduce(torch.ones(2).to([torch.float32, torch.int32][rank]), name="dtype")),
            kind_of_error(lambda: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Min][rank], name="op")),
            kind_of_error(lambda: hvd.broadcast(torch.ones(2), rank, name="root")),
            kind_of_error(lambda: hvd.allgather(torch.ones(2, 2 + rank), name="rows")),
            hvd.allreduce(torch.ones(1), op=hvd.Sum).item(),
        ]

    assert two.run(work) == [["HorovodInternalError"] * 5 + [2.0]] * 2


def test_errors_name_tensor_ranks_and_values(ours):
    def work(backend):
        hvd = backend._hvd
        messages = []
        for call in (
            lambda: hvd.allreduce(torch.ones(2 + hvd.rank()), name="x"),
            lambda: hvd.broadcast(torch.ones(2), hvd.rank(), name="y"),
            lambda: hvd.broadcast(torch.ones(2), 7, name="z"),
        ):
            with pytest.raises(hvd.HorovodInternalError) as raised:
                call()
            messages.append(str(raised.value))
        return messages

    assert (
        ours.run(work)
        == [
            [
                "allreduce.x: the ranks disagree on the shape: rank 0: [2], rank 1: [3]",
                "broadcast.y: the ranks disagree on the root rank: rank 0: 0, rank 1: 1",
                "broadcast.z: root rank 7 is not in the process set, which has ranks 0, 1",
            ]
        ]
        * 2
    )


def test_a_name_in_flight_cannot_be_used_again(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        raised = []
        if rank == 0:
            first = hvd.allreduce_async(torch.ones(1), name="twice")
            try:
                hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="twice"))
            except (ValueError, hvd.HorovodInternalError) as error:
                raised.append("twice" in str(error) or "name" in str(error))
        hvd.barrier()
        if rank == 1:
            first = hvd.allreduce_async(torch.ones(1), name="twice")
        return raised, hvd.synchronize(first).item()

    assert two.run(work) == [([True], 1.0), ([], 1.0)]


def test_join_supplies_zeros_and_tells_who_came_last(two):
    def work(backend):
        hvd = backend._hvd
        sums = []
        if hvd.rank() == 1:
            for i in range(3):
                sums.append(hvd.allreduce(torch.full((5,), 4.0), name=f"join.{i}").tolist())
            sums.append(float(hvd.allreduce(torch.full((20000,), 4.0), name="join.large").sum()))
        return sums, hvd.join()

    assert two.run(work) == [([], 1), ([[2.0] * 5] * 3 + [40000.0], 1)]


def test_the_thread_that_computes_uses_the_device_of_a_rank_that_joins(ours):
    """Without a GPU: the questions to CUDA are answered here. Each thread has a current device of its own."""

    def work(backend):
        import threading

        import torch

        hvd, used = backend._hvd, []
        kept = {name: getattr(torch.cuda, name) for name in ("is_initialized", "current_device", "set_device")}
        torch.cuda.is_initialized = lambda: True
        torch.cuda.current_device = lambda: 2 + hvd.rank()
        torch.cuda.set_device = lambda device: used.append((threading.current_thread().name, str(device)))
        try:
            if hvd.rank() == 0:
                hvd.allreduce(torch.ones(200_000), name="before join")
            hvd.join()
        finally:
            for name, value in kept.items():
                setattr(torch.cuda, name, value)
            hvd.basics.engine()._cuda_device = None
        return sorted(set(used))

    assert ours.run(work)[1] == [("hvd-data", "cuda:3")]


def test_unnamed_operations_match_again_after_join(ours3):
    def work(backend):
        hvd = backend._hvd
        for _ in range(hvd.rank() * 2):
            hvd.allreduce(torch.ones(1))
        hvd.join()
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert ours3.run(work) == [3.0] * 3


def test_gathering_while_a_rank_has_joined_is_an_error_and_not_a_hang(ours3):
    def work(backend):
        hvd = backend._hvd
        text = ""
        if hvd.rank() != 1:
            with pytest.raises(hvd.HorovodInternalError) as raised:
                hvd.allgather(torch.ones(1), name="late")
            text = str(raised.value)
        hvd.join()
        return text

    text = "allgather.late: allgather is not possible after rank 1 called join()"
    assert ours3.run(work) == [text, "", text]


def test_process_sets(ours3):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        even, odd = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1]))
        mine = odd if rank == 1 else even
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set([0, 2])
        summed = hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum, process_set=mine).item()
        large = float(hvd.allreduce(torch.full((10000,), rank + 1.0), process_set=mine)[0])
        gathered = hvd.allgather(torch.tensor([rank]), process_set=mine).tolist()
        sent = hvd.broadcast_object(rank, root_rank=mine.ranks[-1], process_set=mine)
        other = even if rank == 1 else odd
        with pytest.raises(ValueError, match=f"rank {rank} is not in"):
            hvd.allreduce(torch.ones(1), process_set=other)
        places = (mine.size(), mine.rank(), mine.included(), other.included())
        hvd.barrier(mine)
        removed = hvd.remove_process_set(even), hvd.remove_process_set(odd), hvd.remove_process_set(odd)
        return summed, large, gathered, sent, places, removed, mine.process_set_id

    removed = (True, True, False)
    assert ours3.run(work) == [
        (4.0, 2.0, [0, 2], 2, (2, 0, True, False), removed, None),
        (2.0, 2.0, [1], 1, (1, 0, True, False), removed, None),
        (4.0, 2.0, [0, 2], 2, (2, 1, True, False), removed, None),
    ]


@pytest.mark.parametrize("length", [2, 40000])
def test_adasum(ours, length):
    def work(backend, length):
        hvd = backend._hvd
        one, other = torch.zeros(length), torch.zeros(length)
        one[0], other[1] = 1.0, 1.0
        apart = hvd.allreduce(one if hvd.rank() == 0 else other, op=hvd.Adasum)
        together = hvd.allreduce(one, op=hvd.Adasum)
        return apart[:2].tolist(), together[:2].tolist()

    assert ours.run(work, length) == [([1.0, 1.0], [1.0, 0.0])] * 2


def test_objects(two):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        return (
            hvd.broadcast_object({"rank": rank, "long": "x" * 20000}, root_rank=1, name="obj")["rank"],
            hvd.allgather_object(["r"] * (rank + 1), name="objects"),
        )

    assert two.run(work) == [(1, [["r"], ["r", "r"]])] * 2


def test_types_that_the_real_one_refuses(ours):
    def work(backend):
        hvd = backend._hvd
        rank = hvd.rank()
        strided = torch.zeros(4, 2)[:, 0]
        if rank == 0:
            strided += 5
        hvd.broadcast_(strided, 0)
        return (
            hvd.broadcast(torch.tensor([rank == 0]), 0).tolist(),
            hvd.broadcast(torch.tensor([1.5 + rank]).bfloat16(), 0).tolist(),
            hvd.allreduce(torch.tensor([200 + rank], dtype=torch.int16), op=hvd.Sum).tolist(),
            hvd.allreduce(torch.full((20000,), 3, dtype=torch.uint8), op=hvd.Sum)[:1].tolist(),
            hvd.allreduce(torch.full((20000,), 3, dtype=torch.int16), op=hvd.Sum)[:1].tolist(),
            strided.tolist(),
        )

    assert ours.run(work) == [([True], [1.5], [401], [6], [6], [5.0] * 4)] * 2


def test_sync_batch_norm_equals_batch_norm_of_the_whole_batch(ours):
    def work(backend):
        hvd = backend._hvd
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(6, 4, 5, generator=generator, dtype=torch.float64)
        share = slice(0, 2) if hvd.rank() == 0 else slice(2, 6)
        synchronized, local = hvd.SyncBatchNorm(4).double(), torch.nn.BatchNorm1d(4).double()
        ours, reference = whole[share].clone().requires_grad_(), whole.clone().requires_grad_()
        (synchronized(ours) ** 3).sum().backward()
        (local(reference) ** 3).sum().backward()
        weight = hvd.allreduce(synchronized.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(ours.grad, reference.grad[share])
        torch.testing.assert_close(weight, local.weight.grad)
        torch.testing.assert_close(synchronized.running_mean, local.running_mean)
        torch.testing.assert_close(synchronized.running_var, local.running_var)
        return True

    assert ours.run(work) == [True, True]
