"""Gradient compression on the wire (case F): what survives fp16 and what is noticed, on the CPU, in precision fp32."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from hvdtrain.precision import Precision, names_of_non_finite


def reduced_gradient(backend, gradients, compression="fp16"):
    """One step with the gradient gradients[rank]: (reduced gradient, skipped steps, weight after, names at fault)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = backend.wrap(model, optimizer, compression)
    precision = Precision("fp32", backend.device)
    with replica.microbatch(0, 1):
        precision.backward(replica.model(torch.tensor([[gradients[backend.world.rank]]])).sum())
    replica.finish_gradients()
    reduced = model.weight.grad.item()
    norm = precision.unscale_and_clip(optimizer, list(model.parameters())).item()
    replica.step(lambda: precision.step(optimizer, math.isfinite(norm)))
    at_fault = names_of_non_finite(model)
    replica.close()
    return reduced, precision.skipped_steps, model.weight.item(), at_fault


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ((40000.0, 40000.0), 40000.0),  # the sum would not fit
        ((2.0, 4.0), 3.0),
        ((2e-8, 2e-8), 0.0),  # below half of the smallest float16
        ((6e-5, 0.0), float(torch.tensor(6e-5).half() / 2)),
    ],
)
def test_fp16_divides_before_it_sums(pool2, gradients, expected):
    results = pool2.run(reduced_gradient, gradients)
    assert [(result[0], result[1], result[3]) for result in results] == [(expected, 0, [])] * 2
    assert results[0][2] == results[1][2] == pytest.approx(-0.1 * expected)


@pytest.mark.parametrize("gradients", [(1e5, 1.0), (1.0, 1e5), (1e5, 1e5), (1e5, -1e5), (math.nan, 1.0)])
def test_what_does_not_fit_is_noticed_on_every_rank_and_skipped(pool2, gradients):
    for reduced, skipped, weight, at_fault in pool2.run(reduced_gradient, gradients):
        assert not math.isfinite(reduced)
        assert (skipped, weight, at_fault) == (1, 0.0, ["weight"])


def test_without_compression_large_and_tiny_gradients_are_exact(pool2):
    assert [result[0] for result in pool2.run(reduced_gradient, (1e5, -5e4), "none")] == [25000.0] * 2
    tiny = torch.tensor(2e-8).item()
    assert [result[0] for result in pool2.run(reduced_gradient, (tiny, tiny), "none")] == [tiny] * 2


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_sparse_gradients_bypass_it(pool2, compression):
    if compression == "bf16" and pool2.kind != "ddp":
        pytest.skip("Horovod has no bf16")

    def work(backend, compression):
        model = nn.Sequential(nn.Embedding(3, 1, sparse=True), nn.Linear(1, 1, bias=False))
        nn.init.ones_(model[1].weight)
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), compression)
        with replica.microbatch(0, 1):
            (replica.model(torch.tensor([backend.world.rank])) * 100001).sum().backward()
        replica.finish_gradients()
        gradient = model[0].weight.grad
        replica.close()
        return gradient.is_sparse, gradient.to_dense().flatten().tolist()

    # 100001 / 2 has neither a float16 nor a bfloat16
    assert pool2.run(work, compression) == [(True, [50000.5, 50000.5, 0.0])] * 2


def test_narrow_and_wide_gradients(pool2):
    """float16 gradients stay as they are, float64 ones come back as float64."""

    def work(backend):
        results = []
        for dtype in (torch.float16, torch.float64):
            model = nn.Linear(1, 1, bias=False).to(dtype)
            replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
            with replica.microbatch(0, 1):
                replica.model(torch.tensor([[1.0 + backend.world.rank]], dtype=dtype)).sum().backward()
            replica.finish_gradients()
            results.append((model.weight.grad.dtype, model.weight.grad.item()))
            replica.close()
        return results

    assert pool2.run(work) == [[(torch.float16, 1.5), (torch.float64, 1.5)]] * 2


def test_fp16_with_accumulation_and_a_rank_without_data(pool2):
    def work(backend):
        model = nn.Linear(1, 1, bias=False)
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
        if backend.world.rank == 0:
            for index in range(3):
                with replica.microbatch(index, 3):
                    replica.model(torch.tensor([[20000.0]])).sum().backward()
        else:
            replica.without_data()
        replica.finish_gradients()
        gradient = model.weight.grad.item()
        replica.close()
        return gradient

    assert pool2.run(work) == [30000.0] * 2


def trained(backend, compression, steps, widths=(16, 32), bucket_mb=None):
    torch.manual_seed(0)
    hidden = [layer for size in itertools.pairwise(widths) for layer in (nn.Linear(*size), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(widths[-1], 1))
    options = {} if bucket_mb is None else {"bucket_mb": bucket_mb}
    replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05), compression, **options)
    replica.broadcast_state()
    for step in range(steps):
        x = torch.randn(8, widths[0], generator=torch.Generator().manual_seed(2 * step + backend.world.rank))
        with replica.microbatch(0, 1):
            (replica.model(x) - x[:, :1]).square().mean().backward()
        replica.finish_gradients()
        replica.step()
        replica.optimizer.zero_grad()
    eye = torch.eye(widths[0])
    loss = (model(eye) - eye[:, :1]).square().mean().item()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    replica.close()
    return loss, weights


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("powersgd", 0.1)])
def test_training_is_close_to_uncompressed(pool2, compression, tolerance):
    if compression != "fp16" and pool2.kind != "ddp":
        pytest.skip("Horovod has neither")
    plain, compressed = pool2.run(trained, "none", 30), pool2.run(trained, compression, 30)
    assert torch.equal(compressed[0][1], compressed[1][1])
    assert not torch.equal(plain[0][1], compressed[0][1])
    assert compressed[0][0] == pytest.approx(plain[0][0], rel=tolerance)


def test_powersgd_of_many_buckets_is_the_same_on_all_ranks(pools):
    """Its sums over gloo once met those of other buckets: the process aborted, or the ranks went apart."""

    (_, first), (_, second) = pools("ddp", 2).run(trained, "powersgd", 60, range(8, 33), 0.001)
    assert bool(torch.isfinite(first).all())
    assert torch.equal(first, second)


@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_horovod_says_why_it_has_neither(pools, compression):
    def work(backend, compression):
        model = nn.Linear(1, 1)
        try:
            backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), compression)
        except Exception as error:
            return type(error).__name__, str(error)

    message = (
        f"compression: {compression} with backend: horovod: Horovod 0.28.1 has no bfloat16 and no PowerSGD. "
        f"Use compression: fp16, or backend: ddp"
    )
    assert pools("horovod", 2).run(work, compression) == [("UserError", message)] * 2
