"""The node classifier: GAT's numbers, laws of graphs, sparse features, training that resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn import node_train
from graphattn.features import Projection, SparseFeatures, drop
from graphattn.node_data import NodeData, karate, load_nodes
from graphattn.node_train import RECIPES, Recipe, fit, metric, nodes, prepare, recipe_for, roc_auc
from graphattn.nodes import Ensemble, GATLayer, GraphBlock, NodeClassifier

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "nodes"
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"the data sets of {DATA} are not here")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_graph(n: int, edges: int, loops: bool = True) -> ga.Graph:
    """Lopsided: no edge comes back, and the last node reads nobody and is read by nobody."""
    index = torch.randint(n - 1, (2, edges))
    graph = ga.from_edge_index(index[:, index[0] < index[1]], n)
    return graph | ga.self_loops(n) if loops else graph


def models(features: int = 7, classes: int = 3, **options) -> list[NodeClassifier]:
    made = [
        NodeClassifier(features, classes, heads=2, head_dim=5, **options),
        NodeClassifier(features, classes, heads=2, head_dim=5, layers=3, score="gatv2", residual=True, **options),
        NodeClassifier(features, classes, heads=2, head_dim=5, out_heads=3, score="dot", **options),
        NodeClassifier(features, classes, heads=2, head_dim=5, block="transformer", **options),
    ]
    return [m.double().eval() for m in made]


# ---------------------------------------------------------------------- the published model


@pytest.mark.parametrize("score", ["additive", "gatv2", "dot"])
@pytest.mark.parametrize("concat", [True, False])
def test_hops_apply_the_attention_again_and_again(score: str, concat: bool) -> None:
    """Equation 6 of attention diffusion (Wang et al. 2021): Z <- (1 - a) A Z + a V, from Z = V."""
    graph, x = random_graph(13, 60), torch.randn(13, 7).double()
    layer = GATLayer(7, 5, 2, score=score, concat=concat, hops=4, teleport=0.3).double().eval()
    out = layer(x, graph)
    weight = layer.head.weights(x, graph)  # (heads, E)
    target, source = graph.targets_sources()
    dense = torch.zeros(2, 13, 13).double()
    dense[:, target, source] = weight
    value = layer.head.project(x)[2]
    z = value
    for _ in range(4):
        z = 0.7 * dense @ z + 0.3 * value
    want = (z.transpose(0, 1).flatten(1) if concat else z.mean(0)) + layer.bias
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_gat_is_pyg_gat():
    """Two GATConv with the same weights: outputs and gradients."""
    geometric = pytest.importorskip("torch_geometric.nn")
    graph, x = random_graph(13, 60, loops=False), torch.randn(13, 7).double()
    model = NodeClassifier(7, 3, out_heads=4).double().eval()
    first, second = geometric.GATConv(7, 8, 8).double(), geometric.GATConv(64, 3, 4, concat=False).double()
    with torch.no_grad():
        for mine, its in zip(model.layers, (first, second), strict=True):
            mine.bias.normal_()
            its.lin.weight.copy_(mine.head.value.weight)
            its.att_src.copy_(mine.head.source_vector[None])
            its.att_dst.copy_(mine.head.target_vector[None])
            its.bias.copy_(mine.bias)
    index = ga.to_edge_index(graph)
    theirs = second(nn.functional.elu(first(x, index)), index)
    ours = model(x, graph | ga.self_loops(13))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for mine, its in zip(model.layers, (first, second), strict=True):
        torch.testing.assert_close(mine.head.value.weight.grad, its.lin.weight.grad, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mine.head.target_vector.grad[None], its.att_dst.grad, rtol=1e-10, atol=1e-10)


def test_published_shape():
    model = NodeClassifier(1433, 7)
    assert sum(p.numel() for p in model.parameters()) == 1433 * 64 + 2 * 64 + 64 + 64 * 7 + 2 * 7 + 7
    bound = (6 / (1433 + 64)) ** 0.5  # Glorot and Bengio 2010
    weight = model.layers[0].head.value.weight.abs().max()
    assert 0.99 * bound < weight <= bound


@pytest.mark.parametrize("score", ["additive", "gatv2", "dot"])
def test_hops_pass_values_on(score):
    """`hops` rounds of one attention matrix, a share of the values kept in each: against dense powers of it."""
    layer = GATLayer(7, 5, 2, score=score, hops=4, teleport=0.3).double().eval()
    nn.init.normal_(layer.bias)
    graph, x = random_graph(13, 60), torch.randn(13, 7).double()
    target, source = graph.targets_sources()
    passed = torch.zeros(2, 13, 13).double()
    passed[:, target, source] = layer.head.weights(x, graph)
    values = layer.head.value(x).view(13, 2, 5).transpose(0, 1)
    want = values
    for _ in range(4):
        want = 0.7 * passed @ want + 0.3 * values
    torch.testing.assert_close(layer(x, graph), want.transpose(0, 1).reshape(13, 10) + layer.bias)


def test_a_seed_drops_other_edges_in_every_hop():
    """Of the nodes that the first hop reaches along their own edge, the second drops half again."""
    layer = GATLayer(7, 5, dropout=0.5, hops=2, teleport=0.0).double().train()
    graph, x = ga.self_loops(101), torch.randn(101, 7).double()
    both = (layer(x, graph, seed=3) - layer.bias).abs().sum(1) > 0
    layer.hops = 1
    first = (layer(x, graph, seed=3) - layer.bias).abs().sum(1) > 0
    assert bool((both <= first).all()) and 0.3 < float(both.sum() / first.sum()) < 0.7
    torch.testing.assert_close(layer(x, graph, seed=3), layer(x, graph, seed=3), rtol=0, atol=0)


# ---------------------------------------------------------------------- laws


@pytest.mark.parametrize("which", range(4))
def test_a_node_hears_exactly_its_neighbourhood(which):
    """Changing node 4 moves the nodes that reach it within as many hops as there are layers, and no other."""
    model, graph, x = models()[which], random_graph(17, 40), torch.randn(17, 7).double()
    other = x.clone()
    other[4] += 1
    moved = (model(other, graph) - model(x, graph)).abs().sum(1) > 1e-9
    hops = graph ** len(model.layers)
    assert torch.equal(moved, hops.dense()[:, 4])
    assert 1 < int(moved.sum()) < 17


@pytest.mark.parametrize("which", range(4))
def test_relabelling_the_nodes_relabels_the_output(which):
    model, graph, x = models()[which], random_graph(17, 40), torch.randn(17, 7).double()
    order = torch.randperm(17)
    torch.testing.assert_close(model(x[order], graph.relabel(order)), model(x, graph)[order])


@pytest.mark.parametrize("which", range(4))
def test_batch_of_features_on_one_graph(which):
    model, graph, x = models()[which], random_graph(17, 40), torch.randn(3, 17, 7).double()
    torch.testing.assert_close(model(x, graph), torch.stack([model(v, graph) for v in x]))


@pytest.mark.parametrize("which", range(4))
def test_isolated_node_gives_finite_gradients(which):
    model, graph = models()[which], random_graph(17, 40, loops=False)
    assert int(graph.degree()[16]) == 0
    x = torch.randn(17, 7).double().requires_grad_()
    model(x, graph).square().sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_gat_row_without_edges_is_the_bias():
    layer = GATLayer(7, 5, 2)
    nn.init.normal_(layer.bias)
    torch.testing.assert_close(layer(torch.randn(4, 7), ga.empty(4)), layer.bias.expand(4, -1))


@pytest.mark.parametrize("which", range(4))
def test_another_graph_runs_with_the_same_weights(which):
    """The graph is an input: complement, full, self-loops and shuffled edges give other numbers of the same shape."""
    model, graph, x = models()[which], random_graph(17, 40), torch.randn(17, 7).double()
    base = model(x, graph)
    for other in (~graph, ga.full(17), ga.self_loops(17), graph.relabel(torch.randperm(17)), graph.T):
        out = model(x, other)
        assert out.shape == base.shape and out.isfinite().all() and not torch.allclose(out, base)


@pytest.mark.parametrize("which", range(4))
def test_weights_line_up_with_the_callers_edges(which):
    model, graph, x = models()[which], random_graph(17, 40), torch.randn(17, 7).double()
    found = model.weights(x, graph)
    assert len(found) == len(model.layers)
    index = ga.to_edge_index(graph)[:, torch.randperm(graph.num_edges)]
    for weights, layer in zip(found, model.layers, strict=True):
        mine = weights[:, ga.edge_ids(graph, index)]
        assert mine.shape == (layer.head.heads, index.shape[1])
        total = torch.zeros(layer.head.heads, 17).double().index_add_(1, index[1], mine)
        torch.testing.assert_close(total, torch.ones_like(total))
    # the first layer's, from its definition, for one edge of the additive score
    if which == 0:
        j, i = index[:, 5].tolist()
        head = model.layers[0].head
        wx = head.value(x).unflatten(-1, (2, 5))
        left, right = (wx * head.target_vector).sum(-1), (wx * head.source_vector).sum(-1)
        reads = graph.dense()[i].nonzero().squeeze(1)
        s = nn.functional.leaky_relu(left[i] + right[reads], 0.2).softmax(0)
        torch.testing.assert_close(found[0][:, ga.edge_ids(graph, index)[5]], s[reads == j][0])


@pytest.mark.parametrize("which", range(4))
def test_scores_of_pairs_beside_the_output(which):
    """Any pairs: on the graph itself the softmax of the scores are the weights."""
    model, graph, x = models()[which], random_graph(17, 40), torch.randn(17, 7).double()
    out, scores = model(x, graph, pairs=graph)
    torch.testing.assert_close(out, model(x, graph))
    target, _ = graph.targets_sources()
    for s, weights in zip(scores, model.weights(x, graph), strict=True):
        total = torch.zeros(s.shape[0], 17).double().index_add_(1, target, s.exp())
        torch.testing.assert_close(s.exp() / total[:, target], weights)
    pairs = ga.from_edge_index(torch.randint(17, (2, 30)), 17)
    _, scores = model(x, graph, pairs=pairs)
    assert [s.shape for s in scores] == [(layer.head.heads, pairs.num_edges) for layer in model.layers]
    _, batched = model(x.expand(2, 17, 7), graph, pairs=pairs)
    for s, both in zip(scores, batched, strict=True):
        torch.testing.assert_close(both, s.expand_as(both))


def test_drawn_pairs_are_labelled_by_the_graph():
    graph = random_graph(40, 200)
    pairs, real = node_train.drawn_pairs(graph, 0.5, 2.0)
    mask = graph.dense()[pairs.targets_sources()]
    assert torch.equal(real.bool(), mask) and 0 < real.sum() < graph.num_edges and (real == 0).any()
    assert node_train.drawn_pairs(graph, 1.0, 0.0)[0] == graph
    none, real = node_train.drawn_pairs(ga.empty(5), 0.5, 2.0)
    assert none.num_edges == 0 and real.numel() == 0
    # nearly every pair is an edge: random ones that are must not be called wrong
    full = ga.full(9) - ga.from_edge_index(torch.tensor([[0], [1]]), 9)
    pairs, real = node_train.drawn_pairs(full, 0.1, 50.0)
    assert torch.equal(real.bool(), full.dense()[pairs.targets_sources()]) and (real == 0).sum() == 1


def test_weights_leave_training_mode_alone():
    model = models()[0].train()
    model.weights(torch.randn(17, 7).double(), random_graph(17, 40))
    assert model.training


@pytest.mark.parametrize("score", ["additive", "gatv2", "dot"])
def test_edge_features_enter_by_edge(score):
    """Changing one edge's features moves its target alone; they follow their edge through a relabelling."""
    graph, x = random_graph(17, 60), torch.randn(17, 7).double()
    layer = GATLayer(7, 5, 2, score=score, edge_dim=3).double()
    e = torch.randn(graph.num_edges, 3).double()
    base = layer(x, graph, e)
    target = graph.targets_sources()[0]
    at = int((graph.degree()[target] > 2).nonzero()[1])
    changed = e.clone()
    changed[at] += 1
    moved = (layer(x, graph, changed) - base).abs().sum(1) > 1e-12
    assert moved.nonzero().flatten().tolist() == [int(target[at])]
    order = torch.randperm(17)
    turned = graph.relabel(order)
    new_target, new_source = turned.targets_sources()
    ids = ga.edge_ids(graph, torch.stack([order[new_source], order[new_target]]))
    torch.testing.assert_close(layer(x[order], turned, e[ids]), base[order])
    with pytest.raises(ValueError, match="needs edge_features"):
        layer(x, graph)
    torch.autograd.gradcheck(lambda e: layer(x, graph, e), (e.requires_grad_(),))


