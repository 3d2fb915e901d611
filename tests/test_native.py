"""The native engine beyond conformance: every instruction set, its plans, threads, forks, transforms, NaN and inf."""

from __future__ import annotations

import math
import multiprocessing
import resource
import threading

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.backends import native
from graphattn.graph import Graph

pytestmark = pytest.mark.skipif(not native.isas(), reason="the native engine was not built")
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest) -> str:
    native.set_isa(request.param)
    yield request.param
    native.set_isa(native.isas()[-1])


@pytest.fixture
def two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def graph_of(mask: Tensor) -> Graph:
    row, col = mask.nonzero(as_tuple=True)
    return Graph.from_keys(row * (mask.shape[1] + 1) + col, tuple(mask.shape))


def random_mask(t: int, s: int, p: float, seed: int = 0) -> Tensor:
    return torch.rand(t, s, generator=torch.Generator().manual_seed(seed)) < p


def graphs() -> dict[str, Graph]:
    star = random_mask(43, 9001, 0.001)
    star[7] = True  # a hub target: split and merged
    return {
        "window": ga.window(257, 33),
        "causal": ga.causal(97),
        "rectangle": ga.full(45, 601),
        "sparse": graph_of(random_mask(131, 157, 0.04)),
        "half": graph_of(random_mask(131, 157, 0.5)),
        "tiles and rows": ga.causal(97) & graph_of(random_mask(97, 97, 0.99)) | graph_of(random_mask(97, 97, 0.02)),
        "hub target": graph_of(star),
        "hub source": graph_of(star.T.contiguous()),
        "every second": graph_of((torch.arange(101) % 2 == 0)[:, None].expand(101, 67)),
        "mixed": graph_of(torch.cat([random_mask(64, 211, 0.9), random_mask(67, 211, 0.01)])),
    }


GRAPHS = graphs()


def inputs(g: Graph, b: int, h: int, hk: int, d: int, dv: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = (b, h, g.t, d), (b, hk, g.s, d), (b, hk, g.s, dv)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def gradients(leaves: list[Tensor], g: Graph, backend: str, **options) -> list[Tensor]:
    out, lse = ga.attend_lse(*leaves[:3], g, backend=backend, **options)
    gen = torch.Generator().manual_seed(9)
    pull = (
        torch.randn(out.shape, generator=gen, dtype=torch.float64),
        torch.randn(lse.shape, generator=gen, dtype=torch.float64),
    )
    loss = (out.double() * pull[0]).sum() + (lse.double().masked_fill(lse.isinf(), 0) * pull[1]).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        out.detach(),
        lse.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)),
    ]


def near(got: list[Tensor], want: list[Tensor], tolerance: float, what: str) -> None:
    for x, y in zip(got, want, strict=True):
        scale = 1 + y.masked_fill(y.isinf(), 0).abs().max().item()
        torch.testing.assert_close(x.double(), y, rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}")  # noqa: B023


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_is_exact(name: str, dtype: torch.dtype, isa: str) -> None:
    g = GRAPHS[name]
    for b, h, hk, d, dv in ((1, 1, 1, 64, 64), (2, 4, 2, 17, 9), (1, 8, 8, 8, 8), (1, 2, 1, 3, 40)):
        leaves = inputs(g, b, h, hk, d, dv, dtype)
        want = gradients([x.detach().double().requires_grad_() for x in leaves], g, "edges")
        near(gradients(leaves, g, "native"), want, DTYPES[dtype], f"{name} {isa} {(b, h, hk, d, dv)}")


