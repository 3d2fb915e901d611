"""Every backend against the reference: outputs, log-sum-exp and all gradients, over named and random graphs.

A new backend is tested by being in `graphattn.BACKENDS`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.backends import _try_module
from graphattn.graph import Graph

FAST = [b for b in ga.BACKENDS if b != "reference"]
# beyond the rounding of the inputs, which both sides share: relative to 1 + the largest value
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_graph(*shape: int, p: float, seed: int) -> Graph:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < p
    return graph_of(mask)


def graph_of(mask: Tensor) -> Graph:
    """Independent of the converters, which have their own tests."""
    shape = tuple(mask.shape)
    row, col = mask.reshape(math.prod(shape[:-1]), shape[-1]).nonzero(as_tuple=True)
    return Graph.from_keys(row * (shape[-1] + 1) + col, shape)


NAMED = {
    "causal": ga.causal(13),
    "full": ga.full(11),
    "cross": ga.bipartite(5, 7),
    "causal, fewer keys": ga.causal(7, 5, align="start"),
    "causal, more queries than keys": ga.causal(7, 3, align="end"),
    "causal, decode": ga.causal(2, 11, align="end"),
    "window": ga.window(17, 4),
    "band": ga.band(13, 2, 3),
    "prefix": ga.prefix(13, 5),
    "documents": ga.disjoint([ga.causal(3), ga.causal(1), ga.causal(7)]),
    "star": graph_of(torch.eye(7, dtype=torch.bool) | (torch.arange(7)[:, None] >= 6)),
    "chain": graph_of(torch.diag(torch.ones(6, dtype=torch.bool), -1)),
    "holes": ga.window(17, 9) - ga.window(17, 3) | ga.self_loops(17),
    "every second row empty": ga.full(8) & graph_of((torch.arange(8) % 2 == 0)[:, None].expand(8, 8)),
    "empty": ga.empty(5, 3),
    "one": ga.full(1),
    "padding": ga.padding([3, 0], 5, 4),
    "padded causal": ga.padding([5, 2], 5) & ga.causal(5),
    "per head": ga.stack([ga.causal(6), ga.full(6), ga.window(6, 2), ga.empty(6)], axis="head"),
    "random rectangle": random_graph(5, 7, p=0.4, seed=1),
    "random 31": random_graph(31, 31, p=0.2, seed=2),
    "random per sample and head": random_graph(2, 4, 5, 7, p=0.5, seed=3),
}


@dataclass
class Case:
    graph: Graph
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    extra: tuple[Tensor, ...] = ()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.extra]


def leaf(*shape: int, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """A leaf with a gradient, non-contiguous where it can be."""
    x = torch.randn(*shape[::-1], generator=g, dtype=torch.float64).to(dtype)
    return x.permute(*range(len(shape) - 1, -1, -1)).requires_grad_()


OPTIONS = (
    "plain",
    "bias",
    "shared bias",
    "alibi",
    "relative",
    "softcap",
    "dropout",
    "edge vectors",
    "additive",
    "gatv2",
    "scale 0",
    "scale below 0",
    "all",
)


def make_case(
    graph: Graph, option: str, dtype: torch.dtype = torch.float64, *, kv_heads: int = 0, seed: int = 0
) -> Case:
    g = torch.Generator().manual_seed(seed)
    b, h = 2, 4
    bg, hg = graph.lead or (1, 1)
    e, nh = graph.num_edges, (1 if hg > 1 else h)
    d, dv = (1 if option == "additive" else 3), 2
    kv = kv_heads or h
    make = functools.partial(leaf, dtype=dtype, g=g)
    q, k, v = make(b, h, graph.t, d), make(b, kv, graph.s, d), make(b, kv, graph.s, dv)
    options: dict[str, Any] = {}
    extra: list[Tensor] = []

    def new(*shape: int) -> Tensor:
        extra.append(make(*shape))
        return extra[-1]

    everything = option == "all"
    if option == "bias" or everything:
        options["bias"] = new(*([] if bg > 1 else [b]), *([] if hg > 1 else [h]), e)
    if option == "shared bias":
        options["bias"] = new(e)
    if option == "alibi":
        options["bias"] = ga.alibi(new(h), 1)
    if option == "relative":
        options["bias"] = ga.relative(new(h, 5), -1)
    if option == "softcap" or everything:
        options["softcap"] = 0.7
    if option == "dropout" or everything:
        options |= {"dropout": 0.4, "seed": -(2**40) + seed}
    if option == "edge vectors" or everything:
        options["edge_key"], options["edge_value"] = new(e, nh, d), new(e, nh, dv)
    if option == "additive":
        options |= {"score": ga.Additive(0.3), "edge_key": new(e, nh, d)}
    if option == "gatv2" or everything:
        options["score"] = ga.GATv2(new(h, d), 0.1)
    if everything:
        options["scale"] = 0.9
    if option.startswith("scale"):
        options["scale"] = 0.0 if option == "scale 0" else -1.3
    return Case(graph, q, k, v, options, tuple(extra))


def as_double(case: Case) -> Case:
    """The same inputs in float64, so that a half's rounding is shared and only the arithmetic is compared."""
    extra = tuple(x.detach().double().requires_grad_() for x in case.extra)
    swap = dict(zip(map(id, case.extra), extra, strict=True))
    options = dict(case.options)
    for key, value in options.items():
        if isinstance(value, Tensor) and id(value) in swap:
            options[key] = swap[id(value)]
        elif hasattr(value, "slopes"):
            options[key] = ga.alibi(swap[id(value.slopes)], value.offset)
        elif hasattr(value, "table"):
            options[key] = ga.relative(swap[id(value.table)], value.offset)
        elif hasattr(value, "vector"):
            options[key] = ga.GATv2(swap[id(value.vector)], value.slope)
    q, k, v = (x.detach().double().requires_grad_() for x in (case.q, case.k, case.v))
    return Case(case.graph, q, k, v, options, extra)


