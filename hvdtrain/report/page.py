"""The page: one HTML file with its style and its pictures in it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import hvdtrain
from hvdtrain.errors import UserError
from hvdtrain.report.charts import require_matplotlib
from hvdtrain.report.markup import Markup, escape, join
from hvdtrain.report.results import result_section
from hvdtrain.report.runs import curves, default_output, overview, step_time, throughput, title_of
from hvdtrain.report.sources import Result, Run, read_sources
from hvdtrain.report.style import STYLE

# Results come in this order.
_KINDS = ("network", "scaling", "collectives", "parity")


def write_report(paths: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report on what the paths name.

    Args:
        paths: output folders of runs, folders of benchmark results, result files.
        output: the HTML file; None: `report.html` in the folder, of several paths in the working directory.

    Returns:
        The path of the file.

    Raises:
        UserError: a path is no such thing, there is no matplotlib, or the file cannot be written.
    """
    runs, results = read_sources(paths)
    require_matplotlib()
    target = output or default_output(runs, paths)
    text = page(runs, results)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); choose another --output") from None
    return target


def page(runs: Sequence[Run], results: Sequence[Result]) -> str:
    """The HTML document."""
    title = title_of(runs)
    ordered = sorted(results, key=lambda result: _KINDS.index(result.kind))
    body = join([overview(runs), curves(runs), throughput(runs), step_time(runs), *map(result_section, ordered)])
    made = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - hvdtrain report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>{_places(runs)}</header>\n"
        f"<main>\n{body}\n</main>\n"
        f"<footer>hvdtrain {escape(hvdtrain.__version__)}, {escape(made)}</footer>\n</body>\n</html>\n"
    )


def _places(runs: Sequence[Run]) -> Markup:
    folders = ", ".join(str(run.folder) for run in runs)
    return Markup(f"<p class=note>{escape(folders)}</p>") if folders else Markup("")
