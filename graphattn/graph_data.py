"""Many small graphs with a label each, batched as one disjoint graph: nothing is padded and nothing mixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .convert import from_edge_index
from .graph import Graph
from .patterns import disjoint

DATASETS = ("mutag", "proteins", "nci1", "esol")


@dataclass(frozen=True, eq=False)
class Batch:
    """Several graphs as one: x (N, C), a disjoint graph, index (N,) = the graph each node is in, targets y (G,)."""

    x: Tensor
    graph: Graph
    index: Tensor
    edge_features: Tensor | None
    y: Tensor

    @property
    def count(self) -> int:
        return self.y.numel()


@dataclass(frozen=True, eq=False)
class GraphSet:
    """Graphs with node features, perhaps edge features, and one target each.

    graphs: without self-loops.  x: per graph `(n, C)`.  edge_features: per graph `(e, D)` in edge order, or None.
    y: `(G,)`, int64 classes or float32 values.  folds: (train, test) indices, if the set comes with them.
    """

    name: str
    graphs: list[Graph]
    x: list[Tensor]
    edge_features: list[Tensor] | None
    y: Tensor
    folds: list[tuple[Tensor, Tensor]]

    def __len__(self) -> int:
        return len(self.graphs)

    @property
    def features(self) -> int:
        return self.x[0].shape[1]

    @property
    def edge_dim(self) -> int | None:
        return None if self.edge_features is None else self.edge_features[0].shape[1]

    @property
    def classes(self) -> int | None:
        """Number of classes, None for regression."""
        return None if self.y.dtype.is_floating_point else int(self.y.max()) + 1

    def batch(self, ids: Sequence[int] | Tensor) -> Batch:
        """The graphs numbered ids as one disjoint graph; edge features follow in its edge order."""
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        x = torch.cat([self.x[i] for i in ids])
        index = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([self.graphs[i].t for i in ids]))
        edges = None if self.edge_features is None else torch.cat([self.edge_features[i] for i in ids])
        return Batch(x, disjoint([self.graphs[i] for i in ids]), index, edges, self.y[ids])

    def __repr__(self) -> str:
        nodes = sum(g.t for g in self.graphs)
        kind = "regression" if self.classes is None else f"{self.classes} classes"
        return f"GraphSet({self.name}: {len(self)} graphs, {nodes} nodes, {self.features} features, {kind})"


def load_graphs(name: str, path: str | Path) -> GraphSet:
    """mutag, proteins, nci1: a folder with `NAME/NAME.txt` and `NAME/10fold_idx`; esol: its `.npz`, or the folder.

    Raises:
        ValueError: an unknown name.  FileNotFoundError: no such file.
    """
    name, path = name.lower(), Path(path)
    if name not in DATASETS:
        raise ValueError(f"dataset {name!r} is not known: use one of {', '.join(DATASETS)}")
    if name == "esol":
        return read_molecules(path if path.suffix == ".npz" else path / "esol_graphs.npz")
    folder = path / name.upper()
    return read_text(folder if folder.is_dir() else path, name.upper())


def read_text(folder: Path, name: str) -> GraphSet:
    """`NAME.txt` of Xu et al. 2019: the number of graphs; per graph `n label`, then n lines `tag m neighbour ...`.

    Features are the tag and the degree (up to 10, then 10), one-hot.  Folds: `10fold_idx/{train,test}_idx-K.txt`.
    """
    words = iter((folder / f"{name}.txt").read_text().split())
    graphs, tags, labels = [], [], []
    for _ in range(int(next(words))):
        n, label = int(next(words)), int(next(words))
        tag, pairs = [], []
        for i in range(n):
            tag.append(int(next(words)))
            pairs += [(int(next(words)), i) for _ in range(int(next(words)))]
        edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
        graphs.append(cast(Graph, from_edge_index(edges[:, edges[0] != edges[1]], n)))
        tags.append(torch.tensor(tag))
        labels.append(label)
    kinds = torch.cat(tags).unique()
    x = [
        torch.cat([
            F.one_hot(torch.searchsorted(kinds, tag), len(kinds)).float(),
            F.one_hot(graph.degree().clamp(max=10), 11).float(),
        ], 1)
        for tag, graph in zip(tags, graphs, strict=True)
    ]  # fmt: skip
    _, y = torch.tensor(labels).unique(return_inverse=True)
    folds = []
    for k in range(1, 11):
        files = [folder / "10fold_idx" / f"{part}_idx-{k}.txt" for part in ("train", "test")]
        if all(f.exists() for f in files):
            train, test = (torch.from_numpy(np.loadtxt(f, dtype=np.int64, ndmin=1)) for f in files)
            folds.append((train, test))
    return GraphSet(name.lower(), graphs, x, None, y, folds)


def read_molecules(path: Path) -> GraphSet:
    """An `.npz` of molecules: `x (N, 9)` and `edge_attr (E, 3)` of category numbers (one-hot here), `edge_index (2, E)`
    counted within each molecule, `node_ptr`, `edge_ptr` and a real `y` per molecule.  Never unpickles.
    """
    with np.load(path, allow_pickle=False) as file:
        data = {key: torch.from_numpy(file[key].astype(np.int64 if key != "y" else np.float32)) for key in file.files}
    x, attributes = _categories(data["x"]), _categories(data["edge_attr"])
    graphs, xs, es = [], [], []
    for g in range(data["y"].numel()):
        n0, n1 = data["node_ptr"][g : g + 2].tolist()
        e0, e1 = data["edge_ptr"][g : g + 2].tolist()
        graph, ids = cast(tuple[Graph, Tensor], from_edge_index(data["edge_index"][:, e0:e1], n1 - n0, return_ids=True))
        own = attributes.new_zeros(graph.num_edges, attributes.shape[1])
        own[ids] = attributes[e0:e1]
        graphs.append(graph)
        xs.append(x[n0:n1])
        es.append(own)
    return GraphSet(path.stem.removesuffix("_graphs"), graphs, xs, es, data["y"], [])


def _categories(x: Tensor) -> Tensor:
    """Each column one-hot over the values it takes; a column of one value is left out."""
    columns = [torch.searchsorted(c.unique(), c) for c in x.T.contiguous() if c.unique().numel() > 1]
    return torch.cat([F.one_hot(c, int(c.max()) + 1).float() for c in columns], 1)


def walk_returns(graph: Graph, steps: int) -> Tensor:
    """`(n, steps)`: how likely a random walk from each node is back after 2, 3, ... steps (Dwivedi et al. 2022)."""
    step = graph.dense().float()
    step = step / step.sum(1, keepdim=True).clamp(min=1)
    power, out = step, []
    for _ in range(steps):
        power = power @ step
        out.append(power.diagonal())
    return torch.stack(out, 1)