def test_edge_features_in_every_block():
    graph, x = random_graph(17, 60), torch.randn(17, 7).double()
    e = torch.randn(graph.num_edges, 3).double()
    for model in models(edge_dim=3):
        out = model(x, graph, e)
        assert not torch.allclose(out, model(x, graph, e + 1))
        assert model.weights(x, graph, e)[0].shape[-1] == graph.num_edges


def test_a_seed_drops_the_same_edges_on_every_backend_and_others_in_each_layer():
    graph, x = random_graph(17, 60), torch.randn(17, 7).double()
    model = NodeClassifier(7, 10, heads=1, head_dim=10, dropout=0.0, edge_dropout=0.5, score="dot").double().train()
    one = model(x, graph, seed=3)
    torch.testing.assert_close(model(x, graph, seed=3, backend="reference"), one)
    assert not torch.allclose(model(x, graph, seed=4), one)
    # two layers with the same weights and inputs, told apart by nothing but the seed
    seen = []
    for layer in model.layers:
        layer.head.register_forward_hook(lambda *_: None)
        attend = layer.head.attend
        layer.head.attend = lambda *a, attend=attend, **o: seen.append(o["seed"]) or attend(*a, **o)
    model(x, graph, seed=3)
    assert len(set(seen)) == 2


def test_no_dropout_outside_training():
    graph, x = random_graph(17, 60), torch.randn(17, 7).double()
    for model in models(dropout=0.5, edge_dropout=0.5):
        assert torch.equal(model(x, graph), model(x, graph))
        model.train()
        assert not torch.equal(model(x, graph), model(x, graph))


