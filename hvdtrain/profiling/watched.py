"""Stand-ins for what the trainer calls: they pass everything on, and tell the clock when it happened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdtrain.backends import Backend, Replica
from hvdtrain.backends.pending import Pending
from hvdtrain.data.feed import Feed
from hvdtrain.data.groups import Group
from hvdtrain.profiling.step_clock import BACKWARD, COMMUNICATION, DATA_WAIT, FORWARD, OPTIMIZER, StepClock


class _Watched:
    """Passes on whatever a subclass does not define."""

    def __init__(self, inner: Any, clock: StepClock) -> None:
        self._inner, self._clock = inner, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Passes:
    """Where forward ends and backward begins: the task knows the one and the replica the other."""

    forward_end_ns = 0


class WatchedTask(_Watched):
    """Knows when the loss is there."""

    def __init__(self, inner: Any, clock: StepClock, passes: _Passes) -> None:
        super().__init__(inner, clock)
        self._passes = passes

    def loss(self, model: Any, batch: Any) -> Any:
        result = self._inner.loss(model, batch)
        self._passes.forward_end_ns = self._clock.now()
        return result


class WatchedReplica(_Watched):
    """Knows when forward begins, backward ends, gradients are final and the optimizer is done."""

    def __init__(self, inner: Replica, clock: StepClock, passes: _Passes) -> None:
        super().__init__(inner, clock)
        self._passes = passes
        self._reductions = inner.watch_reductions()
        self._final_ns = 0

    @contextlib.contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        start_ns = self._passes.forward_end_ns = self._clock.now()
        with self._inner.microbatch(index, count):
            yield
        end_ns = self._clock.now()
        self._clock.add(FORWARD, start_ns, self._passes.forward_end_ns)
        self._clock.add(BACKWARD, self._passes.forward_end_ns, end_ns)
        self._clock.add_reductions(self._reductions.take())

    def without_data(self) -> None:
        with self._clock.span(BACKWARD):
            self._inner.without_data()
        self._clock.add_reductions(self._reductions.take())

    def finish_gradients(self) -> None:
        with self._clock.span(COMMUNICATION):
            self._inner.finish_gradients()
        self._clock.add_reductions(self._reductions.take())
        self._final_ns = self._clock.now()

    def step(self, apply: Callable[[], Any] | None = None) -> None:
        # Unscaling, clipping and the decision on the step come before this call.
        self._inner.step(apply)
        self._clock.add(OPTIMIZER, self._final_ns, self._clock.now())


class WatchedBackend(_Watched):
    """Knows how long the trainer waits for what the ranks agree on beside backward."""

    def start_sum(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        pending = self._inner.start_sum(tensor, name)

        def finish() -> torch.Tensor:
            with self._clock.span(COMMUNICATION):
                result: torch.Tensor = pending.wait()
            return result

        return Pending(finish)


class WatchedSource(_Watched):
    """Knows how long a step waits for its data. Asking for the next group is where a step begins."""

    def __iter__(self) -> Iterator[Group]:
        groups = iter(self._inner)
        while True:
            self._clock.next_step()
            try:
                with self._clock.span(DATA_WAIT):
                    group = next(groups)
            except StopIteration:
                return
            yield group

    def read_ahead(self) -> None:
        with self._clock.span(DATA_WAIT):
            self._inner.read_ahead()


class WatchedFeed(_Watched):
    """Gives sources that are watched. The vote on an epoch's first group is waiting for the ranks, not for data."""

    def __init__(self, inner: Feed, clock: StepClock) -> None:
        super().__init__(inner, clock)
        vote = inner.vote

        def timed(ballot: tuple[float, float]) -> tuple[float, float]:
            with clock.span(COMMUNICATION):
                return vote(ballot)

        inner.vote = timed

    def epoch(self, epoch: int, used: int) -> Any:
        return WatchedSource(self._inner.epoch(epoch, used), self._clock)


class WatchedShow(_Watched):
    """Knows of evaluations and checkpoints."""

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        self._clock.disturb()
        with self._inner.evaluation():
            yield
        self._clock.disturb()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        self._clock.disturb()
        with self._inner.saving():
            yield
        self._clock.disturb()


def watch(task: Any, backend: Backend, replica: Replica, feed: Feed, clock: StepClock) -> tuple[Any, Any, Any, Any]:
    """The four of them, watched: (task, backend, replica, feed)."""
    passes = _Passes()
    return (
        WatchedTask(task, clock, passes),
        WatchedBackend(backend, clock),
        WatchedReplica(replica, clock, passes),
        WatchedFeed(feed, clock),
    )
