"""Elastic state, and the loop that recovers it.

Under torchrun's elastic agent a lost rank ends all ranks, and the agent starts them anew, perhaps in another number. So
`commit` also writes the committed state to a file on every host, and a restarted job continues from the newest one.
"""

from __future__ import annotations

import functools
import io
import os
import queue
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.hvd.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt


class HostUpdateResult:
    """What changed about the hosts, as bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What training must not lose.

    Args:
        bcast_object: sends rank 0's object to all ranks.
        get_rank: this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call when the set of ranks has changed (to scale the learning rate, say)."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The set of ranks has changed."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """The set of hosts is going to change (see HostUpdateResult)."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the present state as the one to return to, and look for changes of the hosts. Collective.

        Raises:
            HostsUpdatedInterrupt: the hosts have changed.
        """
        self.save()
        self._commits += 1
        _persist(self)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise on all ranks when rank 0 was told of a change of the hosts. Collective.

        Raises:
            HostsUpdatedInterrupt: the hosts have changed.
        """
        newest = before = self._last_updated_timestamp
        result = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > newest:
                newest = timestamp
                result |= update
        before, self._last_updated_timestamp, result = self._bcast_object((before, newest, result))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)

    def save(self) -> None:
        """Copy the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's state. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to another set of ranks, before `sync`."""

    def _snapshot(self) -> Any:
        """What was saved last, to be written to a file; None where the class does not support that."""
        return None

    def _adopt(self, snapshot: Any) -> None:
        """Make a snapshot the saved and the present state."""


class ObjectState(State):
    """State of plain Python objects, each an attribute.

    Args:
        kwargs: the attributes and their first values.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def _snapshot(self) -> Any:
        return dict(self._saved_state)

    def _adopt(self, snapshot: Any) -> None:
        self._saved_state = {**self._saved_state, **snapshot}
        self._set_attrs()


_Result = TypeVar("_Result")


def run_fn(func: Callable[..., _Result], reset: Callable[[], None]) -> Callable[..., _Result]:
    """Make a training function elastic.

    Args:
        func: takes the state first.
        reset: connects the ranks anew.

    Returns:
        A function that synchronizes the state, calls func, and begins again from the last commit when a collective
        failed. Where a rank was lost, it raises, so that the agent (torchrun) restarts the ranks.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        _recover(state)
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                if _rank_lost():
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper


def _rank_lost() -> bool:
    from hvdtrain.hvd import basics

    return basics.is_initialized() and basics.engine().broken is not None


# -- commits on disk --------------------------------------------------------------------------------------------


def _commit_file() -> Path | None:
    """Where this host's commits are: one file for each elastic agent, which outlives the ranks it restarts."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    folder = os.environ.get("HVDTRAIN_ELASTIC_DIR") or str(
        Path(tempfile.gettempdir()) / f"hvdtrain-elastic-{os.getuid()}"
    )
    agent = os.getppid()
    try:
        # A process number may come again; the time of its start (field 22) tells them apart.
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "0"
    return Path(folder) / f"{run}-{agent}-{started}.commit"


def _persist(state: State) -> None:
    import torch

    from hvdtrain.hvd import basics

    path = _commit_file()
    snapshot = state._snapshot()
    if path is None or snapshot is None or basics.local_rank() != 0:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save({"commits": state._commits, "snapshot": snapshot}, temporary)
    temporary.replace(path)


def _recover(state: State) -> None:
    """After a restart by the agent, take over the newest commit that any host has. Collective."""
    from hvdtrain.hvd import basics
    from hvdtrain.hvd.functions import allgather_object, broadcast_object

    path = _commit_file()
    if path is None or not basics.is_initialized():
        return
    data = b""
    commits = 0
    if path.exists() and path.stat().st_uid == os.getuid():
        data = path.read_bytes()
        commits = _load(data)["commits"]
    found = allgather_object((commits, -basics.rank()), name="elastic.recover")
    newest, negative_rank = max(found)
    if newest == 0:
        return
    data = broadcast_object(data, root_rank=-negative_rank, name="elastic.recover")
    loaded = _load(data)
    state._commits = loaded["commits"]
    state._adopt(loaded["snapshot"])


def _load(data: bytes) -> Any:
    import torch

    # Written by ourselves, into a folder that only this user can write to.
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