def test_state_travels():
    graph, x = random_graph(17, 60), torch.randn(17, 7).double()
    for a, b in zip(models(), models(), strict=True):
        b.load_state_dict(a.state_dict())
        assert torch.equal(a(x, graph), b(x, graph))


def test_what_is_refused():
    with pytest.raises(ValueError, match="block must be one of"):
        NodeClassifier(7, 3, block="gcn")
    with pytest.raises(ValueError, match="score must be one of"):
        NodeClassifier(7, 3, score="cosine")
    with pytest.raises(ValueError, match="dropout must be in"):
        NodeClassifier(7, 3, dropout=1.0)
    with pytest.raises(ValueError, match="classes must be at least 1"):
        NodeClassifier(7, 0)
    with pytest.raises(ValueError, match="x has 5 features, this model was built for 7"):
        NodeClassifier(7, 3)(torch.randn(4, 5), ga.full(4))
    with pytest.raises(ValueError, match="hops must be at least 1, got 0"):
        NodeClassifier(7, 3, hops=0)
    with pytest.raises(ValueError, match="teleport must be in"):
        NodeClassifier(7, 3, teleport=1.0)
    with pytest.raises(ValueError, match="multiple of the number of heads"):
        GraphBlock(10, 3)
    with pytest.raises(ValueError, match="x has 4 nodes, but graph is"):
        NodeClassifier(7, 3)(torch.randn(4, 7), ga.full(5))


