"""`draw`: one graph, one Axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graphattn.draw import arrows, layouts, matrix, palette
from graphattn.draw.text import columns, drawn, labels_of
from graphattn.draw.view import View, view_of
from graphattn.graph import Graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYOUTS = ("auto", "matrix", "circle", "line", "columns")
MAX_FORCE_NODES = 300  # Kamada-Kawai takes 9 s at 256 nodes and grows faster than their square

_READS = "arrow: source → target that reads it"


def draw(
    graph: Graph,
    weights: Any = None,
    layout: str | Mapping[int, Any] | Sequence[Any] | Callable[..., Any] = "auto",
    ax: Axes | None = None,
    *,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
    batch: int | None = None,
    head: int | None = None,
    title: str | None = None,
    highlight: int | None = None,
    max_edges: int | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
    measure: str = "attention weight",
    color_bar: bool = True,
) -> Axes:
    """Draw a graph as arrows or as a matrix, and return the Axes.

    Args:
        graph: `(T_q, T_kv)`, or with leading axes `(B, H)`.
        weights: None, or one finite number per edge in edge order (`ga.weights` returns them): `(E,)`, `(H, E)` or
            `(B, H, E)`; width and colour of an arrow, colour of a cell.
        layout: "matrix" (row 0 on top), "circle", "line" (arcs: reading the past above, the future below), "columns"
            (sources left, targets right: for rectangles), a mapping node -> (x, y) or an `(n, 2)` array, or a networkx
            layout such as `networkx.spring_layout`.  For a rectangle, given positions are a pair (targets, sources).
            "auto": arrows while they are readable, else the matrix.
        ax: where to draw; a new figure outside pyplot without it (`ax.figure`; `save(ax, path)` writes it).
        labels, source_labels: one per target and per source, any objects; a square graph needs one sequence only.
        batch, head: which index of the leading axes; without it the mean over the axis, and the picture says so.
        highlight: a target whose edges stand out.
        max_edges: the most arrows drawn (default 600).  Beyond it the heaviest are kept, without weights an even
            sample, and the picture says so.
        vmin, vmax, measure, color_bar: the colour scale, what the numbers are, and whether to show it.
    Returns:
        The Axes.  A matrix beyond 512 nodes is drawn as the density of tiles, computed from runs.
    Raises:
        ValueError: sizes that do not fit; more than 200 nodes as arrows (300 for a networkx layout).
    """
    import matplotlib as mpl

    view = view_of(graph, weights, batch, head, measure)
    target_labels, source_labels_ = labels_of(view.graph, labels, source_labels)
    kind = _choose(view, layout)
    with mpl.rc_context({"text.usetex": False}):
        if ax is None:
            ax = palette.new_axes(*_size(kind, view, target_labels))
        if kind == "matrix":
            note = matrix.draw_matrix(
                ax, view, target_labels, source_labels_, vmin=vmin, vmax=vmax, color_bar=color_bar
            )
            if highlight is not None:
                _frame_row(ax, view.graph, _node(highlight, view.graph.t, "highlight"))
        else:
            note = _draw_arrows(
                ax, view, kind, layout, target_labels, source_labels_, highlight, max_edges, vmin, vmax, color_bar
            )
        _title(ax, view, title, note)
    return ax


def _choose(view: View, layout: Any) -> str:
    t, s, e = view.graph.t, view.graph.s, view.graph.num_edges
    if not isinstance(layout, str):
        return "given"
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known: use one of {', '.join(LAYOUTS)}, positions, or a networkx layout")
    if layout == "auto":
        if 0 in (t, s) or max(t, s) > 16 or e > 90:
            return "matrix"
        return "circle" if t == s else "columns"
    if layout != "columns" and layout != "matrix" and t != s:
        raise ValueError(f"a {layout} needs as many targets as sources, got {view.graph!r}: use layout='columns' or 'matrix'")
    return layout


def _size(kind: str, view: View, labels: list[str] | None) -> tuple[float, float]:
    t, s = view.graph.t, view.graph.s
    if kind == "matrix":
        if not t or not s:
            return 5.0, 4.0
        ratio = min(max(t / s, 0.3), 3.0)
        return (7.2, max(3.2, 6.2 * ratio)) if ratio <= 1 else (max(4.0, 7.2 / ratio + 1.2), 8.0)
    if kind == "line":
        return max(6.0, min(14.0, 0.62 * t + 1.5)), 5.0
    return 7.2, 7.0


def _title(ax: Axes, view: View, title: str | None, note: str) -> None:
    name = repr(view.graph) if title is None else drawn(title, 80)
    small = ", ".join(x for x in (view.shown, note) if x)
    ax.set_title(name + (f"\n{small}" if small else ""), fontsize=11, color=palette.INK)


def _node(i: int, n: int, what: str) -> int:
    if not 0 <= i < n:
        raise ValueError(f"{what} {i} is out of range: there are {n} targets")
    return i


def _frame_row(ax: Axes, graph: Graph, row: int) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((-0.5, row - 0.5), graph.s, 1, fill=False, edgecolor=palette.TARGET, linewidth=2, zorder=5))


def _draw_arrows(
    ax: Axes,
    view: View,
    kind: str,
    layout: Any,
    target_labels: list[str] | None,
    source_labels: list[str] | None,
    highlight: int | None,
    max_edges: int | None,
    vmin: float | None,
    vmax: float | None,
    color_bar: bool,
) -> str:
    graph = view.graph
    limit = MAX_FORCE_NODES if callable(layout) else arrows.MAX_NODES
    if max(graph.t, graph.s) > limit:
        raise ValueError(
            f"{graph!r} is too large for arrows, which are readable up to {limit} nodes: use layout='matrix', "
            f"or draw a part such as graph[:{limit // 4}, :{limit // 4}]"
        )
    pick, note = _pick(view, arrows.MAX_ARROWS if max_edges is None else max_edges)
    target, source = (x[pick].numpy() for x in view.edges())
    value = None if view.value is None else view.value[pick].numpy()

    two_columns = kind == "columns" or (kind == "given" and graph.t != graph.s)
    source_at, target_at, curve, outside = _places(graph, kind, layout, view)
    tl = target_labels or [str(i) for i in range(graph.t)]
    sl = source_labels or [str(j) for j in range(graph.s)]
    radius = _radius(source_at, target_at)

    if value is None:
        base = 1.4 if len(target) <= 60 else 0.9
        width, color = np.full(len(target), base), [palette.EDGE] * len(target)
        alpha = np.full(len(target), 0.9 if len(target) <= 120 else 0.55)
    else:
        norm, cmap = palette.scale(value, vmin, vmax)
        part = np.abs(np.asarray(norm(value), dtype=float).clip(0, 1) - (0.5 if norm.vmin == -norm.vmax else 0.0))  # type: ignore[operator]
        part = part * (2 if norm.vmin == -norm.vmax else 1)  # type: ignore[operator]
        width, color = 0.7 + 3.3 * part, [tuple(c) for c in cmap(norm(value))]
        alpha = np.full(len(target), 0.95)
    if highlight is not None:
        lit = target == _node(highlight, graph.t, "highlight")
        color = [palette.TARGET if on and value is None else c if on else palette.FAINT for c, on in zip(color, lit, strict=True)]
        alpha = np.where(lit, 1.0, 0.35)
        width = np.where(lit, width + 0.6, width * 0.8)
    items = list(zip(source.tolist(), target.tolist(), width.tolist(), color, alpha.tolist(), strict=True))
    arrows.draw_arrows(ax, items, source_at, target_at, radius, curve=curve)

    font = 10.0 if max(graph.t, graph.s) <= 16 else max(5.0, 11 - 0.12 * max(graph.t, graph.s))
    ring: str | list[str] = palette.INK
    if highlight is not None:
        ring = [palette.TARGET if i == highlight else palette.INK for i in range(graph.t)]
    if two_columns:
        arrows.draw_nodes(ax, source_at, sl, radius, outside="left", size=font, ring=palette.SOURCE)
        ring2 = [palette.TARGET] * graph.t
        arrows.draw_nodes(ax, target_at, tl, radius, outside="right", size=font, ring=ring2)
    else:
        arrows.draw_nodes(ax, target_at, tl, radius, outside=outside, size=font, ring=ring)
    _frame(ax, kind, two_columns, source_at, target_at, radius, sl, tl, items)
    if color_bar and value is not None and value.size:
        palette.color_bar(ax, norm, cmap, view.measure)
    return note


def _pick(view: View, limit: int) -> tuple[torch.Tensor, str]:
    """Which edges are drawn, and the words for it."""
    e = view.graph.num_edges
    if e <= limit:
        return torch.arange(e), ""
    if view.value is not None:
        keep = torch.topk(view.value.abs(), limit).indices.sort().values
        return keep, f"the {limit:,} heaviest of {e:,} edges"
    return (torch.arange(limit) * e) // limit, f"an even sample of {limit:,} of {e:,} edges"


Places = tuple[dict[int, layouts.Point], dict[int, layouts.Point], str, str]


def _places(graph: Graph, kind: str, layout: Any, view: View) -> Places:
    t, s = graph.t, graph.s
    if kind == "circle":
        at = layouts.circle(t)
        return at, at, "bend", "radial"
    if kind == "line":
        at = layouts.line(t)
        return at, at, "arc", "below"
    if kind == "columns":
        height = 0.5 * max(t, s)
        wide = max(1.6, 0.32 * max(t, s))
        return layouts.column(s, 0.0, height), layouts.column(t, wide, height), "straight", "right"
    if callable(layout):
        if t != s:
            raise ValueError(f"a networkx layout needs as many targets as sources, got {graph!r}: use layout='columns'")
        from graphattn.draw.formats import networkx_of

        at = layouts.from_networkx(layout, networkx_of(graph), t)
        return at, at, "bend", "radial"
    if t != s:
        if not isinstance(layout, Sequence) or len(layout) != 2:
            raise ValueError(f"{graph!r}: positions are a pair (of the {t} targets, of the {s} sources)")
        joint = [layouts.given(part, n, what) for part, n, what in zip(layout, (t, s), ("target", "source"), strict=True)]
        return joint[1], joint[0], "straight", "right"
    at = layouts.given(layout, t, "node")
    return at, at, "bend", "radial"


def _radius(source_at: dict[int, layouts.Point], target_at: dict[int, layouts.Point]) -> float:
    """A third of the smallest distance between two nodes, within reason."""
    at = np.array([*source_at.values(), *(p for p in target_at.values() if target_at is not source_at)])
    if len(at) < 2:
        return 0.2
    gap = np.sqrt(((at[:, None] - at[None]) ** 2).sum(-1))
    np.fill_diagonal(gap, np.inf)
    span = float((at.max(0) - at.min(0)).max()) or 1.0
    return float(min(max(gap.min() * 0.3, 0.008 * span), 0.09 * span if len(at) > 3 else 0.14 * span))


def _frame(
    ax: Axes,
    kind: str,
    two_columns: bool,
    source_at: dict[int, layouts.Point],
    target_at: dict[int, layouts.Point],
    radius: float,
    sl: list[str],
    tl: list[str],
    items: list[arrows.Arrow],
) -> None:
    ax.set_aspect("equal", adjustable="box")
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_xticks([])
    ax.set_yticks([])
    points = [*source_at.values(), *target_at.values()]
    if not points:
        ax.text(0.5, 0.5, "no nodes", ha="center", va="center", transform=ax.transAxes)
        return
    if kind == "line":
        up = max((arrows.arc_height(abs(a[0] - a[1])) * 0.76 for a in items if a[0] < a[1]), default=0.0)
        down = max((arrows.arc_height(abs(a[0] - a[1])) * 0.76 for a in items if a[0] > a[1]), default=0.0)
        down = max(down, 3.2 * radius if any(a[0] == a[1] for a in items) else 0.0)
        (x0, _), (x1, _) = points[0], points[-1]
        ax.set_xlim(min(x0, x1) - 0.8, max(x0, x1) + 0.8)
        ax.set_ylim(-down - 0.5, up + 0.6)
        ax.set_xlabel("position     (" + _READS + "; past above, future below)", fontsize=9)
        return
    margin = 4.2 * radius if any(a[0] == a[1] for a in items) else 2.2 * radius
    arrows.bounds(ax, points, margin)
    if two_columns and kind == "columns":
        top = max(y for _, y in points) + 3.0 * radius
        for at, name, color in ((source_at, "source (key)", palette.SOURCE), (target_at, "target (query)", palette.TARGET)):
            if at:
                ax.text(at[0][0], top, name, ha="center", va="bottom", fontsize=10, color=color)
        ax.set_ylim(top=top + 3 * radius)
    ax.set_xlabel(_READS, fontsize=9)