def run(case: Case, backend: str, want_lse: bool, pull: tuple[Tensor, Tensor] | None = None) -> list[Tensor]:
    """out, lse (or zeros), gradients of every leaf for one random pull on out and lse."""
    if want_lse:
        out, lse = ga.attend_lse(case.q, case.k, case.v, case.graph, backend=backend, **case.options)
    else:
        out, lse = ga.attend(case.q, case.k, case.v, case.graph, backend=backend, **case.options), None
    if pull is None:
        g = torch.Generator().manual_seed(5)
        pull = (
            torch.randn(out.shape, generator=g, dtype=torch.float64),
            torch.randn(out.shape[:-1], generator=g, dtype=torch.float64),
        )
    loss = (out * pull[0].to(out.dtype)).sum()
    if lse is not None:
        # the loss reads lse only where there are edges: -inf times anything is not a number
        loss = loss + torch.where(lse.isinf(), 0.0, lse * pull[1].to(lse.dtype)).sum().to(loss.dtype)
    grads = torch.autograd.grad(loss, case.leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(case.leaves, grads, strict=True)]
    return [out.detach(), torch.zeros(()) if lse is None else lse.detach(), *grads]


@functools.lru_cache(maxsize=4096)
def _expected(key: Any, want_lse: bool) -> list[Tensor]:
    return run(as_double(_build(key)), "reference", want_lse)


def _build(key: Any) -> Case:
    where, option, dtype, kv_heads, seed = key
    if isinstance(where, str):
        graph = NAMED[where]
    else:
        shape, p = where
        graph = random_graph(*shape, p=p, seed=seed)
    return make_case(graph, option, dtype, kv_heads=kv_heads, seed=seed)


def check(key: Any, backend: str) -> bool:
    """Compare; False where the backend declares that it can't."""
    module, why = _try_module(backend)
    if module is None:
        pytest.skip(f"{backend}: {why}")
    for want_lse in (True, False):
        case = _build(key)
        try:
            got = run(case, backend, want_lse)
        except ValueError as error:
            assert "can't do this call" in str(error), error
            continue
        for name, a, b in zip(
            ["out", "lse", "dq", "dk", "dv", *(["extra"] * 4)], got, _expected(key, want_lse), strict=False
        ):
            near(a, b, key[2], f"{name} of {backend}, {key}, {case.graph!r}")
        degree = case.graph.degree().expand(2, 4, case.graph.t)
        assert (got[0][degree == 0] == 0).all(), "an empty row is exactly 0"
        if want_lse:
            assert got[1].dtype == (torch.float64 if key[2] == torch.float64 else torch.float32)
            assert (got[1][degree == 0] == -math.inf).all()
        return True
    return False


def near(a: Tensor, b: Tensor, dtype: torch.dtype, what: str) -> None:
    a, b = a.double(), b.double()
    assert a.shape == b.shape, what
    assert not a.isnan().any(), what
    finite = b[b.isfinite()]
    bound = TOLERANCE[dtype] * (1 + (finite.abs().max().item() if finite.numel() else 0))
    torch.testing.assert_close(a, b, atol=bound, rtol=0, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("option", OPTIONS)
def test_named_graphs(backend: str, option: str) -> None:
    done = [check((name, option, torch.float64, 0, 0), backend) for name in NAMED]
    if not any(done):
        pytest.skip(f"{backend} declares that it can't do {option}")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    done = [check((name, option, dtype, 0, 0), backend) for name in NAMED for option in ("plain", "all", "alibi")]
    if not any(done):
        pytest.skip(f"{backend} declares that it can't do {dtype}")


@pytest.mark.parametrize("backend", FAST)
def test_grouped_heads(backend: str) -> None:
    for name in NAMED:
        for kv_heads in (1, 2):
            check((name, "plain", torch.float64, kv_heads, 0), backend)
        check((name, "all", torch.float64, 2, 0), backend)


@pytest.mark.parametrize("backend", FAST)
def test_a_thousand_random_graphs(backend: str) -> None:
    """Rectangles, empty rows, zero edges, leading axes, any density; float32 and float64 in turn."""
    for seed in range(1000):
        g = torch.Generator().manual_seed(seed)
        t, s = torch.randint(1, 6, (2,), generator=g).tolist()
        lead = [(), (), (2, 1), (1, 4), (2, 4)][seed % 5]
        p = torch.rand(1, generator=g).item() ** 2
        option = OPTIONS[seed % len(OPTIONS)] if seed % 2 else "plain"
        dtype = torch.float64 if seed % 3 else torch.float32
        check((((*lead, t, s), p), option, dtype, 0, seed), backend)


@pytest.mark.parametrize("backend", FAST)
def test_gradcheck(backend: str) -> None:
    """Against finite differences, so that the reference's own gradient is not the only witness."""
    module, why = _try_module(backend)
    if module is None:
        pytest.skip(f"{backend}: {why}")
    case = make_case(random_graph(3, 4, p=0.6, seed=0), "bias")

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ga.attend(q, k, v, case.graph, bias=bias, backend=backend)

    try:
        f(*case.leaves)
    except ValueError as error:
        pytest.skip(str(error))
    assert torch.autograd.gradcheck(f, case.leaves)


@pytest.mark.parametrize("backend", ["dense", "edges", "csr"])
def test_double_backward(backend: str) -> None:
    """A03: with an empty row."""
    graph = graph_of(torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool))
    q, k, v = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradgradcheck(lambda *x: ga.attend(*x, graph, backend=backend), (q, k, v))


