"""Loading nodes with labels: layouts, PyG's classes, and files that must not run anything."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import graphattn as ga
from graphattn import node_data
from graphattn.features import SparseFeatures
from graphattn.node_data import DATASETS, from_npz, from_pyg_data, load_nodes, read_planetoid

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"the data sets of {DATA} are not here")


def planetoid_like(path: Path, **changes) -> Path:
    """Five nodes: 3 -> 0 alone, so that a flipped direction is seen."""
    arrays = {
        "edge_index": np.array([[3, 1, 2], [0, 2, 1]], np.int32), "x_indptr": np.array([0, 2, 2, 3, 4, 4], np.int32),
        "x_indices": np.array([0, 2, 1, 2], np.int32), "x_data": np.ones(1, np.float32), "x_shape": np.array([5, 3]),
        "y": np.array([0, 1, 1, 0, 2], np.int16), "train_mask": np.array([1, 0, 0, 0, 1], bool),
        "val_mask": np.array([0, 1, 0, 0, 0], bool), "test_mask": np.array([0, 0, 1, 1, 0], bool),
    } | changes  # fmt: skip
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_planetoid_layout(tmp_path):
    data = load_nodes("mine", planetoid_like(tmp_path / "mine.npz"))
    assert data.graph == ga.from_edge_index(torch.tensor([[3, 1, 2], [0, 2, 1]]), 5)
    want = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0.0]])
    assert torch.equal(data.x.to_dense(), want) and torch.equal(data.dense().x, want)
    assert data.y.tolist() == [0, 1, 1, 0, 2] and data.classes == 3 and data.metric == "accuracy"
    assert data.train.tolist() == [[True, False, False, False, True]] and data.test.sum() == 2


def test_heterophilous_layout(tmp_path):
    masks = np.eye(3, 4, dtype=bool)
    np.savez(
        tmp_path / "m.npz", node_features=np.ones((4, 2), np.float32), node_labels=np.array([0, 1, 1, 0]),
        edges=np.array([[0, 1], [2, 1], [3, 3]]), train_masks=masks, val_masks=masks, test_masks=masks,
    )  # fmt: skip
    data = from_npz(tmp_path / "m.npz")
    assert data.name == "m" and data.metric == "auc" and data.train.shape == (3, 4)
    # undirected, and without the self-loop
    assert ga.to_edge_index(data.graph).T.tolist() == [[1, 0], [0, 1], [2, 1], [1, 2]]


def test_splits_are_drawn_where_there_are_none(tmp_path):
    n = 240
    file = planetoid_like(
        tmp_path / "many.npz", y=np.arange(n) % 3, x_shape=np.array([n, 3]), x_indptr=np.zeros(n + 1, np.int32),
        x_indices=np.zeros(0, np.int32), x_data=np.zeros(0, np.float32), train_mask=None, val_mask=None, test_mask=None,
    )  # fmt: skip
    data = from_npz(file)
    assert data.train.shape == (10, n)
    assert data.train.sum(1).tolist() == [60] * 10 and data.val.sum(1).tolist() == [90] * 10
    assert ((data.train.int() + data.val.int() + data.test.int()) == 1).all()
    assert not torch.equal(data.train[0], data.train[1]) and torch.equal(data.train, from_npz(file).train)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dataset 'ogbn' is not known"):
        load_nodes("ogbn", tmp_path)
    with pytest.raises(ValueError, match="cora is read from files"):
        load_nodes("cora")
    with pytest.raises(FileNotFoundError):
        load_nodes("cora", tmp_path / "none.npz")
    with pytest.raises(ValueError, match="lacks y"):
        from_npz(planetoid_like(tmp_path / "a.npz", y=None))
    with pytest.raises(ValueError, match="spans 0..9"):
        from_npz(planetoid_like(tmp_path / "b.npz", edge_index=np.array([[9, 0], [1, 1]])))


class Boom:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_npz_with_objects_is_refused(tmp_path):
    flag = tmp_path / "flag"
    bad = np.empty(1, object)
    bad[0] = Boom(flag)
    with pytest.raises(ValueError, match="allow_pickle"):
        from_npz(planetoid_like(tmp_path / "bad.npz", y=bad))
    assert not flag.exists()


def test_planetoid_pickles_that_name_code_are_refused(tmp_path):
    flag = tmp_path / "flag"
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (tmp_path / f"ind.cora.{part}").write_bytes(pickle.dumps(Boom(flag)))
    with pytest.raises(pickle.UnpicklingError, match="only arrays, sparse matrices and lists"):
        read_planetoid(tmp_path, "cora")
    for name in ("eval", "exec", "getattr"):
        (tmp_path / "ind.cora.tx").write_bytes(f"cbuiltins\n{name}\n.".encode())
        with pytest.raises(pickle.UnpicklingError, match=f"builtins.{name}"):
            read_planetoid(tmp_path, "cora")
    assert not flag.exists()


def test_poisoned_processed_file_is_never_opened(tmp_path, monkeypatch):
    """PyG's own classes unpickle processed files; ours goes by the raw ones."""
    pytest.importorskip("torch_geometric")
    raw, processed = tmp_path / "minesweeper" / "raw", tmp_path / "minesweeper" / "processed"
    raw.mkdir(parents=True)
    processed.mkdir()
    flag = tmp_path / "flag"
    for file in ("data.pt", "pre_transform.pt", "pre_filter.pt"):
        (processed / file).write_bytes(pickle.dumps(Boom(flag)))
    masks = np.eye(3, 4, dtype=bool)
    np.savez(
        raw / "minesweeper.npz", node_features=np.ones((4, 2), np.float32), node_labels=np.array([0, 1, 1, 0]),
        edges=np.array([[0, 1], [2, 1]]), train_masks=masks, val_masks=masks, test_masks=masks,
    )  # fmt: skip
    monkeypatch.setitem(node_data._SIZES, "minesweeper", (4, 2, 2))
    assert load_nodes("minesweeper", tmp_path).graph.num_edges == 4
    assert not flag.exists()


