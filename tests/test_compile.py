"""R02: attention inside torch.compile and torch.export: no graph break, few compilations, the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import graphattn as ga

SHAPE = 12
GRAPHS = [ga.window(SHAPE, 3), ga.prefix(SHAPE, 4), ga.causal(SHAPE), ga.causal(SHAPE) & ga.band(SHAPE, 5)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_four_graphs_share_a_compiled_head() -> None:
    head = ga.Head(16, 8, 2, kv_heads=1, rotary=True, qk_norm=True)
    x = torch.randn(2, SHAPE, 16, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(head, backend=counter, fullgraph=True)
    for graph in GRAPHS:
        graph.is_causal()
        a, b = head(x, graph), compiled(x, graph)
        torch.testing.assert_close(a, b)
        (da,), (db,) = (torch.autograd.grad(y.square().sum(), x) for y in (a, b))
        torch.testing.assert_close(da, db)
    assert counter.frame_count <= 2


def test_every_option_in_a_compiled_region() -> None:
    e = GRAPHS[0].num_edges
    q = torch.randn(2, 2, SHAPE, 4, requires_grad=True)
    learnt = [torch.randn(*s, requires_grad=True) for s in ((2, e), (e, 2, 4), (e, 2, 4), (2, 4), (2,), (2, 5))]

    def f(q: Tensor, bias: Tensor, key: Tensor, value: Tensor, vector: Tensor, slopes: Tensor, table: Tensor) -> Tensor:
        graph = GRAPHS[0]
        a, lse = ga.attend_lse(q, q, q, graph, bias=bias, edge_key=key, edge_value=value, softcap=2.0)
        b = ga.attend(q, q, q, graph, score=ga.GATv2(vector, 0.1), bias=ga.alibi(slopes), dropout=0.3, seed=5)
        c = ga.attend(q[..., :1], q[..., :1], q, graph, score=ga.Additive(), bias=ga.relative(table), scale=0.5)
        return (a * b * c).sum() + lse.sum()

    want, got = f(q, *learnt), torch.compile(f, fullgraph=True, backend="aot_eager")(q, *learnt)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, [q, *learnt]), torch.autograd.grad(want, [q, *learnt]), strict=True):
        torch.testing.assert_close(a, b)


def test_the_backward_goes_on_from_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine's forward pass runs once, not again in the backward, whatever shapes, options and pulls."""
    from graphattn.backends import native

    if isinstance(native._library(), str):
        pytest.skip(native._library())
    ran, call = [], native._call
    monkeypatch.setattr(native, "_call", lambda op, *rest: (ran.append(op), call(op, *rest)))
    for lead, shared in (((), False), ((2,), False), ((3, 2), False), ((3, 2), True)):
        q = torch.randn(*lead, SHAPE, 4, dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(*(1 if shared else n for n in lead[:1]), *lead[1:], SHAPE, d, dtype=torch.float64,
                            requires_grad=True) for d in (4, 3))  # fmt: skip

        def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = ga.attend_lse(q, k, v, GRAPHS[0], softcap=3.0, dropout=0.3, seed=7, backend="native")
            return (out.sin().sum() + lse.sum()) * 2

        want = torch.autograd.grad(f(q, k, v), (q, k, v))
        ran.clear()
        got = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
        assert ran == [0, 1]
        torch.testing.assert_close(got, want)


def test_unseeded_dropout_drops_the_same_edges_in_both_directions() -> None:
    v = torch.ones(1, 1, SHAPE, 1, requires_grad=True)
    q = torch.zeros(1, 1, SHAPE, 4)

    def f(v: Tensor) -> Tensor:
        return ga.attend(q, q, v, GRAPHS[0], dropout=0.5)

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(v)
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad.sum(), out.sum())  # both count the kept weights


@pytest.mark.parametrize("graph", [GRAPHS[0], GRAPHS[2]])
def test_export(graph: ga.Graph, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = ga.Head(8, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x, graph)

    model, x = Model().eval(), torch.randn(2, SHAPE, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))
