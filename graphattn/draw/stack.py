"""A stack of layers unrolled: who reads whom in each, and what a chosen node of the last layer can have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphattn.draw import palette
from graphattn.draw.text import columns, drawn, drawn_title, keep_label, safe_fonts
from graphattn.draw.view import View, view_of
from graphattn.graph import Graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_NODES = 40  # per layer, beyond which a layer is drawn as a strip
MAX_EDGES = 6000


def reach(graphs: Sequence[Graph], target: int, residual: bool = True) -> list[Tensor]:
    """Per level, inputs first, which nodes can influence `target` of the last layer: bool tensors, O(runs).

    `graphs` first layer to last; `residual` adds the node itself wherever a layer has as many targets as sources.
    """
    top = graphs[-1].t
    if not 0 <= target < top:
        raise ValueError(f"target {target} is out of range: the last layer, {graphs[-1]!r}, has {top} targets")
    now = torch.zeros(top, dtype=torch.bool)
    now[target] = True
    levels = [now]
    for graph in reversed(graphs):
        rows = now.repeat(graph.rows // max(graph.t, 1))
        runs = rows[graph.run_row()]
        edge = torch.zeros(graph.s + 1, dtype=torch.int64)
        edge.index_add_(0, graph.start[runs], torch.ones_like(graph.start[runs]))
        edge.index_add_(0, graph.stop[runs], -torch.ones_like(graph.stop[runs]))
        below = edge.cumsum(0)[:-1] > 0
        if residual and graph.t == graph.s:
            below = below | now
        levels.append(below)
        now = below
    return levels[::-1]


def draw_stack(
    graphs: Sequence[Graph],
    target: int | None = None,
    ax: Axes | None = None,
    *,
    labels: Sequence[object] | None = None,
    weights: Sequence[Any] | None = None,
    batch: int | None = None,
    head: int | None = None,
    residual: bool = True,
    title: str | None = None,
) -> Axes:
    """Draw layers from the input (bottom) to the output (top), with the receptive field of `target` lit up.

    Args:
        graphs: one per layer, first to last; the targets of each are the sources of the next.
        target: a node of the last layer; lit is all that can reach it.  Without it nothing is lit.
        labels: of the input nodes; of all levels where the counts agree.
        weights: one entry per layer (None or per-edge numbers as in `draw`), drawn as width.
        residual: residual connections, dotted, carry a node to itself (where a layer is square).
    Returns:
        The Axes.  Beyond 40 nodes a level or 6000 edges each level becomes a strip with the reached nodes filled in.
    Raises:
        ValueError: no layers, layers that do not fit one another, a target or labels out of range.
    """
    import matplotlib as mpl

    graphs = [g.to("cpu") for g in graphs]
    if not graphs:
        raise ValueError("draw_stack needs at least one layer")
    for k in range(1, len(graphs)):
        if graphs[k].s != graphs[k - 1].t:
            raise ValueError(
                f"layer {k + 1}, {graphs[k]!r}, reads {graphs[k].s} sources, but layer {k}, {graphs[k - 1]!r}, "
                f"makes {graphs[k - 1].t}"
            )
    if labels is not None and len(labels) != graphs[0].s:
        raise ValueError(f"labels has {len(labels)} entries, but layer 1 is {graphs[0]!r}: it needs {graphs[0].s}")
    if weights is not None and len(weights) != len(graphs):
        raise ValueError(f"weights has {len(weights)} entries, but there are {len(graphs)} layers: one for each")
    lit = None if target is None else reach(graphs, target, residual)
    counts = [graphs[0].s, *(g.t for g in graphs)]
    wide, edges = max(counts), sum(g.num_edges for g in graphs)
    strips = wide > MAX_NODES or edges > MAX_EDGES
    with mpl.rc_context(safe_fonts(labels, [title or ""])):
        if ax is None:
            width = 8.0 if strips or wide > 12 else max(5.0, 0.55 * wide + 1.6)
            ax = palette.new_axes(width, min(9.0, (0.9 if strips else 1.25) * len(counts) + 1.4))
        if strips:
            _strips(ax, counts, lit)
        else:
            views = [view_of(g, None if weights is None else weights[k], batch, head) for k, g in enumerate(graphs)]
            _nodes_and_edges(ax, views, counts, lit, residual, labels)
        names = ["input", *(f"layer {k + 1}" for k in range(len(graphs)))]
        ax.set_yticks(range(len(counts)), names, fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(-0.4, len(counts) - 0.6 + (0.1 if strips else 0))
        ax.set_xlim(-0.7, wide - 0.3)
        for name in ("top", "right", "left"):
            ax.spines[name].set_visible(False)
        ax.spines["bottom"].set_color(palette.FAINT)
        lines = "" if strips else "   (solid: reads the level below" + ("; dotted: residual)" if residual else ")")
        ax.set_xlabel(("position" if strips or labels is None else "input token") + lines, fontsize=10)
        words = f"{len(graphs)} layers, {edges:,} edges"
        if lit is not None:
            words += f": target {target} sees {int(lit[0].sum()):,} of {counts[0]:,} inputs"
        ax.set_title(words if title is None else drawn_title(title), fontsize=11)
    return ax


def _nodes_and_edges(
    ax: Axes,
    views: list[View],
    counts: list[int],
    lit: list[Tensor] | None,
    residual: bool,
    labels: Sequence[object] | None,
) -> None:
    from matplotlib.collections import LineCollection

    wide = max(counts)
    top = max((float(v.value.max()) for v in views if v.value is not None and v.value.numel()), default=1.0) or 1.0
    for k, view in enumerate(views):
        target, source = (x.numpy() for x in view.edges())
        ends = np.stack(
            [np.stack([source, np.full(len(source), k)], 1), np.stack([target, np.full(len(target), k + 1)], 1)], 1
        )
        on = np.zeros(len(target), dtype=bool) if lit is None else lit[k + 1].numpy()[target]
        width = np.full(len(target), 1.3) if view.value is None else 0.3 + 3.0 * view.value.numpy().clip(0) / top
        if lit is None:
            ax.add_collection(LineCollection(list(ends), colors=palette.EDGE, linewidths=width, alpha=0.75, zorder=1))
        else:
            ax.add_collection(
                LineCollection(list(ends[~on]), colors=palette.FAINT, linewidths=width[~on] * 0.6, alpha=0.8, zorder=1)
            )
            ax.add_collection(LineCollection(list(ends[on]), colors=palette.EDGE, linewidths=width[on], zorder=2))
        if residual and view.graph.t == view.graph.s:
            own = np.arange(view.graph.t)
            stay = np.stack([np.stack([own, np.full(len(own), k)], 1), np.stack([own, np.full(len(own), k + 1)], 1)], 1)
            keep = np.ones(len(own), dtype=bool) if lit is None else lit[k + 1].numpy()
            style = {"linestyles": (0, (1, 1.6)), "linewidths": 1.5}
            ax.add_collection(LineCollection(list(stay[~keep]), colors=palette.FAINT, zorder=1, **style))
            color = palette.EDGE if lit is None else palette.SOURCE
            ax.add_collection(LineCollection(list(stay[keep]), colors=color, zorder=2, **style))
    size = min(260.0, 9000.0 / max(wide, 1))
    for level, n in enumerate(counts):
        at = np.arange(n)
        on = np.zeros(n, dtype=bool) if lit is None else lit[level].numpy()
        last = lit is not None and level == len(counts) - 1
        face = np.where(on, palette.TARGET if last else palette.SOURCE, palette.NODE)
        # a lit node is larger as well as darker: the figure survives a grey printer
        ax.scatter(
            at,
            np.full(n, level),
            s=np.where(on, size * 1.25, size),
            c=face,
            edgecolors=palette.INK,
            linewidths=0.8,
            zorder=3,
        )
        if labels is None and wide <= 20:
            for i in range(n):
                ax.text(
                    i,
                    level,
                    str(i),
                    ha="center",
                    va="center",
                    fontsize=8,
                    zorder=4,
                    color="white" if on[i] else palette.INK,
                )
    _bottom_labels(ax, counts[0], labels)


def _bottom_labels(ax: Axes, n: int, labels: Sequence[object] | None) -> None:
    if labels is None:
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
        return
    text = [drawn(x) for x in labels]
    turn = max((columns(x) for x in text), default=1) > (4 if n <= 12 else 2)
    ax.set_xticks(range(n), text, fontsize=9 if n <= 24 else 7, rotation=90 if turn else 0)
    for tick, label in zip(ax.get_xticklabels(), labels, strict=True):
        keep_label(tick, label)


def _strips(ax: Axes, counts: list[int], lit: list[Tensor] | None) -> None:
    for level, n in enumerate(counts):
        ax.broken_barh([(-0.5, n)], (level - 0.28, 0.56), facecolors=palette.NODE, edgecolors=palette.FAINT, zorder=1)
        if lit is None:
            continue
        on = torch.cat([torch.zeros(1), lit[level].to(torch.float32), torch.zeros(1)]).diff()
        first, last = (on > 0).nonzero().squeeze(1).tolist(), (on < 0).nonzero().squeeze(1).tolist()
        spans = list(zip(first, last, strict=True))
        if len(spans) > 2000:  # finer than a pixel
            step = -(-n // 2000)
            some = torch.nn.functional.pad(lit[level].float(), (0, -n % step)).view(-1, step).amax(1).nonzero()
            spans = [(int(i) * step, min((int(i) + 1) * step, n)) for i in some.squeeze(1)]
        last_level = level == len(counts) - 1
        color = palette.TARGET if last_level else palette.SOURCE
        least = max(counts) / 400  # a single node of thousands stays visible
        bars = [((a + b) / 2 - 0.5 - max(b - a, least) / 2, max(b - a, least)) for a, b in spans]
        ax.broken_barh(bars, (level - 0.28, 0.56), facecolors=color, zorder=2)
        ax.text(n - 0.5, level + 0.3, f"{int(lit[level].sum()):,} of {n:,}", ha="right", va="bottom", fontsize=8)
    _bottom_labels(ax, counts[0], None)
    if max(counts) > 9999:
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
