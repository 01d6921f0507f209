"""The runs behind the tables of `hvdtrain bench network`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.bench.hosts import format_rate
from hvdtrain.bench.machine import machine, shown
from hvdtrain.bench.network.bound import payload_bytes, wire_s
from hvdtrain.bench.placed import NamespacePlace, Place, Spread
from hvdtrain.bench.timing import Variant
from hvdtrain.errors import TrainingFailed, UserError

_TARGET = "hvdtrain.bench.timing:rank"
_START_S = 180.0
_LINK_TEST_S = 2.0


@dataclasses.dataclass(frozen=True)
class Link:
    """The network of one table.

    Attributes:
        bits_per_s: what every host can send and receive at once; None: to be measured.
        limit: None: the network as it is; else what limits it to that rate: "hosts" (namespaces of our own), or the
            name of an interface of every host.
    """

    bits_per_s: float | None
    limit: str | None = None

    @property
    def interface(self) -> str | None:
        """The interface of real hosts that is limited; None where none is."""
        return None if self.limit == "hosts" else self.limit


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is combined with what.

    Attributes:
        no_sync: False is left out where a step has one microbatch, since nothing differs there.
    """

    links: Sequence[Link]
    backends: Sequence[str] = ("ddp", "horovod")
    compressions: Sequence[str] = ("none", "fp16")
    accumulates: Sequence[int] = (4,)
    no_sync: Sequence[bool] = (False, True)

    def variants(self, backend: str) -> list[Variant]:
        """The runs of one backend over one link."""
        able = [name for name in self.compressions if backend == "ddp" or name in ("none", "fp16")]
        return [
            Variant(compression, accumulate, no_sync)
            for accumulate in self.accumulates
            for compression in able
            for no_sync in self.no_sync
            if no_sync or accumulate > 1
        ]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: blocks of each variant; figures are medians over them.
        block_s: about how long a block takes.
        trace_s: how long the traffic of a variant is recorded for the picture; 0: not at all.
        starts: how often the runs that others are compared with (one host, computation) are started; their rounds are
            spread over the starts, because a process may be faster or slower than the next one for all of its life.
    """

    rounds: int = 5
    block_s: float = 2.0
    trace_s: float = 3.0
    starts: int = 3


def measure(
    place: Place,
    job: dict[str, Any],
    grid: Grid,
    effort: Effort,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run all of it.

    Args:
        job: the keys of a job file; backend, compression, accumulate and sync_every_microbatch are replaced.
        keep: called with the result so far whenever rows have been added: a later run may fail, after minutes.

    Returns:
        {"machine", "job", "hosts", "ranks_per_host", "sharing", "effort", "one_host": [...], "rows": [...],
        "traces": [...]}, see `_row` and `_completed`.

    Raises:
        UserError: no backend has any of the compressions.
        TrainingFailed: a run failed, or its bytes took another interface than the limited one.
    """
    backends = [backend for backend in grid.backends if grid.variants(backend)]
    if not backends:
        raise UserError(f"{', '.join(grid.backends)}: nothing to measure with {', '.join(grid.compressions)}")
    for backend in grid.backends:
        if backend not in backends:
            say(f"{backend} is left out: it has no compression {', '.join(grid.compressions)}")
    run = _Runs(place, job, effort)
    result: dict[str, Any] = {
        "machine": machine(),
        "job": shown(job),
        "hosts": place.full.num_hosts,
        "ranks_per_host": list(place.full.ranks),
        "sharing": place.sharing,
        "effort": dataclasses.asdict(effort),
        "one_host": [],
        "rows": [],
        "traces": [],
    }
    one_host: dict[tuple[str, int], dict[str, Any]] = {}
    compute_ms: dict[tuple[str, int], float] = {}
    plain = [Variant(accumulate=accumulate) for accumulate in grid.accumulates]
    first_host = Spread(place.full.ranks[:1])
    for start in range(effort.starts):
        # Backend after backend in each turn, so that a machine whose speed drifts treats them alike.
        for backend in backends:
            say(f"{backend}, one host, start {start + 1} of {effort.starts}")
            run.start(backend, plain, first_host)
            say(f"{backend}, each rank for itself, start {start + 1} of {effort.starts}")
            run.start(backend, plain, place.full, apart=True)
    for backend in backends:
        for variant, row in run.rows(backend, plain, first_host):
            one_host[backend, variant.accumulate] = row
        for variant, milliseconds in run.computation(backend, plain):
            compute_ms[backend, variant.accumulate] = milliseconds
    result["one_host"] = list(one_host.values())
    for link in grid.links:
        rate = run.prepare(link)
        # The variants of one run are all in memory at once: not more of them than take turns with a reason.
        for backend, accumulate in itertools.product(backends, grid.accumulates):
            variants = [variant for variant in grid.variants(backend) if variant.accumulate == accumulate]
            if not variants:
                continue
            shown_rate = f"{format_rate(rate)}{'' if link.bits_per_s else ' (measured)'}"
            say(f"{backend}, {place.full}, {shown_rate}, accumulate {accumulate}")
            with_traces = accumulate == max(grid.accumulates)
            rows, traces = run.several_hosts(backend, variants, link, with_traces=with_traces)
            for row in rows:
                alone = one_host[backend, row["accumulate"]]
                computed = compute_ms[backend, row["accumulate"]]
                result["rows"].append(_completed(row, link, rate, place.full, alone, computed))
            result["traces"] += [{"bits_per_s": rate, **trace} for trace in traces]
            keep(result)
    return result


