"""The result of `hvdtrain bench network` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.bench.hosts import format_rate
from hvdtrain.bench.machine import job_text, machine_text

_HEAD = (
    "| backend | compression | no_sync | ms/step | s/epoch | samples/s | speed-up | sent, MB/step | wire's bound, ms "
    "| step / bound | step / (bound + computation) |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def document(result: dict[str, Any], pictures: Sequence[str] = ()) -> str:
    """The whole file.

    Args:
        pictures: names of picture files beside it.
    """
    parts = ["# Training over a network", conditions(result), tables(result), cuts_table(result), legend(result)]
    parts += [f"![{name}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def conditions(result: dict[str, Any]) -> str:
    """What was measured, and on what."""
    hosts = f"{result['hosts']} hosts with {_listed(result['ranks_per_host'])} rank(s) each"
    return (
        f"{hosts}: {result['sharing'] or 'separate hosts'}. Machine: {machine_text(result['machine'])}.\n"
        f"Job: {job_text(result['job'])}, {result['one_host'][0]['payload_bytes'] / 1e6:.1f} MB of gradients."
    )


def tables(result: dict[str, Any]) -> str:
    """One table per link and number of microbatches, with the row of one host first."""
    parts = []
    for bits_per_s in _in_order(row["bits_per_s"] for row in result["rows"]):
        for accumulate in _in_order(row["accumulate"] for row in result["rows"]):
            rows = [r for r in result["rows"] if (r["bits_per_s"], r["accumulate"]) == (bits_per_s, accumulate)]
            measured = " (measured)" if rows[0]["bits_per_s_from"] == "measured" else ""
            parts.append(f"## {format_rate(bits_per_s)}{measured}, accumulate {accumulate}")
            lines = [_HEAD]
            for backend in _in_order(row["backend"] for row in rows):
                alone = next(r for r in result["one_host"] if (r["backend"], r["accumulate"]) == (backend, accumulate))
                lines.append(_one_host_line(alone))
                lines += [_line(row) for row in rows if row["backend"] == backend]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def legend(result: dict[str, Any]) -> str:
    """What the columns mean."""
    return (
        "ms/step: median of the rounds. Speed-up: samples per time against one host of the same backend, which has its "
        "own batch only, so that two hosts take twice the samples in a step. Sent: by the host that sent most, counted "
        "by the kernel at its interface. Wire's bound: 2 (N - 1) / N x gradients x reductions per step / bandwidth, N "
        "hosts, without headers. Computation: a step of the same job without the others, all ranks at the same time "
        f"({_computation(result)}). no_sync off: gradients travel after every microbatch."
    )


def cuts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """By how much no_sync and compression cut the bytes that a host sends.

    Returns:
        [{"bits_per_s", "backend", "accumulate", "what", "expected", "measured", "ratio": measured / expected}]
    """
    found = []
    rows = {_key(row): row for row in result["rows"]}
    for row in result["rows"]:
        common = {key: row[key] for key in ("bits_per_s", "backend", "accumulate")}
        without = rows.get(_key({**row, "no_sync": False}))
        if row["no_sync"] and without is not None:
            what = f"no_sync, compression {row['compression']}"
            found.append({**common, "what": what, **_cut(without, row, row["accumulate"])})
        plain = rows.get(_key({**row, "compression": "none"}))
        if row["compression"] != "none" and plain is not None:
            what = f"{row['compression']}, no_sync {'on' if row['no_sync'] else 'off'}"
            found.append({**common, "what": what, **_cut(plain, row, plain["payload_bytes"] / row["payload_bytes"])})
    return found


def cuts_table(result: dict[str, Any]) -> str:
    """`cuts` as a table."""
    lines = [
        "## Bytes saved\n",
        "| bandwidth | backend | accumulate | what | bytes cut by, expected | measured |",
        "|---|---|---|---|---|---|",
    ]
    for cut in cuts(result):
        lines.append(
            f"| {format_rate(cut['bits_per_s'])} | {cut['backend']} | {cut['accumulate']} | {cut['what']} "
            f"| {cut['expected']:.4g} | {cut['measured']:.4g} |"
        )
    return "\n".join(lines)


def _cut(more: dict[str, Any], less: dict[str, Any], expected: float) -> dict[str, float]:
    measured = max(more["sent_bytes"]) / max(less["sent_bytes"])
    return {"expected": expected, "measured": measured, "ratio": measured / expected}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("bits_per_s", "backend", "compression", "accumulate", "no_sync"))


def _line(row: dict[str, Any]) -> str:
    no_sync = ("on" if row["no_sync"] else "off") if row["accumulate"] > 1 else ""
    sent_mb = max(row["sent_bytes"]) / 1e6
    return (
        f"| {row['backend']} | {row['compression']} | {no_sync} | {row['step_ms']:.0f} "
        f"| {_or_dash(row['epoch_s'], '.1f')} | {_or_dash(row['samples_per_s'], ',.0f')} | {row['speed_up']:.2f} "
        f"| {sent_mb:.2f} "
        f"| {row['wire_ms']:.0f} | {row['ratio_to_wire']:.2f} | {row['ratio_to_wire_and_computation']:.2f} |"
    )


def _one_host_line(row: dict[str, Any]) -> str:
    return (
        f"| {row['backend']} | one host | | {row['step_ms']:.0f} | {_or_dash(row['epoch_s'], '.1f')} "
        f"| {_or_dash(row['samples_per_s'], ',.0f')} | 1 | | | | |"
    )


def _computation(result: dict[str, Any]) -> str:
    seen: dict[tuple[str, int], float] = {}
    for row in result["rows"]:
        seen[row["backend"], row["accumulate"]] = row["computation_ms"]
    return ", ".join(f"{backend}, accumulate {count}: {ms:.0f} ms" for (backend, count), ms in seen.items())


def _listed(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(set(ranks)) == 1 else ", ".join(map(str, ranks))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _in_order(values: Any) -> list[Any]:
    """Each value once, in the order of its first appearance."""
    return list(dict.fromkeys(values))
