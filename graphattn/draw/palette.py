"""Colours that colour-blind readers tell apart (Okabe and Ito 2008; one hue from light to dark), and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphattn.draw.text import for_xml

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure


class Scale(Protocol):
    """Numbers to the colours that show them; `density`: they are the shares of tiles that are edges, all above 0."""

    def __call__(self, value: np.ndarray, *, density: bool = False) -> tuple[Normalize, Colormap]: ...


INK = "#222222"
FAINT = "#c9cdd2"
PAPER = "#ffffff"
SOURCE = "#0072b2"  # blue
TARGET = "#d55e00"  # vermilion
TARGET_FILL = "#fbdfc9"
NODE = "#eef3f8"
NO_EDGE = "#ffffff"
EDGE = "#3b6ea5"
DENSITY = ["#a3c8e6", "#6daad6", "#3b86c2", "#17589c", "#08306b"]


def new_figure(width: float = 6.4, height: float = 6.0) -> Figure:
    """A figure outside pyplot: nothing to close, no display needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="compressed")
    FigureCanvasAgg(figure)
    return figure


def new_axes(width: float = 6.4, height: float = 6.0) -> Axes:
    return new_figure(width, height).add_subplot()


def scale(
    value: np.ndarray, vmin: float | None = None, vmax: float | None = None, *, density: bool = False
) -> tuple[Normalize, Colormap]:
    """Light to dark blue from 0; with negative values purple to orange around 0.

    When most values are below a twentieth of the largest, the colour follows the square root, as the bar's label says:
    the first row of a causal graph always has a weight of 1, beside which long rows would all look like 0.

    A density has no tile that is nearly white: a column that one token fills is a share of 1 / size, beside a diagonal
    of 1.  Where the largest is more than five times the least, its colour follows the logarithm between the two.
    """
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, PowerNorm

    if density and value.size and vmin is None and vmax is None:
        low, high = float(value.min()), float(value.max())
        cmap = LinearSegmentedColormap.from_list("graphattn_density", DENSITY).with_extremes(bad=NO_EDGE)
        return (LogNorm(low, high) if 0 < 5 * low < high else Normalize(0, high)), cmap
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
    from matplotlib.colors import LogNorm

    how = "logarithm" if isinstance(norm, LogNorm) else "square root" if getattr(norm, "gamma", 1.0) != 1.0 else ""
    return f"{label}\n(colour by {how})" if how else label


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
    kinds: dict[str, Any] = {".png": {"Software": None}, ".svg": None, ".pdf": {"CreationDate": None}}
    if path.suffix.lower() not in kinds:
        raise ValueError(f"cannot write {path.name!r}: a picture ends in .png, .svg or .pdf")
    figure = figure_of(picture)
    metadata = kinds[path.suffix.lower()]
    if path.suffix.lower() == ".svg":
        path.write_text(svg_of(figure, dpi=dpi, facecolor=PAPER), encoding="utf-8", newline="\n")
        return path
    with mpl.rc_context({"text.usetex": False}):
        figure.savefig(path, dpi=dpi, metadata=metadata, facecolor=PAPER)
    return path


def svg_of(figure: Figure, **options: Any) -> str:
    """The SVG of a figure, the same bytes every time; a `<title>` holds what a shortened label stands for."""
    import io
    from xml.sax.saxutils import escape

    import matplotlib as mpl

    out = io.StringIO()
    labelled = figure.findobj(lambda artist: hasattr(artist, "graphattn_label"))
    before = [artist.get_gid() for artist in labelled]
    try:
        for k, artist in enumerate(labelled):
            artist.set_gid(f"label_{k}")
        with mpl.rc_context({"svg.hashsalt": "graphattn", "text.usetex": False}):
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, **options)
    finally:
        for artist, gid in zip(labelled, before, strict=True):
            artist.set_gid(gid)
    text = out.getvalue()
    for k, artist in enumerate(labelled):
        group = f'<g id="label_{k}">'
        title = escape(for_xml(artist.graphattn_label))  # type: ignore[attr-defined]
        text = text.replace(group, f"{group}<title>{title}</title>", 1)
    return text


def figure_of(picture: Any) -> Figure:
    if isinstance(picture, np.ndarray):
        picture = picture.flat[0]
    return picture if hasattr(picture, "savefig") else picture.figure
