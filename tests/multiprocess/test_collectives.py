"""One meaning per collective: the same exact results under every backend, inputs untouched, disagreement an error."""

from __future__ import annotations

import pytest
import torch

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OPS = ["sum", "mean", "min", "max", "product"]


def all_reduce_table(backend, dtypes, ops):
    """(dtype of the result, values) for ranks that pass [rank + 1, 3]; the inputs are checked to be untouched."""
    table = {}
    for dtype in dtypes:
        tensor = torch.tensor([backend.world.rank + 1, 3]).to(dtype)
        before = tensor.clone()
        for op in ops:
            result = backend.all_reduce(tensor, op)
            assert torch.equal(tensor, before), f"all_reduce {op} {dtype} modified its input"
            assert result.data_ptr() != tensor.data_ptr()
            table[str(dtype), op] = (result.dtype, result.tolist())
    return table


def expected_table(dtypes, *, size):
    values = {
        2: {"sum": [3, 6], "mean": [1.5, 3], "min": [1, 3], "max": [2, 3], "product": [2, 9]},
        3: {"sum": [6, 9], "mean": [2, 3], "min": [1, 3], "max": [3, 3], "product": [6, 27]},
    }[size]
    return {
        (str(dtype), op): (torch.float32 if op == "mean" and not dtype.is_floating_point else dtype, values[op])
        for dtype in dtypes
        for op in OPS
    }


def test_all_reduce_of_every_dtype_and_op_on_two_ranks(pool2):
    dtypes = INTEGERS + FLOATS
    assert pool2.run(all_reduce_table, dtypes, OPS) == [expected_table(dtypes, size=2)] * 2


def test_all_reduce_of_every_dtype_and_op_on_three_ranks(pool3):
    dtypes = INTEGERS + FLOATS
    assert pool3.run(all_reduce_table, dtypes, OPS) == [expected_table(dtypes, size=3)] * 3


def test_bools_count_and_min_and_max_mean_all_and_any(pool2):
    def work(backend):
        tensor = torch.tensor([True, backend.world.rank == 0, False])
        return {
            op: (result.dtype, result.tolist()) for op in OPS if (result := backend.all_reduce(tensor, op)) is not None
        }

    expected = {
        "sum": (torch.int64, [2, 1, 0]),
        "mean": (torch.float32, [1.0, 0.5, 0.0]),
        "min": (torch.bool, [True, False, False]),
        "max": (torch.bool, [True, True, False]),
        "product": (torch.int64, [1, 0, 0]),
    }
    assert pool2.run(work) == [expected] * 2


def test_all_reduce_at_the_edges_of_a_dtype(pool2):
    def work(backend):
        def reduce(values, dtype, op):
            return backend.all_reduce(torch.tensor(values, dtype=dtype), op).tolist()

        return [
            reduce([200, 127], torch.uint8, "sum"),  # wraps, as torch's own sum of uint8 tensors
            reduce([127, -128], torch.int8, "sum"),
            reduce([2**31 - 1], torch.int32, "mean"),  # the sum does not fit int32
            reduce([2**62], torch.int64, "mean"),
            reduce([2**53 + 1], torch.int64, "max"),  # not representable in float64
            reduce([40000.0], torch.float16, "mean"),  # the sum does not fit float16
            reduce([40000.0], torch.float16, "sum"),
            reduce([float("nan"), float("inf")], torch.float32, "sum"),
        ]

    for result in pool2.run(work):
        assert result[:5] == [[144, 254], [-2, 0], [2.0**31], [2.0**62], [2**53 + 1]]
        assert result[5:7] == [[40000.0], [float("inf")]]
        assert str(result[7]) == "[nan, inf]"


def test_all_reduce_keeps_every_shape_and_layout(pool2):
    def work(backend):
        rank = backend.world.rank
        zero_d = backend.all_reduce(torch.tensor(rank + 1))
        empty = backend.all_reduce(torch.empty(0, 3))
        transposed = torch.arange(6.0).reshape(2, 3).t()
        strided = torch.arange(10)[::3]
        expanded = torch.tensor([1.0]).expand(4)
        with_gradient = torch.ones(2, requires_grad=True)
        results = [backend.all_reduce(t) for t in (transposed, strided, expanded, with_gradient)]
        assert not results[3].requires_grad
        assert transposed.equal(torch.arange(6.0).reshape(2, 3).t())
        return (zero_d.shape, zero_d.item(), empty.shape, [r.tolist() for r in results])

    lists = [[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], [0, 6, 12, 18], [2.0] * 4, [2.0, 2.0]]
    assert pool2.run(work) == [(torch.Size([]), 3, torch.Size([0, 3]), lists)] * 2


