"""The pictures of `hvdtrain bench network`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hvdtrain.bench.hosts import format_rate
from hvdtrain.bench.plots import COLOURS, GREY, new_figure, save

# Rates are means over this long: shorter, and the times at which the counter was read make a comb of them.
_RATE_WINDOW_S = 0.05


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write all pictures into the folder."""
    made = []
    if result["rows"]:
        made.append(times(result, folder / "time.png"))
    for backend in dict.fromkeys(trace["backend"] for trace in result["traces"]):
        traces = [trace for trace in result["traces"] if trace["backend"] == backend]
        made.append(rates(traces, folder / f"rate-{backend}.png"))
    return made


def times(result: dict[str, Any], path: Path) -> Path:
    """Bars: time per epoch (per step, where the data do not tell an epoch), a row per accumulate, a column per link."""
    accumulates = list(dict.fromkeys(row["accumulate"] for row in result["rows"]))
    links = list(dict.fromkeys(row["bits_per_s"] for row in result["rows"]))
    by_epoch = all(row["epoch_s"] is not None for row in result["rows"])

    def value(row: dict[str, Any]) -> float:
        return float(row["epoch_s"] if by_epoch else row["step_ms"])

    # What differs within a step of one microbatch is less than in one of several: each row has its own bars.
    labels_of = {
        accumulate: list(dict.fromkeys(_label(row) for row in result["rows"] if row["accumulate"] == accumulate))
        for accumulate in accumulates
    }
    most = max(map(len, labels_of.values()))
    backends = list(dict.fromkeys(row["backend"] for row in result["rows"]))
    size = {"width": max(4.0, 1.1 * most + 1) * len(links), "height": 4.4 * len(accumulates)}
    figure, axes = new_figure(len(accumulates), len(links), **size)
    for axis, (accumulate, bits_per_s) in zip(axes.flat, itertools.product(accumulates, links), strict=True):
        labels = labels_of[accumulate]
        for number, backend in enumerate(backends):
            rows = {
                _label(row): row
                for row in result["rows"]
                if (row["accumulate"], row["bits_per_s"], row["backend"]) == (accumulate, bits_per_s, backend)
            }
            width = 0.8 / len(backends)
            shown = [label for label in labels if label in rows]
            at = [labels.index(label) - 0.4 + width * (number + 0.5) for label in shown]
            bars = axis.bar(
                at, [value(rows[label]) for label in shown], width * 0.94, color=COLOURS[number], label=backend
            )
            axis.bar_label(bars, fmt="%.1f" if by_epoch else "%.0f", fontsize=8, padding=1)
            alone = next(r for r in result["one_host"] if (r["backend"], r["accumulate"]) == (backend, accumulate))
            axis.axhline(
                value(alone), color=COLOURS[number], linestyle="--", linewidth=1.2, label=f"{backend}, one host"
            )
            for place, label in zip(at, shown, strict=True):
                row = rows[label]
                bound = value(row) * row["wire_ms"] / row["step_ms"]
                name = "wire's bound" if number == 0 and label == shown[0] else None
                axis.hlines(bound, place - width / 2, place + width / 2, color="black", linewidth=1.5, label=name)
        axis.set_xticks(range(len(labels)), labels, fontsize=9)
        axis.set_title(f"{format_rate(bits_per_s)}, accumulate {accumulate}")
        axis.set_ylabel("seconds per epoch" if by_epoch else "milliseconds per step")
        axis.margins(y=0.12)
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=9, frameon=False)
    figure.suptitle(f"{result['hosts']} hosts: time per {'epoch' if by_epoch else 'step'}; lower is better")
    return save(figure, path)


def rates(traces: list[dict[str, Any]], path: Path) -> Path:
    """What the first host's interface sends over time: a row per link, no_sync off beside on."""
    links = list(dict.fromkeys(trace["bits_per_s"] for trace in traces))
    figure, axes = new_figure(len(links), 2, width=11, height=2.6 * len(links) + 0.6, sharex="row", sharey="row")
    for row, bits_per_s in zip(axes, links, strict=True):
        for axis, no_sync in zip(row, (False, True), strict=True):
            axis.axhline(bits_per_s / 1e9, color=GREY, linestyle="--", linewidth=1)
            axis.set_title(f"{format_rate(bits_per_s)}, no_sync {'on' if no_sync else 'off'}", fontsize=10)
            for trace in traces:
                if (trace["bits_per_s"], trace["no_sync"]) == (bits_per_s, no_sync):
                    at_s, gbit = rate_over_time(trace["at_s"], trace["sent_bytes"])
                    axis.fill_between(at_s, gbit, color=COLOURS[0], alpha=0.35, linewidth=0)
                    axis.plot(at_s, gbit, color=COLOURS[0], linewidth=1)
                    axis.set_xlim(left=0)
            axis.set_ylim(bottom=0)
        row[0].set_ylabel("Gbit/s sent")
        shortest = min(trace["at_s"][-1] for trace in traces if trace["bits_per_s"] == bits_per_s and trace["at_s"])
        row[0].set_xlim(0, shortest)
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    accumulate = traces[0]["accumulate"]
    figure.suptitle(f"{traces[0]['backend']}, accumulate {accumulate}: what one host's interface sends")
    return save(figure, path)


def rate_over_time(at_s: list[float], sent_bytes: list[float]) -> tuple[list[float], list[float]]:
    """(seconds, Gbit/s): means over a sliding window, from counts of bytes so far."""
    times: list[float] = []
    gbit: list[float] = []
    start = 0
    for end in range(1, len(at_s)):
        while at_s[end] - at_s[start + 1] >= _RATE_WINDOW_S:
            start += 1
        times.append((at_s[start] + at_s[end]) / 2)
        gbit.append((sent_bytes[end] - sent_bytes[start]) * 8 / 1e9 / (at_s[end] - at_s[start]))
    return times, gbit


def _label(row: dict[str, Any]) -> str:
    if row["accumulate"] == 1:
        return str(row["compression"])
    return f"{row['compression']}\nno_sync {'on' if row['no_sync'] else 'off'}"
