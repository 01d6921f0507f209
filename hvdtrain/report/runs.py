"""The sections about training runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.report.charts import INK, Chart, bars, colour, series_variable
from hvdtrain.report.markup import Markup, card, cards, escape, join, note, section, table
from hvdtrain.report.sources import Run

# key of metrics.jsonl: title of its picture.
_CURVES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "samples_per_second": "Samples per second",
    "grad_norm": "Norm of the gradient",
    "data_wait_share": "Share of the time waiting for data",
}
_NO_CURVES = ("step", "epoch", "eval", *_CURVES)
# Phases of summary.json's `profile`, in the order of a step.
_PHASES = {
    "data_wait": "data wait",
    "forward": "forward",
    "backward": "backward",
    "communication": "communication",
    "optimizer": "optimizer",
    "other": "other",
}


def overview(runs: Sequence[Run]) -> Markup:
    """A table with a line per run, its colour, and what failed."""
    rows = [_overview_row(number, run) for number, run in enumerate(runs)]
    head = ["run", "status", "backend", "ranks", "steps", "epochs", "samples/s", "last evaluation", "notes"]
    return section("Runs", join([table(head, rows), *[_failure(run) for run in runs]])) if runs else Markup("")


def _overview_row(number: int, run: Run) -> list[Markup]:
    summary = run.summary
    if summary is None:
        last = (run.steps or run.evals)[-1]
        rest = ["", "", f"{last['step']:,}", "", _number(last.get("samples_per_second")), _last_evaluation(run)]
        return [_key(number, run.name), Markup("no summary"), *map(escape, rest), escape("still running, or killed")]
    world = summary["world"]
    ranks = f"{world['size']} on {world['num_nodes']} host{'s' if world['num_nodes'] > 1 else ''}"
    over = f" over {summary['transport']}" if summary.get("transport") else ""
    good = summary["status"] == "done"
    status = Markup(f'<span class="{"good" if good else "bad"}">{escape(summary["status"])}</span>')
    return [
        _key(number, run.name),
        status,
        escape(f"{summary['backend']}{over}"),
        escape(ranks),
        escape(f"{summary['steps']:,}"),
        escape(f"{summary['epochs']:,}"),
        escape(_number(summary.get("samples_per_second"))),
        escape(_last_evaluation(run)),
        escape(_remarks(run)),
    ]


def _remarks(run: Run) -> str:
    assert run.summary is not None
    said = [f"started by {run.summary['launcher']}"]
    if run.summary.get("skipped_steps"):
        said.append(f"{run.summary['skipped_steps']:,} steps skipped")
    if run.summary.get("ranks_agree") is False:
        said.append("THE RANKS' PARAMETERS DIFFER")
    if run.num_unreadable:
        said.append(f"{run.num_unreadable} unreadable line(s) left out")
    return "; ".join(said)


def _last_evaluation(run: Run) -> str:
    metrics = (run.summary or {}).get("eval") or (run.evals[-1]["eval"] if run.evals else {})
    return ", ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _failure(run: Run) -> Markup:
    failure = (run.summary or {}).get("failure")
    if not failure:
        return Markup("")
    where = f"{run.name}: rank {failure.get('rank')} on {failure.get('host')} failed first: {failure.get('message')}"
    told = str(failure.get("traceback") or "").strip()
    said = f"<pre>{escape(told)}</pre>" if told else ""
    return Markup(f"<p class=bad>{escape(where)}</p>{said}")


def curves(runs: Sequence[Run]) -> Markup:
    """Loss, evaluation, throughput, learning rate and whatever else was logged, against the step."""
    made = []
    evaluated = _names(run.evals for run in runs)
    for key, title in list(_CURVES.items())[:1]:
        made += _curve(runs, key, title)
    made += [_evaluation(runs, name) for name in evaluated]
    for key, title in list(_CURVES.items())[1:]:
        made += _curve(runs, key, title)
    others = dict.fromkeys(key for run in runs for line in run.steps for key in line if key not in _NO_CURVES)
    for key in others:
        made += _curve(runs, key, key)
    legend = Markup("")
    if len(runs) > 1:
        keys = join([_key(number, run.name) for number, run in enumerate(runs)])
        legend = Markup(f'<div class="legend">{keys}</div>')
    return section("Curves", join([legend, cards(made)])) if made else Markup("")


def _names(lines_of_runs: Any) -> list[str]:
    return list(dict.fromkeys(name for lines in lines_of_runs for line in lines for name in line["eval"]))


def _curve(runs: Sequence[Run], key: str, title: str) -> list[Markup]:
    drawn = [(number, [line for line in run.steps if key in line]) for number, run in enumerate(runs)]
    drawn = [(number, lines) for number, lines in drawn if any(_is_finite(line[key]) for line in lines)]
    if not drawn:
        return []
    chart = Chart(x_label="step")
    for number, lines in drawn:
        chart.line([line["step"] for line in lines], [_plain(line[key]) for line in lines], number)
    if key in ("samples_per_second", "data_wait_share"):
        chart.axes.set_ylim(bottom=0)
    gaps = sum(not _is_finite(line[key]) for _, lines in drawn for line in lines)
    remark = f"{gaps} logged steps were not finite and leave gaps." if gaps else ""
    return [card(title, chart.markup(f"{title} against the step"), remark)]


def _evaluation(runs: Sequence[Run], name: str) -> Markup:
    chart = Chart(x_label="step")
    for number, run in enumerate(runs):
        lines = [line for line in run.evals if name in line["eval"]]
        if lines:
            chart.line([line["step"] for line in lines], [_plain(line["eval"][name]) for line in lines], number)
    return card(f"Evaluation: {name}", chart.markup(f"{name} of the evaluations against the step"))


def throughput(runs: Sequence[Run]) -> Markup:
    """The runs' speeds side by side."""
    known = [
        (number, run, float(run.summary["samples_per_second"]))
        for number, run in enumerate(runs)
        if run.summary is not None and run.summary.get("samples_per_second")
    ]
    if len(known) < 2:
        return Markup("")
    chart = bars(
        [_short(run.name) for _, run, _ in known],
        [rate for _, _, rate in known],
        [number for number, _, _ in known],
    )
    fastest = max(rate for _, _, rate in known)
    rows = []
    for number, run, rate in known:
        assert run.summary is not None
        size = run.summary["world"]["size"]
        per_rank = [escape(f"{rate:,.1f}"), escape(f"{rate / size:,.1f}"), escape(f"{rate / fastest:.1%}")]
        rows.append([_key(number, run.name), escape(run.summary["backend"]), escape(size), *per_rank])
    head = ["run", "backend", "ranks", "samples/s", "per rank", "of the fastest"]
    picture = cards([card("Samples per second of all ranks", chart.markup("Samples per second of each run"))])
    return section(
        "Throughput", join([picture, table(head, rows), note("Evaluation and checkpoints are not counted.")])
    )