# ---------------------------------------------------------------------- sparse features


def bag(n: int = 13, c: int = 11) -> torch.Tensor:
    x = torch.randn(n, c).double() * (torch.rand(n, c) < 0.3)
    x[3] = 0
    x[:, 5] = 0
    return x


@pytest.mark.parametrize("which", range(4))
def test_sparse_features_are_the_dense_ones(which):
    x, graph = bag(17, 7), random_graph(17, 40)
    model = models()[which]
    results = []
    for given in (x, SparseFeatures.from_dense(x)):
        model.zero_grad()
        out = model(given, graph)
        out.square().sum().backward()
        results.append((out, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])


def test_sparse_round_trip_and_shape():
    x = bag()
    s = SparseFeatures.from_dense(x)
    assert torch.equal(s.to_dense(), x) and s.shape == (13, 11) and s.dim() == 2
    count = int((x != 0).sum())
    assert repr(s) == f"SparseFeatures(13 x 11, {count} non-zeros, {100 * count / 143:.1f}% dense)"
    total = x.sum(1, keepdim=True)
    torch.testing.assert_close(s.normalized().to_dense(), x / torch.where(total == 0, 1.0, total))
    assert s.to(torch.float32).dtype == torch.float32
    empty = SparseFeatures.from_dense(torch.zeros(4, 11).double())
    weight = torch.randn(11, 3).double().requires_grad_()
    (empty @ weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(11, 3).double())


def test_sparse_product_gradient():
    s = SparseFeatures.from_dense(bag())
    torch.autograd.gradcheck(lambda w: s @ w, (torch.randn(11, 3).double().requires_grad_(),))
    linear = Projection(11, 3).double()
    torch.testing.assert_close(linear(s), linear(s.to_dense()))


