"""What rank 0 shows while it trains: one line that moves on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from hvdtrain.metrics.bar import OneLineBar

_REDRAW_EVERY_S = 0.2
# Of a terminal that does not tell its width; tqdm would take 0 columns for its word and show nothing.
_DEFAULT_COLUMNS = 100


class Progress:
    """The progress of a run. Every method does nothing unless `enabled` (rank 0).

    Args:
        total_steps: the step at which the run ends, or None if nobody knows.
        first_step: steps done before (resumed run).
        num_epochs: epochs of the whole run, or None.
        plain_every_s: without a terminal, logged steps are shown at most this often.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        total_steps: int | None = None,
        first_step: int = 0,
        num_epochs: int | None = None,
        stream: TextIO | None = None,
        plain_every_s: float = 5.0,
    ) -> None:
        self._enabled = enabled
        self._stream = stream or sys.stderr
        self._total = total_steps
        self._first = self._step = first_step
        self._num_epochs = num_epochs
        self._epoch = 0
        self._loss: float | None = None
        self._rate: float | None = None
        self._plain_every_s = plain_every_s
        self._last_line_s = float("-inf")
        self._start_s = time.monotonic()
        self._paused_s = 0.0
        self._bar: OneLineBar | None = None
        if enabled and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = OneLineBar(
                total=total_steps,
                initial=first_step,
                file=self._stream,
                mininterval=_REDRAW_EVERY_S,
                dynamic_ncols=_has_width(self._stream),
                ncols=_DEFAULT_COLUMNS,
                leave=False,
                bar_format=self._bar_format(),
            )

    def start_epoch(self, epoch: int) -> None:
        """Epoch, counted from 0 (shown from 1)."""
        self._epoch = epoch
        self._refresh()

    def step(self, step: int) -> None:
        """A step is done (`step` so far, over all epochs). Cheap enough for every step."""
        if self._bar is not None:
            self._bar.update(step - self._step)
        self._step = step

    def logged(self, *, loss: float, samples_per_second: float) -> None:
        """Values of a logged step."""
        self._loss, self._rate = loss, samples_per_second
        if self._bar is not None:
            self._bar.bar_format = self._bar_format()
        elif self._enabled and time.monotonic() - self._last_line_s >= self._plain_every_s:
            self._plain_line()

    @contextlib.contextmanager
    def evaluation(self, total: int | None) -> Iterator[Callable[[int], None]]:
        """Around an evaluation of `total` microbatches; the function that it gives is told how many are done.

        Without a terminal, an evaluation says something only if it takes longer than `plain_every_s`.
        """
        begin_s = last_s = time.monotonic()

        def done(count: int) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if not self._enabled or now_s - last_s < (_REDRAW_EVERY_S if self._bar else self._plain_every_s):
                return
            last_s = now_s
            doing = f"  evaluating {_of(count, total)}"
            if self._bar is None:
                self._say(self._place() + doing)
            self._refresh(doing)

        if self._bar is not None:
            self._refresh(f"  evaluating {_of(0, total)}")
        try:
            yield done
        finally:
            self._paused_s += time.monotonic() - begin_s
            self._refresh()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """The result of an evaluation: a line that stays."""
        self.message(f"{self._place()}  evaluation: {shown_metrics(metrics)}")

    def end_epoch(self) -> None:
        """The epoch is over: a line that stays."""
        self.message(f"{self._place()}  end of epoch{self._values()}")

    def message(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self._enabled:
            self._say(text)

    def close(self) -> None:
        """Take the bar away; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._enabled = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _say(self, text: str) -> None:
        with OneLineBar.external_write_mode(file=self._stream):
            self._stream.write(text + "\n")
            self._stream.flush()

    def _plain_line(self) -> None:
        self._last_line_s = time.monotonic()
        left = self._left_s()
        self._say(f"{self._place()}{self._values()}{'' if left is None else f'  {_clock(left)} left'}")

    def _refresh(self, doing: str = "") -> None:
        if self._bar is not None:
            self._bar.bar_format = self._bar_format(doing)
            self._bar.refresh()

    def _bar_format(self, doing: str = "") -> str:
        epoch = f"epoch {_of(self._epoch + 1, self._num_epochs)}"
        if self._total is None:
            return f"{epoch}  step {{n_fmt}}{doing or self._values()}  {{elapsed}} so far"
        return f"{epoch}  step {{n_fmt}}/{{total_fmt}} |{{bar:10}}|{doing or self._values() + '  {remaining} left'}"

    def _place(self) -> str:
        return f"epoch {_of(self._epoch + 1, self._num_epochs)}  step {_of(self._step, self._total)}"

    def _values(self) -> str:
        loss = "" if self._loss is None else f"  loss {self._loss:.4f}"
        return loss + ("" if self._rate is None else f"  {self._rate:,.0f} samples/s")

    def _left_s(self) -> float | None:
        done = self._step - self._first
        if self._total is None or done <= 0:
            return None
        return (time.monotonic() - self._start_s - self._paused_s) / done * max(0, self._total - self._step)


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """`accuracy 0.9745, loss 0.0812`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "no metrics"


def _has_width(stream: TextIO) -> bool:
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _of(count: int, total: int | None) -> str:
    return str(count) if total is None else f"{count}/{total}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
