"""The trainer's own steps, timed on one rank: variants of one job take turns, with the bytes that they cost.

Runs on every rank of a job that `hvdtrain.bench.placed` has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.bench.hosts import Traffic, read_traffic
from hvdtrain.bench.hosts.shaping import shaped
from hvdtrain.launch.detect import ManualFlags, detect

if TYPE_CHECKING:
    from hvdtrain.backends import Backend
    from hvdtrain.config import Config

# PowerSGD sends everything in its first 10 steps (hvdtrain.backends.ddp_compression).
_WARM_UP_STEPS = {"powersgd": 12}
_MOST_STEPS_IN_BLOCK = 50
_TRACE_EVERY_S = 0.02


@dataclasses.dataclass(frozen=True)
class Variant:
    """What differs between the runs of one job.

    Attributes:
        compression: none | fp16 | bf16 | powersgd.
        accumulate: microbatches of a step.
        no_sync: gradients travel once a step; False: after every microbatch.
    """

    compression: str = "none"
    accumulate: int = 1
    no_sync: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def rank(
    flags: ManualFlags | None,
    backend: str,
    job: dict[str, Any],
    variants: Sequence[Mapping[str, Any]],
    rounds: int,
    block_s: float,
    traced: Sequence[int] = (),
    trace_s: float = 0.0,
    shape: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Time the variants on this rank. Collective.

    Args:
        flags: how to connect; None: the launcher's variables tell.
        job: the keys of a job file.
        variants: fields of `Variant` each.
        rounds: blocks of each variant.
        block_s: about how long a block takes, seconds.
        traced: numbers of the variants whose traffic is also recorded over time, after the rounds.
        trace_s: how long that is recorded, seconds.
        shape: (interface, bits per second): limit that interface of this host for the time of the run.

    Returns:
        {"rank", "node_rank", "local_rank", "host", "interface", "threads", "transport",
        "gradients": [[shape, bytes per element]],
        "items": samples (microbatches, where batch_size is null) in the data set; None: unknown, or not rank 0,
        "variants": [{"steps", "step_s": [], "sent_bytes": [], "received_bytes": []}], (per round, each per step)
        "traces": {number: {"at_s": [], "sent_bytes": []}}}
    """
    import torch

    import hvdtrain

    # Each job would announce itself.
    logging.disable(logging.INFO)
    chosen = [Variant(**dict(variant)) for variant in variants]
    base = _config(job, backend)
    with (
        shaped(tuple(shape) if shape and _is_first_of_host(flags) else None),
        hvdtrain.connect(
            backend,
            device=base.device,
            transport=base.transport,
            network_interface=base.network_interface,
            start_timeout_s=base.start_timeout_s,
            flags=flags,
        ) as connection,
        contextlib.ExitStack() as stack,
    ):
        jobs = [_Steps(base, variant, connection, stack) for variant in chosen]
        clock = _Clock(connection)
        blocks = [steps.steps_in(block_s, connection) for steps in jobs]
        measured: list[dict[str, Any]] = [
            {"steps": count, "step_s": [], "sent_bytes": [], "received_bytes": []} for count in blocks
        ]
        for turn in range(rounds):
            shift = turn % len(jobs)
            for number in [*range(shift, len(jobs)), *range(shift)]:
                count = blocks[number]
                seconds, traffic = clock.time(lambda n=number, c=count: jobs[n].take(c))  # type: ignore[misc]
                measured[number]["step_s"].append(seconds / count)
                measured[number]["sent_bytes"].append(traffic.sent_bytes / count)
                measured[number]["received_bytes"].append(traffic.received_bytes / count)
        traces = {}
        for number in traced:
            count = max(3, jobs[number].steps_in(trace_s, connection))
            with _recorded(connection.interface) as trace:
                clock.time(lambda n=number, c=count: jobs[n].take(c))  # type: ignore[misc]
            traces[str(number)] = trace
        world = connection.world
        return {
            "rank": world.rank,
            "node_rank": world.node_rank,
            "local_rank": world.local_rank,
            "host": connection.host,
            "interface": connection.interface,
            "transport": connection.transport,
            "device": connection.device.type,
            "threads": torch.get_num_threads(),
            "gradients": jobs[0].gradients,
            "items": _items(base) if world.is_root else None,
            "variants": measured,
            "traces": traces,
        }