@pytest.mark.parametrize("backend", [*FAST, "auto"])
def test_sizes_of_zero(backend: str) -> None:
    """H08."""
    module, why = _try_module(backend) if backend != "auto" else (ga, None)
    if module is None:
        pytest.skip(f"{backend}: {why}")
    for b, h, t, s, d in ((0, 2, 3, 3, 4), (1, 2, 0, 3, 4), (1, 2, 3, 0, 4), (1, 0, 3, 3, 4), (1, 1, 3, 3, 0)):
        q, k, v = (torch.randn(b, h, n, d, requires_grad=True) for n in (t, s, s))
        try:
            out = ga.attend(q, k, v, ga.full(t, s), backend=backend)
        except ValueError as error:
            assert "can't do this call" in str(error)
            continue
        assert out.shape == (b, h, t, d)
        out.sum().backward()
        for x in (q, k, v):
            assert x.grad is not None and x.grad.shape == x.shape and (x.grad == 0).all()
        if s == 0:
            assert (out == 0).all()


@pytest.mark.parametrize("backend", FAST)
def test_unseeded_dropout_keeps_the_mean(backend: str) -> None:
    """H04: the mean over many rows of ones is 1; dropped edges are 0, the others scaled."""
    module, why = _try_module(backend)
    if module is None:
        pytest.skip(f"{backend}: {why}")
    q = torch.zeros(1, 1, 2000, 4)
    try:
        out = ga.attend(q, q, torch.ones(1, 1, 2000, 1), ga.window(2000, 40), dropout=0.8, backend=backend)
    except ValueError as error:
        pytest.skip(str(error))
    assert out.mean().item() == pytest.approx(1, abs=0.03)
    assert out.std().item() == pytest.approx((0.8 / 0.2 / 40) ** 0.5, rel=0.2)


@pytest.mark.parametrize("backend", [b for b in FAST if b not in ("dense", "sdpa", "tiles", "flex")] + ["auto"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_read_never_reaches(backend: str, bad: float) -> None:
    """K9: targets that do not read a source hold nothing of it; a source nobody reads moves no gradient."""
    module, why = _try_module(backend) if backend != "auto" else (ga, None)
    if module is None:
        pytest.skip(f"{backend}: {why}")
    for name in ("causal", "window", "prefix", "documents", "random 31", "holes", "chain"):
        for j in (0, NAMED[name].s // 2, NAMED[name].s - 1):
            for graph in (
                NAMED[name],
                NAMED[name] - graph_of((torch.arange(NAMED[name].s) == j).expand(NAMED[name].shape)),
            ):
                q, k, v = (torch.randn(1, 2, n, 3, requires_grad=True) for n in (graph.t, graph.s, graph.s))
                clean = ga.attend(q, k, v, graph, backend="reference")
                kb, vb = k.detach().clone(), v.detach().clone()
                kb[:, :, j] = bad
                vb[:, :, j] = bad
                kb.requires_grad_(), vb.requires_grad_()
                try:
                    out = ga.attend(q, kb, vb, graph, backend=backend)
                except ValueError as error:
                    pytest.skip(str(error))
                apart = ~graph.dense()[:, j]
                torch.testing.assert_close(out[:, :, apart], clean[:, :, apart], atol=1e-5, rtol=1e-5)
                if apart.all():
                    pull = torch.randn_like(out)
                    got = torch.autograd.grad((out * pull).sum(), (q, kb, vb))
                    want = torch.autograd.grad((clean * pull).sum(), (q, k, v))
                    for a, b in zip(got, want, strict=True):
                        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
                    assert (got[1][:, :, j] == 0).all() and (got[2][:, :, j] == 0).all()
