"""The picture of `hvdtrain bench collectives`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.bench.plots import COLOURS, GREY, new_figure, save


def draw(result: dict[str, Any], path: Path) -> Path:
    """Three panels: bytes and time against the number of ranks, time against the size."""
    rows = result["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    largest, most = max(row["bytes"] for row in rows), max(row["ranks"] for row in rows)
    figure, axes = new_figure(1, 3, width=14, height=4.4)
    sent, by_ranks, by_size = axes[0]
    for way, colour, marker in zip(ways, COLOURS, "osDv^<", strict=False):
        mine = [row for row in rows if row["way"] == way]
        style = {"color": colour, "marker": marker, "markersize": 5, "label": way}
        along = sorted((row for row in mine if row["bytes"] == largest), key=lambda row: int(row["ranks"]))
        counts = [row["ranks"] for row in along]
        sent.plot(counts, [max(row["sent_bytes"]) / 1e6 for row in along], **style)
        if along and along[0]["expected_sent_bytes"] is not None:
            expected = [max(row["expected_sent_bytes"]) / 1e6 for row in along]
            sent.plot(counts, expected, color=GREY, linestyle=":", linewidth=2.5, zorder=1)
        by_ranks.plot(counts, [row["ms"] for row in along], **style)
        across = sorted((row for row in mine if row["ranks"] == most), key=lambda row: int(row["bytes"]))
        by_size.plot([row["bytes"] / 1e6 for row in across], [row["ms"] for row in across], **style)
    sent.set_title(f"sent by the busiest host, {largest / 1e6:g} MB")
    sent.set_ylabel("MB per all-reduce (dotted: expected)")
    by_ranks.set_title(f"time, {largest / 1e6:g} MB")
    by_size.set_title(f"time, {most} ranks")
    for axis in (sent, by_ranks):
        axis.set_xlabel("ranks, one per host")
        axis.set_xticks(sorted({row["ranks"] for row in rows}))
        axis.set_ylim(bottom=0)
    by_size.set_xlabel("MB")
    by_size.set_xscale("log")
    by_size.set_yscale("log")
    sizes = sorted({row["bytes"] / 1e6 for row in rows})
    by_size.set_xticks(sizes, [f"{size:g}" for size in sizes])
    by_size.minorticks_off()
    for axis in (by_ranks, by_size):
        axis.set_ylabel("milliseconds")
    handles, names = sent.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    return save(figure, path)
