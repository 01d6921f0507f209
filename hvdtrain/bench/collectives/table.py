"""The result of `hvdtrain bench collectives` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.bench.hosts import format_rate
from hvdtrain.bench.machine import machine_text


def document(result: dict[str, Any], pictures: Sequence[str] = ()) -> str:
    """The whole file.

    Args:
        pictures: names of picture files beside it.
    """
    links = "as they are"
    if result["sharing"] is not None:
        rate = result["bits_per_s"]
        links = "as fast as the machine copies" if rate is None else f"of {format_rate(rate)}"
    hosts = result["sharing"] or "separate hosts"
    parts = [
        "# All-reduce by parameter server, by ring, and by the backends",
        f"One rank per host: {hosts}. Links {links}. Machine: {machine_text(result['machine'])}.",
        *(_table(result, num_bytes) for num_bytes in dict.fromkeys(row["bytes"] for row in result["rows"])),
        _legend(result["rounds"]),
        *(f"![{name}]({name})" for name in pictures),
    ]
    return "\n\n".join(parts) + "\n"


def _legend(rounds: int) -> str:
    return (
        f"ms: median of {rounds} rounds, of the slowest rank in each. Sent and received: in one all-reduce, counted by "
        f"the kernel at each host's interface, headers and the barriers between rounds included. Expected: (N - 1) x "
        f"size for the server, 2 (N - 1) / N x size for each rank of the ring. Each sum is compared with the exact one."
    )


def _table(result: dict[str, Any], num_bytes: int) -> str:
    lines = [
        f"## {num_bytes / 1e6:g} MB",
        "",
        "| ranks | way | ms | busiest host: sent, MB | received, MB | least busy host: sent, MB | sent / expected |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(result["rows"], key=lambda row: int(row["ranks"])):
        if row["bytes"] == num_bytes:
            sent = row["sent_bytes"]
            received = row["received_bytes"][sent.index(max(sent))]
            ratio = "" if row["ratio_sent"] is None else f"{row['ratio_sent']:.3f}"
            lines.append(
                f"| {row['ranks']} | {row['way']} | {row['ms']:.1f} | {max(sent) / 1e6:.2f} | {received / 1e6:.2f} "
                f"| {min(sent) / 1e6:.2f} | {ratio} |"
            )
    return "\n".join(lines)
