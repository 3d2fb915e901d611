"""PyG's layers and ours: the same weights give the same numbers, outputs and every gradient, in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn.pyg import GraphAttentionConv, from_pyg_conv

pyg = pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData  # noqa: E402
from torch_geometric.nn import GATConv, GATv2Conv, Sequential, TransformerConv, to_hetero  # noqa: E402

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "nodes"
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def edges(targets: int, sources: int, n: int, square: bool = False) -> torch.Tensor:
    """n distinct edges in no order, with self-loops where square, and a target and a source without any."""
    cells = torch.randperm((targets - 1) * (sources - 1))[:n]
    index = torch.stack([cells % (sources - 1), cells // (sources - 1)])
    if square:
        loops = torch.tensor([[2, 4], [2, 4]])
        index = torch.cat([index[:, index[0] != index[1]], loops], 1)
        index = index[:, torch.randperm(index.shape[1])]
    return index


def same(conv, x, edge_index, edge_attr=None, new=None):
    """Compare output and gradients of features, edge features and every parameter."""
    conv = conv.double()
    for p in conv.parameters():  # biases start at 0, which hides them
        p.data += 0.1 * torch.randn_like(p)
    new = from_pyg_conv(conv) if new is None else new
    results = []
    for layer in (conv, new):
        xs = [v.clone().requires_grad_() for v in ((x,) if isinstance(x, torch.Tensor) else x) if v is not None]
        e = None if edge_attr is None else edge_attr.clone().requires_grad_()
        given = xs[0] if isinstance(x, torch.Tensor) else (xs[0], xs[1] if len(xs) > 1 else None)
        out = layer(given, edge_index, e) if e is not None else layer(given, edge_index)
        layer.zero_grad()
        torch.manual_seed(1)
        (out * torch.randn_like(out)).sum().backward()
        results.append((out, [v.grad for v in xs], None if e is None else e.grad, layer))
    (out, gx, ge, _), (out2, gx2, ge2, _) = results
    torch.testing.assert_close(out2, out, **TOLERANCE)
    torch.testing.assert_close(gx2, gx, **TOLERANCE)
    if ge is not None:
        torch.testing.assert_close(ge2, ge, **TOLERANCE)
    theirs = sorted((p.grad.flatten() for p in conv.parameters() if p.grad is not None), key=_key)
    ours = sorted((p.grad.flatten() for p in new.parameters() if p.grad is not None), key=_key)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    return new


def _key(g: torch.Tensor) -> tuple[int, float]:
    # the same gradients under other names: pair them by size and by a number that rounding does not reorder
    return g.numel(), round(float(g.abs().sum()), 6)


GAT = [
    {},
    {"concat": False},
    {"residual": True},
    {"bias": False},
    {"add_self_loops": False},
    {"edge_dim": 2},
    {"edge_dim": 2, "fill_value": "add", "concat": False, "residual": True},
    {"edge_dim": 2, "fill_value": 0.3},
    {"edge_dim": 2, "add_self_loops": False},
    {"negative_slope": 0.7, "heads": 1},
]
TRANSFORMER = [
    {},
    {"concat": False},
    {"beta": True},
    {"beta": True, "concat": False, "edge_dim": 2},
    {"root_weight": False},
    {"root_weight": False, "beta": True, "bias": False},
    {"edge_dim": 2},
]
CASES = (
    [pytest.param(GATConv, o, id=f"gat-{o}") for o in GAT]
    + [pytest.param(GATv2Conv, o, id=f"gatv2-{o}") for o in [*GAT, {"share_weights": True}]]
    + [pytest.param(TransformerConv, o, id=f"transformer-{o}") for o in TRANSFORMER]
)


@pytest.mark.parametrize("kind, options", CASES)
def test_square(kind, options):
    options = {"heads": 3} | options
    index = edges(13, 13, 40, square=True)
    e = torch.randn(index.shape[1], 2) if "edge_dim" in options else None
    same(kind(5, 4, **options), torch.randn(13, 5), index, e)


@pytest.mark.parametrize("kind, options", CASES)
def test_bipartite(kind, options):
    options = {"heads": 3} | options
    index = edges(7, 11, 30)
    e = torch.randn(index.shape[1], 2) if "edge_dim" in options else None
    other = 5 if "share_weights" in options else 2
    same(kind((5, other), 4, **options), (torch.randn(11, 5), torch.randn(7, other)), index, e)


@pytest.mark.parametrize("kind, options", CASES)
def test_pair_of_one_width(kind, options):
    """in_channels is one number, x a pair: GATConv then projects both with one matrix."""
    options = {"heads": 3} | options
    index = edges(7, 11, 30)
    e = torch.randn(index.shape[1], 2) if "edge_dim" in options else None
    same(kind(5, 4, **options), (torch.randn(11, 5), torch.randn(7, 5)), index, e)


def test_targets_without_features():
    conv = GATConv((5, 5), 4, heads=2, add_self_loops=False)
    same(conv, (torch.randn(11, 5), None), edges(7, 11, 30))
    with pytest.raises(ValueError, match="needs the targets' features"):
        GraphAttentionConv(5, 4, score="gatv2")((torch.randn(11, 5), None), edges(7, 11, 30))


def test_no_edges_and_isolated_nodes():
    none = torch.zeros(2, 0, dtype=torch.long)
    for kind in (GATConv, GATv2Conv, TransformerConv):
        options = {} if kind is TransformerConv else {"add_self_loops": False}
        conv = kind(5, 4, heads=3, **options)
        torch.testing.assert_close(from_pyg_conv(conv)(torch.ones(6, 5), none), conv(torch.ones(6, 5), none))


@pytest.mark.skipif(not DATA.exists(), reason=f"the Cora of {DATA} is not here")
@pytest.mark.parametrize("kind", [GATConv, GATv2Conv, TransformerConv])
def test_cora(kind):
    from graphattn.node_data import load_nodes

    data = load_nodes("cora", DATA)
    index = ga.to_edge_index(data.graph)
    index = index[:, torch.randperm(index.shape[1])]
    e = torch.randn(index.shape[1], 3)
    same(kind(19, 8, heads=2, edge_dim=3), torch.randn(data.graph.t, 19), index, e)


def test_weights_are_in_the_callers_order():
    index = edges(13, 13, 40, square=True)
    conv = GATConv(5, 4, heads=3).double()
    x = torch.randn(13, 5)
    _, (theirs, alpha) = conv(x, index, return_attention_weights=True)
    _, (ours, weights) = from_pyg_conv(conv)(x, index, return_attention_weights=True)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(weights, alpha, **TOLERANCE)
    conv = TransformerConv(5, 4, heads=3, edge_dim=2)
    e = torch.randn(index.shape[1], 2)
    _, (theirs, alpha) = conv(x, index, e, return_attention_weights=True)
    _, (ours, weights) = from_pyg_conv(conv)(x, index, e, return_attention_weights=True)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(weights, alpha, **TOLERANCE)


def test_edge_order_does_not_matter_and_direction_does():
    index = edges(13, 13, 40)
    e = torch.randn(index.shape[1], 2)
    conv, x = GraphAttentionConv(5, 4, 2, edge_dim=2), torch.randn(13, 5)
    p = torch.randperm(index.shape[1])
    torch.testing.assert_close(conv(x, index[:, p], e[p]), conv(x, index, e))
    assert not torch.allclose(conv(x, index.flip(0), e), conv(x, index, e))


def test_graph_and_sparse_adjacency_are_edges_too():
    index = edges(7, 11, 30)
    x = (torch.randn(11, 5), torch.randn(7, 5))
    conv = GraphAttentionConv(5, 4, 2)
    graph = ga.from_edge_index(index, (7, 11))
    want = conv(x, index)
    torch.testing.assert_close(conv(x, graph), want)
    adjacency = torch.sparse_coo_tensor(index.flip(0), torch.ones(index.shape[1]), (7, 11))
    torch.testing.assert_close(conv(x, adjacency), want)
    torch.testing.assert_close(conv(x, adjacency.to_sparse_csr()), want)
    torch.testing.assert_close(conv(x, pyg.EdgeIndex(index, sparse_size=(11, 7))), want)


def test_a_changed_edge_index_is_seen():
    index = edges(13, 13, 40)
    conv, x = GraphAttentionConv(5, 4, 2), torch.randn(13, 5)
    conv(x, index)
    index[1, 0] = 12
    torch.testing.assert_close(conv(x, index), conv(x, index.clone()))


def test_multigraph_is_refused_by_name():
    index = torch.tensor([[0, 3, 1, 3], [1, 2, 2, 2]])
    with pytest.raises(ValueError, match="edge 3 -> 2 is given more than once"):
        GraphAttentionConv(5, 4)(torch.randn(4, 5), index)
    loops = torch.tensor([[0, 3, 3], [1, 3, 3]])  # replaced by one loop each, as PyG does
    same(GATConv(5, 4), torch.randn(4, 5), loops)


def test_what_is_refused():
    x, index = torch.randn(13, 5), edges(13, 13, 40)
    with pytest.raises(ValueError, match="without edge_dim"):
        GraphAttentionConv(5, 4)(x, index, torch.randn(index.shape[1], 2))
    with pytest.raises(ValueError, match="needs edge_attr"):
        GraphAttentionConv(5, 4, edge_dim=2)(x, index)
    with pytest.raises(ValueError, match="must be 'add'"):
        from_pyg_conv(GATConv(5, 4, aggr="max"))
    with pytest.raises(ValueError, match="flip the edge_index"):
        from_pyg_conv(GATConv(5, 4, flow="target_to_source"))
    with pytest.raises(ValueError, match="call it once"):
        from_pyg_conv(GATConv(-1, 4))
    with pytest.raises(TypeError, match="got GCNConv"):
        from_pyg_conv(pyg.nn.GCNConv(5, 4))
    with pytest.raises(ValueError, match="outside|spans"):
        GraphAttentionConv(5, 4)(x, index + 5)
    with pytest.raises(ValueError, match="edge_attr has 3 rows"):
        GraphAttentionConv(5, 4, edge_dim=2)(x, index, torch.randn(3, 2))


def test_lazy_width_then_converted():
    x, index = torch.randn(13, 5), edges(13, 13, 40)
    conv = GATv2Conv(-1, 4, heads=2)
    conv(x, index)
    torch.testing.assert_close(from_pyg_conv(conv)(x, index), conv(x, index), **TOLERANCE)


def test_batch_on_shared_edges():
    """(B, N, C) on one graph equals each sample alone."""
    x, index = torch.randn(3, 13, 5), edges(13, 13, 40)
    for score in ("dot", "additive", "gatv2"):
        conv = GraphAttentionConv(5, 4, 2, score=score, edge_dim=2, add_self_loops=True)
        e = torch.randn(index.shape[1], 2)
        torch.testing.assert_close(conv(x, index, e), torch.stack([conv(v, index, e) for v in x]))


def test_dropout_in_training_only():
    x, index = torch.randn(13, 5), edges(13, 13, 60)
    conv = GraphAttentionConv(5, 4, 2, dropout=0.5)
    assert not torch.equal(conv(x, index), conv(x, index))
    conv.eval()
    assert torch.equal(conv(x, index), conv(x, index))
    assert from_pyg_conv(GATConv(5, 4, dropout=0.3).eval()).training is False


def test_in_pyg_sequential_and_copy():
    index, x = edges(13, 13, 40), torch.randn(13, 5)
    layers = [
        (GraphAttentionConv(5, 4, 2, score="additive"), "x, edge_index -> x"),
        nn.ReLU(),
        (GraphAttentionConv(8, 3), "x, edge_index -> x"),
    ]
    model = Sequential("x, edge_index", layers)
    assert model(x, index).shape == (13, 3)
    torch.testing.assert_close(copy.deepcopy(model)(x, index), model(x, index))


def test_to_hetero():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = GraphAttentionConv((-1, -1), 4, 2)
            self.second = GraphAttentionConv((8, 8), 3, score="gatv2")

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(13, 5), torch.randn(7, 2)
    kinds = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")]
    for kind, (t, s) in zip(kinds, [(13, 13), (13, 7), (7, 13)], strict=True):
        data[kind].edge_index = edges(t, s, 25)
    model = to_hetero(Net(), data.metadata(), aggr="sum")
    out = model(data.x_dict, data.edge_index_dict)
    assert out["paper"].shape == (13, 3) and out["author"].shape == (7, 3)
    sum(v.sum() for v in out.values()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sampled_batches_agree_with_the_whole():
    """A batch that holds every neighbour gives the seeds the numbers the whole graph gives them."""
    pytest.importorskip("torch_geometric.loader")
    index, x = edges(29, 29, 120), torch.randn(29, 5)
    first, second = GraphAttentionConv(5, 4, 2), GraphAttentionConv(8, 3, score="gatv2")
    whole = second(first(x, index), index)
    for seed in ([3, 8], [0]):
        near, part, _, _ = pyg.utils.k_hop_subgraph(seed, 2, index, relabel_nodes=True, num_nodes=29)
        out = second(first(x[near], part), part)
        at = torch.searchsorted(near, torch.tensor(seed))
        torch.testing.assert_close(out[at], whole[seed], **TOLERANCE)


def test_neighbor_loader():
    from torch_geometric.loader import NeighborLoader

    data = Data(x=torch.randn(29, 5), edge_index=edges(29, 29, 120))
    try:
        batches = list(NeighborLoader(data, [4, 4], batch_size=8))
    except ImportError as error:
        pytest.skip(f"PyG samples only with an extension that is not here: {error}")
    conv = GraphAttentionConv(5, 4, 2)
    for batch in batches:
        assert conv(batch.x, batch.edge_index).shape == (batch.num_nodes, 8)
