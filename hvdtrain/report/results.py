"""The sections about benchmarks and parity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.report.charts import INK, MUTED, Chart, bars, colour
from hvdtrain.report.markup import Markup, card, cards, escape, join, markdown, note, section
from hvdtrain.report.sources import Result


def result_section(result: Result) -> Markup:
    """One result file as a section of its own."""
    title, draw = _KINDS[result.kind]
    return section(title, join([draw(result.document), note(f"From `{result.path}`.")]))


def _network(document: dict[str, Any]) -> Markup:
    from hvdtrain.bench.hosts import format_rate
    from hvdtrain.bench.network.table import conditions, cuts_table, legend, tables

    backends = list(dict.fromkeys(row["backend"] for row in document["rows"]))
    pictures = []
    for accumulate, rate in dict.fromkeys((row["accumulate"], row["bits_per_s"]) for row in document["rows"]):
        rows = [row for row in document["rows"] if (row["accumulate"], row["bits_per_s"]) == (accumulate, rate)]
        chart = bars(
            [_variant(row) for row in rows],
            [row["step_ms"] for row in rows],
            [backends.index(row["backend"]) for row in rows],
        )
        for place, row in enumerate(rows):
            chart.axes.plot([row["wire_ms"]] * 2, [place - 0.42, place + 0.42], color=INK, linewidth=1.6)
        title = f"Milliseconds per step, {format_rate(rate)}, accumulate {accumulate}"
        pictures.append(card(title, chart.markup(title), "The marks are the wire's bound."))
    pictures += _traces(document)
    text = "\n\n".join([conditions(document), tables(document), cuts_table(document)])
    return join([cards(pictures), markdown(text), note(legend(document))])


def _variant(row: dict[str, Any]) -> str:
    plain = f"{row['backend']} {row['compression']}"
    return plain if row["accumulate"] == 1 else f"{plain}, no_sync {'on' if row['no_sync'] else 'off'}"


def _traces(document: dict[str, Any]) -> list[Markup]:
    """What one host's interface sends over time, for each backend and link, no_sync off beside on."""
    from hvdtrain.bench.hosts import format_rate
    from hvdtrain.bench.network.plots import rate_over_time

    made = []
    traces = [trace for trace in document["traces"] if len(trace["at_s"]) > 2]
    for backend, rate in dict.fromkeys((trace["backend"], trace["bits_per_s"]) for trace in traces):
        own = [trace for trace in traces if (trace["backend"], trace["bits_per_s"]) == (backend, rate)]
        shortest = min(trace["at_s"][-1] for trace in own)
        for trace in sorted(own, key=lambda trace: bool(trace["no_sync"])):
            chart = Chart(x_label="seconds", y_label="Gbit/s sent")
            chart.axes.axhline(rate / 1e9, color=MUTED, linestyle="--", linewidth=1)
            at_s, gbit = rate_over_time(trace["at_s"], trace["sent_bytes"])
            chart.axes.fill_between(at_s, gbit, color=colour(0), alpha=0.3, linewidth=0)
            chart.line(at_s, gbit, 0, linewidth=1.1)
            chart.axes.set_ylim(bottom=0)
            chart.axes.set_xlim(0, shortest)
            title = f"{backend} at {format_rate(rate)}, no_sync {'on' if trace['no_sync'] else 'off'}"
            made.append(card(title, chart.markup(f"What one host sends over time: {title}")))
    return made


