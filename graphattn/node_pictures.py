"""Two pictures of a trained node classifier: whom a node reads, and which classes it confuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import draw as _draw
from .features import SparseFeatures
from .graph import Graph
from .node_data import NodeData
from .nodes import Ensemble, NodeClassifier

_FEW = 60  # a graph of at most so many nodes is drawn whole


def picture_files(folder: Path, stem: str) -> list[Path]:
    """Where `save_pictures` writes."""
    return [folder / f"{stem}-neighbourhood.png", folder / f"{stem}-confusion.png"]


def save_pictures(
    model: NodeClassifier | Ensemble,
    data: NodeData,
    x: Tensor | SparseFeatures,
    graph: Graph,
    split: int,
    folder: Path,
    stem: str,
) -> list[Path]:
    """Write a neighbourhood and a confusion matrix; x and graph as the model was trained on them.

    stem: begins the names of the files and their titles: data, recipe and seed.
    """
    model.eval()
    with torch.no_grad():
        guess = model(x, graph).argmax(-1)
    test = data.test[split]
    folder.mkdir(parents=True, exist_ok=True)
    files = picture_files(folder, stem)
    figure = neighbourhood(model, data, x, graph, centre(data, graph, guess, test), guess, stem)
    figure.savefig(files[0], dpi=150)
    confusion(data.y[test], guess[test], data.classes, stem).savefig(files[1], dpi=150)
    return files


def centre(data: NodeData, graph: Graph, guess: Tensor, test: Tensor) -> int:
    """A test node worth showing: rightly classified, with about ten neighbours of more than one class."""
    target, source = graph.targets_sources()
    other = torch.zeros(graph.t, dtype=torch.int64).index_add_(0, target, (data.y[target] != data.y[source]).long())
    fit = (graph.degree() - 10).abs() + 100 * ~((guess == data.y) & test) + 5 * (other == 0)
    return int(fit.argmin())


def neighbourhood(
    model: NodeClassifier | Ensemble,
    data: NodeData,
    x: Tensor | SparseFeatures,
    graph: Graph,
    node: int,
    guess: Tensor,
    name: str | None = None,
) -> Any:
    """A figure of the node, those it reads and the edges among them, by the first layer's weight, mean over heads.

    Labels are `node: class`, `(true)` after it where the model is wrong.  A small graph is drawn whole.
    """
    import networkx as nx

    with torch.no_grad():
        weights = model.weights(x, graph)[0].mean(0)
    if graph.t <= _FEW:
        near = torch.arange(graph.t)
    else:
        a, b = int(graph.edge_ptr()[node]), int(graph.edge_ptr()[node + 1])
        reads = graph.edges()[1][a:b]
        reads = reads[weights[a:b].argsort(descending=True)][: _FEW // 2]
        near = torch.cat([torch.tensor([node]), reads[reads != node]]).sort().values
    part = graph[near, near]
    target, source = part.targets_sources()
    # the weight of an edge of the part is that of the same edge of the whole
    whole = graph.edge_keys()
    at = torch.searchsorted(whole, near[target] * (graph.s + 1) + near[source])
    names = []
    for n in near.tolist():
        wrong = "" if guess[n] == data.y[n] else f" ({int(data.y[n])})"
        names.append(f"{n}: {int(guess[n])}{wrong}")
    layout = _spread(nx.Graph(list(zip(source.tolist(), target.tolist(), strict=True))), part.t)
    whom, lit = ("each member", None) if graph.t <= _FEW else (f"node {node}", int((near == node).nonzero()))
    title = f"{name or data.name}: whom {whom} reads\nnode: predicted class (true one, if wrong)"
    ax = _draw(  # type: ignore[operator]
        part, weights[at], layout=layout, labels=names, highlight=lit, title=title,
        measure="attention weight, first layer, mean of heads",
    )  # fmt: skip
    return ax.figure


def _spread(graph: Any, n: int) -> dict[int, tuple[float, float]]:
    import networkx as nx

    graph.add_nodes_from(range(n))
    place = nx.spring_layout(graph, seed=1, k=2.2 / n**0.5, iterations=300)
    return {i: (float(place[i][0]), float(place[i][1])) for i in range(n)}


def confusion(y: Tensor, guess: Tensor, classes: int, name: str) -> Any:
    """A figure of how many nodes of each class (rows) were taken for which (columns), coloured by share of the row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = torch.zeros(classes, classes, dtype=torch.int64)
    count.view(-1).index_add_(0, y * classes + guess, torch.ones_like(y))
    share = count / count.sum(1, keepdim=True).clamp(min=1)
    size = max(3.6, 0.62 * classes + 1.6)
    figure = Figure(figsize=(size + 0.6, size), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    image = ax.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    for i in range(classes):
        for j in range(classes):
            ink = "white" if share[i, j] > 0.55 else "black"
            ax.text(j, i, str(int(count[i, j])), ha="center", va="center", color=ink)
    ax.set_xticks(range(classes))
    ax.set_yticks(range(classes))
    ax.set_xlabel("predicted class")
    ax.set_ylabel("true class")
    right = int(count.diagonal().sum())
    ax.set_title(f"{name}: {right} of {y.numel()} right", fontsize=11)
    figure.colorbar(image, ax=ax, label="share of the true class", shrink=0.85)
    return figure
