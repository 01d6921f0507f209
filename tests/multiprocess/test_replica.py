"""One step under every backend: order, accumulation, exact gradients, no communication where there should be none."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
from torch import nn

from hvdtrain.precision import Precision


def linear(features=1):
    """loss = mean(w * x) with w = 0."""
    model = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_gradients_add_up_over_microbatches_and_are_the_mean_over_ranks(pool2):
    def work(backend):
        model = linear()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        for count in (1, 3, 2):  # a tail group is shorter
            for index in range(count):
                with replica.microbatch(index, count):
                    x = torch.tensor([[float(10 * index + backend.world.rank)]])
                    replica.model(x).mean().backward()
            replica.finish_gradients()
            seen.append(model.weight.grad.item())
            replica.step()
            model.weight.grad = None
        weight = model.weight.item()
        replica.close()
        return seen, round(weight, 5)

    # sum of 10 * index + rank, then the mean over ranks: 0.5; 30 + 1.5; 10 + 1
    assert pool2.run(work) == [([0.5, 31.5, 11.0], -4.3)] * 2


def test_ranks_may_have_different_counts_or_no_data(pool3):
    def work(backend):
        rank = backend.world.rank
        model = nn.Sequential(nn.BatchNorm1d(1), linear())
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0))
        results = []
        for counts in [(2, 1, 0), (0, 0, 3), (1, 0, 2)]:
            for p in model.parameters():
                p.grad = None
            before = model[0].num_batches_tracked.item(), model[0].running_mean.item()
            for index in range(counts[rank]):
                with replica.microbatch(index, counts[rank]):
                    # the gradient of the weight is mean(batch norm) = 0, that of the batch norm's bias is w = 0 ...
                    (replica.model(torch.tensor([[1.0], [2.0]])).mean() + 6 * model[1].weight.sum()).backward()
            if counts[rank] == 0:
                replica.without_data()
                assert (model[0].num_batches_tracked.item(), model[0].running_mean.item()) == before
            replica.finish_gradients()
            replica.step()
            results.append(round(model[1].weight.grad.item(), 5))
        tracked = model[0].num_batches_tracked.item()
        replica.close()
        return results, tracked

    # 6 per microbatch, divided by 3 ranks
    assert pool3.run(work) == [([6.0, 6.0, 6.0], 3), ([6.0, 6.0, 6.0], 1), ([6.0, 6.0, 6.0], 5)]


def test_a_rank_without_data_adds_exact_zeros_even_to_infinite_parameters(pool2):
    def work(backend):
        model = linear(2)
        with torch.no_grad():
            model.weight[0, 0] = float("inf")
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0))
        if backend.world.rank == 0:
            with replica.microbatch(0, 1):
                (replica.model(torch.ones(1, 2)).sum() * 0 + (model.weight * torch.tensor([2.0, 4.0])).sum()).backward()
        else:
            replica.without_data()
        replica.finish_gradients()
        gradient = model.weight.grad.tolist()
        replica.close()
        return gradient

    assert pool2.run(work) == [[[1.0, 2.0]]] * 2


def test_case_b_reductions_only_in_the_last_microbatch(pool2):
    def work(backend):
        model = mlp()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        replica.broadcast_state()
        calls = []  # microbatches in which something was reduced
        current = 0
        if backend.name == "ddp":
            import torch.distributed as dist

            def hook(state, bucket):
                calls.append(current)
                work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            replica._ddp.register_comm_hook(None, hook)
        elif backend._is_real:
            import horovod.torch.optimizer as module

            original = module.allreduce_async_

            def counted(*args, **kwargs):
                calls.append(current)
                return original(*args, **kwargs)

            module.allreduce_async_ = counted
        local_before_last = []
        for step in range(2):
            local = [torch.zeros_like(p) for p in model.parameters()]
            for index in range(4):
                current = 4 * step + index + 1
                x = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * current + backend.world.rank))
                own = torch.autograd.grad(model(x).mean(), list(model.parameters()))
                local = [total + gradient for total, gradient in zip(local, own, strict=True)]
                with replica.microbatch(index, 4):
                    replica.model(x).mean().backward()
                if index == 2:  # what is there is this rank's own sum
                    pairs = zip(model.parameters(), local, strict=True)
                    local_before_last.append(all(torch.allclose(p.grad, g, atol=1e-6) for p, g in pairs))
            replica.finish_gradients()
            pairs = zip(model.parameters(), local, strict=True)
            mean = [backend.all_reduce(gradient, "mean") for gradient in local]
            pairs = zip(model.parameters(), mean, strict=True)
            local_before_last.append(all(torch.allclose(p.grad, g, atol=1e-6) for p, g in pairs))
            replica.step()
            for p in model.parameters():
                p.grad = None
        if backend.name == "horovod" and backend._is_real:
            module.allreduce_async_ = original
        replica.close()
        return sorted(set(calls)), local_before_last

    expected_calls = [] if pool2.kind == "hvd" else [4, 8]
    assert pool2.run(work) == [(expected_calls, [True] * 4)] * 2


def test_sync_every_microbatch_gives_the_same_gradients(pool3):
    def work(backend):
        rank = backend.world.rank
        model = linear()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), sync_every_microbatch=True)
        results = []
        for counts in [(2, 2, 2), (3, 1, 2), (2, 0, 1)]:
            for index in range(counts[rank]):
                with replica.microbatch(index, counts[rank]):
                    replica.model(torch.tensor([[3.0 * (index + 1) * (rank + 1)]])).sum().backward()
            if counts[rank] == 0:
                replica.without_data()
            replica.finish_gradients()
            results.append(model.weight.grad.item())
            model.weight.grad = None
            replica.step()
        replica.close()
        return results

    # a rank with n microbatches has 3 * (rank + 1) * (1 + ... + n); the mean over three ranks
    expected = [3.0 + 6 + 9, 6.0 + 2 + 9, 3.0 + 0 + 3]
    for result in pool3.run(work):
        assert result == pytest.approx(expected, abs=1e-5)


def test_begin_step_comes_before_what_the_ranks_do_together_within_a_step(pool2):
    """The second rank has no data, and adds its weight before the reductions, the first one in the middle of them."""

    def work(backend):
        count = 2 if backend.world.rank == 0 else 0
        model = linear()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), sync_every_microbatch=True)
        results = []
        for _ in range(2):
            replica.begin_step(count)
            errors = [
                error_of(lambda: replica.begin_step(count)),
                error_of(replica.without_data if count else lambda: replica.microbatch(0, 1).__enter__()),
            ]
            if count == 0:
                total = backend.all_reduce(torch.tensor(0.0)).item()
                replica.without_data()
            for index in range(count):
                with replica.microbatch(index, count):
                    if index == 0:
                        total = backend.all_reduce(torch.tensor(5.0)).item()
                    replica.model(torch.tensor([[3.0 + index]])).sum().backward()
            replica.finish_gradients()
            results.append((total, model.weight.grad.item()))
            model.weight.grad = None
            replica.step()
        replica.close()
        return results, errors

    for rank, (results, errors) in enumerate(pool2.run(work)):
        assert results == [(5.0, 3.5)] * 2
        again, other = (text for _, text in errors)
        assert again.startswith(f"begin_step({2 - 2 * rank}): expected microbatch 0; a step is")
        call = ("without_data()", "microbatch(0, 1)")[rank]
        told = f"{call}: this rank has told the others that it has {2 - 2 * rank} microbatch(es) in this step"
        assert other.startswith(told)


def test_case_d_clips_the_norm_of_the_averaged_gradient(pool2):
    def work(backend):
        model = linear(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = backend.wrap(model, optimizer)
        precision = Precision("fp32", backend.device, clip_norm=1.0)
        x = torch.tensor([[6.0, 0.0]] if backend.world.rank == 0 else [[0.0, 2.0]])
        with replica.microbatch(0, 1):
            precision.backward(replica.model(x).mean())
        replica.finish_gradients()
        norm = precision.unscale_and_clip(optimizer, list(model.parameters())).item()
        replica.step(lambda: precision.step(optimizer, True))
        weights = model.weight.detach().flatten().tolist()
        replica.close()
        return round(norm, 4), [round(w, 5) for w in weights]

    assert pool2.run(work) == [(3.1623, [-0.09487, -0.03162])] * 2


def same_bits(backend, compression):
    model = mlp()
    replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), compression)
    replica.broadcast_state()
    digests = []
    for step in range(3):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(100 * step + backend.world.rank))
        with replica.microbatch(0, 1):
            replica.model(x).square().mean().backward()
        replica.finish_gradients()
        grads = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
        digests.append(hashlib.sha256(grads).hexdigest())
        replica.step()
        replica.optimizer.zero_grad()
    replica.close()
    return digests


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_gradients_have_the_same_bits_on_two_ranks(pool2, compression):
    results = pool2.run(same_bits, compression)
    assert len(set(results[0])) == 3
    assert results == [results[0]] * 2


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_gradients_have_the_same_bits_on_three_ranks(pool3, compression):
    results = pool3.run(same_bits, compression)
    assert len(set(results[0])) == 3
    assert results == [results[0]] * 3


def test_calls_out_of_order_are_refused_and_change_nothing(pool2):
    def work(backend):
        model = linear()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def enter(index, count):
            with replica.microbatch(index, count):
                raise AssertionError("entered")

        errors = [
            error_of(lambda: enter(1, 2)),
            error_of(lambda: enter(0, 0)),
            error_of(lambda: enter(-1, 2)),
            error_of(replica.finish_gradients),
            error_of(replica.step),
        ]
        with replica.microbatch(0, 2):
            replica.model(torch.ones(1, 1)).sum().backward()
        errors += [error_of(lambda: enter(0, 2)), error_of(replica.without_data), error_of(replica.finish_gradients)]
        with replica.microbatch(1, 2):
            replica.model(torch.ones(1, 1)).sum().backward()
        errors += [error_of(lambda: enter(2, 3)), error_of(replica.step)]
        replica.finish_gradients()
        errors += [error_of(replica.finish_gradients), error_of(lambda: enter(0, 1)), error_of(replica.without_data)]
        gradient = model.weight.grad.item()
        replica.step(lambda: None)  # skipped
        errors.append(error_of(replica.step))
        replica.close()
        errors += [error_of(lambda: enter(0, 1)), error_of(replica.broadcast_state), error_of(replica.sync_buffers)]
        return errors, gradient, model.weight.item()

    order = "a step is microbatch(0, n) ... microbatch(n-1, n), finish_gradients(), step()"
    over = "on a replica whose backend is closed; only its state and model are left"
    texts = [
        f"microbatch(1, 2): expected microbatch 0; {order}",
        f"microbatch(0, 0): expected microbatch 0; {order}",
        f"microbatch(-1, 2): expected microbatch 0; {order}",
        f"finish_gradients(): expected microbatch 0; {order}",
        f"step(): expected microbatch 0; {order}",
        f"microbatch(0, 2): expected microbatch 1; {order}",
        f"without_data(): expected microbatch 1; {order}",
        f"finish_gradients(): expected microbatch 1; {order}",
        f"microbatch(2, 3): expected finish_gradients(); {order}",
        f"step(): expected finish_gradients(); {order}",
        f"finish_gradients(): expected step(); {order}",
        f"microbatch(0, 1): expected step(); {order}",
        f"without_data(): expected step(); {order}",
        f"step(): expected microbatch 0; {order}",
        f"microbatch() {over}",
        f"broadcast_state() {over}",
        f"sync_buffers() {over}",
    ]
    assert pool2.run(work) == [([("ContractError", text) for text in texts], 2.0, 0.0)] * 2


def test_an_error_in_a_microbatch_leaves_the_order_as_it_was(pool2):
    def work(backend):
        model = linear()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def broken():
            with replica.microbatch(0, 2):
                raise ValueError("bad batch")

        first = error_of(broken)
        for index in range(2):
            with replica.microbatch(index, 2):
                replica.model(torch.ones(1, 1)).sum().backward()
        replica.finish_gradients()
        gradient = model.weight.grad.item()
        replica.close()
        return first, gradient

    assert pool2.run(work) == [(("ValueError", "bad batch"), 2.0)] * 2


def test_wrap_refuses_what_cannot_be_trained(pool2):
    def work(backend):
        model = linear()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        frozen = linear().requires_grad_(False)
        misplaced = nn.Sequential(linear(), nn.Linear(1, 1, device="meta"))
        replica = backend.wrap(model, sgd)
        errors = [
            error_of(lambda: backend.wrap(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))),
            error_of(lambda: backend.wrap(misplaced, torch.optim.SGD(misplaced.parameters(), lr=0.1))),
            error_of(lambda: backend.wrap(linear(), sgd)),
            error_of(lambda: backend.wrap(model, sgd)),
            error_of(lambda: backend.wrap(model, sgd, "zip")),
        ]
        replica.close()
        again = backend.wrap(model, sgd)  # free again
        again.close()
        other = nn.Linear(1 + backend.world.rank, 1)
        errors.append(error_of(lambda: backend.wrap(other, torch.optim.SGD(other.parameters(), lr=0.1))))
        return errors

    for rank, errors in enumerate(pool2.run(work)):
        kinds = ["ContractError"] * 4 + ["UserError", "CollectiveError"]
        assert [kind for kind, _ in errors] == kinds
        assert "nothing to train" in errors[0][1]
        assert "parameter '1.weight' is on meta, this rank's device is cpu" in errors[1][1]
        assert "the optimizer has 1 parameter(s) that the model has not (first: shape [1, 1])" in errors[2][1]
        assert "parameter 'weight' is part of another replica" in errors[3][1]
        assert "choose one of none, fp16" in errors[4][1]
        own, other = f"(1, {1 + rank})", f"(1, {2 - rank})"
        assert f"the models of rank {1 - rank} and rank {rank} differ" in errors[5][1]
        assert errors[5][1].index(own) < errors[5][1].index(other)


def test_two_replicas_with_equal_parameter_names(pool2):
    """As a GAN: the generator's backward goes through the discriminator, whose gradients it must not reduce."""

    def work(backend):
        rank = backend.world.rank
        generator, discriminator = linear(), linear()
        nn.init.ones_(discriminator.weight)
        g = backend.wrap(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
        d = backend.wrap(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.0))
        seen = []
        for _ in range(2):
            generator.zero_grad()
            with g.microbatch(0, 1):
                d.bare_model(g.model(torch.tensor([[2.0 + 2 * rank]]))).sum().backward()
            g.finish_gradients()
            discriminator.zero_grad()
            for index in range(2):
                with d.microbatch(index, 2):
                    d.model(torch.tensor([[1.0 + rank + index]])).sum().backward()
            d.finish_gradients()
            seen.append((generator.weight.grad.item(), discriminator.weight.grad.item()))
            d.step()
            g.step(lambda: None)
        g.close()
        d.close()
        return seen

    # generator: mean of 2 and 4; discriminator: mean of 1 + 2 and 2 + 3
    assert pool2.run(work) == [[(3.0, 4.0)] * 2] * 2