@pytest.mark.parametrize("p", [0.25, 0.6])
def test_dropout_is_on_non_zeros(p):
    x = torch.ones(200, 200) * (torch.rand(200, 200) < 0.5)
    for given in (x, SparseFeatures.from_dense(x)):
        out = drop(given, p, True)
        out = out.to_dense() if isinstance(out, SparseFeatures) else out
        assert ((out != 0) <= (x != 0)).all()
        kept = out[x != 0]
        torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / (1 - p)]))
        assert abs(float((kept == 0).float().mean()) - p) < 0.02  # 20,000 draws: 0.02 is over 5 deviations
        assert drop(given, p, False) is given and drop(given, 0.0, True) is given


def test_sparse_pieces_that_do_not_fit():
    one = torch.ones(2)
    with pytest.raises(ValueError, match="columns span 0..9"):
        SparseFeatures.from_csr(torch.tensor([0, 1, 2]), torch.tensor([0, 9]), one, (2, 5))
    with pytest.raises(ValueError, match="needs indptr"):
        SparseFeatures.from_csr(torch.tensor([0, 2]), torch.tensor([0, 1]), one, (2, 5))
    with pytest.raises(ValueError, match="without falling"):
        SparseFeatures.from_csr(torch.tensor([0, 3, 2]), torch.tensor([0, 1]), one, (2, 5))


# ---------------------------------------------------------------------- training


