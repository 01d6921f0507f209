"""DistributedOptimizer: a torch optimizer that reduces gradients over the ranks before it steps."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hvdtrain.hvd.adasum_optimizer import AdasumMixin
from hvdtrain.hvd.basics import Adasum, Average, size
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.compression import Compression, Compressor
from hvdtrain.hvd.functions import broadcast_object
from hvdtrain.hvd.reducer import GradientReducer


class DistributedMixin:
    """Put in front of the class of the wrapped optimizer, whose state, defaults and hooks are shared with this one."""

    param_groups: list[dict[str, Any]]
    _reducer: GradientReducer
    _parameter_names: dict[torch.Tensor, str]

    def _setup(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: int | list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._parameter_names = {p: name for name, p in sorted(named_parameters, key=lambda pair: pair[0])}
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._synchronized = False
        self._should_synchronize = True
        own = [p for group in self.param_groups for p in group["params"]]
        self._reducer = GradientReducer(
            [(self._parameter_names[p], p) for p in own],
            compression=compression,
            passes=backward_passes_per_step,
            op=op,
            predivide=gradient_predivide_factor,
            groups=_form_groups(groups, own, self._parameter_names, process_set),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes accumulate gradients locally before they are reduced."""
        self.backward_passes_per_step = passes
        self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; gradients of the new parameters are reduced too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        reducer = getattr(self, "_reducer", None)
        if reducer is not None:
            place = len(self.param_groups) - 1
            for index, p in enumerate(self.param_groups[place]["params"]):
                name = self._parameter_names.setdefault(p, f"allreduce.noname.{place}.{index}")
                reducer.add(name, p)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Collective; the way to the averaged gradients before `step`."""
        self._reducer.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context `step` does not reduce, because `synchronize` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients that are not reduced yet, and apply them. Collective."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self._reducer.finish(again=self._synchronized)
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's.

        Raises:
            AssertionError: gradients of a backward pass are still being reduced.
        """
        if self._reducer.active and self._reducer.outstanding:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's."""
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)  # type: ignore[misc]


def _form_groups(
    groups: int | list[list[torch.Tensor]] | None,
    own: list[torch.Tensor],
    names: dict[torch.Tensor, str],
    process_set: ProcessSet,
) -> list[list[torch.Tensor]]:
    """The explicit groups as lists of parameters, equal on all ranks."""
    if groups is None or not process_set.included() or size() == 1:
        return []
    if isinstance(groups, list):
        return groups
    if groups == 0:
        return []
    trainable = [p for p in own if p.requires_grad]
    order = broadcast_object(
        [names[p] for p in trainable], min(process_set.ranks or [0]), "DistributedOptimizer.groups", process_set
    )
    place = {name: index for index, name in enumerate(order)}
    trainable.sort(key=lambda p: place.get(names[p], len(place)))
    share, rest = divmod(len(trainable), groups)
    formed, start = [], 0
    for index in range(groups):
        end = start + share + (1 if index < rest else 0)
        formed.append(trainable[start:end])
        start = end
    return formed


def named_or_numbered(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None
) -> list[tuple[str, torch.Tensor]]:
    """Check the names that the user gave, or make some.

    Raises:
        ValueError: not pairs, names that are not unique, or parameters of the optimizer without a name.
    """
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", p)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {id(p) for _, p in named}
    shapes = [str(tuple(p.shape)) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if shapes:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Their shapes: "
            + ", ".join(shapes)
        )
    return named


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if isinstance(groups, list):
        seen: set[int] = set()
        for p in (p for group in groups for p in group):
            if not isinstance(p, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(p) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(p))


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that gradients are reduced over the ranks, during backward, before `step` applies them.

    Args:
        optimizer: any torch optimizer; the result shares its state and param_groups.
        named_parameters: `model.named_parameters()`; every parameter of the optimizer must be named.
        compression: of the gradients on the wire.
        backward_passes_per_step: backward passes whose gradients add up locally before a reduction.
        op: Average, Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: with Average, divide by this before the sum and by size/this after it.
        num_groups: deprecated, use `groups`.
        groups: number of groups, or lists of parameters, that are reduced together.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: reduce among these ranks; the other ranks' optimizers step alone.

    Returns:
        An instance of a subclass of the optimizer's class, with `synchronize`, `skip_synchronize` and
        `set_backward_passes_per_step`.

    Raises:
        ValueError: arguments that contradict each other, or `init` was not called.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    named = named_or_numbered(optimizer, named_parameters)
    _check_groups(groups)
    adasum = op == Adasum and size() > 1
    if adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    mixin = AdasumMixin if adasum else DistributedMixin
    base = optimizer.__class__
    cls = type(base.__name__, (mixin, base), {})
    wrapped: Any = cls.__new__(cls)  # type: ignore[call-overload]
    # Not through __init__: that would need the optimizer's own arguments, and would lose its state and defaults. A
    # scheduler may have put a `step` of the old instance among its attributes.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    if adasum:
        wrapped._setup(named, compression, backward_passes_per_step)
    else:
        wrapped._setup(
            named, compression, backward_passes_per_step, op, gradient_predivide_factor, groups, sparse_as_dense,
            process_set,
        )  # fmt: skip
    return wrapped
