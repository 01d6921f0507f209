"""What a report is made of: output folders of runs, and the JSON files that benchmarks and `parity` write."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError

# name of the file: (kind, the key of its list, a key of the list's items by which such a document is known)
_RESULTS = {
    "network.json": ("network", "rows", "wire_ms"),
    "scaling.json": ("scaling", "rows", "efficiency"),
    "collectives.json": ("collectives", "rows", "way"),
    "certificate.json": ("parity", "comparisons", "tolerance"),
}
_METRICS = "metrics.jsonl"


@dataclasses.dataclass
class Run:
    """One training run.

    Attributes:
        name: short, and different from the other runs'.
        summary: summary.json; None: the run is still going on, or was killed.
        steps: lines of metrics.jsonl of logged steps; evals: of evaluations. In order.
        num_unreadable: lines that could not be read (a line that was being written).
    """

    name: str
    folder: Path
    summary: dict[str, Any] | None
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    num_unreadable: int = 0


@dataclasses.dataclass
class Result:
    """One JSON document of a benchmark. kind: network | scaling | collectives | parity."""

    kind: str
    path: Path
    document: dict[str, Any]


def read_sources(paths: Sequence[Path]) -> tuple[list[Run], list[Result]]:
    """Read everything that the paths name: output folders, folders of benchmark results, result files.

    Raises:
        UserError: a path is none of these; the message says what is there.
    """
    runs: list[Run] = []
    results: list[Result] = []
    for path in dict.fromkeys(paths):
        if path.is_dir():
            found_runs, found_results = _read_folder(path)
            runs += found_runs
            results += found_results
        elif path.is_file():
            results.append(_read_result(path))
        else:
            raise UserError(f"{path}: no such file or folder{_near(path)}")
    _name_apart(runs)
    return runs, results


def _read_folder(folder: Path) -> tuple[list[Run], list[Result]]:
    results = [_read_result(folder / name) for name in _RESULTS if (folder / name).is_file()]
    if (folder / _METRICS).is_file():
        return [_read_run(folder)], results
    if (folder / "summary.json").is_file():
        raise UserError(
            f"{folder}: a run without {_METRICS}; it ended before its first logged step, so nothing is to show"
        )
    if not results:
        files = f"{_METRICS}, {', '.join(_RESULTS)}"
        raise UserError(f"{folder}: is no run and holds no results (none of {files}){_inside(folder)}")
    return [], results


def _read_run(folder: Path) -> Run:
    summary_path = folder / "summary.json"
    summary = _read_json(summary_path) if summary_path.is_file() else None
    steps: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    num_unreadable = 0
    for line in (folder / _METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            document = json.loads(line)
            int(document["step"])
        except (ValueError, TypeError, KeyError):
            num_unreadable += 1
            continue
        (evals if isinstance(document.get("eval"), dict) else steps).append(document)
    if not steps and not evals:
        said = "has no line that can be read" if num_unreadable else "is empty"
        raise UserError(f"{folder / _METRICS}: {said}: no step was logged yet (log_every_steps in the job file)")
    return Run(folder.name, folder, summary, steps, evals, num_unreadable)


def _read_result(path: Path) -> Result:
    document = _read_json(path)
    for kind, key, known_by in _RESULTS.values():
        items = document.get(key)
        if isinstance(items, list) and items and isinstance(items[0], dict) and known_by in items[0]:
            return Result(kind, path, document)
    raise UserError(
        f"{path}: is not a result of `hvdtrain bench network`, `bench scaling`, `bench collectives` or `hvdtrain "
        f"parity`, or has no rows; give the output folder of a run, or one of {', '.join(_RESULTS)}"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); was it cut short?") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: holds {type(document).__name__}, not a JSON object")
    return document


def _name_apart(runs: Iterable[Run]) -> None:
    """Runs whose folders have the same name go by their whole paths."""
    runs = list(runs)
    names = [run.name for run in runs]
    for run in runs:
        if not run.name or names.count(run.name) > 1:
            run.name = str(run.folder)


def _inside(folder: Path) -> str:
    holders = sorted(
        str(inner)
        for inner in folder.iterdir()
        if inner.is_dir() and any((inner / name).is_file() for name in (_METRICS, *_RESULTS))
    )
    if not holders:
        return "; an output folder is what `hvdtrain train` names at its end after `results`"
    shown = " ".join(holders[:6]) + (" ..." if len(holders) > 6 else "")
    return f"; folders in it do. Name them: hvdtrain report {shown}"


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent} either; the working directory is {Path.cwd()})"
    from hvdtrain.config.problems import nearest

    found = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    return f"; did you mean {path.with_name(found)}?" if found else f" (the working directory is {Path.cwd()})"