def two_blocks(n: int = 60) -> NodeData:
    """Two communities; features say only who a node is, two nodes of each are labelled."""
    y = (torch.arange(n) >= n // 2).long()
    near = torch.rand(n, n) < torch.where(y[:, None] == y, 0.3, 0.02)
    near = (near | near.T) & ~torch.eye(n, dtype=torch.bool)
    masks = torch.zeros(3, 2, n, dtype=torch.bool)
    masks[0, :, [0, 1, n // 2, n // 2 + 1]] = True
    masks[1, :, 5:15] = masks[1, :, n // 2 + 5 : n // 2 + 15] = True
    masks[2] = ~(masks[0] | masks[1])
    return NodeData("blocks", SparseFeatures.from_dense(torch.eye(n)), y, ga.from_mask(near), *masks)


@pytest.mark.parametrize("block", ["gat", "transformer"])
def test_learns_communities(block):
    data = two_blocks()
    recipe = Recipe(block=block, epochs=120, dropout=0.4, edge_dropout=0.2, lr=0.01)
    run = fit(data, recipe)
    assert run.test >= 85 and run.val >= 85
    again = fit(data, recipe)
    assert (again.val, again.test, again.epoch) == (run.val, run.test, run.epoch)


def test_weights_kept_are_those_validation_chose(monkeypatch):
    """The test nodes are looked at once, after training; the figure is that of the best validation epoch."""
    data, calls = two_blocks(), []
    real = metric

    def watched(kind, out, y):
        calls.append(y.numel())
        return real(kind, out, y)

    monkeypatch.setattr(node_train, "metric", watched)
    run = fit(data, Recipe(epochs=30, select="metric"))
    val, test = int(data.val[0].sum()), int(data.test[0].sum())
    assert val != test and calls.count(test) == 1 and calls[-1] == test
    x, graph = prepare(data, Recipe())
    with torch.no_grad():
        out = run.model(x, graph)
    assert real("accuracy", out[data.val[0]], data.y[data.val[0]]) == run.val
    assert real("accuracy", out[data.test[0]], data.y[data.test[0]]) == run.test


def test_which_epoch_is_kept():
    figures = [(50.0, 0.9), (80.0, 0.5), (90.0, 0.7), (60.0, 0.4), (90.0, 0.6), (90.0, 0.4)]
    answers = {
        "both": [(True, True), (True, True), (False, True), (False, True), (False, True), (True, True)],
        "metric": [(True, True)] * 3 + [(False, False)] + [(True, True)] * 2,
        "loss": [(True, True)] * 2 + [(False, False), (True, True)] + [(False, False)] * 2,
    }
    for select, wanted in answers.items():
        best = node_train.Best(select)
        assert [best.offer(*f) for f in figures] == wanted, select
    with pytest.raises(ValueError, match="select must be both, metric or loss, got 'last'"):
        fit(two_blocks(), Recipe(select="last"))


def test_members_are_trained_apart_and_asked_together(monkeypatch):
    data, calls = two_blocks(), []
    recipe = Recipe(epochs=25, dropout=0.4, edge_dropout=0.2, lr=0.01, members=3, head_dim=4)
    real = metric
    monkeypatch.setattr(node_train, "metric", lambda kind, out, y: calls.append(y.numel()) or real(kind, out, y))
    run = fit(data, recipe, seed=5)
    assert calls.count(int(data.test[0].sum())) == 1  # the test nodes are read once, by all together
    x, graph = prepare(data, recipe)
    alone = [fit(data, replace(recipe, members=1), seed=15 + n) for n in range(3)]
    for member, one in zip(run.model.members, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(member.parameters(), one.model.parameters(), strict=True))
    with torch.no_grad():
        mean = torch.stack([one.model(x, graph).softmax(-1) for one in alone]).mean(0)
        torch.testing.assert_close(run.model(x, graph).exp(), mean)
        weights = [one.model.weights(x, graph) for one in alone]
        for n, layer in enumerate(run.model.weights(x, graph)):
            torch.testing.assert_close(layer, torch.stack([w[n] for w in weights]).mean(0))
    assert run.epochs == round(sum(one.epochs for one in alone) / 3)
    with pytest.raises(ValueError, match="members must be at least 1, got 0"):
        fit(data, replace(recipe, members=0))
    with pytest.raises(ValueError, match="at least one member"):
        Ensemble([])
    with pytest.raises(TypeError, match="no scores of pairs"):
        run.model(x, graph, pairs=graph)


def test_validates_every_so_many_epochs(monkeypatch):
    data, calls = two_blocks(), []
    real = metric
    monkeypatch.setattr(node_train, "metric", lambda kind, out, y: calls.append(y.numel()) or real(kind, out, y))
    run = fit(data, Recipe(epochs=32, every=5, patience=1000))
    assert calls.count(int(data.val[0].sum())) == 6 + 1 + 1  # after 5, 10, .. 30 and the last, and of what was kept
    assert run.epoch in (5, 10, 15, 20, 25, 30, 32)
    assert fit(data, Recipe(epochs=400, every=5, patience=10)).epochs % 5 == 0


@pytest.mark.parametrize("epochs", [1, 2, 20])
def test_a_cycle_ends_at_rest(monkeypatch, epochs):
    """The rate rises to the recipe's and falls to nearly nothing."""
    rates = []
    real = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda o, *a: rates.append(o.param_groups[0]["lr"]) or real(o, *a))
    fit(two_blocks(), Recipe(epochs=epochs, cycle=True, lr=0.02))
    assert len(rates) == epochs
    if epochs > 2:
        assert rates[0] < 0.002 and 0.019 < max(rates) <= 0.02 and rates[-1] < 0.001
        assert rates.index(max(rates)) < epochs / 2


def test_degree_tells_stars_apart():
    """The mean of equal neighbours is the same for two as for five; with degree the model sees how many."""
    star = ga.from_edge_index(torch.tensor([[1, 2, 3, 4, 5, 6, 7], [0, 0, 8, 8, 8, 8, 8]]), 9)
    x = torch.ones(9, 7)
    blind, seeing = (NodeClassifier(7, 3, block="transformer", degree=on).eval() for on in (False, True))
    torch.testing.assert_close(blind(x, star)[0], blind(x, star)[8])
    assert not torch.allclose(seeing(x, star)[0], seeing(x, star)[8], atol=1e-3)


def test_labels_outside_training_do_not_reach_the_model():
    """Wrong labels on test nodes change the figure, never the weights; no validation: nothing to choose by."""
    data = two_blocks()
    flipped = torch.where(data.test[0], 1 - data.y, data.y)
    wrong = NodeData(data.name, data.x, flipped, data.graph, data.train, data.val, data.test)
    a, b = fit(data, Recipe(epochs=20)), fit(wrong, Recipe(epochs=20))
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert a.test == pytest.approx(100 - b.test)


def test_auc():
    sklearn = [(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]), 0.75)]
    ties = (torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([1, 0, 0, 1]), 0.75)
    for score, y, want in [*sklearn, ties]:
        assert roc_auc(score, y) == pytest.approx(want)
    score, y = torch.randn(101), torch.randint(2, (101,))
    a, b = score[y == 1], score[y == 0]
    assert roc_auc(score, y) == pytest.approx(float((a[:, None] > b).double().mean()))
    assert roc_auc(-score, y) == pytest.approx(1 - roc_auc(score, y))


def test_karate_from_one_label_a_side(tmp_path):
    found = nodes("karate", seeds=1, out=str(tmp_path), quiet=True)
    assert found.mean >= 100 * 31 / 32
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "karate-published-seed0-confusion.png", "karate-published-seed0-neighbourhood.png", "karate-published.json",
    ]  # fmt: skip
    assert all(p.stat().st_size > 20_000 for p in found.pictures)
    made = [p.stat().st_mtime_ns for p in found.pictures]
    again = nodes("karate", seeds=1, out=str(tmp_path), quiet=True)  # nothing is trained or drawn again
    assert [p.stat().st_mtime_ns for p in again.pictures] == made


