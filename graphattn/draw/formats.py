"""The graph for other programs: networkx, GraphML, DOT, SVG, with labels and weights, safe for any label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphattn.draw import palette
from graphattn.draw.page import to_html
from graphattn.draw.picture import draw
from graphattn.draw.text import for_xml, labels_of, visible
from graphattn.draw.view import edge_values, view_of
from graphattn.graph import Graph

MAX_EDGES = 1_000_000  # about 100 bytes of text each


def networkx_of(
    graph: Graph,
    weights: Any = None,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
) -> Any:
    """A `networkx.DiGraph` with an edge source -> target per edge, weights and labels on it.

    A square graph has nodes 0..T-1 in order; a rectangle has nodes ("source", j) and ("target", i) with the attribute
    `bipartite` 0 and 1.  Nodes carry `label` if labels are given; edges `weight`, and for `(H, E)` weights
    `weight_h0`, `weight_h1`, ... with their mean as `weight`.

    Raises:
        ValueError: leading axes of more than one graph, sizes that do not fit, more than a million edges.
    """
    import networkx as nx

    if graph.num_edges > MAX_EDGES:
        raise ValueError(f"{graph!r} has more than {MAX_EDGES:,} edges: export a part, graph[rows, cols]")
    if graph.rows != graph.t:
        raise ValueError(f"{graph!r} is several graphs: choose one with graph.select(batch, head)")
    view = view_of(graph, weights)
    target_labels, source_labels_ = labels_of(graph, labels, source_labels)
    out = nx.DiGraph()
    square = graph.t == graph.s
    if square:
        out.add_nodes_from((i, {"label": target_labels[i]} if target_labels else {}) for i in range(graph.t))
    else:
        for side, n, names in (("source", graph.s, source_labels_), ("target", graph.t, target_labels)):
            for i in range(n):
                out.add_node((side, i), bipartite=int(side == "target"), **({"label": names[i]} if names else {}))
    target, source = (x.tolist() for x in view.edges())
    heads = None
    if weights is not None:
        w = edge_values(graph, weights)
        heads = w.reshape(-1, graph.num_edges) if w.shape[0] == 1 and w.shape[1] > 1 else None
    mean = None if view.value is None else view.value.tolist()
    per_head = None if heads is None else heads.T.tolist()
    for e, (i, j) in enumerate(zip(target, source, strict=True)):
        data: dict[str, float] = {} if mean is None else {"weight": mean[e]}
        if per_head is not None:
            data.update({f"weight_h{h}": x for h, x in enumerate(per_head[e])})
        out.add_edge(j if square else ("source", j), i if square else ("target", i), **data)
    return out


def to_graphml(
    graph: Graph,
    weights: Any = None,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
) -> str:
    """GraphML, as `networkx.parse_graphml` and Gephi read it; what `networkx_of` says about nodes and attributes.

    Characters that XML cannot hold are replaced by their pictures (NUL by "^@"); every other label is kept as it is.
    Nodes of a rectangle are named "source 0" and "target 0".
    """
    import networkx as nx

    out = _named(networkx_of(graph, weights, labels, source_labels))
    for _, data in out.nodes(data=True):
        if "label" in data:
            data["label"] = for_xml(data["label"])
    return "\n".join(nx.generate_graphml(out)) + "\n"


def _named(graph: Any) -> Any:
    import networkx as nx

    return nx.relabel_nodes(graph, {v: f"{v[0]} {v[1]}" for v in graph if isinstance(v, tuple)})


def to_dot(
    graph: Graph,
    weights: Any = None,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
) -> str:
    """Graphviz DOT: `dot -Tsvg`, `neato`.  Pen width follows the weight, which is the attribute `attention`."""
    out = networkx_of(graph, weights, labels, source_labels)
    top = max((abs(d["weight"]) for *_, d in out.edges(data=True) if "weight" in d), default=0.0) or 1.0
    lines = ["digraph attention {", "  rankdir=LR;", "  node [shape=circle, fontname=Helvetica];"]
    rank: dict[str, list[str]] = {}
    for v, data in out.nodes(data=True):
        name = _dot_name(v)
        lines.append(f"  {name} [label={_dot_string(data.get('label', v if isinstance(v, int) else v[1]))}];")
        if isinstance(v, tuple):
            rank.setdefault(v[0], []).append(name)
    lines += [f"  {{ rank=same; {' '.join(names)} }}" for names in rank.values()]
    for u, v, data in out.edges(data=True):
        style = ""
        if "weight" in data:
            w = data["weight"]
            style = f' [attention="{w:.6g}", penwidth={0.4 + 3 * abs(w) / top:.2f}]'
        lines.append(f"  {_dot_name(u)} -> {_dot_name(v)}{style};")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_name(node: Any) -> str:
    return f"n{node}" if isinstance(node, int) else f"{node[0]}{node[1]}"


def _dot_string(label: object) -> str:
    text = visible(label).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def to_svg(picture: Any) -> str:
    """The SVG text of an Axes or a Figure: letters as outlines, so it needs no font; the same bytes every time.

    A label that was cut, or holds what no font here has, tells its whole text when hovered.
    """
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "path"}):
        return palette.svg_of(palette.figure_of(picture))


def export(
    path: str | Path,
    graph: Graph,
    weights: Any = None,
    *,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
    layout: Any = "auto",
    title: str | None = None,
    **options: Any,
) -> Path:
    """Write one graph in the format that `path` ends in; returns the path.

    .png .svg .pdf: `draw` with `layout` and `options`, then `save`;   .html: the interactive page;
    .graphml, .dot or .gv: for other programs.

    Raises:
        ValueError: another ending, an option the format has no use for, or what the writer raises.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind in (".png", ".svg", ".pdf"):
        ax = draw(graph, weights, layout, labels=labels, source_labels=source_labels, title=title, **options)
        return palette.save(ax, path)
    if options:
        raise ValueError(f"{kind} files have no {', '.join(options)}")
    if kind == ".html":
        text = to_html(graph, weights, labels, source_labels, title=title)
    elif kind == ".graphml":
        text = to_graphml(graph, weights, labels, source_labels)
    elif kind in (".dot", ".gv"):
        text = to_dot(graph, weights, labels, source_labels)
    else:
        raise ValueError(f"cannot write {path.name!r}: the ending is none of .png .svg .pdf .html .graphml .dot .gv")
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