def _is_first_of_host(flags: ManualFlags | None) -> bool:
    return detect(os.environ, flags).local_rank in (None, 0)


def _config(job: Mapping[str, Any], backend: str) -> Config:
    from hvdtrain.config import Config

    # Steps alone: no end, no evaluation, no checkpoint, no line of the log.
    alone = {
        "epochs": None,
        "max_steps": 10**9,
        "eval": {"every_epochs": None},
        "checkpoint": {"every_steps": None},
        "log_every_steps": 10**9,
    }
    return Config.model_validate({**job, **alone, "backend": backend})


def _items(config: Config) -> int | None:
    from hvdtrain.task import load_task

    dataset: Any = load_task(config).train_dataset()
    try:
        return len(dataset)
    except TypeError:
        return None


class _Steps:
    """One variant of the job, ready to take steps."""

    def __init__(self, base: Config, variant: Variant, connection: Backend, stack: contextlib.ExitStack) -> None:
        from hvdtrain.trainer.run import Job

        output = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-"))
        config = base.model_copy(
            update={
                "compression": variant.compression,
                "accumulate": variant.accumulate,
                "sync_every_microbatch": not variant.no_sync,
                "output": output,
            }
        )
        prepared = Job(config, connection).prepare("none", stack)
        parameters = prepared.replica.bare_model.parameters()
        self.gradients = [[list(p.shape), p.element_size()] for p in parameters if p.requires_grad]
        self._steps = prepared.session.steps()
        self._step_s = self._warm_up(variant, connection)

    def _warm_up(self, variant: Variant, connection: Backend) -> float:
        self.take(_WARM_UP_STEPS.get(variant.compression, 2))
        connection.barrier()
        start_s = time.perf_counter()
        self.take(2)
        return (time.perf_counter() - start_s) / 2

    def steps_in(self, seconds: float, connection: Backend) -> int:
        """About how many steps fit into that time, the same number on every rank. Collective."""
        count = min(_MOST_STEPS_IN_BLOCK, max(2, round(seconds / self._step_s)))
        agreed: int = connection.broadcast_object(count)
        return agreed

    def take(self, count: int) -> None:
        """Take that many steps. Collective."""
        for _ in range(count):
            next(self._steps)


class _Clock:
    """Times what all ranks do together, and counts what it sends from this host."""

    def __init__(self, connection: Backend) -> None:
        self._connection = connection

    def time(self, work: Callable[[], None]) -> tuple[float, Traffic]:
        """(seconds from the moment when all ranks are ready until all are done, bytes meanwhile). Collective."""
        connection = self._connection
        connection.barrier()
        before = read_traffic(connection.interface)
        start_s = time.perf_counter()
        work()
        connection.barrier()
        seconds = time.perf_counter() - start_s
        return seconds, read_traffic(connection.interface) - before


@contextlib.contextmanager
def _recorded(interface: str) -> Iterator[dict[str, list[float]]]:
    """Record the bytes sent so far, every few milliseconds, from a thread of its own."""
    trace: dict[str, list[float]] = {"at_s": [], "sent_bytes": []}
    over = threading.Event()
    start_s, first = time.perf_counter(), read_traffic(interface)

    def sample() -> None:
        while not over.wait(_TRACE_EVERY_S):
            sent = (read_traffic(interface) - first).sent_bytes
            trace["at_s"].append(time.perf_counter() - start_s)
            trace["sent_bytes"].append(sent)

    thread = threading.Thread(target=sample, name="hvdtrain-trace", daemon=True)
    thread.start()
    try:
        yield trace
    finally:
        over.set()
        thread.join()