def test_resumes_without_training_again(tmp_path, monkeypatch):
    options = {"out": str(tmp_path), "quiet": True, "pictures": False, "epochs": 3}
    first = nodes("karate", seeds=2, **options)
    trained = []
    real = fit
    monkeypatch.setattr(node_train, "fit", lambda *a, **o: trained.append(o["seed"]) or real(*a, **o))
    second = nodes("karate", seeds=3, **options)
    assert trained == [2] and second.runs[:2] == first.runs and len(second.runs) == 3
    kept = json.loads(first.file.read_text())
    assert set(kept["runs"]) == {f"split 0 seed {k}" for k in range(3)}
    with pytest.raises(ValueError, match="another epochs"):
        nodes("karate", seeds=1, **(options | {"epochs": 4}))
    assert not list(tmp_path.glob("*.part"))
    del kept["recipe"]["hops"]  # a file older than an option holds runs with its default
    first.file.write_text(json.dumps(kept))
    assert nodes("karate", seeds=1, **options).runs == first.runs[:1]


def test_summary_says_mean_and_deviation(tmp_path, capsys):
    found = nodes("karate", seeds=3, epochs=2, out=str(tmp_path), pictures=False)
    tests = torch.tensor([r["test"] for r in found.runs]).double()
    assert found.mean == pytest.approx(float(tests.mean())) and found.deviation == pytest.approx(float(tests.std()))
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"karate: test accuracy {found.mean:.2f} +- {found.deviation:.2f} over 3 runs"


def test_nodes_refuses(tmp_path):
    with pytest.raises(ValueError, match="recipe 'other' is not known"):
        nodes("karate", recipe="other", out=str(tmp_path), quiet=True)
    with pytest.raises(ValueError, match=r"has 1 split\(s\), got splits=2"):
        nodes("karate", splits=2, out=str(tmp_path), quiet=True)
    with pytest.raises(ValueError, match="seeds must be"):
        nodes("karate", seeds=0, out=str(tmp_path), quiet=True)
    with pytest.raises(ValueError, match="first_seed must be at least 0, got -1"):
        nodes("karate", first_seed=-1, out=str(tmp_path), quiet=True)
    with pytest.raises(ValueError, match="backend 'fast' is not known"):
        nodes("karate", backend="fast", out=str(tmp_path), quiet=True)


def test_kept_runs_are_of_the_same_data_and_said_to_be_kept(tmp_path, capsys, monkeypatch):
    options = dict(seeds=1, epochs=2, out=str(tmp_path), pictures=False)
    nodes("karate", **options)
    assert "(kept)" not in capsys.readouterr().out
    nodes("karate", **options)
    assert "(kept)" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"another epochs \(2 there, 3 here\): use another folder \(--out\)"):
        nodes("karate", **options | {"epochs": 3})
    file = tmp_path / "karate-published.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"data": [35, *kept["data"][1:]]}))
    with pytest.raises(ValueError, match="holds runs on other data"):
        nodes("karate", **options)
    del kept["data"]  # a file older than this check
    file.write_text(json.dumps(kept))
    nodes("karate", **options)

    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(node_train, "fit", stopped)
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        nodes("karate", **options | {"seeds": 2})
    assert f"1 finished run kept in {file}: the same command goes on" in capsys.readouterr().out


