"""Whole graphs, and links: batches that do not mix, pools, folds, and edges that must stay hidden."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn.graph_data import GraphSet, load_graphs, walk_returns
from graphattn.graph_models import GraphPredictor, LinkScorer, pool, split_links
from graphattn.graph_train import GraphRecipe, fit_graphs, graphs, splits_of
from graphattn.node_train import roc_auc
from graphattn.nodes import NodeClassifier

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "graphs"
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"the data sets of {DATA} are not here")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def cycles(count: int = 40, edge_dim: int | None = None) -> GraphSet:
    """Rings of 5 to 11 nodes; the class is whether the ring has a chord."""
    made, y = [], []
    for k in range(count):
        n = 5 + k % 7
        at = torch.arange(n)
        index = torch.stack([at, (at + 1) % n])
        if k % 2:
            index = torch.cat([index, torch.tensor([[0], [2]])], 1)
        made.append(ga.from_edge_index(torch.cat([index, index.flip(0)], 1), n))
        y.append(k % 2)
    x = [g.degree().float()[:, None] for g in made]
    e = None if edge_dim is None else [torch.randn(g.num_edges, edge_dim) for g in made]
    return GraphSet("rings", made, x, e, torch.tensor(y), [])


def run(model: GraphPredictor, b) -> torch.Tensor:
    return model(b.x, b.graph, b.index, b.count, b.edge_features)


def test_pools():
    x, index = torch.tensor([[1.0, -4], [3, -2], [5, -9]]), torch.tensor([0, 0, 2])
    assert pool(x, index, 4, "sum").tolist() == [[4, -6], [0, 0], [5, -9], [0, 0]]
    assert pool(x, index, 4, "mean").tolist() == [[2, -3], [0, 0], [5, -9], [0, 0]]
    assert pool(x, index, 4, "max").tolist() == [[3, -2], [0, 0], [5, -9], [0, 0]]
    with pytest.raises(ValueError, match="how must be one of"):
        pool(x, index, 4, "median")


@pytest.mark.parametrize("score", ["dot", "additive", "gatv2"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_graphs_of_a_batch_do_not_mix(score, norm):
    """Each graph alone, in any order, in any company: the same outputs."""
    data = cycles(9, edge_dim=3)
    model = GraphPredictor(
        1, 4, width=12, heads=3, layers=3, score=score, edge_dim=3, pools=("sum", "mean", "max"), norm=norm, degree=True
    ).eval()
    together = run(model, data.batch(range(9)))
    alone = torch.cat([run(model, data.batch([i])) for i in range(9)])
    torch.testing.assert_close(together, alone)
    order = torch.randperm(9)
    torch.testing.assert_close(run(model, data.batch(order)), together[order])


def test_node_order_does_not_matter():
    data = cycles(3)
    model = GraphPredictor(1, 2, width=8, heads=2, layers=2, pools=("sum", "max")).eval()
    order = torch.randperm(data.graphs[1].t)
    turned = GraphSet("t", [data.graphs[1].relabel(order)], [data.x[1][order]], None, data.y[1:2], [])
    torch.testing.assert_close(run(model, turned.batch([0])), run(model, data.batch([1])))


def test_empty_graph_in_a_batch():
    data = cycles(2)
    data = GraphSet("e", [data.graphs[0], ga.empty(0)], [data.x[0], torch.zeros(0, 1)], None, data.y[:2], [])
    model = GraphPredictor(1, 2, width=8, heads=2, layers=2, pools=("sum", "mean", "max"))
    out = run(model, data.batch([0, 1]))
    out.square().sum().backward()
    assert out.shape == (2, 2) and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_predictor_refuses():
    with pytest.raises(ValueError, match="pools must name"):
        GraphPredictor(1, 2, pools=())
    with pytest.raises(ValueError, match="norm must be one of"):
        GraphPredictor(1, 2, norm="group")
    with pytest.raises(ValueError, match="index must say of each of 4 nodes"):
        GraphPredictor(1, 2)(torch.ones(4, 1), ga.full(4), torch.zeros(3, dtype=torch.long))


def test_walk_returns():
    at = torch.arange(4)
    ring = ga.from_edge_index(torch.stack([at, (at + 1) % 4]), 4)
    ring = ring | ring.T
    # on a ring of four: back after 2 steps half the time, never after 3, half after 4
    torch.testing.assert_close(walk_returns(ring, 3), torch.tensor([[0.5, 0.0, 0.5]]).expand(4, 3))
    assert torch.equal(walk_returns(ga.empty(2), 3), torch.zeros(2, 3))


def test_learns_chords_and_keeps_what_validation_chose():
    data = cycles(60)
    train, val, test = torch.arange(36), torch.arange(36, 48), torch.arange(48, 60)
    recipe = GraphRecipe(width=16, heads=2, layers=2, walk=0, epochs=25, batch=12, lr=5e-3, dropout=0.0)
    model, figures = fit_graphs(data, recipe, train, val, test)
    assert figures["test"] >= 90 and figures["val"] >= 90
    out = run(model, data.batch(test)).argmax(1)
    assert figures["test"] == pytest.approx(100 * float((out == data.y[test]).double().mean()))
    assert fit_graphs(data, recipe, train, val, test)[1]["test"] == figures["test"]


def test_regression_is_in_the_targets_unit():
    data = cycles(60)
    y = torch.tensor([100.0 + 10 * g.t for g in data.graphs])
    data = GraphSet("sizes", data.graphs, data.x, None, y, [])
    ids = torch.arange(60)
    recipe = GraphRecipe(width=16, heads=2, layers=1, walk=0, epochs=80, batch=12, lr=2e-2, pools=("sum",), average=0.9)
    model, figures = fit_graphs(data, replace_norm(recipe), ids[:40], ids[40:50], ids[50:])
    assert 0 < figures["test"] < 10 and figures["val"] > 0  # a spread of 20


def replace_norm(recipe: GraphRecipe) -> GraphRecipe:
    from dataclasses import replace

    return replace(recipe, norm="layer", dropout=0.0)


# ---------------------------------------------------------------------- files


def test_text_layout(tmp_path):
    folder = tmp_path / "MUTAG"
    (folder / "10fold_idx").mkdir(parents=True)
    # node 1 reads 0 and 2 in the first graph; labels -1 and 1
    (folder / "MUTAG.txt").write_text("2\n3 -1\n7 1 1\n5 2 0 2\n7 1 1\n1 1\n5 0\n")
    (folder / "10fold_idx" / "train_idx-1.txt").write_text("1\n0\n")
    (folder / "10fold_idx" / "test_idx-1.txt").write_text("1\n")
    data = load_graphs("MUTAG", tmp_path)
    assert [g.num_edges for g in data.graphs] == [4, 0] and data.y.tolist() == [0, 1]
    assert data.graphs[0].dense().tolist() == [[False, True, False], [True, False, True], [False, True, False]]
    assert data.x[0][:, :2].tolist() == [[0, 1], [1, 0], [0, 1]] and data.x[0][1].tolist()[2 + 2] == 1
    assert [t.tolist() for t in data.folds[0]] == [[1, 0], [1]]


def test_molecules_keep_bonds_on_their_edges(tmp_path):
    np.savez(
        tmp_path / "esol_graphs.npz", x=np.array([[6, 0], [8, 0], [6, 0], [7, 0], [6, 0]], np.int16),
        edge_index=np.array([[1, 0, 0, 2, 1, 0], [0, 1, 2, 0, 0, 1]], np.int16), y=np.array([-1.5, 2], np.float32),
        edge_attr=np.array([[5], [6], [7], [8], [5], [5]], np.int8), node_ptr=np.array([0, 3, 5]),
        edge_ptr=np.array([0, 4, 6]),
    )  # fmt: skip
    data = load_graphs("esol", tmp_path)
    assert data.classes is None and data.edge_dim == 4 and data.features == 3  # a column of one value says nothing
    # edge order of the first: 1 -> 0, 2 -> 0, 0 -> 1, 0 -> 2
    assert data.edge_features[0].argmax(1).tolist() == [0, 3, 1, 2]
    b = data.batch([1, 0])
    assert b.edge_features.argmax(1).tolist() == [0, 0, 0, 3, 1, 2] and b.index.tolist() == [0, 0, 1, 1, 1]
    assert b.y.tolist() == [2, -1.5]


def test_splits_are_disjoint_and_cover():
    data = cycles(40)
    parts = splits_of(data, 3)
    assert [p.numel() for p in parts] == [32, 4, 4] and torch.equal(torch.cat(parts).sort().values, torch.arange(40))
    assert not torch.equal(parts[2], splits_of(data, 4)[2]) and torch.equal(parts[2], splits_of(data, 3)[2])
    folded = GraphSet("f", data.graphs, data.x, None, data.y, [(torch.arange(30), torch.arange(30, 40))])
    train, val, test = splits_of(folded, 0)
    assert (train.numel(), val.numel()) == (27, 3) and torch.equal(test, torch.arange(30, 40))
    assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(30))


@needs_data
def test_given_folds_and_resuming(tmp_path):
    options = {"path": str(DATA), "epochs": 2, "out": str(tmp_path), "quiet": True}
    first = graphs("mutag", splits=1, **options)
    second = graphs("mutag", splits=2, **options)
    kept = json.loads((tmp_path / "mutag-best.json").read_text())["runs"]
    assert second["runs"][0] == first["runs"][0] and len(kept) == 2
    with pytest.raises(ValueError, match="another epochs"):
        graphs("mutag", splits=1, **(options | {"epochs": 3}))
    data = load_graphs("mutag", DATA)
    for k, (_, test) in enumerate(data.folds):
        others = torch.cat([t for j, (_, t) in enumerate(data.folds) if j != k])
        assert not torch.isin(test, others).any() and not torch.isin(test, data.folds[k][0]).any()


# ---------------------------------------------------------------------- links


def blocks(n: int = 40) -> ga.Graph:
    side = torch.arange(n) < n // 2
    near = torch.rand(n, n) < torch.where(side[:, None] == side, 0.5, 0.03)
    return ga.from_mask((near | near.T) & ~torch.eye(n, dtype=torch.bool))


def test_hidden_links_are_hidden():
    graph = blocks()
    left, parts = split_links(graph, 0.1, 0.2, seed=1)
    total = graph.num_edges // 2
    sizes = [parts[k][1].numel() // 2 for k in ("train", "val", "test")]
    assert sum(sizes) == total and sizes[1:] == [round(0.1 * total), round(0.2 * total)]
    assert left == left.T and left <= graph and left.num_edges == 2 * sizes[0]
    whole, seen = graph.dense(), set()
    for name, (pairs, label) in parts.items():
        assert torch.equal(whole[pairs[1], pairs[0]].float(), label)
        known = label if name == "train" else torch.zeros_like(label)
        assert torch.equal(left.dense()[pairs[1], pairs[0]].float(), known)
        seen |= {tuple(p) for p in pairs.T.tolist()}
    assert len(seen) == 2 * total  # every pair in one part alone
    with pytest.raises(ValueError, match="not symmetric"):
        split_links(ga.from_edge_index(torch.tensor([[0], [1]]), 3))
    with pytest.raises(ValueError, match="fewer pairs without"):
        split_links(ga.full(5) - ga.self_loops(5))


def test_link_scores():
    graph = blocks()
    left, parts = split_links(graph, 0.1, 0.2)
    loops = left | ga.self_loops(40)
    encoder = NodeClassifier(40, 16, heads=4, head_dim=8, dropout=0.0, edge_dropout=0.0)
    model, x = LinkScorer(encoder, 16), torch.eye(40)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        pairs, label = parts["train"]
        loss = nn.functional.binary_cross_entropy_with_logits(model(x, loops, pairs), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    pairs, label = parts["test"]
    score = model(x, loops, pairs)
    assert roc_auc(score, label.long()) > 0.75
    torch.testing.assert_close(model(x, loops, pairs.flip(0)), score)
    both = LinkScorer(encoder, 16, directed=True).eval()
    assert not torch.allclose(both(x, loops, pairs.flip(0)), both(x, loops, pairs))
