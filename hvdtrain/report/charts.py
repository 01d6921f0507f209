"""Small SVG pictures whose colours and letters are the page's, so that they follow it into the dark.

matplotlib draws with stand-in colours; in its SVG these become the style sheet's variables.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError
from hvdtrain.report.markup import Markup, escape
from hvdtrain.report.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches. A card is about as wide in pixels as this in points, times 1.2: letters keep their size on narrow windows.
_WIDTH, _HEIGHT = 4.2, 2.5
_INK, _MUTED, _LINE = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "ink", _MUTED: "muted", _LINE: "line"}
_DASHES = ("-", "--", ":", "-.")
_MAX_POINTS = 400
# Any: matplotlib's stubs list the names that it knows.
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hvdtrain",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "grid.color": _LINE,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
}


def require_matplotlib() -> None:
    """Raise UserError where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("the report's pictures need matplotlib: pip install 'hvdtrain[plots]'") from None


def colour(number: int) -> str:
    """The stand-in colour of the series with this number."""
    return LIGHT[number % len(LIGHT)]


def series_variable(number: int) -> str:
    """The style sheet's colour of the series with this number, for HTML."""
    return f"var(--series-{number % len(LIGHT)})"


class Chart:
    """One picture. Use `axes` to draw, with `colour(n)`; then `markup`.

    Args:
        height: inches; the width is the same for all.
    """

    def __init__(self, *, height: float = _HEIGHT, x_label: str = "", y_label: str = "") -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        with matplotlib.rc_context(_SETTINGS):
            self._figure: Figure = pyplot.figure(figsize=(_WIDTH, height), layout="constrained")
            self.axes: Axes = self._figure.add_subplot()
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.grid(axis="y", linewidth=0.6)
        self.axes.set_axisbelow(True)
        self.axes.tick_params(length=0)
        self.axes.set_xlabel(x_label)
        self.axes.set_ylabel(y_label)

    def line(self, x: Sequence[float], y: Sequence[float | None], number: int, **style: Any) -> None:
        """A curve; None and what is not finite leave a gap. Long ones are thinned to means."""
        values = [math.nan if value is None else float(value) for value in y]
        x, values = thinned(x, values)
        dash = _DASHES[(number // len(LIGHT)) % len(_DASHES)]
        marker = "o" if sum(map(math.isfinite, values)) <= 25 else ""
        options = {"color": colour(number), "linestyle": dash, "marker": marker, "markersize": 3, "linewidth": 1.5}
        self.axes.plot(x, values, **{**options, **style})

    def markup(self, description: str) -> Markup:
        """The SVG element; the chart is closed.

        Args:
            description: what the picture shows, for people who cannot see it.
        """
        import matplotlib
        from matplotlib import pyplot

        text = io.StringIO()
        with matplotlib.rc_context(_SETTINGS):
            self._figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(self._figure)
        return Markup(_themed(text.getvalue(), description))


def _themed(svg: str, description: str) -> str:
    found = re.search(r"<svg\b.*</svg>", svg, re.DOTALL)
    assert found is not None
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", found.group(), flags=re.DOTALL)
    # Names of groups would be the same in every picture of the page, and nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    head = f'<svg role="img" aria-label="{escape(description)}"'
    svg = re.sub(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', rf'{head} viewBox="\1">', svg, count=1)
    # href without the namespace, which the line above dropped.
    svg = svg.replace("xlink:href", "href")
    for number, light in enumerate(LIGHT):
        svg = re.sub(light, f"var(--series-{number})", svg, flags=re.IGNORECASE)
    for stand_in, name in _VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return re.sub(r"font: [^;\"]*?(\d+(?:\.\d+)?)px [^;\"]*", r"font-size: \1px", re.sub(r">\s+<", "><", svg))


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `_MAX_POINTS` points: means over stretches of equal length; a value that is not finite makes a gap."""
    if len(x) <= _MAX_POINTS:
        return list(x), list(y)
    length = math.ceil(len(x) / _MAX_POINTS)
    starts = range(0, len(x), length)
    return (
        [sum(x[i : i + length]) / len(x[i : i + length]) for i in starts],
        [sum(y[i : i + length]) / len(y[i : i + length]) for i in starts],
    )


def bars(labels: Sequence[str], values: Sequence[float], numbers: Sequence[int], *, form: str = ",.0f") -> Chart:
    """Horizontal bars, the first on top, each with its value at its end.

    Args:
        numbers: of the series, for the colours.
    """
    chart = Chart(height=0.4 + 0.27 * len(labels))
    places = list(range(len(labels)))
    chart.axes.grid(visible=False)
    chart.axes.spines[["left", "bottom"]].set_visible(False)
    chart.axes.set_xticks([])
    drawn = chart.axes.barh(places, values, 0.62, color=[colour(number) for number in numbers])
    chart.axes.bar_label(drawn, [format(value, form) for value in values], padding=3, color=_INK)
    chart.axes.set_yticks(places, labels)
    chart.axes.invert_yaxis()
    chart.axes.margins(x=0.16)
    return chart


INK, MUTED = _INK, _MUTED