SLOPES, TABLE = torch.tensor([0.002, 0.0001]), torch.linspace(-1, 1, 14).view(2, 7)
OPTIONS = {
    "softcap": {"softcap": 0.7},
    "dropout": {"dropout": 0.4, "seed": -(2**40) + 3},
    "alibi": {"bias": ga.alibi(torch.tensor([0.002, 0.0001]), 5)},
    "relative": {"bias": ga.relative(torch.linspace(-1, 1, 14).view(2, 7), -2)},
    "additive": {"score": ga.Additive(0.2)},
    "all": {"softcap": 2.0, "dropout": 0.2, "seed": 11, "bias": ga.alibi(torch.tensor([0.002, 0.0001]))},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", GRAPHS)
def test_options(name: str, option: str, isa: str) -> None:
    g, options = GRAPHS[name], OPTIONS[option]
    d = 1 if option == "additive" else 7
    for dtype in (torch.float32, torch.float64):
        leaves = inputs(g, 2, 2, 1, d, 5, dtype)
        doubled = dict(options)
        want = gradients([x.detach().double().requires_grad_() for x in leaves], g, "edges", **doubled)
        near(gradients(leaves, g, "native", **options), want, DTYPES[dtype], f"{name} {option} {isa}")


@pytest.mark.parametrize("name", ["window", "half", "mixed", "sparse"])
def test_gradients_of_biases(name: str, isa: str) -> None:
    g = GRAPHS[name]
    for shape in ((2, 2, g.num_edges), (g.num_edges,)):
        leaves = inputs(g, 2, 2, 1, 7, 5, torch.float64)
        bias, slopes, table = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, 2, (2, 7)))
        for extra, options in (
            (bias, {"bias": bias}),
            (slopes, {"bias": ga.alibi(slopes, 3)}),
            (table, {"bias": ga.relative(table, -2)}),
        ):
            options |= {"softcap": 1.5, "dropout": 0.3, "seed": 5}
            want = gradients([*leaves, extra], g, "edges", **options)
            near(gradients([*leaves, extra], g, "native", **options), want, 1e-11, f"{name} {isa}")


@pytest.mark.parametrize("score", ["dot", "additive", "gatv2"])
@pytest.mark.parametrize("heads", [4, 8, 11])
def test_narrow_heads(heads: int, score: str, isa: str) -> None:
    g = GRAPHS["sparse"]
    for d, dv in ((8, 8), (3, 16), (1, 8)):
        d = 1 if score == "additive" else d
        leaves = inputs(g, 2, heads, heads, d, dv, torch.float64)
        options: dict = {"dropout": 0.5, "seed": 3} if dv == 16 else {}
        if score == "additive":
            options["score"] = ga.Additive(0.2)
        elif score == "gatv2":
            leaves.append(torch.randn(heads, d, dtype=torch.float64, requires_grad=True))
            options["score"] = ga.GATv2(leaves[-1], 0.2)
        want = gradients(leaves, g, "edges", **options)
        near(gradients(leaves, g, "native", **options), want, 1e-12, f"{heads} heads {score} {isa}")