def test_a_name_stands_for_one_set(tmp_path):
    file = planetoid_like(tmp_path / "cora.npz")
    for path in (file, tmp_path):
        with pytest.raises(ValueError, match="is not cora: it has 5 nodes, 3 features and 3 classes, cora has 2708"):
            load_nodes("cora", path)
    # any other name, or the file alone, whose case is kept
    mixed = planetoid_like(tmp_path / "MyPapers.npz")
    assert load_nodes("papers", mixed).name == "papers"
    assert load_nodes(str(mixed)).name == "mypapers" and load_nodes(str(mixed)).graph.t == 5
    with pytest.raises(FileNotFoundError, match="Absent.npz"):
        load_nodes(str(tmp_path / "Absent.npz"))


def test_a_wrong_path_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("no data")
    with pytest.raises(ValueError, match="neither a folder nor an .npz"):
        load_nodes("cora", tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_nodes("cora", tmp_path / "a" / "b")

    def offline(name, root):
        (root / "Cora" / "raw").mkdir(parents=True)
        raise OSError("no route to host")

    monkeypatch.setattr(node_data, "_through_pyg", offline)
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(OSError, match="neither planetoid_cora.npz nor cora.npz.*no route to host"):
            load_nodes("cora", folder)
    assert [p.name for p in tmp_path.rglob("*")] == ["notes.txt"]


def test_from_pyg_data():
    data = pytest.importorskip("torch_geometric.data")
    x = torch.zeros(6, 8)
    x[2, 5] = 3
    mask = torch.tensor([True, False, True, False, False, False])
    given = data.Data(
        x=x, edge_index=torch.tensor([[0, 2, 4], [1, 2, 3]]), y=torch.tensor([0, 1, 2, 0, 1, 2]), train_mask=mask,
        val_mask=torch.stack([mask, ~mask], 1), test_mask=~mask,
    )  # fmt: skip
    ours = from_pyg_data(given)
    assert isinstance(ours.x, SparseFeatures) and torch.equal(ours.x.to_dense(), x)
    assert ga.to_edge_index(ours.graph).T.tolist() == [[0, 1], [4, 3]]  # the self-loop is left out
    assert ours.val.shape == (2, 6) and torch.equal(ours.val[1], ~mask)
    assert not isinstance(from_pyg_data(given.update({"x": torch.ones(6, 8)})).x, SparseFeatures)


@needs_data
@pytest.mark.parametrize(
    "name, nodes, edges, classes, splits, parts",
    [
        ("cora", 2708, 10556, 7, 1, (140, 500, 1000)),
        ("citeseer", 3327, 9104, 6, 1, (120, 500, 1000)),
        ("pubmed", 19717, 88648, 3, 1, (60, 500, 1000)),
        ("minesweeper", 10000, 78804, 2, 10, (5000, 2500, 2500)),
        ("tolokers", 11758, 1038000, 2, 10, (5879, 2939, 2940)),
    ],
)
def test_the_named_datasets(name, nodes, edges, classes, splits, parts):
    data = load_nodes(name.upper(), DATA / "nodes")
    assert (data.graph.t, data.graph.num_edges, data.classes, len(data.train)) == (nodes, edges, classes, splits)
    assert data.graph == data.graph.T and not bool((data.graph & ga.self_loops(nodes)).num_edges)
    assert tuple(int(m[0].sum()) for m in (data.train, data.val, data.test)) == parts
    assert not (data.train & data.val).any() and not (data.train & data.test).any() and not (data.val & data.test).any()
    assert data.metric == ("auc" if splits == 10 else "accuracy") and name in DATASETS
    if name == "citeseer":
        assert int((data.graph.degree() == 0).sum()) == 48


@needs_data
def test_cora_through_pyg_is_the_npz():
    """The raw pickles, read without unpickling objects, hold what the npz holds, field by field."""
    pytest.importorskip("torch_geometric")
    a, b = load_nodes("cora", DATA / "nodes"), load_nodes("cora", DATA / "planetoid")
    assert a.graph == b.graph and torch.equal(a.y, b.y) and torch.equal(a.x.to_dense(), b.x.to_dense())
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(a, part), getattr(b, part))