def test_the_user_s_optimizer_keeps_state_defaults_and_scheduler(pool2):
    def work(backend):
        model = nn.Sequential(linear(), linear())
        optimizer = torch.optim.SGD([model[0].weight], lr=0.4, momentum=0.5)  # over a part of the model
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # made before wrap
        model[0].weight.grad = torch.ones(1, 1)
        optimizer.step()
        scheduler.step()
        buffer = optimizer.state[model[0].weight]["momentum_buffer"]
        replica = backend.wrap(model, optimizer)
        replica.broadcast_state()
        assert replica.optimizer is optimizer
        assert type(optimizer) is torch.optim.SGD
        assert backend.world.rank != 0 or optimizer.state[model[0].weight]["momentum_buffer"] is buffer
        optimizer.zero_grad()
        with replica.microbatch(0, 1):
            (replica.model(torch.ones(1, 1)) + model[0].weight.sum() * (1.0 + 2 * backend.world.rank)).sum().backward()
        replica.finish_gradients()
        replica.step()
        scheduler.step()
        results = (
            round(model[0].weight.item(), 6),
            optimizer.state[model[0].weight]["momentum_buffer"].item(),
            model[1].weight.item(),
            optimizer.param_groups[0]["lr"],
            optimizer.defaults["momentum"],
        )
        replica.close()
        return results

    # -0.4 * 1, then the gradient 2 with momentum: 0.5 * 1 + 2 = 2.5, times 0.2
    assert pool2.run(work) == [(-0.9, 2.5, 0.0, 0.1, 0.5)] * 2


