"""The graph as a matrix: one row per target, the first on top; and, when it is too large, how full each tile is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from graphattn.audit.page import density_map
from graphattn.draw import palette
from graphattn.draw.text import columns, drawn, keep_label
from graphattn.draw.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# targets or sources up to which every cell is drawn, and tiles along the longer axis beyond that: in a picture of its
# own, and for edges in a small panel, where a cell must not be thinner than a pixel either
MAX_CELLS, TILES = 512, 256
MAX_SMALL_CELLS, SMALL_TILES = 192, 64
MAX_NAMED = 48  # labels along an axis up to which each is written


def cells(view: View) -> np.ma.MaskedArray:
    """`(t, s)`: the mask as 0/1, or the value of each edge with the rest masked out."""
    target, source = (x.numpy() for x in view.edges())
    shape = (view.graph.t, view.graph.s)
    edge = np.zeros(shape, dtype=bool)
    edge[target, source] = True
    if view.value is None:
        return np.ma.MaskedArray(edge.astype(np.uint8), mask=np.zeros(shape, dtype=bool))
    out = np.zeros(shape)
    out[target, source] = view.value.numpy()
    return np.ma.MaskedArray(out, mask=~edge)


def tile_size(t: int, s: int, tiles: int = TILES) -> int:
    """Side of a square tile, a power of two, so that the longer axis has at most `tiles`."""
    size = 1
    while max(t, s) > size * tiles:
        size *= 2
    return size


def tile_density(view: View, size: int) -> np.ndarray:
    """`(tiles of targets, tiles of sources)`: the share of cells that are edges, exactly, in O(runs).

    With a value per edge: the value that one target of the tile's rows gives to the tile, on average.
    """
    graph = view.graph
    rows, cols = -(-graph.t // size), -(-graph.s // size)
    if view.value is not None:
        total = torch.zeros(rows * cols, dtype=torch.float64)
        target, source = view.edges()
        total.index_add_(0, torch.div(target, size, rounding_mode="floor") * cols + source // size, view.value)
        height = torch.full((rows,), float(size), dtype=torch.float64)
        height[-1] = graph.t - (rows - 1) * size
        return (total.view(rows, cols) / height[:, None]).numpy()
    return density_map(graph, size)


def tile_mass(view: View, size: int) -> np.ma.MaskedArray:
    """`tile_density`, with tiles that have no edge masked out."""
    return np.ma.masked_where(tile_density(replace(view, value=None), size) == 0, tile_density(view, size))


def shades(view: View, compact: bool = False) -> tuple[np.ma.MaskedArray, int]:
    """What `draw_matrix` colours, masked where there is no edge, and the side of its tiles, 1 for every cell."""
    t, s = view.graph.t, view.graph.s
    if max(t, s) <= (MAX_SMALL_CELLS if compact and view.value is None else MAX_CELLS):
        return cells(view), 1
    size = tile_size(t, s, SMALL_TILES if compact else TILES)
    return tile_mass(view, size), size


def tile_label(view: View) -> str:
    """What the number of a tile is."""
    if view.value is None:
        return "share of a tile's cells that are edges"
    return f"{view.measure}, summed over a tile per target"


def draw_matrix(
    ax: Axes,
    view: View,
    target_labels: list[str] | None,
    source_labels: list[str] | None,
    *,
    scale: palette.Scale,
    color_bar: bool,
    compact: bool = False,
) -> str:
    """Fill the axes; returns the words a reader needs beside the title (empty when every cell is shown as it is)."""
    from matplotlib.colors import ListedColormap, Normalize

    graph = view.graph
    t, s = graph.t, graph.s
    if t == 0 or s == 0:
        ax.text(
            0.5, 0.5, f"{t} targets, {s} sources:\nno cell to draw", ha="center", va="center", transform=ax.transAxes
        )
        ax.set_xticks([])
        ax.set_yticks([])
        _axes_names(ax, compact)
        return ""
    data, size = shades(view, compact)
    tiled = size > 1
    extent = (-0.5, data.shape[1] * size - 0.5, data.shape[0] * size - 0.5, -0.5)
    if tiled:
        norm, cmap = scale(data.compressed(), density=view.value is None)
        label, note = tile_label(view), f"each cell is a tile of {size} x {size} pairs"
    elif view.value is None:
        norm, cmap = Normalize(0, 1), ListedColormap([palette.NO_EDGE, palette.EDGE])
        label, note = "", ""
    else:
        norm, cmap = scale(data.compressed())
        label, note = view.measure, ""
    # smoothing would mix a tile that holds few edges with the white beside it
    how = "nearest" if tiled else "antialiased"
    ax.imshow(data, cmap=cmap, norm=norm, origin="upper", interpolation=how, extent=extent, aspect="equal")
    ax.set_xlim(-0.5, s - 0.5)
    ax.set_ylim(t - 0.5, -0.5)
    limit = 24 if compact else MAX_NAMED
    _ticks(ax, "y", t, target_labels, limit, compact)
    _ticks(ax, "x", s, source_labels, limit, compact)
    if max(t, s) <= (16 if compact else 64) and not tiled:
        ax.set_xticks(np.arange(s + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(t + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="#dfe3e8", linewidth=0.6)
        ax.tick_params(which="minor", length=0)
    for side in ax.spines.values():
        side.set_edgecolor(palette.FAINT)
    _axes_names(ax, compact)
    if color_bar and label:
        palette.color_bar(ax, norm, cmap, label)
    return note


def _axes_names(ax: Axes, compact: bool) -> None:
    ax.set_xlabel("source" if compact else "source (key) that is read", fontsize=8 if compact else 10)
    ax.set_ylabel("target" if compact else "target (query) that reads", fontsize=8 if compact else 10)


def _ticks(ax: Axes, axis: str, n: int, labels: list[str] | None, limit: int, compact: bool) -> None:
    size = 10.0 if n <= 16 else max(5.5, 10.5 - 0.11 * n)
    size = max(5.0, size - 2.5) if compact else size
    if labels is not None and n <= limit:
        name_ticks(ax, axis, labels, size)
    elif n <= 16 and not compact:
        name_ticks(ax, axis, [str(i) for i in range(n)], size)
    else:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        which = ax.xaxis if axis == "x" else ax.yaxis
        which.set_major_locator(MaxNLocator(nbins=4 if compact else 8, integer=True, min_n_ticks=1))
        which.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        turn = {"labelrotation": 30} if axis == "x" and n > 9999 else {}
        ax.tick_params(axis=axis, labelsize=7 if compact else 9, **turn)  # type: ignore[arg-type]


def name_ticks(ax: Axes, axis: str, labels: list[str], size: float) -> None:
    """A tick per node with its label, on its side if it is wider than its place."""
    text = [drawn(x) for x in labels]
    n = len(text)
    wide = max((columns(x) for x in text), default=1) > (3 if n <= 16 else 2)
    put = ax.set_xticks if axis == "x" else ax.set_yticks
    put(range(n), text, fontsize=size, rotation=90 if axis == "x" and wide else 0)
    for tick, label in zip(ax.get_xticklabels() if axis == "x" else ax.get_yticklabels(), labels, strict=True):
        keep_label(tick, label)
