"""Laws that hold for every graph: hypothesis looks for one that breaks them."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import graphattn as ga


@st.composite
def masks(draw: st.DrawFn, t: int | None = None, s: int | None = None, lead: bool = True) -> Tensor:
    """Bool masks whose rows hypothesis can shrink: sizes 0 to 6, with or without leading axes."""
    t = draw(st.integers(0, 6)) if t is None else t
    s = draw(st.integers(0, 6)) if s is None else s
    axes = draw(st.sampled_from([(), (), (1, 1), (2, 1), (1, 3), (2, 2)])) if lead else ()
    n = t * s
    for a in axes:
        n *= a
    bits = draw(st.integers(0, 2**n - 1))
    return torch.tensor([bits >> k & 1 for k in range(n)], dtype=torch.bool).view(*axes, t, s)


def graph(mask: Tensor) -> ga.Graph:
    return ga.from_mask(mask)


@st.composite
def pairs(draw: st.DrawFn, n: int = 2) -> list[ga.Graph]:
    first = draw(masks())
    return [graph(first), *(graph(draw(masks(*first.shape[-2:], lead=False))) for _ in range(n - 1))]


@given(pairs(3))
def test_sets(graphs: list[ga.Graph]) -> None:
    a, b, c = graphs
    assert a | b == b | a and a & b == b & a and a ^ b == b ^ a
    assert (a | b) | c == a | (b | c) and (a & b) & c == a & (b & c)
    assert a & (b | c) == (a & b) | (a & c) and a | (b & c) == (a | b) & (a | c)
    assert ~(a | b) == ~a & ~b and ~~a == a and a - b == a & ~b and a ^ b == (a | b) - (a & b)
    assert (a & b) <= a <= (a | b) and ((a <= b) == ((a & b) == a.expand(*(a & b).lead) if a.lead else (a & b) == a))
    everything, nothing = ga.full(a.t, a.s), ga.empty(a.t, a.s)
    assert a & everything == a and a | nothing == a and (a & nothing).num_edges == 0  # K7
    assert (a | b).num_edges == (a - b).num_edges + (b - a).num_edges + (a & b).num_edges


@given(pairs())
def test_transposes(graphs: list[ga.Graph]) -> None:
    a, b = graphs
    assert a == a.T.T and (a | b).T == a.T | b.T and (a - b).T == a.T - b.T and (~a).T == ~a.T
    assert a.num_edges == a.T.num_edges and (a <= b) == (a.T <= b.T)


@given(masks(lead=False), st.data())
def test_products(mask: Tensor, data: st.DataObject) -> None:
    a = graph(mask)
    b, c = (graph(data.draw(masks(t=a.s, lead=False))) for _ in range(2))
    assert (a @ b).T == b.T @ a.T
    assert a @ ga.self_loops(a.s) == a == ga.self_loops(a.t) @ a
    if b.s == c.s:
        assert a @ (b | c) == (a @ b) | (a @ c)


@given(st.integers(0, 6).flatmap(lambda t: masks(t=t, s=t, lead=False)), st.data())
def test_relabelling(mask: Tensor, data: st.DataObject) -> None:
    a = graph(mask)
    order = torch.tensor(data.draw(st.permutations(range(a.t))), dtype=torch.int64)
    assert a.relabel(order).relabel(order.argsort()) == a
    assert a.T.relabel(order) == a.relabel(order).T and (~a).relabel(order) == ~a.relabel(order)
    # leaks and fields do not care what nodes are called, once labels are called alike
    label = torch.tensor(
        data.draw(st.lists(st.integers(-1, max(a.t - 1, 0)), min_size=a.t, max_size=a.t)), dtype=torch.int64
    )
    label = label.clamp(max=a.t - 1)
    back = order.argsort()
    moved = torch.where(label[order] < 0, label[order], back[label[order].clamp(min=0)]) if a.t else label
    one, two = ga.find_leak([a] * 2, labels=label), ga.find_leak([a.relabel(order)] * 2, labels=moved)
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert len(one.path) == len(two.path)
    for i in range(a.t):
        field = ga.receptive_field([a.relabel(order)] * 2, i)
        assert torch.equal(order[field].sort().values, ga.receptive_field([a] * 2, int(order[i])))


@given(st.integers(0, 8), st.integers(0, 9), st.integers(0, 9))
def test_patterns_in_terms_of_each_other(t: int, x: int, y: int) -> None:
    causal = ga.causal(t)
    assert causal | causal.T == ga.full(t) and causal & causal.T == ga.self_loops(t)
    assert ga.band(t, x, y) == ga.band(t, x) | ga.band(t, y).T and ga.band(t, y, x) == ga.band(t, x, y).T
    assert ga.window(t, x + 1) == ga.band(t, x) == causal & ga.band(t, x, y)
    assert ga.band(t, t, -1) == causal - ga.self_loops(t)
    assert ga.strided(t, x + 1) == ga.window(t, x + 1) | ga.dilated(t, t + 1, x + 1)
    assert ga.fixed(t, x + 1, 0) == causal & ga.shifted_window(t, x + 1)
    assert ga.fixed(t, x + 1, x + 1) == causal
    assert ga.neighborhood(t, x) == ga.band(t, x, x) and ga.tree_ancestors(range(-1, t - 1)) == causal
    assert ga.shared_prefix(t, []) == causal and ga.shared_prefix(0, [t]) == causal
    assert ga.documents([x, y]) == ga.disjoint([ga.full(x), ga.full(y)]) == ga.block_sparse(ga.self_loops(2), [x, y])
    assert ga.block_causal([x, y]) == ga.documents([x, y]) | ga.causal(x + y)
    assert ga.prefix(t, min(x, t)) == causal | (ga.full(t) & ga.from_key_padding(torch.arange(t) < x, "keep"))
    assert ga.encoder_decoder(x, y) == ga.prefix(x + y, x)
    assert ga.k_hop(ga.band(t, 1, 1), x) == ga.band(t, x, x) - ga.self_loops(t) | (
        ga.self_loops(t) if x else ga.empty(t)
    )


@given(masks())
def test_conversions(mask: Tensor) -> None:
    a = graph(mask)
    assert ga.from_mask(ga.to_mask(a)) == a == ga.from_additive(ga.to_additive(a)) == pickle.loads(pickle.dumps(a))
    if a.lead:
        assert ga.from_hf(ga.to_hf(a)) == a
        return
    index = ga.to_edge_index(a)
    again = ga.from_edge_index(torch.cat([index, index], 1)[:, torch.randperm(2 * a.num_edges)], a.shape)  # K4
    assert again == a == ga.from_csr(*ga.to_csr(a), a.shape) == ga.from_scipy(ga.to_scipy(a))
    assert ga.from_edge_index(index.flip(0), a.shape[::-1]) == a.T  # K3
    assert torch.equal(ga.edge_ids(a, index), torch.arange(a.num_edges))
    if a.t == a.s:
        assert ga.from_networkx(ga.to_networkx(a)) == a == ga.from_pyg(ga.to_pyg(a))


@settings(max_examples=40)
@given(masks())
def test_flex(mask: Tensor) -> None:
    a = graph(mask)
    assert ga.from_predicate(ga.to_predicate(a), a.shape) == a
    back = ga.from_block_mask(ga.to_block_mask(a, (2, 3)))
    assert back == (a if a.lead not in ((), (1, 1)) else a.select(0, 0) if a.lead else a)


@given(st.lists(masks(t=5, s=5, lead=False), min_size=1, max_size=4), st.integers(-2, 4))
def test_leaks_are_monotone(layers: list[Tensor], offset: int) -> None:
    """More edges, more layers or a nearer label never mend a leak; a hidden source never makes one."""
    graphs = [graph(m) for m in layers]
    found = ga.find_leak(graphs, offset)
    if found is not None:
        assert ga.find_leak([g | ga.self_loops(5) for g in graphs], offset) is not None
        assert ga.find_leak([*graphs, ga.empty(5)], offset) is not None
        assert ga.find_leak([ga.causal(5), *graphs], offset) is not None
        assert ga.find_leak(graphs, offset - 1) is not None
        assert ga.find_leak(graphs, offset, hidden=torch.ones(5).bool()) is None
        assert ga.find_leak(graphs, offset, targets=[found.target]) == found
        used = [ga.from_edge_index([[h.source], [h.target]], 5) for h in found.path]
        alone = ga.find_leak(used, offset, targets=[found.target]) if used else found
        assert alone is not None and alone.source == found.source  # the witness leaks by itself
    assert ga.find_leak([g & ga.causal(5) for g in graphs]) is None
    first = ga.stack([graphs[0], ga.causal(5)], "batch")
    assert (ga.find_leak([first, *graphs[1:]], offset) is None) <= (found is None)


@given(pairs())
def test_differences(graphs: list[ga.Graph]) -> None:
    a, b = graphs
    found = ga.compare(a, b)
    assert (b | found.only_a) - found.only_b == (a | (b & ga.empty(a.t, a.s)))
    assert str(found) and found.equal == (found.only_a.num_edges + found.only_b.num_edges == 0)
