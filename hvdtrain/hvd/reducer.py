"""Reduces the gradients of one wrapped optimizer, overlapped with backward.

In the first step each gradient is a named allreduce, as under Horovod. At its end the ranks plan buckets together (see
`Channel`), and from then on hooks copy each gradient into its bucket as soon as it is there. A gradient that is missing
at `finish` counts as zero, so that the ranks may use different parts of the model. Compressors that we do not know, and
reductions other than sums, stay with named allreduces.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.hvd import basics
from hvdtrain.hvd.allreduce import allreduce_async_, sparse_allreduce_async
from hvdtrain.hvd.basics import Average, Max, Min, Sum
from hvdtrain.hvd.buckets import Description, dense_stride
from hvdtrain.hvd.channel import Channel
from hvdtrain.hvd.common.exceptions import HorovodInternalError
from hvdtrain.hvd.common.process_sets import ProcessSet
from hvdtrain.hvd.compression import Compressor, FP16Compressor, NoneCompressor
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.request import Entry, dtype_name
from hvdtrain.hvd.handles import synchronize

# Parameters stay in the buckets, as zeros, for so many steps after they were frozen: freezing them for one step only
# (as GANs do) must not cost a new plan.
_PATIENCE_STEPS = 10

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class Slot:
    """One parameter."""

    __slots__ = ("computed", "delay", "group", "handle", "name", "number", "param", "ready", "required")

    def __init__(self, name: str, param: torch.Tensor, delay: int, group: int) -> None:
        self.name = name
        self.param = param
        self.delay = delay
        self.required = param.requires_grad
        self.group = group
        # Number in the plan; -1 while it is in none.
        self.number = -1
        # A backward has reached it since the last `finish`.
        self.computed = False
        # Its gradient is in the bucket, or its named operation is on its way.
        self.ready = False
        self.handle: Any = None


class GradientReducer:
    """See the module's description.

    Args:
        named: names and parameters of the optimizer; names unique.
        passes: backward passes between two calls of `finish`.
        groups: parameters that are reduced together.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        compression: type[Compressor],
        passes: int,
        op: int,
        predivide: float,
        groups: Sequence[Sequence[torch.Tensor]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.compression = compression
        self.passes = passes
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        group_of = {id(p): number for number, group in enumerate(groups) for p in group}
        self.slots = [Slot(name, p, passes, group_of.get(id(p), -1)) for name, p in named]
        self._by_param = {id(slot.param): slot for slot in self.slots}
        self._planned = compression in (NoneCompressor, FP16Compressor) and op in (Average, Sum)
        self._channel: Channel | None = None
        self._in_plan: list[Slot] = []
        # A plan that was submitted and is not in use yet: what was submitted, and its parameters.
        self._pending: tuple[Entry, list[Slot]] | None = None
        # Says that this rank has done with its plan; at the latest when this object is gone.
        self._release: weakref.finalize[..., GradientReducer] | None = None
        self._ready_order: list[Slot] = []
        self._changed_steps = 0
        self._usage: tuple[bool, ...] = ()
        self._usage_hash = 0
        self._engine: Engine | None = None
        self._active = False
        self._label = ""
        self._plans = 0
        self._attach()
        for slot in self.slots:
            _on_gradient(slot, weakref.ref(self))

    @property
    def active(self) -> bool:
        """Whether there is anybody to reduce with."""
        return self._active

    @property
    def outstanding(self) -> bool:
        """Whether gradients were computed since the last `finish`."""
        return any(slot.computed for slot in self.slots)

    def add(self, name: str, param: torch.Tensor) -> None:
        """Take care of a parameter that came later (add_param_group)."""
        if id(param) not in self._by_param:
            slot = Slot(name, param, self.passes, -1)
            self.slots.append(slot)
            self._by_param[id(param)] = slot
            _on_gradient(slot, weakref.ref(self))

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes between two calls of `finish`."""
        self.passes = passes
        for slot in self.slots:
            slot.delay = passes

    def _attach(self) -> None:
        """Belong to the running generation of the engine; a plan of an earlier one is void."""
        engine = basics.engine()
        if engine is self._engine:
            return
        self._engine = engine
        self._active = (self.process_set.size() or 1) > 1 and bool(self.process_set.included())
        self._channel = None
        self._pending = None
        self._in_plan = []
        self._plans = 0
        for slot in self.slots:
            slot.number, slot.computed, slot.ready, slot.handle, slot.delay = -1, False, False, None, self.passes
        names = "\n".join(sorted(slot.name for slot in self.slots))
        digest = hashlib.sha256(names.encode()).hexdigest()[:12]
        self._label = f"{digest}.{engine.plans.number(digest)}"

    # -- during backward --------------------------------------------------------------------------------------------

    def on_gradient(self, slot: Slot) -> None:
        """A backward pass has accumulated the parameter's gradient."""
        if self._engine is not basics._engine:
            self._attach()
        if not self._active:
            return
        if slot.delay <= 0:
            raise AssertionError(_TOO_MANY_PASSES)
        slot.computed = True
        slot.delay -= 1
        if slot.delay == 0:
            self._ready(slot)

    def _ready(self, slot: Slot) -> None:
        if self._pending is not None:
            self._adopt_plan()
        channel = self._channel
        if channel is None or slot.number < 0:
            self._ready_order.append(slot)
            self._submit(slot)
        elif slot.number in channel.sparse:
            self._submit_sparse(slot)
        else:
            self._fill(slot, channel)
            channel.launch_ready()
        slot.ready = True

    def _fill(self, slot: Slot, channel: Channel) -> None:
        """Put the gradient, or zeros, into the bucket."""
        bucket = channel.bucket_of[slot.number]
        view = bucket.views[slot.number]
        gradient = slot.param.grad
        if gradient is None:
            view.zero_()
        else:
            if gradient.is_sparse:
                gradient = _dense(gradient)
            factor = channel.prescale_copies[slot.number]
            if gradient is view:
                if factor != 1.0:
                    view.mul_(factor)
            elif factor == 1.0 or gradient.dtype != view.dtype:
                view.copy_(gradient)
                if factor != 1.0:
                    view.mul_(factor)
            else:
                torch.mul(gradient.detach(), factor, out=view)
        bucket.missing -= 1
        if bucket.lanes is not None and bucket.missing == 0:
            channel.write_lanes(False, self._current_usage_hash())

    def _submit(self, slot: Slot) -> None:
        """Start a named allreduce of the parameter's gradient."""
        param = slot.param
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if param.grad.is_sparse and not self.sparse_as_dense:
            self._submit_sparse(slot)
            return
        gradient = _dense(param.grad) if param.grad.is_sparse else param.grad
        compressed, ctx = self.compression.compress(gradient)
        averaged = self.op == Average
        handle = allreduce_async_(
            compressed,
            name=f"{slot.name}.{self._label}",
            op=self.op,
            prescale_factor=1.0 / self.predivide if averaged else 1.0,
            postscale_factor=self.predivide if averaged else 1.0,
            process_set=self.process_set,
        )
        slot.handle = (handle, ctx, param.grad.is_sparse)

    def _submit_sparse(self, slot: Slot) -> None:
        gradient = slot.param.grad
        if gradient is None:
            gradient = _empty_sparse(slot.param)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        slot.handle = sparse_allreduce_async(
            gradient, f"{slot.name}.{self._label}", self.op, process_set=self.process_set
        )

    # -- at the end of a step ---------------------------------------------------------------------------------------

    def finish(self, again: bool = False) -> None:
        """Reduce what is still missing and wait for all; then every gradient is the reduced one. Collective.

        Args:
            again: the gradients were reduced already, and no backward came in between: averages stay what they are,
                sums must not be summed once more.

        Raises:
            HorovodInternalError: a rank was lost, or the ranks have different parameters.
        """
        if self._engine is not basics._engine:
            self._attach()
        if not self.active:
            for slot in self.slots:
                slot.computed, slot.delay = False, self.passes
            return
        if again and self.op not in (Average, Min, Max):
            return
        engine = self._engine
        assert engine is not None
        if self._pending is not None:
            self._adopt_plan()
        channel = self._channel
        agreed: bool | None = None
        extras = [
            slot for slot in self.slots
            if slot.number < 0 and (slot.param.requires_grad or (slot.required and not self._planned))
        ]  # fmt: skip
        if channel is not None:
            for slot in self._in_plan:
                if not slot.ready:
                    if slot.number in channel.sparse:
                        self._submit_sparse(slot)
                    else:
                        self._fill(slot, channel)
            channel.launch_ready()
        if channel is None and self._planned:
            self._plan([slot for slot in self.slots if slot.param.requires_grad])
        missing = [slot for slot in extras if not slot.ready]
        sparse = self._sparse_elsewhere(missing) if channel is None else set()
        for slot in missing:
            if id(slot) in sparse:
                self._submit_sparse(slot)
            else:
                self._submit(slot)
        if channel is not None:
            agreed = self._wait_for_buckets(engine, channel)
        for slot in self.slots:
            if slot.handle is not None:
                self._take_result(slot)
            slot.computed, slot.ready, slot.delay = False, False, self.passes
        if channel is not None:
            self._consider_new_plan(agreed, bool(extras))
        self._ready_order.clear()

    def _sparse_elsewhere(self, missing: list[Slot]) -> set[int]:
        """Which of these, that have no gradient here, have a sparse one on another rank: ids of the slots."""
        if self._pending is None or all(slot.param.grad is not None for slot in missing):
            return set()
        # The ranks' proposals for the plan tell. Waiting for them is no more than waiting for the gradients.
        entry, slots = self._pending
        return {id(slots[number]) for number in entry.wait().sparse}

    def _wait_for_buckets(self, engine: Engine, channel: Channel) -> bool | None:
        """Wait for the buckets; returns whether all ranks use the same parameters, None where that was not asked."""
        engine.plans.waiting = (f"DistributedOptimizer {self._label}", channel.step)
        agreed: bool | None = None
        try:
            for bucket in channel.buckets:
                bucket.finish()
        except RuntimeError as error:
            reason = engine.fail(f"DistributedOptimizer: the reduction of gradients failed: {error}")
            raise HorovodInternalError(reason) from error
        finally:
            engine.plans.waiting = None
        channel.finish_step()
        usage_differs = not all(slot.param.requires_grad for slot in self._in_plan) or any(
            slot.number < 0 and slot.param.requires_grad for slot in self.slots
        )
        if usage_differs:
            agreed = channel.usage_agreed()
        for slot in self._in_plan:
            if slot.number not in channel.sparse:
                self._hand_out(slot, channel, agreed)
        return agreed

    def _hand_out(self, slot: Slot, channel: Channel, agreed: bool | None) -> None:
        param = slot.param
        if agreed and not param.requires_grad and param.grad is None:
            # Frozen on all ranks: the optimizer shall not touch it.
            return
        view = channel.bucket_of[slot.number].views[slot.number]
        gradient = param.grad
        if gradient is view:
            return
        if gradient is not None and gradient.is_sparse:
            param.grad = view.to_sparse(gradient.sparse_dim()).to(gradient.dtype)
        elif view.dtype == param.dtype:
            param.grad = view
        else:
            if gradient is None:
                gradient = param.grad = torch.empty_like(param)
            gradient.detach().copy_(view)

    def _take_result(self, slot: Slot) -> None:
        handle, slot.handle = slot.handle, None
        param = slot.param
        if callable(handle):
            param.grad = handle().coalesce()
            return
        number, ctx, was_sparse = handle
        result = self.compression.decompress(synchronize(number), ctx)
        if was_sparse:
            param.grad = result.to_sparse(1)
        elif result is not param.grad:
            assert param.grad is not None
            param.grad.detach().copy_(result)

    # -- plans ------------------------------------------------------------------------------------------------------

    def _current_usage_hash(self) -> int:
        usage = tuple(slot.param.requires_grad for slot in self.slots)
        if usage != self._usage:
            self._usage = usage
            used = "\n".join(sorted(slot.name for slot in self.slots if slot.param.requires_grad))
            self._usage_hash = int.from_bytes(hashlib.sha256(used.encode()).digest()[:2], "big")
        return self._usage_hash

    def _consider_new_plan(self, agreed: bool | None, extras: bool) -> None:
        """Plan again where all ranks use other parameters than planned, and seem to mean it."""
        if not agreed:
            self._changed_steps = 0
            return
        self._changed_steps += 1
        if extras or self._changed_steps >= _PATIENCE_STEPS:
            self._plan([slot for slot in self.slots if slot.param.requires_grad])

    def _plan(self, slots: list[Slot]) -> None:
        """Begin to agree with the other ranks on buckets, their order, and what is sparse; the next step needs it.

        Nobody is waited for: the ranks may finish the steps of several optimizers in different orders.
        """
        engine = self._engine
        assert engine is not None
        old, self._channel = self._channel, None
        if old is not None:
            for slot in self._in_plan:
                # The old buffer must not stay alive through its views.
                if slot.param.grad is not None and not slot.param.grad.is_sparse:
                    slot.param.grad = slot.param.grad.clone()
                slot.number = -1
        self._changed_steps = 0
        slots = sorted(slots, key=lambda slot: slot.name)
        numbers = {id(slot): number for number, slot in enumerate(slots)}
        descriptions = [_describe(slot) for slot in slots]
        seen = [numbers[id(slot)] for slot in dict.fromkeys(self._ready_order) if id(slot) in numbers]
        # Those without a gradient so far: against the order of the model, as backward would reach them.
        position = {id(slot): index for index, slot in enumerate(self.slots)}
        rest = sorted((n for n in range(len(slots)) if n not in set(seen)), key=lambda n: -position[id(slots[n])])
        sparse = [] if self.sparse_as_dense else [
            numbers[id(slot)] for slot in slots if slot.param.grad is not None and slot.param.grad.is_sparse
        ]  # fmt: skip
        options = [self.op, self.predivide, self.compression is FP16Compressor, engine.settings.bucket_bytes]
        name = f"{self._label}.{self._plans}"
        self._plans += 1
        number = self.process_set.process_set_id
        assert number is not None
        strict = [[description.to_json() for description in descriptions], options]
        entry = engine.submit_plan(number, name, strict, {"order": seen + rest, "sparse": sparse})
        self._pending = entry, slots
        if old is not None and self._release is not None:
            self._release()
        self._release = weakref.finalize(self, engine.release_plan, name)

    def _adopt_plan(self) -> None:
        """Use the plan from now on.

        Raises:
            HorovodInternalError: the ranks have different parameters or options; the message names them.
        """
        assert self._pending is not None
        (entry, slots), self._pending = self._pending, None
        self._channel = entry.wait()
        self._in_plan = slots
        for number, slot in enumerate(slots):
            slot.number = number


def _describe(slot: Slot) -> Description:
    param = slot.param
    return Description(
        slot.name,
        dtype_name(param.dtype),
        tuple(param.shape),
        dense_stride(param),
        param.device.type,
        slot.group,
    )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A sparse gradient as a dense one.

    Not `gradient.to_dense()` alone: torch 2.13 loses a single value that is an expanded tensor, as the gradient of a
    sum over an embedding is.
    """
    values = gradient._values()
    copied = torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
    return torch.sparse_coo_tensor(gradient._indices(), copied, gradient.shape, check_invariants=False).to_dense()


def _empty_sparse(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries, with one sparse dimension as embeddings have them."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def _on_gradient(slot: Slot, reducer: weakref.ref[GradientReducer]) -> None:
    """Call the reducer whenever the parameter's gradient was accumulated; also one that is frozen now."""

    def hook(_: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.on_gradient(slot)

    param = slot.param
    frozen = not param.requires_grad
    if frozen and not (param.is_floating_point() or param.is_complex()):
        return  # cannot have a gradient
    if frozen:
        param.requires_grad_(True)
    handle: Any = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    remove: Callable[[], None] = handle.remove
    if frozen:
        param.requires_grad_(False)
    owner = reducer()
    if owner is not None:
        weakref.finalize(owner, remove)
