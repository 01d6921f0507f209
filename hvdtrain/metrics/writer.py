"""metrics.jsonl and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdtrain.checkpoint.atomic import atomic_write, cannot_write
from hvdtrain.metrics.event_file import EventFile, drop_later_events
from hvdtrain.metrics.plain_json import to_json

_FLUSH_EVERY_S = 3.0
_FLUSH_EVERY_RECORDS = 1000


class MetricsWriter:
    """Appends what is logged to `metrics.jsonl` and `tensorboard/` in the output folder. For rank 0 alone.

    A line of a step:        {"step", "epoch", "loss", "grad_norm", "lr", "samples_per_second", ...named values}
    A line of an evaluation: {"step", "epoch", "eval": {name: value}}
    NaN and the infinities are null in JSON; TensorBoard shows them as they are.

    Lines are buffered; they reach the files at least every few seconds of logging, at `flush` and at `close`. No step
    appears twice: a step (or an evaluation of a step) that was written already is passed over.

    Args:
        output: the output folder; made if missing.
        resume_step: the step of the checkpoint that the run continues from: whatever is of later steps is removed
            from the files. None: a new run, whatever an earlier one left is removed.
    """

    def __init__(self, output: Path, *, resume_step: int | None) -> None:
        last_step = -1 if resume_step is None else resume_step
        output.mkdir(parents=True, exist_ok=True)
        self._path = output / "metrics.jsonl"
        self._last_train, self._last_eval = _drop_later_lines(self._path, last_step)
        drop_later_events(output / "tensorboard", last_step)
        # Unbuffered: what a failed write leaves in a buffer would be written again at the next flush.
        self._lines = self._path.open("ab", buffering=0)
        self._events = EventFile(output / "tensorboard")
        # (wall time, step, JSON document, TensorBoard values)
        self._pending: list[tuple[float, int, dict[str, Any], dict[str, float]]] = []
        self._last_flush_s = time.monotonic()
        # A watcher thread may flush before it ends the process.
        self._lock = threading.Lock()

    def log(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        grad_norm: float | None,
        lr: float,
        samples_per_second: float,
        data_wait_share: float | None = None,
        values: Mapping[str, float] | None = None,
    ) -> None:
        """A logged step.

        Args:
            grad_norm: norm of the averaged gradient before clipping, if it was computed.
            data_wait_share: part of the time (0 to 1) that this rank waited for data.
            values: what the task's loss returned by name; under `train/<name>` in TensorBoard.
        """
        if step <= self._last_train:
            return
        self._last_train = step
        document: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "samples_per_second": samples_per_second,
        }
        if data_wait_share is not None:
            document["data_wait_share"] = data_wait_share
        if values:
            # The names above are ours: a task's value of the same name does not replace them.
            document = {**values, **document}
        self._add(
            step,
            document,
            {f"train/{k}": v for k, v in document.items() if k not in ("step", "epoch") and v is not None},
        )

    def log_eval(self, *, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after `step`."""
        if step <= self._last_eval:
            return
        self._last_eval = step
        self._add(
            step,
            {"step": step, "epoch": epoch, "eval": dict(metrics)},
            {f"eval/{name}": value for name, value in metrics.items()},
        )

    def log_profile(self, *, step: int, points: Sequence[tuple[int, float, Mapping[str, float]]], table: str) -> None:
        """Where the steps' time went: for TensorBoard alone.

        Args:
            points: (step, wall time, {phase: milliseconds}); under `profile/<phase>_ms`.
            table: Markdown; under `profile` in the text page, at `step`.
        """
        self.flush()
        with self._lock:
            try:
                for at_step, wall_time_s, values in points:
                    self._events.add(at_step, wall_time_s, {f"profile/{k}_ms": v for k, v in values.items()})
                self._events.add_text(step, time.time(), "profile", table)
                self._events.flush()
            except OSError as error:
                raise cannot_write(self._events.path, error) from error

    def flush(self) -> None:
        """Hand everything to the operating system. Any thread may call it.

        Raises:
            TrainingFailed: a file cannot be written; the message has path and free bytes.
        """
        with self._lock:
            pending, self._pending = self._pending, []
            self._last_flush_s = time.monotonic()
            if not pending:
                return
            try:
                self._lines.write("".join(to_json(document) + "\n" for _, _, document, _ in pending).encode())
            except OSError as error:
                raise cannot_write(self._path, error) from error
            try:
                for wall_time_s, step, _, values in pending:
                    self._events.add(step, wall_time_s, values)
                self._events.flush()
            except OSError as error:
                raise cannot_write(self._events.path, error) from error

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._lines.closed:
            return
        try:
            self.flush()
        finally:
            for file in (self._lines, self._events):
                with contextlib.suppress(OSError):
                    file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, step: int, document: dict[str, Any], values: dict[str, float]) -> None:
        self._pending.append((time.time(), step, document, values))
        if (
            len(self._pending) >= _FLUSH_EVERY_RECORDS
            or "eval" in document
            or time.monotonic() - self._last_flush_s >= _FLUSH_EVERY_S
        ):
            self.flush()


def _drop_later_lines(path: Path, last_step: int) -> tuple[int, int]:
    """Remove lines after `last_step` and torn ones; returns the last steps of training and of evaluation that stay."""
    last_train = last_eval = -1
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return last_train, last_eval
    kept = []
    for line in lines:
        try:
            document = json.loads(line)
            step = int(document["step"])
        except (ValueError, TypeError, KeyError):
            continue
        if step > last_step or not line.endswith(b"\n"):
            continue
        kept.append(line)
        if "eval" in document:
            last_eval = max(last_eval, step)
        else:
            last_train = max(last_train, step)
    if len(kept) != len(lines):
        with atomic_write(path) as file:
            file.writelines(kept)
    return last_train, last_eval
