"""The planned paths of the optimizers: made when all ranks agree, closed when no rank needs them any more."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvdtrain.hvd.buckets import Description
from hvdtrain.hvd.channel import Channel
from hvdtrain.hvd.engine.groups import GroupPool


class Plans:
    """The channels of one engine.

    Args:
        rank: this one.
        sets: ranks of each process set; the engine's own, which changes.
        pool: connections between the ranks.
        lock: the engine's. Announcing that this rank joins and taking part on every path must be one step, and so must
            be learning of a path and taking part on it: else a path is missed, or taken part on twice.
        run_later: have the data thread call something.
    """

    def __init__(
        self,
        rank: int,
        sets: Mapping[int, tuple[int, ...]],
        pool: GroupPool,
        lock: threading.Lock,
        run_later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._rank, self._sets, self._pool = rank, sets, pool
        self._lock, self._run_later = lock, run_later
        self._channels: dict[str, Channel] = {}
        self._numbers: collections.Counter[str] = collections.Counter()
        self._stand_ins: list[threading.Thread] = []
        # What the main thread waits for on a path, which the control thread cannot see: (name, step).
        self.waiting: tuple[str, int] | None = None
        self._waited: tuple[str, int] | None = None

    def __len__(self) -> int:
        """How many paths are open."""
        return len(self._channels)

    def names(self) -> set[str]:
        """Of the paths that are open."""
        return set(self._channels)

    def number(self, digest: str) -> int:
        """How many optimizers with the same parameter names (a digest of them) were wrapped before this one."""
        self._numbers[digest] += 1
        return self._numbers[digest] - 1

    def still_waiting(self) -> tuple[str, int] | None:
        """What the main thread waits for, if it waited for the same at the last call."""
        now, before = self.waiting, self._waited
        self._waited = now
        return now if now == before else None

    def make(self, name: str, document: dict[str, Any]) -> Channel:
        """Connect the path that the ranks agreed on. Collective over the process set; on the data thread.

        Args:
            document: the coordinator's answer: members "s", parameters and options "m", what varies "v", and "j", the
                ranks that had joined before.

        Raises:
            RuntimeError: a rank was lost meanwhile.
        """
        channel = self._channels.get(name)
        # Else this rank had joined when the others planned, and has taken part without an optimizer of its own.
        if channel is None:
            channel = self._connect(name, document)
        with self._lock:
            self._channels[name] = channel
            if self._rank in document["j"]:
                self._stand_in(name, channel)
        return channel

    def drop(self, name: str) -> None:
        """Close a path that no rank needs. On the data thread."""
        # The channel is not given up: a stand-in of this rank may be on it, and learns by the other ranks' closing.
        with self._lock:
            self._channels.pop(name, None)
        self._pool.drop(name)

    def stand_in_on_all(self) -> None:
        """This rank joins: take part on every path with zeros. Call with the lock held."""
        for name, channel in self._channels.items():
            self._stand_in(name, channel)

    def wait_for_stand_ins(self) -> None:
        """All ranks have joined: the stand-ins are about to end."""
        for stand_in in self._stand_ins:
            stand_in.join()
        self._stand_ins.clear()

    def give_up(self) -> None:
        """Let go of all connections; where a rank still waits on one, it learns that it waits in vain."""
        for channel in self._channels.values():
            channel.give_up()

    def _stand_in(self, name: str, channel: Channel) -> None:
        """Take part on a path for this rank, which has joined.

        Where all optimizers of the path are gone it may be closed meanwhile; then there is nothing to take part in any
        more. A rank that was lost shows on the control connections.
        """

        def run() -> None:
            try:
                channel.take_part_until_all_joined()
            except RuntimeError:
                channel.give_up()
                self._run_later(functools.partial(self.drop, name))

        thread = threading.Thread(target=run, name="hvd-joined", daemon=True)
        self._stand_ins.append(thread)
        thread.start()

    def _connect(self, name: str, document: dict[str, Any]) -> Channel:
        parameters, (op, predivide, half, bucket_bytes) = document["m"]
        descriptions = [Description.from_json(parameter) for parameter in parameters]
        members = self._sets[document["s"]]
        groups = {
            device: self._pool.get_for_sums(name, members, device)
            for device in sorted({description.device for description in descriptions})
        }
        device = torch.device("cuda", torch.cuda.current_device()) if "cuda" in groups else torch.device("cpu")
        for where, group in groups.items():
            # Once this is done all ranks are connected, and one that drops the plan early disturbs nobody.
            group.allreduce([torch.zeros(1, device=device if where == "cuda" else "cpu")]).wait()
        return Channel(
            descriptions,
            document["v"]["order"],
            document["v"]["sparse"],
            op=op,
            predivide=predivide,
            half=half,
            bucket_bytes=bucket_bytes,
            num_ranks=len(members),
            groups=groups,
            device=device,
        )
