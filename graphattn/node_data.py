"""Graphs with labelled nodes: from an `.npz`, through PyG's dataset classes, or karate, which needs no file.

Nothing here unpickles objects: `.npz` files are read with `allow_pickle=False`; of PyG's classes the download and the
file layout are used, not their `torch.load`, and Planetoid's pickles go through an unpickler that knows numpy arrays
and scipy matrices alone.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .convert import from_edge_index, from_networkx
from .features import SparseFeatures
from .graph import Graph

DATASETS = ("cora", "citeseer", "pubmed", "minesweeper", "tolokers", "karate")
_PLANETOID = ("cora", "citeseer", "pubmed")
# nodes, features and classes of the sets that names stand for
_SIZES = {
    "cora": (2708, 1433, 7),
    "citeseer": (3327, 3703, 6),
    "pubmed": (19717, 500, 3),
    "minesweeper": (10000, 7, 2),
    "tolokers": (11758, 10, 2),
}
# a feature matrix emptier than this is kept by its non-zeros
_SPARSE_BELOW = 0.25


@dataclass(frozen=True, eq=False)
class NodeData:
    """One graph whose nodes have features and labels, and one or more splits of the nodes.

    x: `(N, C)` float32, or `SparseFeatures`.  y: `(N,)` int64.  graph: `(N <- N)`, both directions, without self-loops.
    train, val, test: `(splits, N)` bool.  metric: "accuracy", or "auc" for two unequal classes.
    """

    name: str
    x: Tensor | SparseFeatures
    y: Tensor
    graph: Graph
    train: Tensor
    val: Tensor
    test: Tensor
    metric: str = "accuracy"

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def dense(self) -> NodeData:
        """The same with features as a dense tensor."""
        return replace(self, x=self.x.to_dense()) if isinstance(self.x, SparseFeatures) else self

    def __repr__(self) -> str:
        kind = "" if isinstance(self.x, SparseFeatures) else " dense"
        return (
            f"NodeData({self.name}: {self.graph!r}, {self.x.shape[1]}{kind} features, {self.classes} classes, "
            f"{len(self.train)} split{'s' if len(self.train) > 1 else ''})"
        )


def load_nodes(name: str, path: str | Path | None = None) -> NodeData:
    """A dataset by name.

    Args:
        name: one of `DATASETS`; with an `.npz` path, any name; or that path itself, whose stem is then the name.
        path: an `.npz` file; or a folder with `NAME.npz` or `planetoid_NAME.npz`; or the folder given to PyG's dataset
            classes as `root`, into which what is missing is downloaded.  karate needs none.

    Raises:
        ValueError: an unknown name, no path, or a file that holds another set than the name says.
        OSError: there is no such file or folder, or nothing in it and the download failed.
    """
    if path is None and Path(name).suffix == ".npz":
        path, name = name, Path(name).stem
    name = name.lower()
    if name == "karate":
        return karate()
    if path is not None and Path(path).suffix == ".npz":
        return _as_named(from_npz(path, name), path)
    if name not in DATASETS:
        raise ValueError(f"dataset {name!r} is not known: use one of {', '.join(DATASETS)}, or the path of an .npz")
    if path is None:
        raise ValueError(f"{name} is read from files: give an .npz, its folder, or a folder to download into")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"{folder} is neither a folder nor an .npz: give one that holds {name}.npz, or the file itself"
        )
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}, nor the one it would be made in")
    names = [f"planetoid_{name}.npz", f"{name}.npz"]
    for file in names:
        if (folder / file).is_file():
            return _as_named(from_npz(folder / file, name), folder / file)
    before = set(folder.iterdir()) if folder.exists() else None
    try:
        return _as_named(_through_pyg(name, folder), folder)
    except OSError as error:
        _tidy(folder, before)
        wanted = " nor ".join(names)
        raise OSError(
            f"{folder} holds neither {wanted}, and what PyG reads could not be downloaded: {error}"
        ) from error


def _tidy(folder: Path, before: set[Path] | None) -> None:
    """Remove the empty folders that a download made and did not fill; before: what was there, None for no folder."""
    if not folder.exists():
        return
    new = [path for path in folder.iterdir() if before is None or path not in before]
    made = [path for entry in new for path in (entry, *entry.rglob("*"))]
    for path in sorted(made + [folder] * (before is None), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _as_named(data: NodeData, path: str | Path) -> NodeData:
    found = (data.graph.t, data.x.shape[1], data.classes)
    known = _SIZES.get(data.name, found)
    if found != known:
        what = "{} nodes, {} features and {} classes"
        raise ValueError(
            f"{path} is not {data.name}: it has {what.format(*found)}, {data.name} has {what.format(*known)}"
        )
    return data


def from_npz(path: str | Path, name: str | None = None) -> NodeData:
    """Features as CSR or dense, one of two layouts; never unpickles.

    `edge_index (2, E)`, `x_indptr, x_indices, x_data, x_shape`, `y`, `train_mask, val_mask, test_mask` (Planetoid), or
    `edges (E, 2)` of undirected edges, `node_features`, `node_labels`, `train_masks, ...` `(splits, N)` (Platonov et
    al. 2023).  Without masks: 10 splits, each drawing 20 training and 30 validation nodes of every class.

    Raises:
        ValueError: neither layout; what is missing is named.
    """
    path = Path(path)
    with np.load(path, allow_pickle=False) as file:
        data = {key: file[key] for key in file.files}
    name = path.stem if name is None else name
    if "node_features" in data:
        return _heterophilous(data, name)
    wanted = ("edge_index", "x_indptr", "x_indices", "x_data", "x_shape", "y")
    missing = [key for key in wanted if key not in data]
    if missing:
        raise ValueError(f"{path.name} lacks {', '.join(missing)} of {', '.join(wanted)}, and has no node_features")
    n, c = (int(v) for v in data["x_shape"])
    values = torch.from_numpy(data["x_data"]).float()
    indices = torch.from_numpy(data["x_indices"])
    if values.numel() == 1:
        values = values.expand(indices.numel()).contiguous()
    x = SparseFeatures.from_csr(torch.from_numpy(data["x_indptr"]), indices, values, (n, c))
    y = torch.from_numpy(data["y"]).long()
    if "train_mask" in data:
        masks = [torch.from_numpy(data[f"{part}_mask"])[None] for part in ("train", "val", "test")]
    else:
        masks = _drawn(y)
    graph = cast(Graph, from_edge_index(torch.from_numpy(data["edge_index"]), n))
    train, val, test = masks
    return NodeData(name, x, y, graph, train, val, test)


def from_pyg_data(data: Any, name: str = "data") -> NodeData:
    """A `torch_geometric.data.Data` with x, edge_index, y and masks `(N,)` or `(N, splits)`.

    Self-loops are left out; features with less than a quarter of non-zeros become sparse.
    """
    n = data.num_nodes
    masks = []
    for part in ("train", "val", "test"):
        mask = data[f"{part}_mask"]
        masks.append(mask[None] if mask.dim() == 1 else mask.T.contiguous())
    x = data.x.float()
    if float((x != 0).float().mean()) < _SPARSE_BELOW:
        x = SparseFeatures.from_dense(x)
    source, target = data.edge_index
    keep = source != target
    graph = cast(Graph, from_edge_index(data.edge_index[:, keep], n))
    train, val, test = masks
    return NodeData(name, x, data.y.long(), graph, train, val, test)


def karate() -> NodeData:
    """Zachary's karate club: 34 members, one known label on each side (0, the teacher, and 33, the officer).

    Features say only who a node is.  There is no validation; the other 32 members are the test.
    """
    import networkx as nx

    club = nx.karate_club_graph()
    y = torch.tensor([int(club.nodes[n]["club"] != "Mr. Hi") for n in range(34)])
    train = torch.zeros(1, 34, dtype=torch.bool)
    train[0, [0, 33]] = True
    x = SparseFeatures.from_dense(torch.eye(34))
    return NodeData("karate", x, y, cast(Graph, from_networkx(club)), train, torch.zeros_like(train), ~train)


def _heterophilous(data: dict[str, np.ndarray], name: str) -> NodeData:
    x = torch.from_numpy(data["node_features"]).float()
    y = torch.from_numpy(data["node_labels"]).long()
    edges = torch.from_numpy(data["edges"]).T
    edges = torch.cat([edges, edges.flip(0)], 1)
    graph = cast(Graph, from_edge_index(edges[:, edges[0] != edges[1]], x.shape[0]))
    train, val, test = (torch.from_numpy(data[f"{part}_masks"]) for part in ("train", "val", "test"))
    return NodeData(name, x, y, graph, train, val, test, "auc" if int(y.max()) == 1 else "accuracy")


def _drawn(y: Tensor, splits: int = 10, train: int = 20, val: int = 30) -> list[Tensor]:
    masks = [torch.zeros(splits, y.numel(), dtype=torch.bool) for _ in range(3)]
    for k in range(splits):
        draw = torch.Generator().manual_seed(k)
        for c in range(int(y.max()) + 1):
            own = (y == c).nonzero().squeeze(1)
            own = own[torch.randperm(own.numel(), generator=draw)]
            for mask, part in zip(masks, (own[:train], own[train : train + val], own[train + val :]), strict=True):
                mask[k, part] = True
    return masks


# ---------------------------------------------------------------------- PyG's dataset classes, without their loads


def _through_pyg(name: str, root: Path) -> NodeData:
    """Download, if need be, through PyG's class; decode the raw files here."""
    from torch_geometric.datasets import HeterophilousGraphDataset, Planetoid

    if name in _PLANETOID:
        proper = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}[name]
        return read_planetoid(Path(_raw_only(Planetoid, root, proper).raw_dir), name)
    return from_npz(Path(_raw_only(HeterophilousGraphDataset, root, name.capitalize()).raw_paths[0]), name)


