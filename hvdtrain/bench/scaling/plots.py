"""The picture of `hvdtrain bench scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.bench.plots import COLOURS, GREY, new_figure, save


def curve(result: dict[str, Any], path: Path) -> Path:
    """Throughput and efficiency against the number of ranks, with the ideal."""
    in_samples = all(row["samples_per_s"] is not None for row in result["rows"])
    figure, axes = new_figure(1, 2, width=9, height=4)
    throughput, efficiency = axes[0]
    counts = sorted({row["ranks"] for row in result["rows"]})
    for number, backend in enumerate(dict.fromkeys(row["backend"] for row in result["rows"])):
        rows = [row for row in result["rows"] if row["backend"] == backend]
        ranks = [row["ranks"] for row in rows]
        rate = [row["samples_per_s"] if in_samples else row["steps_per_s"] * row["ranks"] for row in rows]
        style = {"color": COLOURS[number], "marker": "o", "label": backend}
        throughput.plot(ranks, rate, **style)
        ideal = [rate[0] / ranks[0] * count for count in ranks]
        throughput.plot(ranks, ideal, color=COLOURS[number], linestyle=":", label=f"{backend}, ideal")
        efficiency.plot(ranks, [row["efficiency"] * 100 for row in rows], **style)
    efficiency.axhline(100, color=GREY, linestyle=":", label="ideal")
    for axis in (throughput, efficiency):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.set_xlabel("ranks")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, frameon=False)
    throughput.set_ylabel("samples per second" if in_samples else "steps of single ranks per second")
    efficiency.set_ylabel("efficiency, %")
    return save(figure, path)
