"""What the benchmarks' pictures share: matplotlib without a screen, and one look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Readable apart by people who see fewer colours, and in grey (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY = "#666666"


def require_matplotlib() -> None:
    """Raise UserError where there is no matplotlib; to be asked before measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "the pictures need matplotlib: pip install 'hvdtrain[plots]', or leave them out with --no-plots"
        ) from None


def new_figure(rows: int, columns: int, *, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure in inches and its axes, always as an array [rows, columns]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG and let go of the figure."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
