"""Tiles equal the reference: outputs, log-sum-exp and every gradient, on plans of many small blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn import patterns
from graphattn.backends import make_call, tiles
from graphattn.graph import Graph


def of_mask(mask: Tensor) -> Graph:
    row, source = mask.reshape(-1, mask.shape[-1]).nonzero(as_tuple=True)
    return Graph.from_keys(row * (mask.shape[-1] + 1) + source, mask.shape)


def late_window(t: int, s: int) -> Graph:
    """A shared prefix of 3, and a window that moves: two spans, one of which stays."""
    i, j = torch.arange(t)[:, None], torch.arange(s)
    return of_mask((j < 3) | ((j >= i + 5) & (j < i + 12)))


def rough(t: int, s: int, seed: int = 0) -> Graph:
    """Intervals of random ends, and every fifth target reads nothing."""
    make = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(0, s + 1, (t,), generator=make) for _ in range(2))
    b[::5] = a[::5]
    i = torch.arange(s)
    return of_mask((i >= torch.minimum(a, b)[:, None]) & (i < torch.maximum(a, b)[:, None]))


GRAPHS = {
    "causal": lambda: ga.causal(37),
    "causal, end": lambda: ga.causal(23, 41, align="end"),
    "causal, more targets": lambda: ga.causal(41, 23, align="end"),
    "window": lambda: ga.window(53, 7),
    "band": lambda: ga.band(53, -2, 9),
    "prefix": lambda: ga.causal(43) | ga.prefix(43, 11),
    "documents": lambda: ga.documents([8] * 5),
    "uneven documents": lambda: ga.documents([13, 1, 0, 7, 20]),
    "causal documents": lambda: ga.causal(40) & ga.documents([8] * 5),
    "full": lambda: ga.full(19, 31),
    "two spans": lambda: late_window(29, 43),
    "rough": lambda: rough(37, 29),
    "late rows": lambda: of_mask(torch.arange(41)[:, None].ge(20) & torch.ones(41, 17, dtype=torch.bool)),
    "scattered": lambda: of_mask(torch.rand(17, 23, generator=torch.Generator().manual_seed(1)) < 0.2),
    "empty": lambda: ga.empty(5, 7),
    "padding": lambda: patterns.padding([5, 0, 23], 23, 29),
    "per head": lambda: ga.stack([ga.causal(31), ga.window(31, 3), ga.full(31), ga.self_loops(31)], axis="head"),
}


@pytest.fixture(params=[(1, 0), (10**6, 2**26)], ids=["one block a chunk", "many, kept"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "BLOCKS", (4,))
    monkeypatch.setattr(tiles, "GAP", 1)
    cells, stash = request.param
    monkeypatch.setattr(tiles, "CELLS", cells)
    monkeypatch.setattr(tiles, "STASH", stash)
    # strides below this are not added in slices; blocks of 4 must be
    monkeypatch.setattr(tiles, "LEAST_STEP", 1)


def check(
    graph: Graph, *, heads: int = 4, kv_heads: int = 4, batch: int = 1, d: int = 3, dtype=torch.float64, **options
) -> None:
    make = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_()

    q, k, v = leaf(batch, heads, graph.t, d), leaf(batch, kv_heads, graph.s, d), leaf(batch, kv_heads, graph.s, 2)
    leaves = [q, k, v]
    for name, value in options.items():
        if callable(value):
            options[name] = value = value(leaf)
        for x in (value, getattr(value, "slopes", None), getattr(value, "table", None)):
            if isinstance(x, Tensor) and x.requires_grad:
                leaves.append(x)
    out, lse = ga.attend_lse(q, k, v, graph, backend="tiles", **options)
    want, want_lse = ga.attend_lse(q, k, v, graph, backend="reference", **options)
    tight = {"atol": 1e-11, "rtol": 1e-11} if dtype == torch.float64 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(out, want, **tight)
    torch.testing.assert_close(lse, want_lse, **tight, check_dtype=False)
    nothing = (graph.degree() == 0).expand(lse.shape)
    assert (out[nothing] == 0).all() and (lse[nothing] == -math.inf).all()
    go, gl = torch.randn(out.shape, generator=make).to(dtype), torch.randn(lse.shape, generator=make)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (out * go).sum() + (torch.where(nothing, 0.0, lse) * gl).sum()

    got = torch.autograd.grad(loss(out, lse), leaves, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(loss(want, want_lse), leaves, allow_unused=True, materialize_grads=True)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, **tight)
    assert (got[0][nothing] == 0).all()


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_and_gradient(name: str, small: None) -> None:
    graph = GRAPHS[name]()
    check(graph, batch=graph.lead[0] if graph.lead and graph.lead[0] > 1 else 2)


@pytest.mark.parametrize("name", ["window", "two spans", "rough", "padding", "per head", "documents"])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.7},
        {"scale": -0.3},
        {"bias": lambda leaf: ga.alibi(leaf(4), 2)},
        {"bias": lambda leaf: ga.relative(leaf(4, 7), -1)},
        {"bias": lambda leaf: ga.relative(leaf(7)), "softcap": 1.3},
        {"dropout": 0.3, "seed": -5},
        {"dropout": 0.3, "seed": torch.tensor(2**40 + 1), "bias": lambda leaf: ga.alibi(leaf(()))},
    ],
    ids=lambda o: "+".join(o),
)
def test_every_option(name: str, options: dict, small: None) -> None:
    graph = GRAPHS[name]()
    check(graph, kv_heads=2, batch=graph.lead[0] if graph.lead else 2, **options)


@pytest.mark.parametrize("name", ["window", "two spans", "rough", "padding", "per head"])
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_bias_per_edge(name: str, axes: int, small: None) -> None:
    graph = GRAPHS[name]()
    bg, hg = graph.lead or (1, 1)
    batch = bg if bg > 1 else 2
    full = [n for n, own in ((batch, bg), (4, hg)) if own == 1]
    check(graph, batch=batch, softcap=2.0, bias=lambda leaf: leaf(*full[max(0, len(full) - axes) :], graph.num_edges))


@pytest.mark.parametrize("name", ["window", "two spans", "rough", "per head"])
def test_additive_score(name: str, small: None) -> None:
    check(GRAPHS[name](), d=1, score=ga.Additive(0.2), scale=0.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half(dtype: torch.dtype, small: None) -> None:
    check(GRAPHS["window"](), dtype=dtype)


def test_real_block_sizes() -> None:
    """The constants as they are: joined blocks, trimmed first ones, a last one that is shorter."""
    graph = ga.window(333, 40)
    groups = tiles.plan(graph).groups
    assert max(g.size for g in groups) > 1 and groups[-1].rows < groups[0].rows
    check(graph, batch=1, heads=2, kv_heads=1)


def test_bias_of_minus_infinity_on_every_edge_of_a_target() -> None:
    graph = ga.window(9, 3)
    q = torch.randn(1, 9, 4, dtype=torch.float64)
    bias = torch.zeros(graph.num_edges, dtype=torch.float64)
    bias[graph.edges()[0] == 4] = -math.inf
    out, lse = ga.attend_lse(q, q, q, graph, bias=bias, backend="tiles")
    want, want_lse = ga.attend_lse(q, q, q, graph, bias=bias, backend="dense")
    torch.testing.assert_close(out, want, equal_nan=True)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("stash", [0, 2**26])
def test_unseeded_dropout_repeats_with_torchs_seed_and_keeps_the_mean(
    stash: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "STASH", stash)
    graph = ga.window(64, 17)
    q, k, v = (torch.randn(1, 2, 64, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run() -> tuple[Tensor, ...]:
        out = ga.attend(q, k, v, graph, dropout=0.5, backend="tiles")
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    for x, y in zip(first, run(), strict=True):
        assert torch.equal(x, y)
    # the gradient is that of the very edges that were kept: a small step changes the loss by as much
    eps, n = 1e-6, torch.randn_like(q)
    torch.manual_seed(0)
    up = ga.attend(q + eps * n, k, v, graph, dropout=0.5, backend="tiles").square().sum()
    torch.manual_seed(0)
    down = ga.attend(q - eps * n, k, v, graph, dropout=0.5, backend="tiles").square().sum()
    torch.testing.assert_close((up - down) / (2 * eps), (first[1] * n).sum(), rtol=1e-5, atol=1e-7)
    mean = torch.stack([ga.attend(q, k, v, graph, dropout=0.5, backend="tiles").detach() for _ in range(400)]).mean(0)
    assert (mean - ga.attend(q, k, v, graph)).abs().max() < 0.5


def test_no_log_sum_exp_asked_for_is_no_gradient_lost() -> None:
    graph = ga.window(50, 9)
    q, k, v = (torch.randn(2, 50, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    got = torch.autograd.grad(ga.attend(q, k, v, graph, backend="tiles").sum(), (q, k, v))
    want = torch.autograd.grad(ga.attend(q, k, v, graph, backend="dense").sum(), (q, k, v))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_strided_inputs() -> None:
    graph = ga.window(70, 9)
    q, k, v = (torch.randn(1, 70, 3, 4, dtype=torch.float64).transpose(1, 2) for _ in range(3))
    q = q[:, :1].expand(2, 3, 70, 4)
    torch.testing.assert_close(
        ga.attend(q, k, v, graph, backend="tiles"), ga.attend(q, k, v, graph, backend="dense"), rtol=1e-12, atol=1e-12
    )


def test_the_plan_is_made_once_and_covers_the_edges() -> None:
    for name, make in GRAPHS.items():
        graph = make()
        plan = tiles.plan(graph)
        assert tiles.plan(graph) is plan
        assert plan.cells >= graph.num_edges, name
        covered = torch.zeros(graph.rows, graph.s, dtype=torch.bool)
        for g in plan.groups:
            for j in range(g.size):
                a = g.lead * graph.t + g.first + j * g.rows
                for p in g.parts:
                    low = p.first + j * p.step
                    assert low >= 0 and low + p.width <= graph.s
                    covered[a : a + g.rows, low : low + p.width] = True
        assert (covered | ~graph.dense().view(graph.rows, graph.s)).all(), name


def test_what_it_refuses() -> None:
    q = torch.randn(1, 5, 4)
    loops = ga.self_loops(5)
    vector, edge = ga.GATv2(torch.ones(4)), torch.zeros(5, 4)
    assert "gatv2" in str(tiles.why_not(make_call(q, q, q, loops, score=vector)))
    assert "edge_value" in str(tiles.why_not(make_call(q, q, q, loops, edge_value=edge)))
    t = 30_000
    source = torch.randint(0, t, (t, 4), generator=torch.Generator().manual_seed(0))
    scattered = Graph.from_keys((source + torch.arange(t)[:, None] * (t + 1)).reshape(-1), (t, t))
    q = torch.zeros(1, t, 1)
    assert "intervals" in str(tiles.why_not(make_call(q, q, q, scattered)))
    with pytest.raises(ValueError, match="intervals"):
        ga.attend(q, q, q, scattered, backend="tiles")


def test_memory_is_that_of_chunks() -> None:
    graph = ga.window(2**16, 129)
    q = torch.empty(1, 1, 2**16, 64)
    assert tiles.memory(make_call(q, q, q, graph)) < 10 * q.numel() * 4