def test_buffers_stay_local_while_training_and_are_equal_after_sync_buffers(pool2):
    def work(backend):
        rank = backend.world.rank
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), linear())
        model.register_buffer("note", torch.tensor([rank], dtype=torch.int16))
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for step in range(2):
            with replica.microbatch(0, 1):
                replica.model(torch.tensor([[rank + step + 0.0], [rank + step + 2.0]])).sum().backward()
            replica.finish_gradients()
            replica.step()
        local = model[0].running_mean.item()
        replica.sync_buffers(root=1)
        synced = (model[0].running_mean.item(), model[0].num_batches_tracked.item(), model.note.tolist())
        replica.close()
        return local, synced

    assert pool2.run(work) == [(2.0, (3.0, 2, [1])), (3.0, (3.0, 2, [1]))]


def trained_state(backend, load=None):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = backend.wrap(model, optimizer)
    if load is not None:
        replica.load_state_dict(load)
    for step in range(2):
        x = torch.full((2, 16), 1.0 + step + backend.world.rank)
        with replica.microbatch(0, 1):
            replica.model(x).mean().backward()
        replica.finish_gradients()
        replica.step()
        optimizer.zero_grad()
    state = replica.state_dict()
    replica.close()
    return state


def test_state_moves_between_the_backends(pools):
    first = {kind: pools(kind, 2).run(trained_state)[0] for kind in ("ddp", "horovod")}
    assert list(first["ddp"]["model"]) == list(first["horovod"]["model"]) == list(mlp().state_dict())
    second = {
        (was, now): pools(now, 2).run(trained_state, first[was])[0]
        for was in ("ddp", "horovod")
        for now in ("ddp", "horovod")
    }
    expected = second["ddp", "ddp"]
    for state in second.values():
        for name, tensor in expected["model"].items():
            assert torch.equal(state["model"][name], tensor)  # two ranks: a sum has no order to differ in
        for index, values in expected["optimizer"]["state"].items():
            assert values["step"].item() == 4
            for name, tensor in values.items():
                assert torch.equal(state["optimizer"]["state"][index][name], tensor)


