"""One step, and an epoch of steps: the same under every backend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from hvdtrain.backends import Backend, Replica
from hvdtrain.backends.nothing import loss_of_nothing, sparse_parameters
from hvdtrain.backends.pending import Pending
from hvdtrain.config import Config
from hvdtrain.data.device import to_device
from hvdtrain.data.groups import Group, GroupSource
from hvdtrain.errors import ContractError
from hvdtrain.precision import Precision, names_of_non_finite
from hvdtrain.trainer.control import Control, Heard, LoggedStep, LoggedSums, Said
from hvdtrain.trainer.losses import add_logged, require_gradient, unpack, zero_gradients
from hvdtrain.trainer.position import Position
from hvdtrain.trainer.schedule import Schedule
from hvdtrain.trainer.weights import correction, reference_for


@dataclasses.dataclass
class Step:
    """What one step gave.

    Attributes:
        logged: this step's loss is to be logged; it comes in the `results` of this step or of a later one.
        num_samples: over all ranks (weights, where batches have no number of samples).
        results: of logged steps up to this one, in order.
        norm: of the averaged gradient, before clipping.
        lr: the first group's learning rate in this step.
        finite: False: the step was skipped by every rank.
        has_weight: False: skipped because no microbatch of it weighed anything.
        stop: the ranks agreed to stop after this step.
    """

    logged: bool
    num_samples: float
    results: list[LoggedStep] = dataclasses.field(default_factory=list)
    norm: float = math.nan
    lr: float = math.nan
    finite: bool = True
    has_weight: bool = True
    stop: bool = False


class Loop:
    """Runs steps. Everything that the ranks must do together happens here in the same order on all of them."""

    def __init__(
        self,
        task: Any,
        config: Config,
        backend: Backend,
        replica: Replica,
        precision: Precision,
        schedule: Schedule,
        position: Position,
    ) -> None:
        self._task, self._backend, self._replica = task, backend, replica
        self._precision, self._schedule, self._position = precision, schedule, position
        self._log_every = config.log_every_steps
        self._size = backend.world.size
        self._control = Control(backend)
        self._parameters = [p for p in replica.bare_model.parameters() if p.requires_grad]
        self._sparse = {id(p) for p in sparse_parameters(replica.bare_model)}
        # Whether the task gives the microbatches' weights itself; found out, by all ranks together, in the first step.
        self._weighted: bool | None = None
        # Of the next step's weights; None: from the first microbatches. Part of a checkpoint: where gradients travel as
        # float16 another power of two may round small ones differently.
        self.weight_reference: float | None = None

    def steps(self, source: GroupSource) -> Iterator[tuple[Group, Step]]:
        """Take one step for each group of the source."""
        for group in source:
            yield group, self._step(group, source)

    def flush(self) -> list[LoggedStep]:
        """The results of logged steps that no step has brought yet. Collective."""
        return self._control.flush()

    # ---- one step ----

    def _step(self, group: Group, source: GroupSource) -> Step:
        step = self._position.step + 1
        logged = step % self._log_every == 0
        name = f"gradient reduction of step {step}"
        replica, guard = self._replica, self._backend.guard
        said = Said()
        sums = LoggedSums(step) if logged else None
        pending: Pending[Heard] | None = None
        # 1: where there is no sample at all the step is left out, whatever its gradients were divided by.
        reference = group.num_samples / self._size or 1.0
        count = len(group.microbatches)
        if source.votes:
            source.read_ahead()
        # First of all: what follows is another thing together for a rank without data than for the others.
        replica.begin_step(count)
        for index, (batch, num_samples) in enumerate(group.microbatches):
            with replica.microbatch(index, count):
                with self._precision.autocast():
                    result = self._task.loss(replica.model, to_device(batch, self._backend.device))
                loss, weight, values, own_weight = unpack(result, num_samples)
                require_gradient(loss)
                if self._weighted is None:
                    self._find_out_weights(own_weight, weight)
                if own_weight is not self._weighted:
                    raise ContractError(
                        f"loss() returned {'a' if own_weight else 'no'} weight in step {step} and did the opposite "
                        f"before; return (loss, weight) always or never"
                    )
                if own_weight:
                    assert self.weight_reference is not None
                    reference = self.weight_reference
                said.weight += weight
                if sums is not None:
                    add_logged(sums, loss, weight, values)
                if index == count - 1:
                    pending = self._speak(step, said, source, sums)
                    with guard.operation(name):
                        self._backward(loss, weight / reference)
                else:
                    self._backward(loss, weight / reference)
        with guard.operation(name):
            if count == 0:
                if self._weighted is None:
                    self._find_out_weights(False, 0.0, has_data=False)
                pending = self._speak(step, said, source, sums)
                replica.without_data()
            replica.finish_gradients()
            heard = pending.wait() if pending is not None else None
        return self._apply(group, source, heard, logged)

    def _backward(self, loss: torch.Tensor, factor: float) -> None:
        if factor == 0.0:
            self._backward_of_nothing(loss)
        else:
            self._precision.backward(loss if factor == 1.0 else loss * factor)

    def _backward_of_nothing(self, loss: torch.Tensor) -> None:
        # A loss without weight may be NaN (the mean over no token), and 0 * NaN would spoil the step of every rank.
        if self._replica.options.find_unused_parameters:
            # DDP has noted which parameters this loss leads to, and wants the gradients of these alone.
            with zero_gradients(self._parameters):
                self._precision.backward(loss)
        else:
            self._precision.backward(loss_of_nothing(self._parameters, self._sparse))

    def _speak(self, step: int, said: Said, source: GroupSource, sums: LoggedSums | None) -> Pending[Heard] | None:
        if sums is not None:
            self._control.log(sums)
        if not (source.votes or self._weighted or self._control.is_due(step)):
            return None
        said.stop = self._backend.guard.stop_requested
        said.has_next, said.next_samples = source.ballot()
        return self._control.start(step, said)

    def _apply(self, group: Group, source: GroupSource, heard: Heard | None, logged: bool) -> Step:
        precision, replica = self._precision, self._replica
        result = Step(logged, group.num_samples)
        if heard is not None:
            result.stop = heard.stop
            if source.votes:
                source.decide(heard.num_ranks_with_next, heard.next_samples)
            result.results = heard.logged
        result.has_weight = group.num_samples > 0
        if self._weighted:
            assert heard is not None, "weights are summed in every step"
            result.has_weight = heard.weight > 0
            assert self.weight_reference is not None
            self._correct(correction(self.weight_reference, self._size, heard.weight))
            if result.has_weight:
                self.weight_reference = reference_for(heard.weight, self._size)
        norm = precision.unscale_and_clip(replica.optimizer, self._parameters)
        norm_value = norm.item()
        # The same bits on every rank, so the same decision, with nothing to exchange.
        result.finite = math.isfinite(norm_value) and result.has_weight
        result.norm = norm_value
        result.lr = float(replica.optimizer.param_groups[0]["lr"])
        replica.step(lambda: precision.step(replica.optimizer, result.finite))
        if result.finite:
            self._schedule.step()
        else:
            precision.check_progress(lambda: names_of_non_finite(replica.bare_model), result.has_weight)
        for parameter in self._parameters:
            parameter.grad = None
        self._position.step += 1
        return result

    # ---- weights ----

    def _find_out_weights(self, own_weight: bool, weight: float, *, has_data: bool = True) -> None:
        """In the first step of a run: do tasks return weights, and of what size? Collective."""
        mine = torch.tensor([float(has_data), float(own_weight), weight], dtype=torch.float64)
        with self._backend.guard.operation("agreeing on the weights of microbatches"):
            ranks, weighted, total = self._backend.start_sum(mine, "weights").wait().tolist()
        if weighted not in (0.0, ranks):
            raise ContractError(
                f"loss() returned a weight on {int(weighted)} of {int(ranks)} ranks with data; do it on all or on none"
            )
        self._weighted = weighted > 0
        if self.weight_reference is None:
            self.weight_reference = reference_for(total, self._size)

    def _correct(self, factor: float) -> None:
        if factor != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


def vote(backend: Backend, ballot: tuple[float, float]) -> tuple[float, float]:
    """Sum a ballot over the ranks now. Collective."""
    with backend.guard.operation("voting on the first microbatches of an epoch"):
        sums = backend.start_sum(torch.tensor(ballot, dtype=torch.float64), "vote").wait().tolist()
    return sums[0], sums[1]
