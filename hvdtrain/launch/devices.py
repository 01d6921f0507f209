"""The device of each rank, and the mistakes that NCCL would only report as a hang or a crash."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hvdtrain.errors import LaunchError
from hvdtrain.launch.roster import ranks_text
from hvdtrain.launch.world import World

if TYPE_CHECKING:
    import torch

    from hvdtrain.launch.rendezvous import Rendezvous


@dataclasses.dataclass(frozen=True)
class VisibleDevices:
    """What one rank sees. uuids: one per visible device, the same text for the same physical device on a host."""

    rank: int
    host: str
    host_id: str
    uuids: tuple[str, ...]
    reason: str = ""  # why there are none, if somebody might wonder


def assign_devices(
    requested: str, transport: str, worlds: Sequence[World], seen: Sequence[VisibleDevices]
) -> list[str]:
    """The device of every rank, as torch spells it: "cpu", "cuda:0", ...

    A rank takes the visible device of its local rank, or device 0 where it sees one device of its own.

    Args:
        requested: "auto" (cuda where every rank has one), "cpu" or "cuda".
        transport: "nccl" takes one rank per physical device; "gloo", "mpi" and "auto" let ranks share one on request.

    Raises:
        LaunchError: a rank has no device, or two ranks have the same one under nccl; names the ranks.
    """
    if requested == "cpu" or (requested == "auto" and not any(view.uuids for view in seen)):
        if transport == "nccl":
            why = next((view.reason for view in seen if view.reason), "device: cpu was asked for")
            raise LaunchError(f"transport nccl needs CUDA devices, but the ranks run on the CPU ({why}). Use gloo")
        return ["cpu"] * len(seen)
    without = [view for view in seen if not view.uuids]
    if without:
        hosts = ", ".join(dict.fromkeys(view.host for view in without))
        reason = next((f" ({view.reason})" for view in without if view.reason), "")
        others = " while the other ranks have one" if len(without) < len(seen) else ""
        raise LaunchError(
            f"{ranks_text(view.rank for view in without)} on host {hosts} see no CUDA device{reason}{others}. Set "
            "device: cpu, or start the ranks only where there are devices"
        )
    chosen: list[str] = []
    owners: dict[tuple[str, str], VisibleDevices] = {}
    for world, view in zip(worlds, seen, strict=True):
        local = [other for other in seen if other.host_id == view.host_id]
        private = len(view.uuids) == 1 and sum(other.uuids == view.uuids for other in local) == 1
        index = 0 if private else world.local_rank
        if index >= len(view.uuids):
            if transport == "nccl" or (transport == "auto" and requested != "cpu"):
                first = next(other for other in local if other.uuids[:1] == view.uuids[:1])
                raise LaunchError(
                    f"host {view.host} has {world.local_size} ranks but rank {view.rank} (local rank "
                    f"{world.local_rank}) sees only {len(view.uuids)} CUDA device"
                    f"{'' if len(view.uuids) == 1 else 's'}, which rank {first.rank} and those after it use. Start at "
                    "most one rank per device, check CUDA_VISIBLE_DEVICES, or use transport: gloo to share a device"
                )
            index %= len(view.uuids)
        key = (view.host_id, view.uuids[index])
        if key in owners and transport in ("nccl", "auto"):
            other = owners[key]
            raise LaunchError(
                f"rank {other.rank} and rank {view.rank} on host {view.host} would use the same CUDA device "
                f"{view.uuids[index]}, which NCCL does not allow. Give each local rank a device of its own "
                "(CUDA_VISIBLE_DEVICES, --local-rank), or use transport: gloo"
            )
        owners.setdefault(key, view)
        chosen.append(f"cuda:{index}")
    return chosen


def visible_uuids(environ: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], str]:
    """The CUDA devices that this process sees, and why there are none. Allocates nothing on them."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        environ = os.environ if environ is None else environ
        hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        reason = "CUDA_VISIBLE_DEVICES hides all" if hidden else "torch finds no usable driver or device"
        return (), reason if built else "this torch is built without CUDA"
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())), ""


def choose_device(
    requested: str,
    rendezvous: Rendezvous,
    *,
    transport: str = "auto",
    look: Callable[[], tuple[tuple[str, ...], str]] = visible_uuids,
) -> torch.device:
    """This rank's device, checked against the other ranks' before any of them starts NCCL. Collective.

    Args:
        requested: "auto", "cpu" or "cuda" (the `device` key of the job file), the same on all ranks.
        transport: "auto", "nccl", "gloo" or "mpi".
        look: what this process sees; replaced in tests.

    Raises:
        LaunchError: see `assign_devices`; the same on every rank.
    """
    import torch

    rank = rendezvous.world.rank
    uuids, reason = look() if requested != "cpu" else ((), "device: cpu was asked for")
    own = {"uuids": uuids, "reason": reason}
    gathered = [json.loads(text) for text in rendezvous.all_gather_text(json.dumps(own))]
    seen = [
        VisibleDevices(peer.rank, peer.host, peer.host_id, tuple(view["uuids"]), view["reason"])
        for peer, view in zip(rendezvous.peers, gathered, strict=True)
    ]
    devices = assign_devices(requested, transport, [peer.world for peer in rendezvous.peers], seen)
    return torch.device(devices[rank])
