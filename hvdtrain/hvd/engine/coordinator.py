"""Decides, on rank 0, what is done and in which order. No sockets, no threads, no tensors: messages in, messages out.

Messages from a rank (JSON lists):

    ["q", [item, ...]]   announcements; item is [set id, name, strict, varying, payload bytes or -1], or
                         [cache number, varying, payload bytes or -1] once the same thing was agreed before
    ["j", counters]      the rank has joined (has no more data); counters are its numbers of unnamed operations
    ["b"]                the rank shuts down
    ["w", name, step]    the rank has waited for this planned step longer than the stall limit
    ["d", name]          the rank has done with this plan: its optimizer is gone, or has a new one

Messages to a rank are documented at `Coordinator._answer`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from hvdtrain.hvd.engine.request import AVERAGE, OP_NAMES, STRICT_FIELDS, SUM, shape_numel
from hvdtrain.hvd.engine.settings import Settings

# Kinds that need every rank of the set: a joined rank has nothing to give and cannot know how much it would receive.
_NEEDS_EVERYONE = frozenset({"allgather", "broadcast", "alltoall", "reducescatter"})
_INLINE_KINDS = frozenset({"allreduce", "allgather", "broadcast"})
_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2,
}  # fmt: skip

Outgoing = tuple[tuple[int, ...], dict[str, Any], bytes]
# (kind, strict, payloads by position in the set, number of ranks that the average divides by) -> result bytes
Combine = Callable[[str, list[Any], list[bytes], int], bytes]


@dataclasses.dataclass
class Pending:
    """One name that some ranks have announced and others have not."""

    kind: str
    since_s: float
    strict: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    varying: dict[int, Any] = dataclasses.field(default_factory=dict)
    payload: dict[int, bytes | None] = dataclasses.field(default_factory=dict)
    warned: bool = False


class Coordinator:
    """State of the negotiation of one generation.

    Args:
        size: number of ranks.
        settings: thresholds and limits.
        combine: reduces or concatenates inline payloads.
        warn: called with each stall warning.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        size: int,
        settings: Settings,
        combine: Combine,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.settings = settings
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self.on_first: Callable[[str, str, int], None] | None = None
        self.on_ready: Callable[[str], None] | None = None
        self._combine = combine
        self._warn = warn
        self._clock = clock
        self._next_set = 1
        self._pending: dict[tuple[int, str], Pending] = {}
        self._ready: list[tuple[int, str]] = []
        self._joined: dict[int, dict[str, int]] = {}
        self._join_order: list[int] = []
        self._join_counters: dict[str, int] = {}
        self._departed: dict[int, str] = {}
        self._cache: list[tuple[int, str, list[Any]]] = []
        self._cache_numbers: dict[tuple[int, str], int] = {}
        self._plans: dict[tuple[int, str], tuple[dict[str, Any], list[Any], set[int]]] = {}
        self._released: dict[str, set[int]] = {}
        self._waiting: dict[tuple[str, int], tuple[float, set[int]]] = {}
        self._out: list[Outgoing] = []

    # -- messages in ------------------------------------------------------------------------------------------------

    def handle(self, rank: int, message: list[Any], blob: bytes) -> list[Outgoing]:
        """Take one message of a rank; return what is to be sent, in this order."""
        what = message[0]
        if what == "q":
            self._announce(rank, message[1], blob)
        elif what == "j":
            self._join(rank, message[1])
        elif what == "b":
            self._depart(rank, f"rank {rank} has shut down")
            if len(self._departed) == self.size:
                self._send(range(self.size), {"closed": True})
        elif what == "w":
            self._report_wait(rank, message[1], message[2])
        elif what == "d":
            self._released.setdefault(message[1], set()).add(rank)
            self._drop_if_released(message[1])
        return self.flush()

    def _announce(self, rank: int, items: list[Any], blob: bytes) -> None:
        offset = 0
        for item in items:
            if len(item) == 3:
                set_id, name, strict = self._cache[item[0]]
            else:
                set_id, name, strict = item[:3]
            varying, length = item[-2:]
            payload: bytes | None = None
            if length >= 0:
                payload = blob[offset : offset + length]
                offset += length
            self._register(rank, set_id, name, strict, varying, payload)

    def _register(
        self, rank: int, set_id: int, name: str, strict: list[Any], varying: Any, payload: bytes | None
    ) -> None:
        kind = name.partition(".")[0]
        members = self.sets.get(set_id)
        if members is None:
            self._answer_error((rank,), set_id, name, f"{name}: process set {set_id} does not exist (any more)")
            return
        gone = [reason for other, reason in self._departed.items() if other in members]
        if gone:
            self._answer_error((rank,), set_id, name, f"{name}: {gone[0]}")
            return
        key = (set_id, name)
        if kind == "plan" and key in self._plans and rank not in self._plans[key][2]:
            self._answer_known_plan(rank, key, strict)
            return
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = Pending(kind, self._clock())
            if self.on_first is not None:
                self.on_first(kind, name, rank)
        pending.strict[rank] = strict
        pending.varying[rank] = varying
        pending.payload[rank] = payload
        if self._complete(key, pending):
            self._ready.append(key)

    def _complete(self, key: tuple[int, str], pending: Pending) -> bool:
        announced = pending.strict
        if len(announced) >= len(self.sets[key[0]]):
            return True
        return bool(self._joined) and all(r in announced or r in self._joined for r in self.sets[key[0]])

    def _join(self, rank: int, counters: dict[str, int]) -> None:
        self._joined[rank] = counters
        self._join_order.append(rank)
        for name, count in counters.items():
            self._join_counters[name] = max(count, self._join_counters.get(name, 0))
        if self._departed:
            reason = next(iter(self._departed.values()))
            self._send((rank,), {"joined": -1, "error": f"join: {reason}", "counters": {}})
            return
        if len(self._joined) == self.size:
            self._send(range(self.size), {"joined": self._join_order[-1], "counters": self._join_counters})
            self._joined, self._join_order, self._join_counters = {}, [], {}
            return
        for key, pending in self._pending.items():
            if key not in self._ready and self._complete(key, pending):
                self._ready.append(key)

    def _depart(self, rank: int, reason: str) -> None:
        """A rank has left, in good order or not: nothing that needs it can ever be done."""
        self._departed.setdefault(rank, reason)
        for key in [key for key in self._pending if rank in self.sets[key[0]]]:
            pending = self._pending.pop(key)
            self._answer_error(tuple(r for r in pending.strict if r != rank), *key, f"{key[1]}: {reason}")
        for other in self._joined:
            if other != rank:
                self._send((other,), {"joined": -1, "error": f"join: {reason}", "counters": {}})

    def lose(self, rank: int, reason: str) -> list[Outgoing]:
        """A rank's connection broke: tell everybody, because their data connections to it are broken too."""
        if rank in self._departed:
            return []
        self._depart(rank, reason)
        self._send([r for r in range(self.size) if r not in self._departed], {"lost": reason})
        return self.flush()

    # -- stalls -----------------------------------------------------------------------------------------------------

    def next_check_s(self) -> float | None:
        """Seconds until `check_stalls` should run; None while nothing is pending."""
        limits = [
            limit
            for limit in (self.settings.stall_warning_s, self.settings.stall_abort_s)
            if limit is not None and (self._pending or self._waiting)
        ]
        if not limits:
            return None
        since = [p.since_s for p in self._pending.values()] + [s for s, _ in self._waiting.values()]
        now = self._clock()
        due = [s + limit - now for s in since for limit in limits]
        return max(0.05, min((d for d in due if d > 0), default=min(limits)))

    def check_stalls(self) -> list[Outgoing]:
        """Warn about names that some ranks do not announce; give them up after the abort limit."""
        now = self._clock()
        for key, pending in list(self._pending.items()):
            waited = now - pending.since_s
            missing = [r for r in self.sets[key[0]] if r not in pending.strict and r not in self._joined]
            text = (
                f"{key[1]}: rank{_s(pending.strict)} {_ranks(pending.strict)} submitted it {waited:.0f} s ago, "
                f"rank{_s(missing)} {_ranks(missing)} did not"
            )
            if self.settings.stall_abort_s is not None and waited >= self.settings.stall_abort_s:
                del self._pending[key]
                self._answer_error(tuple(pending.strict), *key, f"{text} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)")
            elif (
                self.settings.stall_warning_s is not None
                and waited >= self.settings.stall_warning_s
                and not pending.warned
            ):
                pending.warned = True
                self._warn(text)
        for step_key, (since, ranks) in list(self._waiting.items()):
            if now - since >= 1.0:
                # A second after the first report everybody who waits has reported.
                del self._waiting[step_key]
                absent = [r for r in range(self.size) if r not in ranks]
                name, step = step_key
                self._warn(
                    f"{name}: rank{_s(ranks)} {_ranks(ranks)} wait for step {step}, which "
                    f"rank{_s(absent)} {_ranks(absent)} did not reach"
                )
        return self.flush()

    def _report_wait(self, rank: int, name: str, step: int) -> None:
        _, ranks = self._waiting.setdefault((name, step), (self._clock(), set()))
        ranks.add(rank)

    # -- answers ----------------------------------------------------------------------------------------------------

    def flush(self) -> list[Outgoing]:
        """Turn what has become ready into answers, fusing small tensors of one kind."""
        if self._ready:
            ready, self._ready = self._ready, []
            self._resolve(ready)
        out, self._out = self._out, []
        return out

    def _resolve(self, ready: list[tuple[int, str]]) -> None:
        bins: dict[str, list[tuple[str, Pending]]] = {}
        sizes: dict[str, int] = {}
        for key in ready:
            pending = self._pending.pop(key, None)
            if pending is None:
                continue
            set_id, name = key
            if self.on_ready is not None:
                self.on_ready(name)
            error = self._disagreement(set_id, name, pending)
            if error is not None:
                self._answer_error(self.sets[set_id], set_id, name, error)
            elif pending.kind in ("add_process_set", "remove_process_set", "plan"):
                self._resolve_special(set_id, name, pending)
            elif self._inline(set_id, name, pending):
                pass
            elif pending.kind == "allreduce" and len(next(iter(pending.strict.values()))[0]) == 1:
                strict = next(iter(pending.strict.values()))
                signature = f"{set_id} {strict[0]} {strict[2:]}"
                size = shape_numel(strict[1][0]) * _ITEM_BYTES.get(strict[0][0], 1)
                if signature in bins and sizes[signature] + size > self.settings.fusion_threshold_bytes:
                    self._answer(set_id, bins.pop(signature))
                    sizes[signature] = 0
                bins.setdefault(signature, []).append((name, pending))
                sizes[signature] = sizes.get(signature, 0) + size
            else:
                self._answer(set_id, [(name, pending)])
        for signature, names in bins.items():
            self._answer(int(signature.partition(" ")[0]), names)

    def _answer(self, set_id: int, names: list[tuple[str, Pending]]) -> None:
        """Say that these names are to be done together by all ranks of the set.

        The message: {"s": set id, "k": kind, "n": names, or numbers where the rank has them cached, "c": cache numbers
        given out now, "v": what varies, in rank order, per name; "j": ranks that have joined, with "m": strict metadata
        for them to make zeros from; "b": lengths of inline results, whose bytes follow}.
        """
        members = self.sets[set_id]
        document: dict[str, Any] = {"s": set_id, "k": names[0][1].kind}
        self._describe(document, set_id, names)
        joined = [r for r in members if r in self._joined]
        if joined:
            document["j"] = joined
            document["m"] = [next(iter(pending.strict.values())) for _, pending in names]
        if any(value is not None for _, pending in names for value in pending.varying.values()):
            document["v"] = [[pending.varying.get(r) for r in members] for _, pending in names]
        self._send(members, document)

    def _describe(self, document: dict[str, Any], set_id: int, names: list[tuple[str, Pending]]) -> None:
        labels: list[Any] = []
        numbers: list[int | None] = []
        for name, pending in names:
            strict = next(iter(pending.strict.values()))
            number = self._cache_numbers.get((set_id, name))
            known = number is not None and self._cache[number][2] == strict
            labels.append(number if known else name)
            numbers.append(None if known else self._remember(set_id, name, strict))
        document["n"] = labels
        if any(number is not None for number in numbers):
            document["c"] = numbers

    def _remember(self, set_id: int, name: str, strict: list[Any]) -> int | None:
        # Unnamed operations never come again under the same name.
        if ".noname." in name or len(self._cache) >= self.settings.cache_capacity:
            return None
        self._cache.append((set_id, name, strict))
        number = len(self._cache) - 1
        self._cache_numbers[(set_id, name)] = number
        return number

    def _inline(self, set_id: int, name: str, pending: Pending) -> bool:
        """Answer with the result itself where all contributions came with the announcements."""
        members = self.sets[set_id]
        if pending.kind not in _INLINE_KINDS:
            return False
        strict = next(iter(pending.strict.values()))
        givers = [r for r in members if r in pending.strict]
        if pending.kind == "broadcast":
            givers = [strict[3]]
        elif len(givers) < len(members) and strict[3] not in (SUM, AVERAGE):
            return False
        payloads = [pending.payload.get(r) for r in givers]
        if any(payload is None for payload in payloads):
            return False
        result = self._combine(pending.kind, strict, [p for p in payloads if p is not None], len(members))
        document: dict[str, Any] = {"s": set_id, "k": pending.kind, "b": [len(result)]}
        self._describe(document, set_id, [(name, pending)])
        if pending.kind == "allgather":
            document["v"] = [[pending.varying.get(r) for r in members]]
        self._send(members, document, result)
        return True

    def _resolve_special(self, set_id: int, name: str, pending: Pending) -> None:
        strict = next(iter(pending.strict.values()))
        document: dict[str, Any] = {"s": set_id, "k": pending.kind, "n": [name]}
        if pending.kind == "add_process_set":
            ranks = tuple(strict[0])
            if ranks in self.sets.values():
                document["v"] = [-1, list(ranks)]
            else:
                document["v"] = [self._next_set, list(ranks)]
                self.sets[self._next_set] = ranks
                self._next_set += 1
        elif pending.kind == "remove_process_set":
            known = strict[0] in self.sets and strict[0] != 0
            document["v"] = [strict[0] if known else -1]
            if known:
                for key in [key for key in self._pending if key[0] == strict[0]]:
                    waiting = self._pending.pop(key)
                    self._answer_error(tuple(waiting.strict), *key, f"{key[1]}: process set {strict[0]} was removed")
                del self.sets[strict[0]]
        else:
            first = min(pending.varying)
            sparse = sorted({i for varying in pending.varying.values() for i in varying["sparse"]})
            document["v"] = {"order": pending.varying[first]["order"], "sparse": sparse}
            document["m"] = strict
            document["j"] = [r for r in self.sets[set_id] if r in self._joined]
            self._plans[(set_id, name)] = (document, strict, set(pending.strict))
        self._send(self.sets[set_id], document)
        self._drop_if_released(name)

    def _drop_if_released(self, name: str) -> None:
        """Let all ranks close a plan's connections once no rank needs them: closed at one end earlier, they would take
        from a slower rank what is still on its way to it."""
        for key, (document, _, served) in list(self._plans.items()):
            if key[1] == name and self._released.get(name, set()) >= served:
                del self._plans[key], self._released[name]
                self._send(sorted(served | set(document["j"])), {"dropped": name})

    def _answer_known_plan(self, rank: int, key: tuple[int, str], strict: list[Any]) -> None:
        document, agreed, served = self._plans[key]
        served.add(rank)
        if strict == agreed:
            self._send((rank,), {**document, "j": []})
        else:
            text = f"{key[1]}: rank {rank} comes late with other parameters or options than the others planned with"
            self._answer_error((rank,), *key, text)

    def _disagreement(self, set_id: int, name: str, pending: Pending) -> str | None:
        joined = [r for r in self.sets[set_id] if r in self._joined]
        if joined and pending.kind in _NEEDS_EVERYONE:
            return f"{name}: {pending.kind} is not possible after rank{_s(joined)} {_ranks(joined)} called join()"
        by_rank = sorted(pending.strict.items())
        first = by_rank[0][1]
        for rank, strict in by_rank[1:]:
            if strict == first:
                continue
            for index, field in enumerate(STRICT_FIELDS[pending.kind]):
                if strict[index] != first[index]:
                    values: dict[str, list[int]] = {}
                    for other, theirs in by_rank:
                        values.setdefault(_value(field, theirs[index], first[index], strict[index]), []).append(other)
                    said = ", ".join(f"rank{_s(ranks)} {_ranks(ranks)}: {value}" for value, ranks in values.items())
                    return f"{name}: the ranks disagree on the {field}: {said}"
            return f"{name}: rank {rank} disagrees with rank {by_rank[0][0]}"
        return _impossible(name, pending.kind, first, self.sets[set_id])

    def _answer_error(self, ranks: Iterable[int], set_id: int, name: str, error: str) -> None:
        self._send(ranks, {"s": set_id, "n": [name], "e": error})

    def _send(self, ranks: Iterable[int], document: dict[str, Any], blob: bytes = b"") -> None:
        self._out.append((tuple(ranks), document, blob))