def say(text: str) -> None:
    """A line on what is being measured."""
    print(f"bench network: {text} ...", file=sys.stderr, flush=True)


class _Runs:
    """Starts the ranks of each run and reads what they bring back."""

    def __init__(self, place: Place, job: dict[str, Any], effort: Effort) -> None:
        self._place, self._job, self._effort = place, job, effort
        # What the ranks brought back, by backend and whether they were apart.
        self._kept: dict[tuple[str, bool], list[Any]] = {}

    def prepare(self, link: Link) -> float:
        """Bring the network into the state of the link; its rate in bits per second."""
        place = self._place
        if isinstance(place, NamespacePlace):
            place.hosts.shape(link.bits_per_s)
        if link.bits_per_s is not None:
            return link.bits_per_s
        arguments = {"seconds": _LINK_TEST_S, "network_interface": self._job.get("network_interface", "auto")}
        results = place.run("hvdtrain.bench.network.link:rank", arguments, spread=place.full, limit_s=_START_S)
        # A reduction goes as fast as its slowest link.
        return min(float(r["received_bits_per_s"]) for r in results if r["received_bits_per_s"] is not None)

    def start(self, backend: str, variants: list[Variant], spread: Spread, *, apart: bool = False) -> None:
        """Run the variants once more and keep what comes back, for `rows` and `computation`."""
        rounds = math.ceil(self._effort.rounds / self._effort.starts)
        new = self._run(backend, variants, spread, apart=apart, rounds=rounds)
        old = self._kept.setdefault((backend, apart), new)
        if old is not new:
            for of_rank, more in zip(old, new, strict=True):
                for measured, further in zip(of_rank["variants"], more["variants"], strict=True):
                    for key in ("step_s", "sent_bytes", "received_bytes"):
                        measured[key] += further[key]

    def rows(self, backend: str, variants: list[Variant], spread: Spread) -> list[tuple[Variant, dict[str, Any]]]:
        """The rows of what was started on the spread."""
        results = self._kept[backend, False]
        return [(variant, self._row(backend, variant, results, i, spread)) for i, variant in enumerate(variants)]

    def computation(self, backend: str, variants: list[Variant]) -> list[tuple[Variant, float]]:
        """Milliseconds of a step without the others: all ranks at once, each a world of its own; the slowest rank's."""
        medians = [
            max(statistics.median(result["variants"][i]["step_s"]) for result in self._kept[backend, True]) * 1000
            for i in range(len(variants))
        ]
        return list(zip(variants, medians, strict=True))

    def several_hosts(
        self, backend: str, variants: list[Variant], link: Link, *, with_traces: bool
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All hosts: (rows, traces of the uncompressed variants)."""
        with_traces = with_traces and self._effort.trace_s > 0
        traced = [i for i, variant in enumerate(variants) if variant.compression == "none" and with_traces]
        results = self._run(backend, variants, self._place.full, traced=traced, link=link)
        rows = [self._row(backend, v, results, i, self._place.full) for i, v in enumerate(variants)]
        _check_limited(link, rows)
        traces = [{"backend": backend, **variants[i].to_dict(), **results[0]["traces"][str(i)]} for i in traced]
        return rows, traces

    def _run(
        self,
        backend: str,
        variants: list[Variant],
        spread: Spread,
        *,
        apart: bool = False,
        traced: Sequence[int] = (),
        link: Link | None = None,
        rounds: int | None = None,
    ) -> list[Any]:
        effort = self._effort
        arguments = {
            "backend": backend,
            "job": self._job,
            "variants": [variant.to_dict() for variant in variants],
            "rounds": rounds or effort.rounds,
            "block_s": effort.block_s,
            "traced": list(traced),
            "trace_s": effort.trace_s,
            "shape": [link.interface, link.bits_per_s] if link is not None and link.interface is not None else None,
        }
        # A block has two steps at least, however long they take; three minutes are enough for slow starts.
        limit_s = _START_S + len(variants) * (effort.rounds + 3) * max(10 * effort.block_s, 60.0)
        return self._place.run(_TARGET, arguments, spread=spread, limit_s=limit_s, apart=apart)

    def _row(self, backend: str, variant: Variant, results: list[Any], number: int, spread: Spread) -> dict[str, Any]:
        """What was measured of one variant:

        {"backend", "compression", "accumulate", "no_sync", "hosts", "ranks", "step_ms", "step_ms_rounds", "steps",
        "epoch_s", "samples_per_s", "sent_bytes", "received_bytes" (per host, of a step), "payload_bytes",
        "transport", "interfaces", "threads"}; epoch_s and samples_per_s are None where the data do not tell.
        """
        own = results[0]["variants"][number]
        firsts = [result for result in results if result["local_rank"] == 0]
        if len(firsts) != spread.num_hosts:
            raise TrainingFailed(f"{spread} were started, and {len(firsts)} hosts answered")
        step_s = statistics.median(own["step_s"])
        batch_size = self._job["batch_size"]
        taken = (batch_size or 1) * variant.accumulate * spread.size
        items = results[0]["items"]
        return {
            "backend": backend,
            **variant.to_dict(),
            "hosts": spread.num_hosts,
            "ranks": spread.size,
            "step_ms": step_s * 1000,
            "step_ms_rounds": [seconds * 1000 for seconds in own["step_s"]],
            "steps": own["steps"],
            "epoch_s": None if items is None else items / taken * step_s,
            "samples_per_s": None if batch_size is None else taken / step_s,
            "sent_bytes": [statistics.median(first["variants"][number]["sent_bytes"]) for first in firsts],
            "received_bytes": [statistics.median(first["variants"][number]["received_bytes"]) for first in firsts],
            "payload_bytes": payload_bytes(results[0]["gradients"], variant.compression),
            "transport": results[0]["transport"],
            "interfaces": [first["interface"] for first in firsts],
            "threads": results[0]["threads"],
        }


def _check_limited(link: Link, rows: list[dict[str, Any]]) -> None:
    """What was limited must be what the ranks' bytes went through."""
    used = {interface for row in rows for interface in row["interfaces"]}
    if link.interface is not None and used != {link.interface}:
        raise TrainingFailed(
            f"interface {link.interface} was limited, and the ranks sent over {', '.join(sorted(used))}: limit that "
            f"one, or send over {link.interface} with --set network_interface={link.interface}"
        )


def _completed(
    row: dict[str, Any], link: Link, rate: float, spread: Spread, alone: dict[str, Any], computed_ms: float
) -> dict[str, Any]:
    """The row with what it is compared with."""
    reductions = 1 if row["no_sync"] else row["accumulate"]
    wire_ms = wire_s(row["payload_bytes"], spread.num_hosts, rate) * reductions * 1000
    return {
        "bits_per_s": rate,
        "bits_per_s_from": "limit" if link.limit else ("measured" if link.bits_per_s is None else "stated"),
        **row,
        # Work per time: the same as the ratio of the epochs' times.
        "speed_up": (row["ranks"] / row["step_ms"]) / (alone["ranks"] / alone["step_ms"]),
        "wire_ms": wire_ms,
        "computation_ms": computed_ms,
        "ratio_to_wire": row["step_ms"] / wire_ms,
        "ratio_to_wire_and_computation": row["step_ms"] / (wire_ms + computed_ms),
    }