def test_all_gather_joins_ragged_tensors_in_order_of_rank(pool3):
    def work(backend):
        rank = backend.world.rank
        ragged = torch.arange(2 * rank, dtype=torch.int16).reshape(rank, 2)  # rank 0 has no row
        before = ragged.clone()
        bools = torch.tensor([rank == 1])
        results = [
            backend.all_gather(ragged),
            backend.all_gather(bools),
            backend.all_gather(torch.tensor(rank * 1.5, dtype=torch.bfloat16)),
            backend.all_gather(torch.empty(0, 4)),
            backend.all_gather(torch.arange(6.0).reshape(2, 3).t()[:rank]),
            backend.all_gather(torch.empty(2, 0)),
            # 0-d counts as one row
            backend.all_gather(torch.tensor(7) if rank == 0 else torch.tensor([8] * rank)),
        ]
        assert ragged.equal(before)
        return [(r.dtype, tuple(r.shape), r.tolist()) for r in results]

    expected = [
        (torch.int16, (3, 2), [[0, 1], [0, 1], [2, 3]]),
        (torch.bool, (3,), [False, True, False]),
        (torch.bfloat16, (3,), [0.0, 1.5, 3.0]),
        (torch.float32, (0, 4), []),
        (torch.float32, (3, 2), [[0.0, 3.0], [0.0, 3.0], [1.0, 4.0]]),
        (torch.float32, (6, 0), [[]] * 6),
        (torch.int64, (4,), [7, 8, 8, 8]),
    ]
    assert pool3.run(work) == [expected] * 3


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_gives_the_root_s_tensor(pool3, root):
    def work(backend, root):
        rank = backend.world.rank
        results = []
        for dtype in [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64]:
            tensor = torch.full((2, 3), rank).to(dtype).t()
            before = tensor.clone()
            result = backend.broadcast(tensor, root)
            assert tensor.equal(before)
            assert result.dtype == dtype
            assert result.equal(torch.full((3, 2), root).to(dtype))
            result.zero_()  # a tensor of its own
            assert tensor.equal(before)
        results.append(backend.broadcast(torch.tensor(float(rank)), root).item())
        results.append(tuple(backend.broadcast(torch.empty(0, 2), root).shape))
        results.append(backend.broadcast_object({"rank": rank, "big": "x" * (rank * 100_000)}, root)["rank"])
        return results

    assert pool3.run(work, root) == [[float(root), (0, 2), root]] * 3


def test_objects_of_different_sizes(pool3):
    def work(backend):
        rank = backend.world.rank
        backend.barrier()
        gathered = backend.all_gather_object(None if rank == 0 else "x" * 10**rank)
        return gathered, backend.broadcast_object(("root", rank) if rank == 1 else None, 1)

    assert pool3.run(work) == [([None, "x" * 10, "x" * 100], ("root", 1))] * 3