def _impossible(name: str, kind: str, strict: list[Any], members: tuple[int, ...]) -> str | None:
    """Why all ranks agree on something that cannot be done; None where it can."""
    if kind in ("allgather", "alltoall", "reducescatter") and None in strict[1]:
        return f"{name}: {kind} needs a tensor of at least one dimension"
    if kind == "broadcast" and strict[3] not in members:
        return f"{name}: root rank {strict[3]} is not in the process set, which has ranks {_ranks(members)}"
    if kind == "reducescatter" and strict[3] not in (AVERAGE, SUM):
        return f"{name}: reducescatter does Average and Sum, not {OP_NAMES[strict[3]]}"
    return None


def _s(ranks: Iterable[int]) -> str:
    return "" if len(list(ranks)) == 1 else "s"


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _value(field: str, value: Any, one: Any, other: Any) -> str:
    """A metadata value for a message: of long parameter lists only what differs, of one-element lists the element."""
    if field == "parameters":
        theirs, ours = ([tuple(map(str, p)) for p in side] for side in (other, one))
        mine = [tuple(map(str, p)) for p in value]
        differing = [p for p in mine if not (p in theirs and p in ours)]
        return " ".join(" ".join(p[:3]) for p in differing[:3]) or f"{len(mine)} parameters"
    if field == "op":
        return OP_NAMES[value]
    if isinstance(value, list) and len(value) == 1:
        return str(value[0])
    return str(value)
