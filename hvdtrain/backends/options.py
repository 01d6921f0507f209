"""What a person may choose when connecting and when wrapping a model."""

from __future__ import annotations

import dataclasses

from hvdtrain.launch import ManualFlags


@dataclasses.dataclass(frozen=True)
class ConnectOptions:
    """How to connect.

    Attributes:
        device: auto | cpu | cuda.
        transport: auto | gloo | nccl | mpi; auto is nccl on CUDA, otherwise what the backend prefers on the CPU.
        network_interface: auto, or the name of the interface that the ranks use.
        start_timeout_s: how long to wait for the other ranks.
        stall_warning_s: a collective that waits longer is reported.
        stall_abort_s: a collective that waits longer ends the job.
        silent_limit_s: a rank whose host stands still or is cut off, or that was stopped, for so long is lost.
        flags: ranks and addresses given by hand.
        keep_threads: leave torch's thread count as it is.
        timeline: let the library's own timeline be recorded on demand (`Backend.start_timeline`), where it has one.
        groups: `Backend.group` will be called. Horovod then agrees on its process sets in every cycle, which makes the
            steps of a small model up to a quarter longer (measured: two ranks, two cores); the trainer does without.
        handle_signals: turn SIGTERM, SIGINT and SIGUSR1 into `guard.stop_requested`, for loops that look at it.
    """

    device: str = "auto"
    transport: str = "auto"
    network_interface: str = "auto"
    start_timeout_s: float = 300.0
    stall_warning_s: float = 60.0
    stall_abort_s: float = 600.0
    silent_limit_s: float = 20.0
    flags: ManualFlags | None = None
    keep_threads: bool = False
    timeline: bool = False
    groups: bool = True
    handle_signals: bool = False


@dataclasses.dataclass(frozen=True)
class WrapOptions:
    """How a model is wrapped.

    Attributes:
        compression: none | fp16 | bf16 | powersgd.
        find_unused_parameters: parameters may be left out of a step (ddp searches the graph; horovod needs nothing).
        static_graph: the graph is the same in every step (ddp; horovod needs nothing).
        bucket_mb: size of a gradient bucket in MiB (ddp), of the fusion buffer where the backend can set it.
        compile: run the model through torch.compile.
        sync_every_microbatch: reduce after every microbatch instead of once a step.
    """

    compression: str = "none"
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: float = 25.0
    compile: bool = False
    sync_every_microbatch: bool = False