def test_the_forward_pass_has_to_go_through_replica_model_under_ddp(pools):
    def work(backend):
        model = linear()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def bypass():
            with replica.microbatch(0, 1):
                model(torch.ones(1, 1)).sum().backward()

        error = error_of(bypass)
        replica.close()
        return error

    for rank, (kind, text) in enumerate(pools("ddp", 2).run(work)):
        assert kind == "ContractError"
        assert text.startswith(f"rank {rank}: the forward pass of the last microbatch did not go through replica.model")


def test_sparse_gradients(pool2):
    def work(backend):
        rank = backend.world.rank
        model = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(model.weight)
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
        seen = []
        for indices in [([0, 1], [1, 1]), ([3], None), (None, [2])]:
            own = indices[rank]
            model.weight.grad = None
            if own is None:
                replica.without_data()
            else:
                with replica.microbatch(0, 1):
                    replica.model(torch.tensor(own)).sum().backward()
            replica.finish_gradients()
            seen.append((model.weight.grad.is_sparse, model.weight.grad.to_dense()[:, 0].tolist()))
            replica.step()
        weights = model.weight[:, 0].tolist()
        replica.close()
        return seen, weights

    seen = [(True, [0.5, 1.5, 0.0, 0.0]), (True, [0.0, 0.0, 0.0, 0.5]), (True, [0.0, 0.0, 0.5, 0.0])]
    assert pool2.run(work) == [(seen, [0.75, 0.25, 0.75, 0.75])] * 2


def test_bfloat16_models(pool2):
    def work(backend):
        model = linear().to(torch.bfloat16)
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        replica.broadcast_state()
        with replica.microbatch(0, 1):
            replica.model(torch.tensor([[1.0 + 2 * backend.world.rank]], dtype=torch.bfloat16)).sum().backward()
        replica.finish_gradients()
        result = (model.weight.grad.dtype, model.weight.grad.item())
        replica.close()
        return result

    assert pool2.run(work) == [(torch.bfloat16, 2.0)] * 2


def test_compiled_models(pool2):
    def work(backend):
        # before torch's compiler is imported: no worker processes, which would outlive the test
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        model = mlp()
        plain = mlp()
        replica = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=True)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(backend.world.rank))
        for index in range(2):
            with replica.microbatch(index, 2):
                replica.model(x).mean().backward()
        replica.finish_gradients()
        plain(x).mean().mul(2).backward()
        same = all(
            torch.allclose(p.grad, backend.all_reduce(q.grad, "mean"), atol=1e-6)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
        names = list(replica.state_dict()["model"])
        replica.close()
        return same, names == list(plain.state_dict())

    assert pool2.run(work, limit_s=200) == [(True, True)] * 2
