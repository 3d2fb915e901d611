"""One self-contained HTML page: hover nodes, step through layers and heads, switch graphs.

Nothing is fetched: a content security policy allows the page's own script and style, by hash, and no other source.
Labels travel as JSON data and reach the page as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphattn.draw.text import visible
from graphattn.draw.view import edge_values
from graphattn.graph import Graph

MAX_VALUES = 1_000_000  # edges, and weights over all heads: about 8 bytes each in the file
MAX_NODES = 1024

Layers = Graph | Sequence[Graph]


def to_html(
    graphs: Layers | Mapping[str, Layers],
    weights: Any = None,
    labels: Any = None,
    source_labels: Any = None,
    *,
    title: str | None = None,
) -> str:
    """The page's text; write it to a file that ends in .html.

    Args:
        graphs: a graph, a list of layers, or a mapping from a name to either, among which the page switches.
        weights: None; for one graph what `draw` takes, `(E,)` or `(H, E)`; for layers a list of that; for a mapping
            a mapping with the same names (those left out have none).
        labels, source_labels: of targets and sources, used by every layer whose size they fit; for a mapping of graphs
            either one sequence for all or a mapping by name.
        title: heading of the page.

    Raises:
        ValueError: labels that fit no layer; more than 1024 nodes in a layer or a million numbers in all, with the
            figure and what to leave out.
    """
    import jinja2
    from markupsafe import Markup

    named = graphs if isinstance(graphs, Mapping) else {"graph": graphs}
    if not named:
        raise ValueError("to_html needs at least one graph")
    data, size = [], 0
    for name, layers in named.items():
        w = weights.get(name) if isinstance(graphs, Mapping) and weights is not None else weights
        mine = labels.get(name) if isinstance(labels, Mapping) else labels
        theirs = source_labels.get(name) if isinstance(source_labels, Mapping) else source_labels
        one, used = _one(name, layers, w, mine, theirs, shared=mine is labels and isinstance(graphs, Mapping))
        data.append(one)
        size += used
        if size > MAX_VALUES:
            raise ValueError(
                f"the page would hold more than {MAX_VALUES:,} numbers ({size:,} up to {name!r}): give fewer layers, "
                "heads or targets, or draw it with draw_attention"
            )
    source = (Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8")
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'"
    for kind, tag in (("script", "script"), ("style", "style")):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", source, re.S)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body.group(1).encode()).digest()).decode()
        policy += f"; {kind}-src 'sha256-{digest}'"
    template = jinja2.Environment(autoescape=True, keep_trailing_newline=True).from_string(source)
    heading = visible(title) if title is not None else "Attention graphs" if len(named) > 1 else data[0]["title"]
    payload = json.dumps({"graphs": data}, separators=(",", ":"), allow_nan=False)
    for c in "<>&":  # inside a script element only these could end it
        payload = payload.replace(c, f"\\u{ord(c):04x}")
    return template.render(title=heading, policy=policy, payload=Markup(payload))


def _one(
    name: str, layers: Layers, weights: Any, labels: Any, source_labels: Any, shared: bool
) -> tuple[dict[str, Any], int]:
    """The data of one entry and how many numbers it holds; `shared` labels need not fit every graph."""
    if isinstance(layers, Graph):
        each, values = [layers], [weights]
    else:
        each, values = list(layers), [None] * len(layers) if weights is None else list(weights)
    if not each:
        raise ValueError(f"{name!r} has no layers")
    if len(values) != len(each):
        raise ValueError(f"weights of {name!r} has {len(values)} entries, but there are {len(each)} layers")
    size = 0
    out = []
    for k, (graph, w) in enumerate(zip(each, values, strict=True)):
        layer, used = _layer(graph.to("cpu"), w, f"layer {k + 1} of {name!r}")
        layer["targets"] = (
            _fitting(labels, graph.t) or (graph.t == graph.s and _fitting(source_labels, graph.s)) or None
        )
        layer["sources"] = _fitting(source_labels, graph.s) or _fitting(labels, graph.s) or None
        out.append(layer)
        size += used
    for given, what, fits in (
        (labels, "labels", {n for g in each for n in (g.t, g.s)}),
        (source_labels, "source_labels", {g.s for g in each}),
    ):
        if given is not None and len(given) not in fits and not shared:
            raise ValueError(f"{what} has {len(given)} entries, but {name!r} is {each[0]!r}")
    return {"name": visible(name), "title": repr(each[0]), "layers": out}, size


def _fitting(labels: Any, n: int) -> list[list[str]] | None:
    """`[short, full]` names where the labels are as many as the nodes."""
    if labels is None or len(labels) != n:
        return None
    return [[visible(x, 14) for x in labels], [visible(x, 200) for x in labels]]


def _layer(graph: Graph, weights: Any, what: str) -> tuple[dict[str, Any], int]:
    if max(graph.t, graph.s) > MAX_NODES:
        raise ValueError(f"{what}, {graph!r}, has more than {MAX_NODES} nodes: cut it, graph[rows, cols]")
    nb, nh = graph.lead or (1, 1)
    values = None if weights is None else edge_values(graph, weights)
    if nb > 1 or (values is not None and values.shape[0] > 1):
        raise ValueError(f"{what} is a batch: choose one, graph.select(batch, None) and weights[batch]")
    heads = max(nh, 1 if values is None else values.shape[1])
    size = graph.num_edges * (1 + (0 if values is None else values.shape[1]))
    if size > MAX_VALUES:
        raise ValueError(
            f"{what}, {graph!r}, would put {size:,} numbers on the page, more than {MAX_VALUES:,}: draw fewer targets "
            "or heads, or use draw_attention"
        )
    ptr, (_, source) = graph.edge_ptr(), graph.edges()
    sets, items = [], []
    for h in range(nh):
        p = ptr[h * graph.t : (h + 1) * graph.t + 1]
        sets.append({"ptr": (p - p[0]).tolist(), "source": source[int(p[0]) : int(p[-1])].tolist()})
    for h in range(heads):
        item: dict[str, Any] = {"set": h if nh > 1 else 0, "weight": None}
        if values is not None:
            own = values[0, h] if nh == 1 else values[0, 0, int(ptr[h * graph.t]) : int(ptr[(h + 1) * graph.t])]
            item["weight"] = [float(f"{x:.4g}") for x in own.tolist()]
        items.append(item)
    return {"t": graph.t, "s": graph.s, "sets": sets, "heads": items, "repr": repr(graph)}, size