def _raw_only(kind: type, root: Path, name: str) -> Any:
    """An instance of a PyG dataset class that has its raw files and never processed, saved or loaded any."""
    nothing: Callable[..., None] = lambda self, *args, **kwargs: None  # noqa: E731
    return type(kind.__name__, (kind,), {"_process": nothing, "process": nothing, "load": nothing})(str(root), name)


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays, scipy CSR matrices and plain containers; refuses to name anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "defaultdict"):
            return defaultdict
        if (module, name) in (("__builtin__", "list"), ("builtins", "list")):
            return list
        if (module, name) == ("_codecs", "encode"):
            import _codecs

            return _codecs.encode
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if module in ("scipy.sparse.csr", "scipy.sparse._csr") and name == "csr_matrix":
            from scipy.sparse import csr_matrix

            return csr_matrix
        raise pickle.UnpicklingError(f"file names {module}.{name}: only arrays, sparse matrices and lists are read")


def _unpickle(path: Path) -> Any:
    return _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()


def read_planetoid(raw: Path, name: str) -> NodeData:
    """The eight files `ind.NAME.*` of kimiyoung/planetoid, and its public split (Yang et al. 2016).

    Raises:
        pickle.UnpicklingError: a file that holds anything but arrays, sparse matrices and lists.
    """
    import scipy.sparse as sp

    def read(part: str) -> Any:
        return _unpickle(raw / f"ind.{name.lower()}.{part}")

    tx, allx, ty, ally, edges = (read(part) for part in ("tx", "allx", "ty", "ally", "graph"))
    train = read("y").shape[0]
    test = np.loadtxt(raw / f"ind.{name.lower()}.test.index", dtype=np.int64, ndmin=1)
    low, size = int(test.min()), int(test.max()) - int(test.min()) + 1
    # CiteSeer's test nodes have gaps: isolated nodes without features, class 0 as in PyG
    place = sp.csr_matrix((np.ones(len(test)), (test - low, np.arange(len(test)))), shape=(size, len(test)))
    x = sp.csr_matrix(sp.vstack([allx, place @ tx]).tocsr(), dtype=np.float32)
    x.sort_indices()
    y = np.concatenate([ally, place @ ty]).argmax(1)
    n = len(y)
    pairs = np.array([(a, b) for a, near in edges.items() for b in near if a != b], dtype=np.int64).T
    masks = torch.zeros(3, 1, n, dtype=torch.bool)
    masks[0, 0, :train] = True
    masks[1, 0, train : train + 500] = True
    masks[2, 0, torch.from_numpy(test)] = True
    indptr, indices, values = (torch.from_numpy(v) for v in (x.indptr, x.indices, x.data))
    features = SparseFeatures.from_csr(indptr, indices, values, (n, x.shape[1]))
    graph = cast(Graph, from_edge_index(torch.from_numpy(pairs), n))
    return NodeData(name, features, torch.from_numpy(y).long(), graph, masks[0], masks[1], masks[2])