def test_mistakes_are_named_in_the_callers_words():
    model, graph, x = NodeClassifier(7, 3), random_graph(9, 20), torch.randn(9, 7)
    index = ga.to_edge_index(graph)
    for call, kind, what in (
        (lambda: model(x, index), TypeError, "graph must be a Graph, got Tensor: graphattn.from_edge_index"),
        (lambda: model(x, graph, pairs=index), TypeError, "pairs must be a Graph, got Tensor"),
        (lambda: model(x, graph, pairs=ga.causal(5)), ValueError, "x has 9 nodes, but pairs is"),
        (lambda: model(x[:4], graph), ValueError, "x has 4 nodes, but graph is"),
        (lambda: model(x.double(), graph), TypeError, "x is torch.float64, the model torch.float32"),
        (lambda: model(x, graph, torch.randn(graph.num_edges, 2)), ValueError, "built without edge_dim"),
        (lambda: NodeClassifier(7, 3, tied=True), ValueError, "tied belongs to the dot score, not to additive"),
        (lambda: Ensemble([model, 3]), TypeError, "must be NodeClassifiers, got NodeClassifier, int"),
        (lambda: Ensemble([model, NodeClassifier(7, 4)]), ValueError, r"agree on the classes, got \[3, 4\]"),
    ):
        with pytest.raises(kind, match=what):
            call()
    for layer in (GATLayer(7, 4, 2), GraphBlock(7, 1)):
        with pytest.raises(ValueError, match="built without edge_dim"):
            layer(x, graph, torch.randn(graph.num_edges, 2))
    assert len(Ensemble(model).members) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x.bfloat16(), graph)


@pytest.mark.parametrize("block", ["gat", "transformer"])
def test_link_term_teaches_scores_to_find_edges(block):
    """With it the scores say far better than without which pairs are edges."""
    data = two_blocks()

    def missed(link: float) -> float:
        recipe = Recipe(
            block=block, score="dot", tied=True, epochs=60, dropout=0.2, edge_dropout=0.2, lr=0.02, link=link,
            link_pairs=2.0, select="metric", weight_decay=0.0,
        )  # fmt: skip
        model = fit(data, recipe).model.eval()
        x, graph = prepare(data, recipe)
        every = ga.full(graph.t)
        with torch.no_grad():
            _, scores = model(x, graph, pairs=every)
        real = graph.dense().flatten().double()
        return sum(float(nn.functional.binary_cross_entropy_with_logits(s.mean(0).double(), real)) for s in scores)

    assert missed(10.0) < missed(0.0) / 2


def test_recipes_fall_back():
    assert recipe_for("published", "something of mine") == RECIPES["published"]["cora"]
    assert recipe_for("published", "pubmed").out_heads == 8
    assert recipe_for("best", "something of mine") == RECIPES["best"]["cora"]
    assert recipe_for("best", "karate") == RECIPES["published"]["karate"]
    assert recipe_for("published", "minesweeper") == RECIPES["best"]["minesweeper"]


@needs_data
def test_cora_in_a_few_epochs():
    """Not the figure, but far from chance: 40 epochs and one seed."""
    run = fit(load_nodes("cora", DATA), Recipe(epochs=40, select="metric"))
    assert run.test > 70


@needs_data
def test_first_layer_on_sparse_and_dense_cora():
    data = load_nodes("cora", DATA)
    x, graph = prepare(data, Recipe())
    dense, _ = prepare(data.dense(), Recipe())
    torch.testing.assert_close(x.to_dense(), dense)
    model = NodeClassifier(1433, 7).eval()
    torch.testing.assert_close(model(x, graph), model(dense, graph), rtol=1e-4, atol=1e-5)


def test_picture_marks_the_wrong_and_draws_a_part(tmp_path):
    from graphattn.node_pictures import centre, confusion, neighbourhood

    data = two_blocks(80)
    x, graph = prepare(data, Recipe())
    model = NodeClassifier(80, 2).eval()
    guess = torch.zeros(80, dtype=torch.int64)
    node = centre(data, graph, guess, data.test[0])
    assert data.test[0, node] and data.y[node] == 0
    texts = {t.get_text() for t in neighbourhood(model, data, x, graph, node, guess).axes[0].texts}
    assert f"{node}: 0" in texts
    reads = graph.edges()[1][graph.edge_ptr()[node] : graph.edge_ptr()[node + 1]].tolist()
    assert {t for t in texts if ":" in t} == {f"{j}: 0" + (" (1)" if data.y[j] else "") for j in reads}
    counts = [t.get_text() for t in confusion(data.y, guess, 2, "blocks").axes[0].texts]
    assert counts == ["40", "0", "40", "0"]


def test_karate_has_two_labels_and_no_validation():
    data = karate()
    assert data.train.sum() == 2 and data.val.sum() == 0 and data.test.sum() == 32
    assert repr(data) == "NodeData(karate: Graph(34 <- 34, 156 edges, 13.5% dense), 34 features, 2 classes, 1 split)"
