"""Horovod's environment variables, as far as they mean something here; read once, at `init`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits and thresholds of one generation of the engine.

    Attributes:
        fusion_threshold_bytes: HOROVOD_FUSION_THRESHOLD; named tensors are fused up to this size.
        bucket_bytes: size of a gradient bucket; HOROVOD_FUSION_THRESHOLD if the user set it, else 25 MiB as in
            DistributedDataParallel, because a bucket of 128 MiB leaves nothing to overlap with backward.
        stall_warning_s: HOROVOD_STALL_CHECK_TIME_SECONDS; None with HOROVOD_STALL_CHECK_DISABLE=1.
        stall_abort_s: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; None means never, as in Horovod.
        cache_capacity: HOROVOD_CACHE_CAPACITY; agreed requests that are sent as a number from then on.
        start_timeout_s: HOROVOD_START_TIMEOUT; how long ranks wait for each other in `init`.
        inline_bytes: host tensors up to this size travel with the negotiation. HVDTRAIN_INLINE_BYTES.
        timeline: HOROVOD_TIMELINE; a path, or DYNAMIC.
        timeline_cycles: HOROVOD_TIMELINE_MARK_CYCLES=1.
    """

    fusion_threshold_bytes: int = 128 * 1024 * 1024
    bucket_bytes: int = 25 * 1024 * 1024
    stall_warning_s: float | None = 60.0
    stall_abort_s: float | None = None
    cache_capacity: int = 1024
    start_timeout_s: float = 300.0
    inline_bytes: int = 8192
    timeline: str | None = None
    timeline_cycles: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            ValueError: a variable is not a number.
        """
        fusion = _number(environ, "HOROVOD_FUSION_THRESHOLD")
        warning = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS")
        abort = _number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
        capacity = _number(environ, "HOROVOD_CACHE_CAPACITY")
        start = _number(environ, "HOROVOD_START_TIMEOUT")
        inline = _number(environ, "HVDTRAIN_INLINE_BYTES")
        stall_warning: float | None = cls.stall_warning_s if warning is None else warning
        if environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            stall_warning, abort = None, None
        return cls(
            fusion_threshold_bytes=cls.fusion_threshold_bytes if fusion is None else int(fusion),
            bucket_bytes=cls.bucket_bytes if fusion is None else int(fusion),
            stall_warning_s=stall_warning or None,
            stall_abort_s=abort or None,
            cache_capacity=cls.cache_capacity if capacity is None else int(capacity),
            start_timeout_s=cls.start_timeout_s if start is None else start,
            inline_bytes=cls.inline_bytes if inline is None else int(inline),
            timeline=environ.get("HOROVOD_TIMELINE") or None,
            timeline_cycles=environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"),
        )


def _number(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: a number was expected") from None
