"""Counts gradient reductions on the wire, from inside a rank."""

from __future__ import annotations

import contextlib

import torch


@contextlib.contextmanager
def counted_reductions(backend):
    """Yields a function: reductions that had been started when each microbatch so far ended."""
    from hvdtrain.backends.replica import Replica

    started = [0]
    counts: list[int] = []
    with contextlib.ExitStack() as stack:
        if backend.name == "ddp":
            _count_ddp(stack, started)
        elif backend._hvd.__name__ == "hvdtrain.hvd":
            _count_hvd(stack, started)
        else:
            _count_horovod(stack, backend, started)
        microbatch = Replica.microbatch

        @contextlib.contextmanager
        def counting(replica, index, count):
            with microbatch(replica, index, count):
                yield
            counts.append(started[0])

        Replica.microbatch = counting
        stack.callback(setattr, Replica, "microbatch", microbatch)
        yield lambda: counts


def _count_ddp(stack, started):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from hvdtrain.backends import ddp

    register = ddp.register_compression

    def hook(state, bucket):
        started[0] += 1
        return default_hooks.allreduce_hook(None, bucket)

    # torch checks the annotations of a hook.
    hook.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    ddp.register_compression = lambda module, compression: module.register_comm_hook(None, hook)
    stack.callback(setattr, ddp, "register_compression", register)


def _count_horovod(stack, backend, started):
    names = backend._hvd.DistributedOptimizer.__globals__
    original = names["allreduce_async_"]
    first: list[str] = []

    def counting(tensor, *args, **kwargs):
        # One tensor of the model stands for all: they are reduced together.
        name = kwargs.get("name", "")
        if not first:
            first.append(name)
        started[0] += name == first[0]
        return original(tensor, *args, **kwargs)

    names["allreduce_async_"] = counting
    stack.callback(names.__setitem__, "allreduce_async_", original)


def _count_hvd(stack, started):
    from hvdtrain.hvd.reducer import GradientReducer

    original = GradientReducer._ready
    first: list[str] = []

    def counting(reducer, slot):
        if not first:
            first.append(slot.name)
        started[0] += slot.name == first[0]
        original(reducer, slot)

    GradientReducer._ready = counting
    stack.callback(setattr, GradientReducer, "_ready", original)
