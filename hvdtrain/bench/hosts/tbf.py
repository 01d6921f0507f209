"""The token bucket filter of one interface: the `tc` lines that set a rate and take it away again."""

from __future__ import annotations

# Bytes that may leave at once after a pause. Large enough for one frame of 64 KiB that a device has yet to cut and for
# the kernel's timers (1 ms of the rate), small beside a bucket of gradients, which would otherwise pass unshaped.
_LEAST_BURST_BYTES = 128 * 1024
_BURST_S = 1e-3
# The longest wait in the queue before the filter drops. TCP keeps far less than this in it.
_QUEUE = "50ms"


def shape_line(interface: str, bits_per_s: float) -> list[str]:
    """Limit what leaves through `interface`; replaces an earlier limit."""
    burst = max(_LEAST_BURST_BYTES, round(bits_per_s / 8 * _BURST_S))
    return [
        "tc", "qdisc", "replace", "dev", interface, "root", "tbf",
        "rate", f"{round(bits_per_s)}bit", "burst", f"{burst}b", "latency", _QUEUE,
    ]  # fmt: skip


def unshape_line(interface: str) -> list[str]:
    """Give `interface` its default queue back; fails where it has it already."""
    return ["tc", "qdisc", "delete", "dev", interface, "root"]