@pytest.mark.parametrize("score", ["dot", "additive", "gatv2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("beside", [False, True])
def test_eight_heads_of_eight(beside: bool, dtype: torch.dtype, score: str, isa: str) -> None:
    """A route of its own: rows and sources nobody reads, long rows, dropout, lse's gradient, both layouts."""
    mask = random_mask(70, 900, 0.03, 5)
    mask[:3], mask[:, 40:60], mask[7] = False, False, True
    mask[7, 40:60] = False
    g = graph_of(mask)
    d = 1 if score == "additive" else 8
    for options in ({}, {"dropout": 0.4, "seed": 9}):
        leaves = inputs(g, 2, 16, 16, d, 8, dtype)
        if score == "additive":
            options["score"] = ga.Additive(0.2)
        elif score == "gatv2":
            leaves.append(torch.randn(16, d, dtype=dtype, requires_grad=True))
        exact = [x.detach().double().requires_grad_() for x in leaves]
        if score == "gatv2":
            options["score"] = ga.GATv2(exact[-1], 0.2)
        want = gradients(exact, g, "edges", **options)
        own = [x.detach() for x in leaves]
        if beside:
            own = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in own]
        own = [x.requires_grad_() for x in own]
        if score == "gatv2":
            options["score"] = ga.GATv2(own[-1], 0.2)
        got = gradients(own, g, "native", **options)
        near(got, want, DTYPES[dtype], f"{score} {isa}")


def test_eight_heads_and_values_that_are_not_finite(isa: str) -> None:
    g = ga.window(20, 3)
    q, k, v = torch.randn(1, 8, 20, 1), torch.randn(1, 8, 20, 1), torch.randn(1, 8, 20, 8)
    k[0, 2, 5], k[0, 3, 6], v[0, 4, 7], q[0, 1, 9] = math.nan, math.inf, math.nan, -math.inf
    for x, y in zip(
        *(ga.attend_lse(q, k, v, g, score=ga.Additive(), backend=b) for b in ("native", "reference")), strict=True
    ):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("heads,width", [(8, 8), (16, 8), (3, 5), (2, 64), (1, 7), (9, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_of_the_additive_score(dtype: torch.dtype, heads: int, width: int, isa: str) -> None:
    from graphattn.backends import terms

    values = torch.randn(2, 300, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
    vectors = [torch.randn(heads, width, dtype=dtype, requires_grad=True) for _ in range(2)]
    assert terms._fast(values.transpose(1, 2), *vectors)
    leaves, close = [values, *vectors], 1e-13 if dtype == torch.float64 else 1e-5
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = [terms.additive_term(exact[0], x) for x in exact[1:]]
    ups = [torch.randn(x.shape, dtype=torch.float64) for x in want]
    gradients = list(torch.autograd.grad(want, exact, ups))
    for graph_too in (False, True):
        got = terms.additive_terms(*leaves)
        near(list(got), want, close, "terms")
        near(
            list(torch.autograd.grad(got, leaves, [x.to(dtype) for x in ups], create_graph=graph_too)),
            gradients, close, f"gradients, differentiable {graph_too}",
        )  # fmt: skip
    torch.func.vmap(lambda v: terms.additive_terms(v, *vectors)[0])(values)


@pytest.mark.parametrize("name", ["hub source", "half", "window"])
def test_recomputing_equals_keeping(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = GRAPHS[name]
    leaves = inputs(g, 2, 2, 1, 7, 5, torch.float64)
    kept = gradients(leaves, g, "native", softcap=1.0)
    for limit in (0, 4 * g.num_edges * 16 - 1):  # nothing; one batch entry at a time
        monkeypatch.setattr(native, "STASH", limit)
        near(gradients(leaves, g, "native", softcap=1.0), kept, 1e-13, "recomputed")


def everyone() -> Graph:
    """40,000 targets that read source 0, which is cut into pieces, and two others."""
    target = torch.arange(40000).repeat(3)
    source = torch.cat([torch.zeros(40000, dtype=torch.int64), 1 + torch.arange(80000) * 7 % 399])
    return Graph.from_keys(torch.unique(target * 401 + source), (40000, 400))


def gathered_often() -> dict[str, Graph]:
    """Graphs off the tile route each of whose sources many targets read."""
    hub = random_mask(2100, 1500, 0.008)
    hub[11] = True
    hub[20:40] = False
    first = (torch.arange(600) < 90)[:, None].expand(600, 600)
    return {
        "regular": ga.random_regular(700, 8, seed=1),
        "hub target and empty rows": graph_of(hub),
        "hub source": graph_of(hub.T.contiguous()[:, :200].contiguous()),
        "source of all": everyone(),
        "pairs": graph_of(random_mask(900, 450, 0.02).repeat_interleave(2, 1)),
        "tiles too": ga.random_regular(600, 9, seed=2) | ga.window(600, 80) & graph_of(first),
    }  # fmt: skip


@pytest.mark.parametrize("name", gathered_often())
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_gathered_one_by_one_give_the_same_bits(
    name: str, dtype: torch.dtype, isa: str, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where keys and values together are larger than the last level of cache, rows are gone through in phases."""
    g = gathered_often()[name]
    try:
        for b, h, hk, d, dv in ((1, 1, 1, 64, 64), (2, 4, 2, 17, 9), (1, 8, 8, 8, 8), (1, 2, 1, 3, 40)):
            for option in ("none", "dropout", "alibi", "relative", "softcap", "bias"):
                options: dict = (
                    {"bias": torch.randn(h, g.num_edges)} if option == "bias" else dict(OPTIONS.get(option, {}))
                )
                if option in ("alibi", "relative") and h != 2:
                    continue
                leaves = inputs(g, b, h, hk, d, dv, dtype)
                native.set_last_level(2**40)
                whole = gradients(leaves, g, "native", **options)
                native.set_last_level(8)
                for hold in (0, 2**60):  # the forward leaves its scores for the backward, or doesn't
                    monkeypatch.setattr(native, "HOLD", hold)
                    for got, want in zip(gradients(leaves, g, "native", **options), whole, strict=True):
                        assert torch.equal(got, want), (name, option, (b, h, hk, d, dv), hold)
                if option == "dropout":
                    want = gradients([x.detach().double().requires_grad_() for x in leaves], g, "edges", **options)
                    near(whole, want, DTYPES[dtype], f"{name} {isa}")
    finally:
        native.set_last_level(0)


@pytest.mark.parametrize("name", GRAPHS)
def test_same_bits_every_time(name: str, two_threads: None) -> None:
    leaves = inputs(GRAPHS[name], 1, 3, 3, 16, 16, torch.float32)
    first = gradients(leaves, GRAPHS[name], "native")
    for _ in range(5):
        for x, y in zip(gradients(leaves, GRAPHS[name], "native"), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["causal", "half", "sparse", "every second", "mixed"])
def test_what_is_not_read_never_arrives(name: str, bad: float, isa: str) -> None:
    """Hold one node's key and value (or query and pull) at NaN: only its readers may notice."""
    g = GRAPHS[name]
    row, col = g.edges()
    node = int(col[len(col) // 2])
    readers = torch.zeros(g.t, dtype=torch.bool)
    readers[row[col == node]] = True
    if readers.all():
        pytest.skip("every target reads it")
    leaves = inputs(g, 1, 1, 1, 16, 16, torch.float32)
    clean = gradients(leaves, g, "native")
    for which in (1, 2):
        dirty = [x.detach().clone() for x in leaves]
        dirty[which][0, 0, node] = bad
        got = gradients([x.requires_grad_() for x in dirty], g, "native")
        torch.testing.assert_close(got[0][0, 0, ~readers], clean[0][0, 0, ~readers])
        torch.testing.assert_close(got[1][0, 0, ~readers], clean[1][0, 0, ~readers])
        torch.testing.assert_close(got[2][0, 0, ~readers], clean[2][0, 0, ~readers])
        assert not got[0][0, 0, readers].isfinite().any() or which == 1
    target = int(row[len(row) // 3])
    read = torch.zeros(g.s, dtype=torch.bool)
    read[col[row == target]] = True
    dirty = [x.detach().clone() for x in leaves]
    dirty[0][0, 0, target] = bad
    got = gradients([x.requires_grad_() for x in dirty], g, "native")
    for x, y in zip(got[3:], clean[3:], strict=True):
        torch.testing.assert_close(x[0, 0, ~read], y[0, 0, ~read])
        assert not x[0, 0, read].isfinite().all()


def test_strides_and_layouts() -> None:
    g = GRAPHS["window"]
    make = lambda: torch.randn(2, g.t, 3, 32)  # noqa: E731
    q, k, v = (make().transpose(1, 2)[..., ::2].requires_grad_() for _ in range(3))
    near(
        gradients([q, k, v], g, "native"),
        gradients([x.detach().double().requires_grad_() for x in (q, k, v)], g, "edges"),
        1e-5,
        "",
    )
    out = ga.attend(make().transpose(1, 2), make().transpose(1, 2), make().transpose(1, 2), g, backend="native")
    assert out.transpose(1, 2).is_contiguous(), "heads lie beside width where the query's do"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_beside_each_other_are_copied_to_be_gathered(dtype: torch.dtype) -> None:
    """Large tables whose heads lie beside each other take a way of their own, to the same bits."""
    gen = torch.Generator().manual_seed(1)
    t, s, h, d = 2300, 2100, 8, 64
    target = torch.arange(t - 5).repeat_interleave(9)
    g = ga.from_edge_index(torch.stack([torch.randint(0, s, target.shape, generator=gen), target]), (t, s))
    leaves = [x.detach() for x in inputs(g, 1, h, h // 2, d, d, dtype)]
    beside = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    assert beside[0].stride(2) == h * d
    for options in ({}, {"dropout": 0.3, "seed": 4, "softcap": 5.0}):
        want = gradients([x.requires_grad_() for x in leaves], g, "native", **options)
        for x, y in zip(gradients(beside, g, "native", **options), want, strict=True):
            assert torch.equal(x, y)


def test_sizes_of_zero() -> None:
    for b, h, t, s, d, dv in (
        (0, 2, 3, 3, 4, 4),
        (2, 0, 3, 3, 4, 4),
        (1, 1, 0, 3, 4, 4),
        (1, 1, 3, 0, 4, 4),
        (1, 2, 3, 3, 0, 4),
        (1, 2, 3, 3, 4, 0),
    ):
        g = ga.full(t, s)
        leaves = [torch.randn(b, h, n, w, requires_grad=True) for n, w in ((t, d), (s, d), (s, dv))]
        got = gradients(leaves, g, "native")
        for x, y in zip(got, gradients(leaves, g, "reference"), strict=True):
            torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-5, atol=1e-5)


def test_second_derivative_says_no() -> None:
    q, k, v = inputs(GRAPHS["sparse"], 1, 1, 1, 4, 4, torch.float64)
    out = ga.attend(q, k, v, GRAPHS["sparse"], backend="native")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dq.square().sum().backward()


def test_vmap_and_func_grad() -> None:
    g = GRAPHS["sparse"]
    q, k, v = (x.detach() for x in inputs(g, 6, 2, 2, 5, 5, torch.float64))
    q, k, v = (x.view(3, 2, *x.shape[1:]) for x in (q, k, v))
    bias = torch.randn(3, g.num_edges, dtype=torch.float64)

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ga.attend(q, k, v, g, bias=bias, backend="native")

    want = torch.stack([f(q[i], k[i], v[i], bias[i]) for i in range(3)])
    torch.testing.assert_close(torch.vmap(f)(q, k, v, bias), want)
    torch.testing.assert_close(torch.vmap(f, in_dims=(0, None, None, None))(q, k[0], v[0], bias[0])[0], want[0])
    loss = lambda q, k, v, bias: f(q, k, v, bias).square().sum()  # noqa: E731
    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, bias)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in (q, k, v, bias)]
        for x, y in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(x[i], y)


def test_unseeded_dropout_follows_torch() -> None:
    q, k, v = (x.detach() for x in inputs(GRAPHS["half"], 1, 1, 1, 4, 4, torch.float32))
    draw = lambda: ga.attend(q, k, v, GRAPHS["half"], dropout=0.5, backend="native")  # noqa: E731
    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert torch.equal(first, draw()) and not torch.equal(first, second)


def test_eight_python_threads(two_threads: None) -> None:
    names = list(GRAPHS)
    want = {n: gradients(inputs(GRAPHS[n], 1, 2, 2, 16, 16, torch.float32), GRAPHS[n], "native") for n in names}
    wrong: list[str] = []

    def work(at: int) -> None:
        for turn in range(20):
            n = names[(at + turn) % len(names)]
            got = gradients(inputs(GRAPHS[n], 1, 2, 2, 16, 16, torch.float32), GRAPHS[n], "native")
            if not all(torch.equal(x, y) for x, y in zip(got, want[n], strict=True)):
                wrong.append(n)

    crew = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in crew:
        t.start()
    for t in crew:
        t.join(120)
    assert not any(t.is_alive() for t in crew) and not wrong


def _child(queue: multiprocessing.SimpleQueue) -> None:
    g = GRAPHS["window"]
    q, k, v = (x.detach() for x in inputs(g, 1, 2, 2, 16, 16, torch.float32))
    queue.put(ga.attend(q, k, v, g, backend="native").numpy().tobytes())


def test_a_forked_child_answers(two_threads: None) -> None:
    g = GRAPHS["window"]
    q, k, v = (x.detach() for x in inputs(g, 1, 2, 2, 16, 16, torch.float32))
    want = ga.attend(q, k, v, g, backend="native").numpy().tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    child.join(30)
    alive = child.is_alive()
    if alive:
        child.kill()
    assert not alive and queue.get() == want


def test_ten_thousand_calls_leak_nothing(two_threads: None) -> None:
    g = GRAPHS["mixed"]
    leaves = inputs(g, 1, 2, 2, 16, 16, torch.float32)

    def calls(n: int) -> int:
        for _ in range(n):
            ga.attend(*leaves, g, backend="native").sum().backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = calls(500)
    assert calls(1500) - before < 4096  # KiB
