"""Groups of some of the ranks: process groups under ddp, process sets under horovod."""

from __future__ import annotations

import torch


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_collectives_within_a_group_leave_the_others_out(pool3):
    def work(backend):
        rank = backend.world.rank
        group = backend.group([2, 0])  # any order
        assert group.ranks == (0, 2)
        assert group.size == 2
        results = None
        if rank != 1:
            results = [
                backend.all_reduce(torch.tensor(rank + 1), group=group).item(),
                backend.all_reduce(torch.tensor(rank + 1), "mean", group).item(),
                backend.all_gather(torch.arange(rank), group).tolist(),
                backend.broadcast(torch.tensor(rank), 2, group).item(),
                backend.broadcast_object(f"from {rank}", 0, group),
                backend.all_gather_object(rank * 10, group),
            ]
            backend.barrier(group)
        return results, backend.all_reduce(torch.tensor(rank)).item()

    members = [4, 2.0, [0, 1], 2, "from 0", [0, 20]]
    assert pool3.run(work) == [(members, 3), (None, 3), (members, 3)]


def test_groups_work_at_the_same_time_and_overlap(pool3):
    def work(backend):
        rank = backend.world.rank
        low, high = backend.group([0, 1]), backend.group([1, 2])
        sums = [backend.all_reduce(torch.tensor(10**rank), group=g).item() for g in (low, high) if rank in g.ranks]
        alone = [backend.group([r]) for r in range(3)]
        return sums, backend.all_reduce(torch.tensor(rank), group=alone[rank]).item()

    assert pool3.run(work) == [([11], 0), ([11, 110], 1), ([110], 2)]


def test_the_whole_world_and_a_group_asked_for_twice(pool2):
    def work(backend):
        whole = backend.group([1, 0])
        alone, again = backend.group([0]), backend.group([0])
        assert alone is again
        return whole.ranks, backend.all_reduce(torch.tensor(5), group=whole).item()

    assert pool2.run(work) == [((0, 1), 10)] * 2


def test_misuse_is_refused_and_the_connection_survives(pool3):
    def work(backend):
        rank = backend.world.rank
        group = backend.group([0, 1])
        outsider = error_of(lambda: backend.all_reduce(torch.ones(1), group=group)) if rank == 2 else None
        outside_root = error_of(lambda: backend.broadcast(torch.ones(1), 2, group)) if rank == 0 else None
        errors = [
            error_of(lambda: backend.group([0, 0])),
            error_of(lambda: backend.group([])),
            error_of(lambda: backend.group([1, 3])),
            error_of(lambda: backend.group([-1])),
            error_of(lambda: backend.group([0, 1] if rank < 2 else [0, 2])),
        ]
        assert backend.all_reduce(torch.tensor(1)).item() == 3
        return outsider, outside_root, errors

    results = pool3.run(work)
    assert results[2][0] == ("ContractError", "all_reduce() on rank 2, which is not in the group [0, 1]")
    assert results[0][1] == ("ContractError", "broadcast(root=2): the group has the ranks [0, 1]")
    errors = [
        ("ContractError", "group(ranks=[0, 0]): give distinct ranks from 0 to 2"),
        ("ContractError", "group(ranks=[]): give distinct ranks from 0 to 2"),
        ("ContractError", "group(ranks=[1, 3]): give distinct ranks from 0 to 2"),
        ("ContractError", "group(ranks=[-1]): give distinct ranks from 0 to 2"),
        (
            "CollectiveError",
            "group(): the ranks passed different lists: rank 0: [0, 1]; rank 1: [0, 1]; rank 2: [0, 2]",
        ),
    ]
    assert [result[2] for result in results] == [errors] * 3


def test_disagreement_within_a_group(pool3):
    def work(backend):
        group = backend.group([1, 2])
        if backend.world.rank == 0:
            return None
        return error_of(lambda: backend.all_reduce(torch.ones(backend.world.rank), group=group))

    said = "rank 1: all_reduce(float32[1], op=sum); rank 2: all_reduce(float32[2], op=sum)"
    error = ("CollectiveError", f"the ranks called different collectives: {said}")
    assert pool3.run(work) == [None, error, error]
