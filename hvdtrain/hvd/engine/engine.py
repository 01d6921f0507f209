"""One generation of the engine, from `init` to `shutdown`: its threads, its connections and its open operations."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from hvdtrain.hvd.common.exceptions import HorovodInternalError
from hvdtrain.hvd.engine.coordinator import Coordinator, Outgoing
from hvdtrain.hvd.engine.executor import Executor, Job
from hvdtrain.hvd.engine.groups import GroupPool
from hvdtrain.hvd.engine.plans import Plans
from hvdtrain.hvd.engine.reduction import combine_inline, tensor_bytes, tensor_from_bytes
from hvdtrain.hvd.engine.request import Entry, Kind
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.engine.star import Star, connect_star
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.launch.host import usable_cpus
from hvdtrain.launch.world import World

# How long `close` waits for the other ranks to say goodbye as well.
_GOODBYE_S = 2.0


class Engine:
    """Negotiates and executes; `submit` may be called from any thread.

    Args:
        world: place of this process.
        store: reaches all ranks; keys of this generation only.
        address: what the other hosts can reach rank 0 at (used on rank 0).
        settings: limits and thresholds.
    """

    def __init__(self, world: World, store: Store, address: str, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        self.store = store
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(world.size))}
        self.timeline = Timeline()
        self.broken: str | None = None
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, str], Entry] = {}
        self._running: set[Entry] = set()
        self._outbox: collections.deque[Entry | list[Any]] = collections.deque()
        self._counters: collections.Counter[str] = collections.Counter()
        self._join_entry: Entry | None = None
        self._cache_numbers: dict[tuple[int, str], tuple[int, list[Any]]] = {}
        self._cache: dict[int, tuple[int, str, list[Any]]] = {}
        self._jobs: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        # This rank's, once a tensor on it, or a rank that joins, has told.
        self._cuda_device: torch.device | None = None
        self._closed = threading.Event()
        self._peers_closed = threading.Event()

        self._star: Star = connect_star(world, store, address, settings.start_timeout_s)
        # Number of ranks on every host, in the order of the hosts.
        self.local_sizes_by_node = [n for _, n in sorted(dict(self._star.places).items())]
        pool_store = PrefixStore("data", store)
        has_core = len(usable_cpus()) >= world.local_size
        self.pool = GroupPool(pool_store, world.rank, self._star.address, settings.stall_abort_s, has_core)
        self.plans = Plans(world.rank, self.sets, self.pool, self._lock, self._jobs.put)
        self._executor = Executor(world.rank, self.pool)
        self._coordinator: Coordinator | None = None
        if world.rank == 0:
            self._coordinator = Coordinator(world.size, settings, combine_inline, self._warn_stall)
            self._coordinator.on_first = self.timeline.negotiation_starts
            self._coordinator.on_ready = self.timeline.negotiation_ends

        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._awake = False
        self._control_thread = threading.Thread(target=self._control, name="hvd-control", daemon=True)
        self._data_thread = threading.Thread(target=self._data, name="hvd-data", daemon=True)
        self._control_thread.start()
        self._data_thread.start()

    # -- called by the user's threads -------------------------------------------------------------------------------

    def auto_name(self, kind: Kind, set_id: int) -> str:
        """A name for an operation that the user gave none: equal on all ranks that call in the same order."""
        with self._lock:
            self._counters[f"{kind.value}/{set_id}"] += 1
            return f"noname.{set_id}.{self._counters[f'{kind.value}/{set_id}']}"

    def submit(self, entry: Entry) -> Entry:
        """Announce an operation.

        Raises:
            HorovodInternalError: the engine is broken (another rank was lost).
            ValueError: an operation of this name is still open on this rank.
        """
        key = (entry.set_id, entry.name)
        if entry.inputs and entry.inputs[0].is_cuda:
            self._cuda_device = entry.inputs[0].device
            entry.ready_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            entry.ready_event.record(torch.cuda.current_stream(entry.inputs[0].device))
        with self._lock:
            if self.broken is not None:
                raise HorovodInternalError(f"{entry.name}: {self.broken}")
            if key in self._entries:
                raise ValueError(
                    f"{entry.name} is still in flight on rank {self.world.rank}: a name may be submitted again when "
                    "its operation has finished; synchronize() the first one, or give the second one another name"
                )
            self._entries[key] = entry
            self._outbox.append(entry)
            self._wake()
        return entry

    def join(self) -> int:
        """Announce that this rank has no more data, take part with zeros until all ranks have joined.

        Returns:
            The rank that joined last.

        Raises:
            HorovodInternalError: a rank was lost or has shut down.
        """
        entry = Entry(Kind.BARRIER, "join", 0, [])
        if self._cuda_device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda_device = torch.device("cuda", torch.cuda.current_device())
        with self._lock:
            if self.broken is not None:
                raise HorovodInternalError(f"join: {self.broken}")
            self._join_entry = entry
            self._outbox.append(["j", dict(self._counters)])
            self.plans.stand_in_on_all()
            self._wake()
        last = entry.wait()
        self.plans.wait_for_stand_ins()
        return int(last)

    def submit_plan(self, set_id: int, name: str, strict: list[Any], varying: dict[str, Any]) -> Entry:
        """Propose the buckets of an optimizer. The entry's result is the `Channel` on which all ranks agreed.

        Args:
            strict: descriptions of the parameters, and options: equal on all ranks.
            varying: "order" in which gradients became ready, "sparse" parameters.
        """
        return self.submit(Entry(Kind.PLAN, f"plan.{name}", set_id, strict, varying=varying))

    def release_plan(self, name: str) -> None:
        """Done with a plan: its optimizer is gone, or has a new one. May be called while garbage is collected.

        The connections stay, and a rank that joins takes part on them, until no rank needs them any more.
        """
        self._jobs.put(functools.partial(self.tell, ["d", f"plan.{name}"]))

    def fail(self, reason: str) -> str:
        """Note that the data connections are broken; returns the reason to show, which may be an earlier one."""
        if self.broken is None:
            # Where a process has ended, its control connection says so in a moment, and says it better.
            time.sleep(0.2)
        first = self.broken or reason
        self._break(first)
        return first

    def tell(self, message: list[Any]) -> None:
        """Send a message without an answer to the coordinator."""
        with self._lock:
            self._outbox.append(message)
            self._wake()

    def close(self) -> None:
        """Finish what is agreed, say goodbye, end the threads. Not collective, but waits a little for the others."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._outbox.append(["b"])
            self._wake()
        self._peers_closed.wait(_GOODBYE_S if self.broken is None else 0)
        self._jobs.put(None)
        self._data_thread.join(_GOODBYE_S if self.broken is not None else None)
        with self._lock:
            self.broken = self.broken or "Horovod has been shut down"
            self._closed.set()
            self._awake = False
            self._wake()
        self._control_thread.join()
        self._fail_all(self.broken)
        self.timeline.stop()
        self._star.close()
        self.plans.give_up()
        self.pool.clear()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- control thread ---------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            os.write(self._wake_write, b"x")

    def _control(self) -> None:
        try:
            self._control_loop()
        except Exception as error:  # whatever it is, nobody may wait for ever
            self._break(f"the control thread of rank {self.world.rank} failed: {type(error).__name__}: {error}")

    def _timeout_s(self) -> float | None:
        """How long the control thread may sleep when no message comes."""
        coordinator = self._coordinator
        timeout = coordinator.next_check_s() if coordinator is not None else None
        limit = self.settings.stall_warning_s
        if limit is None or len(self.plans) == 0:
            return timeout
        return limit if timeout is None else min(limit, timeout)

    def _report_waiting(self) -> None:
        """Tell the coordinator when the main thread still waits for what it waited for a stall limit ago."""
        waiting = self.plans.still_waiting()
        if waiting is not None:
            self._to_coordinator(["w", *waiting], b"")

    def _control_loop(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_read, selectors.EVENT_READ, None)
        for rank, connection in self._star.connections.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        coordinator = self._coordinator
        while not self._closed.is_set():
            events = selector.select(self._timeout_s())
            if not events:
                self._report_waiting()
                if coordinator is not None:
                    self._deliver(coordinator.check_stalls())
            for key, _ in events:
                if key.data is None:
                    os.read(self._wake_read, 64)
                    self._send_outbox()
                    continue
                connection = self._star.connections[key.data]
                for document, blob in connection.receive():
                    if coordinator is not None:
                        self._deliver(coordinator.handle(key.data, document, blob))
                    else:
                        self._obey(document, blob)
                if connection.closed:
                    selector.unregister(connection)
                    self._peer_gone(key.data)
        selector.close()

    def _send_outbox(self) -> None:
        with self._lock:
            self._awake = False
            taken = list(self._outbox)
            self._outbox.clear()
        items: list[Any] = []
        blobs: list[bytes] = []
        for message in taken:
            if isinstance(message, Entry):
                items.append(self._announcement(message, blobs))
                continue
            if items:
                self._to_coordinator(["q", items], b"".join(blobs))
                items, blobs = [], []
            self._to_coordinator(message, b"")
        if items:
            self._to_coordinator(["q", items], b"".join(blobs))

    def _announcement(self, entry: Entry, blobs: list[bytes]) -> list[Any]:
        length = -1
        payload = self._payload(entry)
        if payload is not None:
            length = len(payload)
            blobs.append(payload)
        known = self._cache_numbers.get((entry.set_id, entry.name))
        if known is not None and known[1] == entry.strict:
            return [known[0], entry.varying, length]
        return [entry.set_id, entry.name, entry.strict, entry.varying, length]

    def _payload(self, entry: Entry) -> bytes | None:
        """The bytes of a small host tensor, which travel with the announcement."""
        if len(entry.inputs) != 1 or entry.inputs[0].is_cuda:
            return None
        if entry.kind not in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST):
            return None
        if entry.kind is Kind.BROADCAST and entry.root != self.world.rank:
            return None
        tensor = entry.inputs[0]
        if tensor.numel() * tensor.element_size() > self.settings.inline_bytes or tensor.dtype == torch.bool:
            return None
        return tensor_bytes(tensor)

    def _to_coordinator(self, message: list[Any], blob: bytes) -> None:
        if self._coordinator is not None:
            self._deliver(self._coordinator.handle(0, message, blob))
            return
        try:
            self._star.connections[0].send(message, blob)
        except OSError:
            self._peer_gone(0)

    def _deliver(self, outgoing: list[Outgoing]) -> None:
        for ranks, document, blob in outgoing:
            mine = False
            for rank in ranks:
                if rank == 0:
                    mine = True
                    continue
                # Where the peer has gone, its end of file arrives through the selector.
                with contextlib.suppress(OSError):
                    self._star.connections[rank].send(document, blob)
            if mine:
                self._obey(document, blob)

    def _obey(self, document: dict[str, Any], blob: bytes) -> None:
        """Do what the coordinator says (see `Coordinator._answer` for the message)."""
        if "k" in document:
            self._obey_operation(document, blob)
        elif "e" in document:
            entry = self._take(document["s"], document["n"][0])
            if entry is not None:
                entry.finish(error=document["e"])
        elif "joined" in document:
            self._finish_join(document)
        elif "lost" in document:
            self._break(document["lost"])
        elif "dropped" in document:
            self._jobs.put(functools.partial(self.plans.drop, document["dropped"]))
        elif "closed" in document:
            self._peers_closed.set()

    def _take(self, set_id: int, name: str) -> Entry | None:
        with self._lock:
            return self._entries.pop((set_id, name), None)

    def _obey_operation(self, document: dict[str, Any], blob: bytes) -> None:
        set_id, kind = document["s"], Kind(document["k"])
        names = [self._cache[n][1] if isinstance(n, int) else n for n in document["n"]]
        if self.timeline.active:
            self.timeline.agreed(kind.value, names)
        entries = [self._take(set_id, name) for name in names]
        self._learn(document, set_id, names, entries)
        if kind is Kind.ADD_SET:
            set_number, ranks = document["v"]
            if set_number >= 0:
                self.sets[set_number] = tuple(ranks)
            _finish_all(entries, set_number)
        elif kind is Kind.REMOVE_SET:
            self._jobs.put(Job(kind, document["v"][0], (), [e for e in entries if e is not None]))
        elif kind is Kind.PLAN:
            self._jobs.put(functools.partial(self._make_plan, document, names[0], entries[0]))
        elif "b" in document:
            self._finish_inline(document, blob, entries[0])
        else:
            ghosts = document.get("m") if any(entry is None for entry in entries) else None
            present = [entry for entry in entries if entry is not None]
            with self._lock:
                self._running.update(present)
            self._jobs.put(Job(kind, set_id, self.sets[set_id], present, document.get("v"), ghosts))

    def _learn(self, document: dict[str, Any], set_id: int, names: list[str], entries: list[Entry | None]) -> None:
        for index, number in enumerate(document.get("c", [])):
            if number is None:
                continue
            entry = entries[index]
            strict = entry.strict if entry is not None else document.get("m", [None] * len(names))[index]
            self._cache[number] = (set_id, names[index], strict or [])
            self._cache_numbers[(set_id, names[index])] = (number, strict or [])

    def _finish_inline(self, document: dict[str, Any], blob: bytes, entry: Entry | None) -> None:
        if entry is None:
            return  # this rank has joined
        tensor = entry.inputs[0]
        if entry.kind is Kind.ALLGATHER:
            rows = sum(theirs[0] for theirs in document["v"][0])
            target = tensor_from_bytes(blob, tensor.dtype, [rows, *tensor.shape[1:]])
        else:
            assert entry.outputs is not None
            target = entry.outputs[0]
            if not (entry.kind is Kind.BROADCAST and entry.root == self.world.rank and target is tensor):
                target.copy_(tensor_from_bytes(blob, tensor.dtype, list(tensor.shape)))
        entry.finish(target if entry.single else (target,))

    def _finish_join(self, document: dict[str, Any]) -> None:
        with self._lock:
            entry, self._join_entry = self._join_entry, None
            for name, count in document["counters"].items():
                self._counters[name] = max(count, self._counters[name])
        if entry is None:
            return
        if "error" in document:
            entry.finish(error=document["error"])
        else:
            entry.finish(torch.tensor(document["joined"], dtype=torch.int))

    def _peer_gone(self, rank: int) -> None:
        reason = f"the connection to rank {rank} broke: that process has ended, or its host is out of reach"
        if self._coordinator is not None:
            self._deliver(self._coordinator.lose(rank, reason))
            if rank in self._star.connections:
                self._star.connections[rank].closed = True
        else:
            self._peers_closed.set()
            self._break(reason if not self._closing else "Horovod has been shut down")

    def _break(self, reason: str) -> None:
        with self._lock:
            self.broken = self.broken or reason
        self._peers_closed.set()
        self._fail_all(self.broken)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            open_entries = [*self._entries.values(), *self._running]
            self._entries.clear()
            if self._join_entry is not None:
                open_entries.append(self._join_entry)
                self._join_entry = None
        for entry in open_entries:
            entry.finish(error=f"{entry.name}: {reason}")

    def _warn_stall(self, text: str) -> None:
        print(
            f"[hvd] stalled: {text}. All ranks must submit the same operations under the same names",
            file=sys.stderr,
            flush=True,
        )

    # -- data thread ------------------------------------------------------------------------------------------------

    def _data(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if self._cuda_device is not None:
                # Every thread has a current device of its own, the first one unless told otherwise; zeros for a rank
                # that has joined and buckets are made on it.
                torch.cuda.set_device(self._cuda_device)
            if not isinstance(job, Job):
                job()
                continue
            try:
                started = time.perf_counter()
                self._do(job)
                with self._lock:
                    self._running.difference_update(job.entries)
                if self.timeline.active:
                    self.timeline.executed(job.kind.value, [e.name for e in job.entries], started)
            except Exception as error:
                reason = self.broken or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                for entry in job.entries:
                    entry.finish(error=f"{entry.name}: {reason}")
                self._break(f"an earlier collective failed: {reason}")

    def _do(self, job: Job) -> None:
        if job.kind is Kind.REMOVE_SET:
            self.sets.pop(job.set_id, None)
            self.pool.drop(f"set{job.set_id}")
            _finish_all(list(job.entries), job.set_id)
        else:
            self._executor.run(job)

    def _make_plan(self, document: dict[str, Any], name: str, entry: Entry | None) -> None:
        try:
            channel = self.plans.make(name, document)
        except Exception as error:
            reason = self.fail(f"{name}: {type(error).__name__}: {error}")
            if entry is not None:
                entry.finish(error=reason)
            return
        with self._lock:
            # The control thread must look at the clock from now on.
            self._wake()
        if entry is not None:
            entry.finish(channel)


def _finish_all(entries: list[Entry | None], result: Any) -> None:
    for entry in entries:
        if entry is not None:
            entry.finish(result)
