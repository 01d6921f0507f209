"""Does, on the data thread, what was agreed: fuses, calls the collective, hands out results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.hvd.engine.adasum import adasum_pair
from hvdtrain.hvd.engine.groups import Group, GroupPool, byte_view
from hvdtrain.hvd.engine.reduction import finish_, scale_
from hvdtrain.hvd.engine.request import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Entry, Kind
from hvdtrain.hvd.engine.solo import SoloGroup

_REDUCE_OPS = {
    SUM: dist.ReduceOp.SUM,
    AVERAGE: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}
# gloo cannot add these; it can add what stands on the right.
_WIRE_DTYPES = {torch.int16: torch.int32, torch.bool: torch.uint8}


@dataclasses.dataclass
class Job:
    """What the coordinator said shall be done now.

    Attributes:
        entries: this rank's entries in the agreed order; empty on a rank that has joined.
        members: ranks of the process set.
        varying: per entry, per member: rows (allgather) or splits (alltoall).
        ghosts: strict metadata per entry, where this rank has joined and takes part with zeros.
    """

    kind: Kind
    set_id: int
    members: tuple[int, ...]
    entries: list[Entry]
    varying: list[list[Any]] | None = None
    ghosts: list[list[Any]] | None = None


class Executor:
    """Runs jobs one after the other; only the data thread calls it."""

    def __init__(self, rank: int, pool: GroupPool) -> None:
        self._rank = rank
        self._pool = pool
        self._fusion: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def run(self, job: Job) -> None:
        """Do one job and finish its entries.

        Raises:
            RuntimeError: the collective failed; the connection to the others is not usable any more.
        """
        if job.ghosts is not None:
            self._run_ghost(job)
            return
        if job.kind is Kind.BARRIER:
            job.entries[0].finish()
            return
        device = job.entries[0].inputs[0].device
        if device.type == "cuda":
            self._run_cuda(job, device)
        else:
            self._run(job, self._group(job, "cpu"))

    def _run_cuda(self, job: Job, device: torch.device) -> None:
        # One side stream per device; the entries' events order it against the streams of the submitting threads.
        stream = _side_stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for entry in job.entries:
                if entry.ready_event is not None:
                    stream.wait_event(entry.ready_event)
                for tensor in [*entry.inputs, *(entry.outputs or [])]:
                    tensor.record_stream(stream)
            self._run(job, self._group(job, "cuda"))

    def _run(self, job: Job, group: Group) -> None:
        if job.kind is Kind.ALLREDUCE:
            self._allreduce(job, group)
        elif job.kind is Kind.ALLGATHER:
            self._allgather(job, group)
        elif job.kind is Kind.BROADCAST:
            self._broadcast(job, group)
        elif job.kind is Kind.ALLTOALL:
            self._alltoall(job, group)
        elif job.kind is Kind.REDUCESCATTER:
            self._reducescatter(job, group)
        else:
            raise RuntimeError(f"no collective for {job.kind}")

    def _group(self, job: Job, device_type: str) -> Group:
        return self._pool.get(f"set{job.set_id}", job.members, device_type)

    # -- allreduce --------------------------------------------------------------------------------------------------

    def _allreduce(self, job: Job, group: Group) -> None:
        first = job.entries[0]
        pairs = [pair for entry in job.entries for pair in zip(entry.inputs, entry.outputs or [], strict=True)]
        if first.op == ADASUM:
            for source, target in pairs:
                _adasum(source, target, first.prescale, first.postscale, group, job.members, self._rank)
        else:
            by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for source, target in pairs:
                if source.numel():
                    by_dtype.setdefault(source.dtype, []).append((source, target))
            for dtype, same in by_dtype.items():
                self._allreduce_fused(same, dtype, first, group, len(job.members))
        for entry in job.entries:
            _finish(entry)

    def _allreduce_fused(
        self,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
        entry: Entry,
        group: Group,
        num_ranks: int,
    ) -> None:
        wire = _WIRE_DTYPES.get(dtype, dtype)
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[entry.op]  # type: ignore[assignment]
        if len(pairs) == 1 and wire == dtype and pairs[0][1].is_contiguous():
            source, target = pairs[0]
            buffer = target.reshape(-1)
            if source is not target:
                buffer.copy_(source.reshape(-1))
        else:
            buffer = self._fusion_buffer(sum(s.numel() for s, _ in pairs), wire, pairs[0][0].device)
            torch.cat([s.reshape(-1).to(wire) for s, _ in pairs], out=buffer)
        scale_(buffer, entry.prescale)
        group.allreduce([buffer], options).wait()
        finish_(buffer, entry.op, entry.postscale, num_ranks)
        if len(pairs) > 1 or buffer.data_ptr() != pairs[0][1].data_ptr():
            offset = 0
            for _, target in pairs:
                target.copy_(buffer[offset : offset + target.numel()].reshape(target.shape))
                offset += target.numel()

    def _fusion_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (str(device), dtype)
        buffer = self._fusion.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._fusion[key] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]

    def _run_ghost(self, job: Job) -> None:
        """Take part with zeros in the name of a rank that has joined; only allreduces and barriers come here."""
        if job.kind is Kind.BARRIER:
            return
        assert job.ghosts is not None
        entries = []
        for strict in job.ghosts:
            dtypes, shapes, device, op, prescale, postscale = strict
            where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
            zeros = [
                torch.zeros(shape, dtype=getattr(torch, dtype), device=where)
                for dtype, shape in zip(dtypes, shapes, strict=True)
            ]
            entries.append(
                Entry(
                    job.kind, "joined", job.set_id, strict, inputs=zeros, outputs=zeros,
                    op=op, prescale=prescale, postscale=postscale,
                )
            )  # fmt: skip
        self.run(dataclasses.replace(job, entries=entries, ghosts=None))

    # -- the others -------------------------------------------------------------------------------------------------

    def _allgather(self, job: Job, group: Group) -> None:
        assert job.varying is not None
        for entry, rows_by_rank in zip(job.entries, job.varying, strict=True):
            entry.outputs = []
            for index, tensor in enumerate(entry.inputs):
                rows = [theirs[index] for theirs in rows_by_rank]
                entry.outputs.append(_allgather_rows(tensor.contiguous(), rows, group))
            _finish(entry)

    def _broadcast(self, job: Job, group: Group) -> None:
        for entry in job.entries:
            assert entry.outputs is not None
            for source, target in zip(entry.inputs, entry.outputs, strict=True):
                is_root = entry.root == self._rank
                buffer = (
                    source.contiguous() if is_root else torch.empty_like(target, memory_format=torch.contiguous_format)
                )
                if not is_root and target.is_contiguous():
                    buffer = target
                if buffer.numel():
                    options = dist.BroadcastOptions()
                    options.rootRank = job.members.index(entry.root)
                    options.rootTensor = 0
                    group.broadcast([byte_view(buffer)], options).wait()
                if buffer is not target and not (is_root and source is target):
                    target.copy_(buffer)
            _finish(entry)

    def _alltoall(self, job: Job, group: Group) -> None:
        assert job.varying is not None
        place = job.members.index(self._rank)
        for entry, splits_by_rank in zip(job.entries, job.varying, strict=True):
            tensor = entry.inputs[0].contiguous()
            sent = splits_by_rank[place]
            received = [theirs[place] for theirs in splits_by_rank]
            output = tensor.new_empty([sum(received), *tensor.shape[1:]])
            _alltoall_rows(output, tensor, received, sent, group)
            if entry.splits is None:
                counts = torch.tensor(received, dtype=torch.int32)
            else:
                counts = torch.tensor(received, dtype=entry.splits.dtype, device=entry.splits.device)
            entry.outputs = [output, counts]
            _finish(entry)

    def _reducescatter(self, job: Job, group: Group) -> None:
        num_ranks = len(job.members)
        place = job.members.index(self._rank)
        for entry in job.entries:
            entry.outputs = []
            for tensor in entry.inputs:
                rows = split_rows(tensor.shape[0], num_ranks)
                mine = rows[place]
                parts = tensor.new_empty([num_ranks * mine, *tensor.shape[1:]])
                source = tensor.contiguous()
                if entry.prescale != 1.0:
                    source = source.clone()
                    scale_(source, entry.prescale)
                _alltoall_rows(parts, source, [mine] * num_ranks, rows, group)
                stacked = parts.reshape(num_ranks, mine, *tensor.shape[1:])
                half = tensor.dtype in (torch.float16, torch.bfloat16)
                output = stacked.sum(0, dtype=torch.float32 if half else tensor.dtype).to(tensor.dtype)
                finish_(output, entry.op, entry.postscale, num_ranks)
                entry.outputs.append(output)
            _finish(entry)


def split_rows(rows: int, num_ranks: int) -> list[int]:
    """How reducescatter divides the first dimension: evenly, what is left over to the first ranks."""
    share, rest = divmod(rows, num_ranks)
    return [share + (1 if r < rest else 0) for r in range(num_ranks)]


def _finish(entry: Entry) -> None:
    outputs = entry.outputs or []
    if outputs and outputs[0].is_cuda:
        entry.done_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        entry.done_event.record(torch.cuda.current_stream())
    if entry.kind is Kind.ALLTOALL:
        entry.finish((outputs[0], outputs[1]))
    else:
        entry.finish(outputs[0] if entry.single else tuple(outputs))


def _allgather_rows(tensor: torch.Tensor, rows: list[int], group: Group) -> torch.Tensor:
    """Concatenate tensors that may differ in their first dimension, padded to the longest on the wire."""
    tail = list(tensor.shape[1:])
    output = tensor.new_empty([sum(rows), *tail])
    longest = max(rows)
    if output.numel() == 0:
        return output
    if all(r == longest for r in rows):
        group._allgather_base(byte_view(output), byte_view(tensor)).wait()
        return output
    padded = tensor
    if tensor.shape[0] != longest:
        padded = tensor.new_empty([longest, *tail])
        padded[: tensor.shape[0]] = tensor
    gathered = tensor.new_empty([len(rows), longest, *tail])
    group._allgather_base(byte_view(gathered), byte_view(padded)).wait()
    torch.cat([gathered[i, :r] for i, r in enumerate(rows)], out=output)
    return output


def _alltoall_rows(
    output: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int], group: Group
) -> None:
    row_bytes = source.element_size()
    for dimension in source.shape[1:]:
        row_bytes *= dimension
    if row_bytes == 0:
        return
    # alltoall_base refuses empty tensors on one side only; a row of bytes keeps both two-dimensional.
    out_bytes = byte_view(output).reshape(-1, row_bytes)
    in_bytes = byte_view(source[: sum(sent)]).reshape(-1, row_bytes)
    group.alltoall_base(out_bytes, in_bytes, received, sent).wait()


def _adasum(
    source: torch.Tensor,
    target: torch.Tensor,
    prescale: float,
    postscale: float,
    group: Group,
    members: tuple[int, ...],
    rank: int,
) -> None:
    """Recursive doubling: after exchange k, blocks of 2^k neighbouring ranks hold their combination."""
    current = source.contiguous().clone()
    scale_(current, prescale)
    place, distance = members.index(rank), 1
    while distance < len(members) and current.numel():
        partner = place ^ distance
        theirs = torch.empty_like(current)
        assert not isinstance(group, SoloGroup)
        send = group.send([byte_view(current)], partner, distance)
        group.recv([byte_view(theirs)], partner, distance).wait()
        send.wait()
        current = adasum_pair(current, theirs) if place < partner else adasum_pair(theirs, current)
        distance *= 2
    scale_(current, postscale)
    target.copy_(current)


_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[index]
