"""`draw`: one graph, one Axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graphattn.draw import arrows, layouts, matrix, palette
from graphattn.draw.text import columns, drawn, drawn_title, keep_label, labels_of, safe_fonts
from graphattn.draw.view import View, view_of
from graphattn.graph import Graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Layout = str | Mapping[int, Any] | Sequence[Any] | np.ndarray | torch.Tensor | Callable[..., Any]

LAYOUTS = ("auto", "matrix", "circle", "line", "columns")
ARROW = "arrow: source → target that reads it"


def draw(
    graph: Graph,
    weights: Any = None,
    layout: Layout = "auto",
    ax: Axes | None = None,
    *,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
    batch: int | None = None,
    head: int | None = None,
    title: str | None = None,
    highlight: int | None = None,
    max_edges: int = arrows.MAX_ARROWS,
    vmin: float | None = None,
    vmax: float | None = None,
    measure: str = "attention weight",
    color_bar: bool | None = None,
) -> Axes:
    """Draw a graph as arrows or as a matrix, and return the Axes.

    Args:
        graph: `(T_q, T_kv)`, or with leading axes `(B, H)`.
        weights: None, or one finite number per edge in edge order (`ga.weights` returns them): `(E,)`, `(H, E)` or
            `(B, H, E)`; an axis the graph owns is inside E.  Width and colour of an arrow, colour of a cell.
        layout: "matrix" (row 0 on top), "circle", "line" (arcs: reading the past above, the future below), "columns"
            (sources left, targets right: for rectangles), positions as a mapping node -> (x, y) or an `(n, 2)` array,
            or a networkx layout such as `networkx.spring_layout`.  For a rectangle, positions are a pair (of targets,
            of sources).  "auto": arrows up to 16 nodes and 90 edges, else the matrix.
        ax: where to draw.  Without it a new figure outside pyplot: `save(ax, path)` writes it, `ax.figure` is it.
        labels, source_labels: one per target and one per source, any objects; one sequence serves a square graph.
        batch, head: which index of the leading axes.  Without it the mean over the axis, and the picture says so.
        title: text above; the graph's repr without it.
        highlight: a target whose edges stand out.
        max_edges: the most arrows drawn.  Of more, the heaviest are kept, without weights an even sample, and the
            picture says so.
        vmin, vmax, measure, color_bar: the colour scale, what the numbers are, and whether to show it (default: on a
            figure of its own; beside other Axes there is no room kept for it).

    Returns:
        The Axes.  A matrix beyond 512 nodes shows how full tiles are, computed from runs in O(runs).

    Raises:
        ValueError: sizes that do not fit; numbers that are not finite; more than 200 nodes as arrows (beyond them
            Kamada and Kawai's layout takes many seconds), which names the size and the way out.
    """
    view = view_of(graph, weights, batch, head, measure)
    names = labels_of(view.graph, labels, source_labels)
    return draw_view(
        view, layout, ax, *names, title=title, highlight=highlight, max_edges=max_edges, color_bar=color_bar,
        scale=partial(palette.scale, vmin=vmin, vmax=vmax),
    )  # fmt: skip


def draw_view(
    view: View,
    layout: Layout,
    ax: Axes | None,
    target_labels: list[str] | None,
    source_labels: list[str] | None,
    *,
    title: str | None = None,
    highlight: int | None = None,
    max_edges: int = arrows.MAX_ARROWS,
    scale: palette.Scale = palette.scale,
    color_bar: bool | None = None,
    compact: bool = False,
) -> Axes:
    """`draw` of what is already one graph; `compact` for a small panel."""
    import matplotlib as mpl

    graph = view.graph
    kind = _choose(graph, layout)
    color_bar = ax is None if color_bar is None else color_bar
    if highlight is not None and not 0 <= highlight < graph.t:
        raise ValueError(f"highlight {highlight} is out of range: {graph!r} has {graph.t} targets")
    with mpl.rc_context(safe_fonts(target_labels, source_labels, [title or ""])):
        if kind == "matrix":
            ax = palette.new_axes(*_matrix_size(graph)) if ax is None else ax
            note = matrix.draw_matrix(
                ax, view, target_labels, source_labels, scale=scale, color_bar=color_bar, compact=compact
            )
            if highlight is not None:
                _frame_row(ax, graph, highlight)
        else:
            scene = _scene(view, kind, layout, target_labels, source_labels, max_edges, compact)
            ax = palette.new_axes(*scene.size(view)) if ax is None else ax
            _draw_scene(ax, view, scene, highlight, scale, color_bar, compact)
            note = scene.note
        name = (view.name or repr(graph)) if title is None else drawn_title(title)
        small = ", ".join(x for x in (view.shown, note) if x)
        shown = "\n".join(x for x in (name, small) if x)
        heading = ax.set_title(shown, fontsize=8 if compact else 11, color=palette.INK)
        if title is not None:
            keep_label(heading, "\n".join(x for x in (title, small) if x))
    return ax


def _choose(graph: Graph, layout: Any) -> str:
    t, s = graph.t, graph.s
    if not isinstance(layout, str):
        return "given"
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}: use one of {', '.join(LAYOUTS)}, positions, or a networkx layout")
    if layout == "auto":
        if 0 in (t, s) or max(t, s) > 16 or graph.num_edges > 90:
            return "matrix"
        return "circle" if t == s else "columns"
    if layout in ("circle", "line") and t != s:
        raise ValueError(f"a {layout} needs as many targets as sources, got {graph!r}: use 'columns' or 'matrix'")
    return layout


def _matrix_size(graph: Graph) -> tuple[float, float]:
    if not graph.t or not graph.s:
        return 5.0, 4.0
    ratio = min(max(graph.t / graph.s, 0.3), 3.0)
    return (7.2, max(3.2, 6.2 * ratio)) if ratio <= 1 else (max(4.0, 7.2 / ratio + 1.2), 8.0)


def _frame_row(ax: Axes, graph: Graph, row: int) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((-0.5, row - 0.5), graph.s, 1, fill=False, edgecolor=palette.TARGET, linewidth=2, zorder=5))


# ---------------------------------------------------------------------- arrows


@dataclass
class _Scene:
    """Where everything of an arrow picture stands, before a figure exists."""

    kind: str
    source_at: dict[int, layouts.Point]
    target_at: dict[int, layouts.Point]
    target: np.ndarray
    source: np.ndarray
    value: np.ndarray | None
    target_labels: list[str]
    source_labels: list[str]
    note: str
    inside: bool
    radius: float
    loop: float
    bend: float

    @property
    def one_set(self) -> bool:
        return self.source_at is self.target_at

    @property
    def looped(self) -> set[int]:
        return set(self.target[self.target == self.source].tolist()) if self.one_set else set()

    def heights(self) -> tuple[float, float]:
        """How far the arcs of a line reach above and below it."""
        d = self.target - self.source
        above, below = (0.76 * arrows.arc_height(int(x.max())) if x.size else 0.0 for x in (d[d > 0], -d[d < 0]))
        return max(above, self.radius) + 0.15, max(below, self.loop if self.looped else self.radius) + 0.15

    def size(self, view: View) -> tuple[float, float]:
        if self.kind != "line":
            return 7.2, 7.0
        longest = 0 if self.inside else max(columns(drawn(x)) for x in self.target_labels)
        named = 0.0 if self.inside else 0.35 + (0.085 * longest if longest > 3 else 0.0)
        return 8.0, min(10.0, 6.8 * sum(self.heights()) / max(len(self.target_at), 1) + 1.2 + named)


def _scene(
    view: View,
    kind: str,
    layout: Any,
    target_labels: list[str] | None,
    source_labels: list[str] | None,
    max_edges: int,
    compact: bool,
) -> _Scene:
    graph = view.graph
    limit = arrows.MAX_NODES
    if max(graph.t, graph.s) > limit:
        raise ValueError(
            f"{graph!r} is too large for arrows, which are drawn up to {limit} nodes: use layout='matrix', "
            f"or draw a part such as graph[:{limit // 4}, :{limit // 4}]"
        )
    pick, note = _pick(view, max_edges)
    if max(graph.t, graph.s) > arrows.MAX_NAMED:
        note = f"{note}{', ' if note else ''}nodes unnamed"
    target, source = (x[pick].numpy() for x in view.edges())
    source_at, target_at = _places(graph, kind, layout)
    tl = target_labels or [str(i) for i in range(graph.t)]
    sl = source_labels or [str(j) for j in range(graph.s)]
    base = arrows.node_radius(source_at, *([] if target_at is source_at else [target_at]))
    inside = arrows.fits_inside(sl + tl) and not (compact and kind == "columns")
    return _Scene(
        kind=kind,
        source_at=source_at,
        target_at=target_at,
        target=target,
        source=source,
        value=None if view.value is None else view.value[pick].numpy(),
        target_labels=tl,
        source_labels=sl,
        note=note,
        inside=inside,
        radius=base if inside else 0.6 * base,
        loop=(2.0 if kind == "line" else 2.3) * base,
        # positions on a grid put nodes on the straight way between others
        bend=0.1 if kind == "given" and not callable(layout) and graph.t == graph.s else 0.0,
    )


def _pick(view: View, limit: int) -> tuple[torch.Tensor, str]:
    """Which edges are drawn, and the words for it."""
    e = view.graph.num_edges
    if e <= limit:
        return torch.arange(e), ""
    if view.value is not None:
        keep = torch.topk(view.value.abs(), limit).indices.sort().values
        return keep, f"the {limit:,} heaviest of {e:,} edges"
    return (torch.arange(limit) * e) // max(limit, 1), f"an even sample of {limit:,} of {e:,} edges"


def _places(graph: Graph, kind: str, layout: Any) -> tuple[dict[int, layouts.Point], dict[int, layouts.Point]]:
    """Positions of sources and of targets; one dict where they are the same nodes."""
    t, s = graph.t, graph.s
    if kind == "columns":
        high = 0.5 * max(t, s)
        return layouts.column(s, 0.0, high), layouts.column(t, max(1.6, 0.32 * max(t, s)), high)
    if kind == "given" and t != s:
        if callable(layout):
            raise ValueError(f"a networkx layout needs as many targets as sources, got {graph!r}: use 'columns'")
        if not isinstance(layout, Sequence) or len(layout) != 2:
            raise ValueError(f"{graph!r}: positions are a pair (of the {t} targets, of the {s} sources)")
        return layouts.given_pair(layout[1], s, layout[0], t)
    if kind == "circle":
        at = layouts.circle(t)
    elif kind == "line":
        at = layouts.line(t)
    elif callable(layout):
        from graphattn.draw.formats import networkx_of

        at = layouts.given(layout(networkx_of(graph)), t, "node")
    else:
        at = layouts.given(layout, t, "node")
    return at, at


def _draw_scene(
    ax: Axes,
    view: View,
    scene: _Scene,
    highlight: int | None,
    scale: palette.Scale,
    color_bar: bool,
    compact: bool,
) -> None:
    graph, value = view.graph, scene.value
    n = len(scene.target)
    # thick arrows between nodes that stand close would hide them
    thin = min(1.0, max(0.45, 12 / max(graph.t, graph.s, 1))) * (0.6 if compact else 1.0)
    if value is None:
        width = np.full(n, thin * (1.4 if n <= 60 else 0.9))
        color: list[Any] = [palette.EDGE] * n
        alpha = np.full(n, 0.9 if n <= 120 else 0.55)
    else:
        norm, cmap = scale(value)
        part = np.asarray(norm(value), dtype=float).clip(0, 1)
        part = np.abs(2 * part - 1) if norm.vmin < 0 < norm.vmax else part  # type: ignore[operator]
        width, color = thin * (0.6 + 2.8 * part), [tuple(c) for c in cmap(norm(value))]
        alpha = np.full(n, 0.95)
    if highlight is not None:
        lit = scene.target == highlight
        own = [palette.TARGET] * n if value is None else color
        color = [c if on else palette.FAINT for c, on in zip(own, lit, strict=True)]
        alpha, width = np.where(lit, 1.0, 0.35), np.where(lit, width + 0.6, 0.8 * width)
    items = list(zip(scene.source.tolist(), scene.target.tolist(), width.tolist(), color, alpha.tolist(), strict=True))
    arrows.draw_arrows(
        ax, items, scene.source_at, scene.target_at, scene.radius, bend=scene.bend, loop=scene.loop,
        curve="arc" if scene.kind == "line" else "chord",
    )  # fmt: skip
    _draw_names(ax, graph, scene, highlight, compact)
    _frame(ax, scene, compact)
    if color_bar and value is not None and n:
        palette.color_bar(ax, norm, cmap, view.measure)


def _draw_names(ax: Axes, graph: Graph, scene: _Scene, highlight: int | None, compact: bool) -> None:
    most = max(graph.t, graph.s)
    size = 10.0 if most <= 16 else max(5.0, 11 - 0.12 * most)
    hide = most > arrows.MAX_NAMED
    size = size * 0.6 if compact else size
    target_ring = [palette.INK if scene.one_set else palette.TARGET] * graph.t
    target_fill = [palette.NODE] * graph.t
    if highlight is not None:
        target_ring[highlight], target_fill[highlight] = palette.TARGET, palette.TARGET_FILL
    away = "none" if scene.kind == "line" else "radial" if scene.one_set else "right"
    arrows.draw_nodes(
        ax, scene.target_at, scene.target_labels, scene.radius, size=size,
        side="none" if hide else "inside" if scene.inside else away,
        ring=target_ring, fill=target_fill, clear=scene.loop, looped=scene.looped,
    )  # fmt: skip
    if not scene.one_set:
        arrows.draw_nodes(
            ax, scene.source_at, scene.source_labels, scene.radius, size=size,
            side="none" if hide else "inside" if scene.inside else "left",
            ring=[palette.SOURCE] * graph.s, fill=[palette.NODE] * graph.s,
        )  # fmt: skip


def _frame(ax: Axes, scene: _Scene, compact: bool) -> None:
    ax.set_aspect("equal", adjustable="box")
    for edge in ax.spines.values():
        edge.set_visible(False)
    ax.set_xticks([])
    ax.set_yticks([])
    points = np.array([*scene.source_at.values(), *scene.target_at.values()])
    if not len(points):
        ax.text(0.5, 0.5, "no nodes", ha="center", va="center", transform=ax.transAxes)
        return
    (x0, y0), (x1, y1) = points.min(0), points.max(0)
    if scene.kind == "line":
        above, below = scene.heights()
        ax.set_xlim(x0 - 0.6, x1 + 0.6)
        ax.set_ylim(-below, above)
        if not scene.inside and len(scene.target_at) <= arrows.MAX_NAMED:
            matrix.name_ticks(ax, "x", scene.target_labels, 10.0 if len(scene.target_at) <= 16 else 6.5)
            ax.tick_params(axis="x", length=0)
        where = "token" if not scene.inside else "position"
        ax.set_xlabel("" if compact else f"{where}     ({ARROW}; past above, future below)", fontsize=9)
        return
    margin = (scene.loop if scene.looped else scene.radius) + (0.35 * scene.radius if scene.inside else 0.12)
    margin += 0.05 * max(x1 - x0, y1 - y0)
    ax.set_xlim(x0 - margin, x1 + margin)
    ax.set_ylim(y0 - margin, y1 + margin)
    if scene.kind == "columns" and not compact:
        top = y1 + 2.5 * scene.radius
        for at, name, color in (
            (scene.source_at, "source (key)", palette.SOURCE),
            (scene.target_at, "target (query)", palette.TARGET),
        ):
            if at:
                ax.text(at[0][0], top, name, ha="center", va="bottom", fontsize=10, color=color)
        ax.set_ylim(top=top + 0.3 + 0.03 * (y1 - y0))
    ax.set_xlabel("" if compact else ARROW, fontsize=9)
