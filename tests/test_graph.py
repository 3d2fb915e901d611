"""Graph: a canonical, immutable value whose algebra is that of boolean matrices."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphattn as ga
from graphattn.graph import LIMIT, Graph
from tests.test_conformance import graph_of


@st.composite
def masks(draw: st.DrawFn, t: int | None = None, s: int | None = None, lead: tuple[int, ...] | None = None) -> Tensor:
    t = draw(st.integers(0, 7)) if t is None else t
    s = draw(st.integers(0, 7)) if s is None else s
    lead = draw(st.sampled_from([(), (), (1, 1), (2, 1), (1, 3), (2, 3)])) if lead is None else lead
    seed, p = draw(st.integers(0, 2**30)), draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return torch.rand(*lead, t, s, generator=torch.Generator().manual_seed(seed)) < p


@given(masks())
def test_canonical(mask: Tensor) -> None:
    graph = graph_of(mask)
    assert torch.equal(graph.dense(), mask)
    assert graph.shape == tuple(mask.shape) and graph.num_edges == int(mask.sum())
    assert torch.equal(graph.degree(), mask.sum(-1))
    assert graph.is_full() == bool(mask.all())
    # runs: sorted, not empty, and never touching within a row
    assert bool((graph.stop > graph.start).all())
    row = graph.run_row()
    same = row[1:] == row[:-1]
    assert bool((graph.start[1:][same] > graph.stop[:-1][same]).all())
    # any order, doubled, cut in single edges: the same value
    r, c = graph.edges()
    twice = torch.cat([r, r]) * (graph.s + 1) + torch.cat([c, c])
    assert Graph.from_keys(twice[torch.randperm(twice.numel())], graph.shape) == graph
    order = torch.randperm(r.numel())
    order = order[torch.argsort(r[order], stable=True)]
    singles = Graph.from_runs(graph.edge_ptr(), c[order], c[order] + 1, graph.shape)
    assert singles == graph and hash(singles) == hash(graph) and singles.digest() == graph.digest()


@given(st.data())
def test_algebra_is_that_of_boolean_matrices(data: st.DataObject) -> None:
    a = data.draw(masks())
    b = data.draw(masks(*a.shape[-2:], lead=data.draw(st.sampled_from([a.shape[:-2], ()]))))
    x, y = graph_of(a), graph_of(b)
    for got, want in (
        (x | y, a | b), (x & y, a & b), (x - y, a & ~b), (x ^ y, a ^ b), (~x, ~a), (x.T, a.mT), (x & x, a), (x - x, a & ~a),
    ):  # fmt: skip
        assert torch.equal(got.dense(), want.expand(got.shape))
    assert (x <= y) == bool((a <= b).all()) and (x >= y) == bool((a >= b).all())
    assert (x == y) == (a.shape == b.shape and torch.equal(a, b))
    assert x == x.T.T and ~~x == x
    c = data.draw(masks(a.shape[-1], lead=()))
    assert torch.equal((x @ graph_of(c)).dense(), (a.float() @ c.float()) > 0)


@given(st.data())
def test_slices(data: st.DataObject) -> None:
    a = data.draw(masks())
    t, s = a.shape[-2:]
    x = graph_of(a)
    rows = data.draw(st.lists(st.integers(0, t - 1), max_size=9) if t else st.just([]))
    cols = data.draw(st.lists(st.integers(0, s - 1), max_size=9) if s else st.just([]))
    r, c = torch.tensor(rows, dtype=torch.int64), torch.tensor(cols, dtype=torch.int64)
    assert torch.equal(x[rows, cols].dense(), a[..., r, :][..., c])
    assert torch.equal(x[1:, :3].dense(), a[..., 1:, :3])
    assert torch.equal(x[::2, ::3].dense(), a[..., ::2, ::3])
    assert torch.equal(x[-2:, -3:].dense(), a[..., -2:, -3:])
    keep = torch.rand(s) < 0.5
    assert torch.equal(x[:, keep].dense(), a[..., keep])
    if x.lead:
        assert torch.equal(x.select(0, 0).dense(), a[0, 0])
        assert torch.equal(x.select(batch=-1).dense(), a[-1:])
        assert torch.equal(x.select(head=0).dense(), a[:, :1])


@given(st.data())
def test_relabelling_and_powers(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 7))
    a = data.draw(masks(n, n))
    order = torch.tensor(data.draw(st.permutations(range(n))))
    x = graph_of(a)
    assert torch.equal(x.relabel(order).dense(), a[..., order, :][..., order])
    power = torch.eye(n, dtype=torch.bool).expand(a.shape)
    for k in range(4):
        assert torch.equal((x**k).dense(), power)
        power = (power.float() @ a.float()) > 0


def test_a_transpose_that_explodes_is_refused_with_its_size() -> None:
    """Every second of 65,536 targets reads all sources: 32,768 runs would become two billion."""
    n = 65_536
    indptr = torch.arange(n + 1).add(1).div(2, rounding_mode="floor")
    stripes = Graph.from_runs(indptr, torch.zeros(n // 2, dtype=torch.int64), torch.full((n // 2,), n), (n, n))
    assert stripes.num_edges == n * n // 2
    with pytest.raises(ValueError, match="2,147,483,648 runs"):
        _ = stripes.T
    assert n * n // 2 > LIMIT
    with pytest.raises(ValueError, match="over the limit"):
        _ = stripes.relabel(torch.arange(n).view(2, -1).T.reshape(-1)).T
    with pytest.raises(ValueError, match="product.*over the limit"):
        _ = ga.causal(n) @ ga.causal(n)
    # stripes of sources, on the other hand, transpose to runs
    assert stripes[:64, :] == stripes[:64, :].T.T


def test_long_graphs_are_small() -> None:
    t = 1 << 20
    for graph in (ga.causal(t), ga.window(t, 128), ga.prefix(t, 1000), ga.full(t)):
        assert graph.num_runs == t
        assert graph.T.num_runs == t
    assert (ga.causal(t) | ga.causal(t).T) == ga.full(t)
    assert ga.causal(t).num_edges == t * (t + 1) // 2


def test_values_are_immutable_hashable_and_survive_copies() -> None:
    """F05, F09, K13."""
    graph = ga.causal(5)
    for name in ("start", "t", "new"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(graph, name, 1)
    with pytest.raises(AttributeError):
        del graph.start
    with pytest.raises(TypeError, match="built by"):
        Graph()
    with pytest.raises(TypeError, match="ambiguous"):
        bool(graph)
    with pytest.raises(TypeError, match="not a sequence"):
        list(graph)
    with pytest.raises(TypeError, match="which end"):
        _ = (3, 2) in graph
    assert copy.copy(graph) is graph and copy.deepcopy([graph])[0] is graph
    for other in (graph, ga.padding([3, 1], 5), ga.empty(0), ga.empty(3, 5)):
        again = pickle.loads(pickle.dumps(other))
        assert again == other and hash(again) == hash(other) and again.shape == other.shape
    assert {graph: 1}[ga.window(5, 5)] == 1
    assert graph != ga.full(5) and graph != "causal"
    assert graph.to("cpu") is graph


def test_the_digest_is_the_same_in_every_process() -> None:
    """K17."""
    code = "import graphattn as ga; g = ga.window(9, 3); print(g.digest().hex(), hash(g))"
    out = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": s, "PATH": ""},
        ).stdout
        for s in ("1", "2")
    }
    graph = ga.window(9, 3)
    assert out == {f"{graph.digest().hex()} {hash(graph)}\n"}


def test_repr() -> None:
    assert repr(ga.causal(64) | ga.self_loops(64)) == "Graph(64 <- 64, 2080 edges, 50.8% dense)"
    assert repr(ga.self_loops(1)) == "Graph(1 <- 1, 1 edge, 100.0% dense)"
    assert repr(ga.padding([1, 2], 3)) == "Graph(2 x 1 x 3 <- 3, 9 edges, 50.0% dense)"
    assert repr(ga.empty(0, 3)) == "Graph(0 <- 3, 0 edges, 0.0% dense)"


def test_errors() -> None:
    a, b = ga.causal(4), ga.causal(5)
    with pytest.raises(ValueError, match="same number of targets"):
        _ = a | b
    with pytest.raises(TypeError):
        _ = a | torch.ones(4, 4)
    with pytest.raises(ValueError, match="do not broadcast"):
        _ = ga.padding([1, 2], 3) & ga.padding([1, 2, 3], 3)
    with pytest.raises(ValueError, match="permutation"):
        a.relabel([0, 0, 1, 2])
    with pytest.raises(IndexError, match="0 <= index < 4"):
        _ = a[[-1], :]
    with pytest.raises(IndexError, match="keeps both axes"):
        _ = a[1, :]
    with pytest.raises(IndexError, match="two indices"):
        _ = a[1:]
    with pytest.raises(ValueError, match="must be the 5 targets"):
        _ = a @ b
    with pytest.raises(ValueError, match="at least 0"):
        _ = a**-1
    for shape in ((2,), (2, -1), (1, 2, 3), (2**40, 2**40)):
        with pytest.raises(ValueError, match="shape"):
            Graph.from_keys(torch.zeros(0, dtype=torch.int64), ga.graph.check_shape(shape))
    for runs in (
        ([0, 1], [0], [5]), ([0, 1], [-1], [2]), ([0, 2], [0], [1]), ([0, 1], [3], [2]), ([0, 1], [0, 1], [1]), ([0], [0], [1]),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            Graph.from_runs(*(torch.tensor(x) for x in runs), (1, 4))
    with pytest.raises(TypeError, match="integers"):
        Graph.from_runs([0, 1], [0.0], [1.0], (1, 4))


def test_nothing_keeps_a_graph_alive() -> None:
    import gc
    import weakref

    ref = weakref.ref(ga.causal(3))
    gc.collect()
    assert ref() is None