def test_start_sum_runs_beside_backward(pool2):
    """The control sums and the gradients of 30 steps are right, although they are under way together."""

    def work(backend):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(8)])
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), bucket_mb=0.004)
        alone = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(8)])
        alone.load_state_dict(model.state_dict())
        batches = [torch.randn(4, 32, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        alone.zero_grad()
        sum(alone(batch).square().mean() for batch in batches).div(2).backward()
        sums, worst = [], 0.0
        for step in range(30):
            mine = torch.tensor([float(step), float(backend.world.rank)], dtype=torch.float64)
            with replica.microbatch(0, 1):
                loss = replica.model(batches[backend.world.rank]).square().mean()
                pending = backend.start_sum(mine, "control")
                loss.backward()
            replica.finish_gradients()
            sums.append(pending.wait().tolist() == [2.0 * step, 1.0] and pending.wait() is pending.wait())
            assert mine.tolist() == [float(step), float(backend.world.rank)]
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                worst = max(worst, (p.grad - q.grad).abs().max().item())
                p.grad = None
            replica.step()
        replica.close()
        return all(sums), worst < 1e-6

    assert pool2.run(work) == [(True, True)] * 2


def refused(backend, call):
    """(kind, text) of the error that the call raises; then shows that the connection still works."""
    try:
        call()
    except Exception as error:
        assert backend.all_reduce(torch.tensor(1)).item() == backend.world.size
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            (lambda b: b.all_reduce(torch.ones(2)), lambda b: b.all_reduce(torch.ones(2), "max")),
            "rank 0: all_reduce(float32[2], op=sum); rank 1: all_reduce(float32[2], op=max)",
        ),
        (
            (lambda b: b.all_reduce(torch.ones(2)), lambda b: b.all_reduce(torch.ones(3))),
            "rank 0: all_reduce(float32[2], op=sum); rank 1: all_reduce(float32[3], op=sum)",
        ),
        (
            (lambda b: b.all_reduce(torch.ones(2)), lambda b: b.all_reduce(torch.ones(2, 1))),
            "rank 0: all_reduce(float32[2], op=sum); rank 1: all_reduce(float32[2, 1], op=sum)",
        ),
        (
            (lambda b: b.all_reduce(torch.ones(2)), lambda b: b.all_reduce(torch.ones(2).int())),
            "rank 0: all_reduce(float32[2], op=sum); rank 1: all_reduce(int32[2], op=sum)",
        ),
        (
            (lambda b: b.broadcast(torch.ones(2), 0), lambda b: b.broadcast(torch.ones(2), 1)),
            "rank 0: broadcast(float32[2], root=0); rank 1: broadcast(float32[2], root=1)",
        ),
        (
            (lambda b: b.broadcast_object(1, 0), lambda b: b.broadcast_object(1, 1)),
            "rank 0: broadcast_object(root=0); rank 1: broadcast_object(root=1)",
        ),
        (
            (lambda b: b.all_reduce(torch.ones(2)), lambda b: b.barrier()),
            "rank 0: all_reduce(float32[2], op=sum); rank 1: barrier()",
        ),
        (
            (lambda b: b.all_gather(torch.ones(2, 3)), lambda b: b.all_gather(torch.ones(2, 4))),
            "rank 0: all_gather(float32[2, 3]); rank 1: all_gather(float32[2, 4])",
        ),
        (
            (lambda b: b.all_gather(torch.ones(2)), lambda b: b.all_gather(torch.ones(2).double())),
            "rank 0: all_gather(float32[2]); rank 1: all_gather(float64[2])",
        ),
        (
            (lambda b: b.all_gather_object(1), lambda b: b.close()),
            "rank 0: all_gather_object(); rank 1: close()",
        ),
    ],
)
def test_disagreement_is_the_same_error_everywhere_and_the_connection_survives(pool2, calls, text):
    def work(backend, calls):
        return refused(backend, lambda: calls[backend.world.rank](backend))

    error = ("CollectiveError", f"the ranks called different collectives: {text}")
    assert pool2.run(work, calls) == [error] * 2


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "broadcast"])
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        (torch.eye(2).to_sparse(), "torch.float32, torch.sparse_coo"),
    ],
)
def test_what_cannot_travel_is_refused(pool2, call, tensor, said):
    def work(backend, call, dense, sparse):
        tensor = dense.to_sparse() if sparse else dense
        return refused(backend, lambda: getattr(backend, call)(tensor))

    error = ("ContractError", f"{call}(): a tensor of {said} cannot travel; pass a dense, real one")
    assert pool2.run(work, call, tensor.to_dense(), tensor.is_sparse) == [error] * 2


def test_unknown_op_and_root_are_refused(pool2):
    def work(backend):
        return [
            refused(backend, lambda: backend.all_reduce(torch.ones(1), "average")),
            refused(backend, lambda: backend.broadcast(torch.ones(1), 2)),
            refused(backend, lambda: backend.broadcast_object(1, -1)),
        ]

    assert (
        pool2.run(work)
        == [
            [
                ("ContractError", "all_reduce(op='average'): choose one of sum, mean, min, max, product"),
                ("ContractError", "broadcast(root=2): the group has the ranks [0, 1]"),
                ("ContractError", "broadcast_object(root=-1): the group has the ranks [0, 1]"),
            ]
        ]
        * 2
    )
