"""Colours that colour-blind readers tell apart (Okabe and Ito 2008; one hue from light to dark), and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

    Scale = Callable[[np.ndarray], tuple[Normalize, Colormap]]

INK = "#222222"
FAINT = "#c9cdd2"
PAPER = "#ffffff"
SOURCE = "#0072b2"  # blue
TARGET = "#d55e00"  # vermilion
TARGET_FILL = "#fbdfc9"
NODE = "#eef3f8"
NO_EDGE = "#ffffff"
EDGE = "#3b6ea5"


def new_figure(width: float = 6.4, height: float = 6.0) -> Figure:
    """A figure outside pyplot: nothing to close, no display needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="compressed")
    FigureCanvasAgg(figure)
    return figure


def new_axes(width: float = 6.4, height: float = 6.0) -> Axes:
    return new_figure(width, height).add_subplot()


def scale(value: np.ndarray, vmin: float | None = None, vmax: float | None = None) -> tuple[Normalize, Colormap]:
    """Light to dark blue from 0; with negative values purple to orange around 0.

    When most values are below a twentieth of the largest, the colour follows the square root, as the bar's label says:
    the first row of a causal graph always has a weight of 1, beside which long rows would all look like 0.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm

    low = float(value.min()) if value.size else 0.0
    high = float(value.max()) if value.size else 1.0
    if vmin is None and low < 0:
        top = max(-low, high) if vmax is None else vmax
        stops = ["#5e3c99", "#b2abd2", "#ececec", "#fdb863", "#b35806"]
        return Normalize(-top, top), LinearSegmentedColormap.from_list("graphattn_signed", stops)
    vmin = 0.0 if vmin is None else vmin
    vmax = high if vmax is None else vmax
    if vmax <= vmin:
        vmax = vmin + 1.0
    # the light end stays apart from white: an edge of weight 0 is still an edge
    stops = ["#d9e6f2", "#9dc3e0", "#4f94c8", "#1f64a8", "#08306b"]
    cmap = LinearSegmentedColormap.from_list("graphattn", stops).with_extremes(bad=NO_EDGE)
    if vmin == 0 and value.size and float(np.median(value)) < 0.05 * vmax:
        return PowerNorm(0.5, vmin, vmax), cmap
    return Normalize(vmin, vmax), cmap


def bar_label(norm: Normalize, label: str) -> str:
    return f"{label} (colour by square root)" if getattr(norm, "gamma", 1.0) != 1.0 else label


def color_bar(ax: Axes, norm: Normalize, cmap: Colormap, label: str) -> None:
    from matplotlib.cm import ScalarMappable

    bar = ax.figure.colorbar(ScalarMappable(norm, cmap), ax=ax, shrink=0.75, fraction=0.06, pad=0.02)
    bar.set_label(bar_label(norm, label), fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_edgecolor(FAINT)  # type: ignore[operator]


def save(picture: Any, path: str | Path, *, dpi: int = 150) -> Path:
    """Write an Axes, an array of Axes or a Figure as PNG, SVG or PDF, by the ending of `path`; returns the path.

    The same picture gives the same bytes: no date is written, and SVG identifiers are fixed.
    """
    import matplotlib as mpl

    path = Path(path)
    kinds = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    if path.suffix.lower() not in kinds:
        raise ValueError(f"cannot write {path.name!r}: a picture ends in .png, .svg or .pdf")
    figure = figure_of(picture)
    metadata: dict[str, Any] = kinds[path.suffix.lower()]
    with mpl.rc_context({"svg.hashsalt": "graphattn", "text.usetex": False}):
        figure.savefig(path, dpi=dpi, metadata=metadata, facecolor=PAPER)
    return path


def figure_of(picture: Any) -> Figure:
    if isinstance(picture, np.ndarray):
        picture = picture.flat[0]
    return picture if hasattr(picture, "savefig") else picture.figure