def step_time(runs: Sequence[Run]) -> Markup:
    """Where a step's time goes, of the runs that were made with --profile."""
    profiled = [(run, run.summary["profile"]) for run in runs if run.summary and run.summary.get("profile")]
    if not profiled:
        return Markup("")
    chart = Chart(height=0.75 + 0.34 * len(profiled))
    axes, places = chart.axes, range(len(profiled))
    axes.grid(visible=False)
    left = [0.0] * len(profiled)
    for number, phase in enumerate(_PHASES):
        widths = [float(profile["phases"][phase]["ms"]) for _, profile in profiled]
        axes.barh(places, widths, 0.6, left=left, color=colour(number))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [_short(run.name) for run, _ in profiled])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    keys = join([_key(number, title) for number, title in enumerate(_PHASES.values())])
    picture = Markup(f'{chart.markup("Milliseconds of each phase of a step")}<div class="legend">{keys}</div>')
    rows, remarks = [], []
    for run, profile in profiled:
        shares = [f"{float(profile['phases'][phase]['share']):.1%}" for phase in _PHASES]
        communication = profile["communication"]
        rows.append(
            [
                escape(run.name),
                escape(f"{profile['step_ms']:.2f}"),
                *map(escape, shares),
                escape(f"{communication['under_way_ms']:.2f}"),
                escape(_share(communication["not_hidden_share"])),
            ]
        )
        if profile.get("traced"):
            remarks.append(note(f"{run.name}: while the steps were traced, which slows them."))
    head = ["run", "step, ms", *_PHASES.values(), "communication under way, ms", "of that not hidden"]
    explained = note(
        "communication: the share of a step in which nothing but communication went on; what runs beside backward is "
        "hidden and counts as backward."
    )
    body = [cards([card("Milliseconds of a step", picture)]), table(head, rows), explained, *remarks]
    return section("Where a step's time goes", join(body))


def _key(number: int, name: str) -> Markup:
    return Markup(f'<span class="key"><i style="border-color: {series_variable(number)}"></i>{escape(name)}</span>')


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"...{name[-22:]}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _plain(value: Any) -> float | None:
    return float(value) if _is_finite(value) else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def title_of(runs: Sequence[Run]) -> str:
    """What the page is about, for its heading."""
    if len(runs) == 1:
        return runs[0].name
    return f"{len(runs)} runs" if runs else "Results"


def default_output(runs: Sequence[Run], paths: Sequence[Path]) -> Path:
    """`report.html` in the folder that the report is about; of several, in the working directory."""
    if len(paths) == 1:
        return (paths[0] if paths[0].is_dir() else paths[0].parent) / "report.html"
    return Path("report.html")
