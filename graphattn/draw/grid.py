"""Small multiples: heads and layers, or several graphs, side by side on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphattn.draw import matrix, palette
from graphattn.draw.picture import ARROW, draw_view
from graphattn.draw.text import drawn, drawn_title, labels_of, safe_fonts
from graphattn.draw.view import View, edge_values, view_of
from graphattn.graph import Graph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS, MAX_COLUMNS = 16, 16
MAX_PANELS = 36  # axes of their own, a tenth of a second each; more become tiles of one image
MAX_GRID = 64


def draw_grid(
    graphs: Graph | Sequence[Graph],
    weights: Any = None,
    *,
    titles: Sequence[str] | None = None,
    columns: int | None = None,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
    layout: str = "matrix",
    title: str | None = None,
    measure: str = "attention weight",
    vmax: float | None = None,
) -> Figure:
    """Several pictures on one scale.

    Args:
        graphs: a list, or one graph: then a panel per index of its leading axes and per head of its weights.
        weights: for a list, one entry per graph (None or what `draw` takes); for one graph, what `draw` takes.
        titles: one per panel.
        columns: panels per row; by default as square as it gets, at most 4 (one row per batch entry if there are
            both batch and heads).
    Returns:
        A `matplotlib.figure.Figure` outside pyplot; `figure.axes` are the panels, row by row.
    Raises:
        ValueError: more than 64 panels, or what `draw` raises.
    """
    views: list[View] = []
    if isinstance(graphs, Graph):
        graph = graphs
        lead = graph.lead or (1, 1)
        free = (1, 1) if weights is None else tuple(edge_values(graph, weights).shape[:2])
        nb, nh = (max(a, b) for a, b in zip(lead, free, strict=True))
        _limit(nb * nh, f"{nb} batch entries x {nh} heads")
        names = []
        for b in range(nb):
            for h in range(nh):
                views.append(view_of(graph, weights, b if nb > 1 else None, h if nh > 1 else None, measure))
                names.append(views[-1].shown or repr(graph))
        columns = columns or (nh if nb > 1 and nh > 1 else None)
    else:
        graphs = list(graphs)
        _limit(len(graphs), f"{len(graphs)} graphs")
        each = [None] * len(graphs) if weights is None else list(weights)
        if len(each) != len(graphs):
            raise ValueError(f"weights has {len(each)} entries, but there are {len(graphs)} graphs: one for each")
        views = [view_of(g, w, measure=measure) for g, w in zip(graphs, each, strict=True)]
        names = [repr(g) for g in graphs]
    if not views:
        raise ValueError("draw_grid needs at least one graph")
    if titles is not None and len(titles) != len(views):
        raise ValueError(f"titles has {len(titles)} entries, but there are {len(views)} panels: one for each")
    names = names if titles is None else [drawn(t, 40) for t in titles]
    if columns is None:
        columns = min(4, int(np.ceil(np.sqrt(len(views)))))
    rows = -(-len(views) // columns)
    return _panels(views, names, rows, columns, labels, source_labels, layout, title, vmax, None)


def draw_attention(
    tokens: Sequence[object],
    graphs: Graph | Sequence[Graph],
    weights: Sequence[Any],
    *,
    source_tokens: Sequence[object] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    layout: str = "matrix",
    title: str | None = None,
    vmax: float | None = 1.0,
) -> Figure:
    """What a trained model attends to: a row of panels per layer, a column per head.

    Args:
        tokens: `T_q` labels of the targets (and of the sources, when there are as many).
        graphs: one per layer, or one for all.
        weights: one entry per layer, `(H, E)`, `(1, H, E)` or `(E,)` in edge order, as `head.weights` returns them.
        source_tokens: `T_kv` labels of the sources, for cross-attention.
        layers, heads: which of them; all by default.  Layers count from 1, as in `find_leak`; heads are indices.
        layout: as in `draw`; "matrix" and "columns" suit small panels.
        vmax: the darkest weight; 1 by default, so that pictures compare; None for the largest weight shown.
    Returns:
        A Figure outside pyplot; `save(figure, path)` writes it.
    Raises:
        ValueError: more than 16 layers or heads at once, or more than 36 panels of arrows; sizes that do not fit.
    """
    each = [graphs] * len(weights) if isinstance(graphs, Graph) else list(graphs)
    if len(each) != len(weights):
        raise ValueError(f"weights has {len(weights)} layers, but there are {len(each)} graphs: one for each")
    if not each:
        raise ValueError("draw_attention needs at least one layer")
    pick_layers = list(range(1, len(each) + 1)) if layers is None else list(layers)
    views: list[list[View]] = []
    count = 0
    for k in pick_layers:
        if not 1 <= k <= len(each):
            raise ValueError(f"layer {k} is out of range: there are {len(each)}, numbered from 1")
        graph, weight = each[k - 1], weights[k - 1]
        values, lead = edge_values(graph, weight), graph.lead or (1, 1)
        n, samples = max(values.shape[1], lead[1]), max(values.shape[0], lead[0])
        if samples > 1:
            raise ValueError(
                f"layer {k} holds a batch of {samples}: choose one, weights[{k - 1}][b] or graph.select(b)"
            )
        pick = list(range(n)) if heads is None else list(heads)
        for h in pick:
            if not 0 <= h < n:
                raise ValueError(f"head {h} is out of range: layer {k} has {n}, numbered from 0")
        count = max(count, len(pick))
        if lead[1] > 1:
            views.append([view_of(graph, weight, None, h) for h in pick])
        else:
            plain = view_of(graph).graph
            views.append([View(plain, values[0, h], "attention weight", "") for h in pick])
    rows, columns = len(views), count
    if rows > MAX_ROWS or columns > MAX_COLUMNS or not rows or not columns:
        raise ValueError(
            f"{rows} layers x {columns} heads cannot be read in one picture: choose 1 to {MAX_ROWS} with layers=[...] "
            f'and 1 to {MAX_COLUMNS} with heads=[...], or write the interactive page with export("page.html", ...)'
        )
    flat: list[View | None] = []
    for line in views:
        flat += [*line, *([None] * (columns - len(line)))]
    names = [f"head {h}" for h in (range(columns) if heads is None else heads)]
    sides = [f"layer {k}" for k in pick_layers]
    shapes = {v.graph.shape for line in views for v in line}
    if rows * columns > MAX_PANELS:
        if layout != "matrix" or len(shapes) != 1:
            raise ValueError(
                f"{rows} layers x {columns} heads are more than {MAX_PANELS} panels, which needs layout='matrix' "
                "and graphs of one size: choose some with layers=[...] and heads=[...]"
            )
        return _mosaic(views, names, sides, title, vmax)
    return _panels(flat, names, rows, columns, tokens, source_tokens, layout, title, vmax, sides)


def _limit(panels: int, what: str) -> None:
    if panels > MAX_GRID:
        raise ValueError(f"{what} are {panels:,} panels, more than {MAX_GRID}: draw some of them")


def _panels(
    views: Sequence[View | None],
    names: Sequence[str],
    rows: int,
    columns: int,
    labels: Sequence[object] | None,
    source_labels: Sequence[object] | None,
    layout: str,
    title: str | None,
    vmax: float | None,
    sides: Sequence[str] | None,
) -> Figure:
    """`sides` given: columns share `names`, rows are named by `sides`; else every panel has its own name."""
    import matplotlib as mpl

    shown = [v for v in views if v is not None]
    scale, bar_of = _one_scale(shown, layout, vmax)
    t, s = max(v.graph.t for v in shown), max(v.graph.s for v in shown)
    ratio = min(max(t / s, 0.4), 2.5) if t and s else 1.0
    width = 8.0 if columns > 1 else 5.0
    panel = (width - 1.5) / columns
    with mpl.rc_context(safe_fonts(labels, source_labels, names, [title or ""])):
        figure = palette.new_figure(width, min(40.0, rows * (panel * ratio + (0.12 if sides else 0.4)) + 1.0))
        grid = figure.subplots(rows, columns, squeeze=False)
        small = panel < 1.6
        most = max(t, s)
        named = most * 0.075 <= panel  # at 5 points a name needs 7 pixels of the figure's 100 an inch
        for k, (ax, view) in enumerate(zip(grid.flat, [*views, *[None] * (grid.size - len(views))], strict=True)):
            if view is None:
                ax.set_axis_off()
                continue
            row, column = divmod(k, columns)
            lowest = k + columns >= len(views) or views[k + columns] is None
            if layout == "matrix":
                tl, sl = labels_of(view.graph, labels, source_labels)
                matrix.draw_matrix(ax, view, tl, sl, scale=scale, color_bar=False, compact=True)
                if not named:
                    _few_ticks(ax, view, small)
                elif labels is not None:
                    for tick in (*ax.get_xticklabels(), *ax.get_yticklabels()):
                        tick.set_fontsize(max(5.0, min(7.5, 58 * panel / most)))
                alike = sides is not None or len({v.graph.shape for v in shown}) == 1
                if alike and column:
                    ax.set_ylabel("")
                    ax.set_yticklabels([])
                if alike and not lowest:
                    ax.set_xlabel("")
                    ax.set_xticklabels([])
            else:
                draw_view(
                    view,
                    layout,
                    ax,
                    *labels_of(view.graph, labels, source_labels),
                    scale=scale,
                    color_bar=False,
                    compact=True,
                )
            size = 9 if panel > 1.1 else 6.5
            ax.set_title(names[k] if sides is None else names[column] if row == 0 else "", fontsize=size)
            if sides is not None and column == 0:
                mark = f"{sides[row]}\n" + (ax.get_ylabel() if layout == "matrix" else "")
                ax.set_ylabel(mark, fontsize=size)
        if bar_of is not None:
            from matplotlib.cm import ScalarMappable

            norm, cmap, label = bar_of
            bar = figure.colorbar(
                ScalarMappable(norm, cmap),
                ax=grid,
                shrink=min(1.0, 2.2 / rows + 0.25),
                fraction=0.03,
                pad=0.01,
                aspect=25,
            )
            bar.set_label(label, fontsize=9)
            bar.ax.tick_params(labelsize=8)
            bar.outline.set_edgecolor(palette.FAINT)  # type: ignore[operator]
        if title is not None:
            figure.suptitle(drawn_title(title), fontsize=12)
        if layout != "matrix":
            figure.supxlabel(
                "arrow: source (left) → target that reads it (right)" if layout == "columns" else ARROW, fontsize=9
            )
    return figure


def _one_scale(
    shown: Sequence[View], layout: str, vmax: float | None
) -> tuple[palette.Scale, tuple[Any, Any, str] | None]:
    """The colours all panels share, and the bar beside them: none where every cell is an edge or none."""
    pooled: dict[bool, list[np.ndarray]] = {True: [], False: []}
    labels: dict[bool, str] = {}
    sizes: set[int] = set()
    for v in shown:
        plain = v.value is None
        if layout == "matrix" and v.graph.t and v.graph.s:
            data, size = matrix.shades(v, compact=True)
            sizes.add(size)
            if size > 1 or not plain:
                pooled[plain].append(data.compressed())
                labels.setdefault(plain, v.measure if size == 1 else matrix.tile_label(v))
        elif v.value is not None:
            pooled[False].append(v.value.numpy())
            labels.setdefault(False, v.measure)
    made = {
        plain: palette.scale(np.concatenate([np.zeros(0), *parts]), None, None if plain else vmax, density=plain)
        for plain, parts in pooled.items()
    }

    def scale(value: np.ndarray, *, density: bool = False) -> tuple[Any, Any]:
        return made[density]

    for plain in (False, True):
        if any(x.size for x in pooled[plain]):
            norm, cmap = made[plain]
            side = max(sizes, default=1)
            note = f"\neach cell is a tile of {side} x {side} pairs" if sizes == {side} and side > 1 else ""
            return scale, (norm, cmap, palette.bar_label(norm, labels[plain]) + note)
    return scale, None


def _mosaic(
    views: Sequence[Sequence[View]], names: Sequence[str], sides: Sequence[str], title: str | None, vmax: float | None
) -> Figure:
    """All heads and layers as tiles of one image."""
    import matplotlib as mpl

    t, s = views[0][0].graph.shape
    size = matrix.tile_size(t, s, 96) if max(t, s) > 96 else 1
    note = f"{s} sources from left to right, {t} targets from top to bottom"
    if size > 1:
        note += f", {size} x {size} pairs a cell"
    cells = [[matrix.cells(v) if size == 1 else matrix.tile_mass(v, size) for v in line] for line in views]
    t, s = cells[0][0].shape
    rows, columns, gap = len(views), max(len(line) for line in views), max(1, round(max(t, s) / 12))
    high, wide = t + gap, s + gap
    image = np.ma.MaskedArray(np.zeros((rows * high - gap, columns * wide - gap)), mask=True)
    for r, line in enumerate(cells):
        for c, part in enumerate(line):
            image[r * high : r * high + t, c * wide : c * wide + s] = part
    norm, cmap = palette.scale(image.compressed(), None, vmax)
    with mpl.rc_context(safe_fonts([title or ""])):
        figure = palette.new_figure(8.0, min(12.0, 6.6 * image.shape[0] / image.shape[1] + 1.2))
        ax = figure.add_subplot()
        ax.imshow(image, cmap=cmap, norm=norm, interpolation="antialiased")
        for r in range(rows):
            for c in range(columns):
                frame = (c * wide - 0.5, r * high - 0.5)
                ax.add_patch(mpl.patches.Rectangle(frame, s, t, fill=False, edgecolor=palette.FAINT, linewidth=0.6))
        short = [n.removeprefix("head ") for n in names]
        ax.set_xticks([c * wide + (s - 1) / 2 for c in range(columns)], short, fontsize=9)
        ax.set_yticks([r * high + (t - 1) / 2 for r in range(rows)], sides, fontsize=9)
        ax.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
        for edge in ax.spines.values():
            edge.set_visible(False)
        ax.set_title("head", fontsize=10)
        ax.set_xlabel(f"within a tile: {note}", fontsize=9)
        palette.color_bar(ax, norm, cmap, views[0][0].measure)
        if title is not None:
            figure.suptitle(drawn_title(title), fontsize=12)
    return figure


def _few_ticks(ax: Any, view: View, small: bool) -> None:
    """First and last number only: token names would overlap at this size."""
    for put, n in ((ax.set_xticks, view.graph.s), (ax.set_yticks, view.graph.t)):
        put(
            [0, n - 1] if n > 1 else [0] if n else [],
            fontsize=6 if small else 7,
            labels=["0", str(n - 1)] if n > 1 else ["0"] if n else [],
        )