def _scaling(document: dict[str, Any]) -> Markup:
    from hvdtrain.bench.scaling.table import conditions, table

    rows = document["rows"]
    in_samples = all(row["samples_per_s"] is not None for row in rows)
    counts = sorted({row["ranks"] for row in rows})
    label = "samples per second" if in_samples else "steps of single ranks per second"
    speed, efficiency = Chart(x_label="ranks", y_label=label), Chart(x_label="ranks", y_label="efficiency, %")
    for number, backend in enumerate(dict.fromkeys(row["backend"] for row in rows)):
        own = [row for row in rows if row["backend"] == backend]
        ranks = [row["ranks"] for row in own]
        rates = [row["samples_per_s"] if in_samples else row["steps_per_s"] * row["ranks"] for row in own]
        ideal = {"linestyle": ":", "marker": "", "linewidth": 1.2, "label": f"{backend}, ideal"}
        speed.line(ranks, [rates[0] / ranks[0] * count for count in ranks], number, **ideal)
        speed.line(ranks, rates, number, label=backend)
        efficiency.line(ranks, [row["efficiency"] * 100 for row in own], number, label=backend)
    efficiency.axes.axhline(100, color=MUTED, linestyle=":", linewidth=1.2)
    for chart in (speed, efficiency):
        chart.axes.set_xscale("log", base=2)
        chart.axes.set_xticks(counts, [str(count) for count in counts])
        chart.axes.minorticks_off()
        chart.axes.set_ylim(bottom=0)
        chart.axes.legend(fontsize=8, frameon=False)
    pictures = [
        card("Throughput against the number of ranks", speed.markup("Throughput against the number of ranks")),
        card("Efficiency", efficiency.markup("Efficiency against the number of ranks")),
    ]
    return join([cards(pictures), markdown(f"{conditions(document)}\n\n{table(document)}")])


def _collectives(document: dict[str, Any]) -> Markup:
    from hvdtrain.bench.collectives.table import document as as_markdown

    largest = max(row["bytes"] for row in document["rows"])
    rows = [row for row in document["rows"] if row["bytes"] == largest]
    counts = sorted({row["ranks"] for row in rows})
    time, sent = Chart(x_label="ranks", y_label="milliseconds"), Chart(x_label="ranks", y_label="MB")
    for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        own = sorted((row for row in rows if row["way"] == way), key=lambda row: int(row["ranks"]))
        ranks = [row["ranks"] for row in own]
        time.line(ranks, [row["ms"] for row in own], number, label=way)
        sent.line(ranks, [max(row["sent_bytes"]) / 1e6 for row in own], number, label=way)
    pictures = []
    for chart, what in ((time, "Time of an all-reduce"), (sent, "Sent by the busiest host")):
        chart.axes.set_xticks(counts, [str(count) for count in counts])
        chart.axes.set_ylim(bottom=0)
        chart.axes.legend(fontsize=8, frameon=False)
        title = f"{what} of {largest / 1e6:g} MB"
        pictures.append(card(title, chart.markup(f"{title} against the number of ranks")))
    text = as_markdown(document).partition("\n\n")[2]
    return join([cards(pictures), markdown(text)])


def _parity(document: dict[str, Any]) -> Markup:
    # Late: it imports torch.
    from hvdtrain.parity.certificate import comparison_table

    job = document["job"]
    passed = document["passed"]
    verdict = f'<p><span class="{"good" if passed else "bad"}">{"Passed" if passed else "FAILED"}</span> '
    what = f"{job['file']}: {job['steps']} steps on {job['ranks']} ranks, seed {job['seed']}, {job['precision']}"
    problems = [
        f"{item['first']} and {item['second']}: {text}" for item in document["comparisons"] for text in item["problems"]
    ]
    listed = f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in problems)}</ul>" if problems else ""
    chart = Chart(x_label="step", y_label="loss")
    for number, run in enumerate(document["runs"]):
        losses = run["losses"]
        # Runs that agree lie on top of each other: each later one is thinner.
        width = 3.2 - 2.2 * number / max(1, len(document["runs"]) - 1)
        chart.line(range(1, len(losses) + 1), losses, number, label=run["name"], linewidth=width, marker="")
    chart.axes.legend(fontsize=8, frameon=False)
    picture = cards([card("Loss of each run", chart.markup("The loss of each run against the step"))])
    head = Markup(f"{verdict}{escape(what)}</p>{listed}")
    return join([head, markdown(comparison_table(document)), picture])


_KINDS: dict[str, tuple[str, Callable[[dict[str, Any]], Markup]]] = {
    "network": ("Training over a network", _network),
    "scaling": ("Scaling", _scaling),
    "collectives": ("All-reduce by parameter server, by ring, and by the backends", _collectives),
    "parity": ("Parity", _parity),
}
