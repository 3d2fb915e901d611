"""The front door: what `attend` promises beyond any one backend."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

import graphattn as ga
from graphattn.backends.numerics import drop_threshold, edge_hash, hash32
from tests.test_conformance import NAMED, graph_of, random_graph

SOFT = ["reference", "dense", "edges", "csr"]
EVERY = [*SOFT, "sdpa", "auto"]


def mask(*rows: str):
    return graph_of(torch.tensor([[c == "1" for c in row] for row in rows]))


# (seed, batch, head, target, source) -> MurmurHash3_x86_32 of (seed >> 32, batch, head, target, source), murmur seed
# the lower half of seed: these numbers were computed with the independent C implementation in the package mmh3 5
HASHES = {
    (0, 0, 0, 0, 0): 0xEE9D294A,
    (1, 0, 0, 0, 0): 0x0B0AB260,
    (0, 1, 0, 0, 0): 0x55D4A8C6,
    (0, 0, 1, 0, 0): 0x82747245,
    (0, 0, 0, 1, 0): 0xCC2C819B,
    (0, 0, 0, 0, 1): 0x7743FE48,
    (123456789, 2, 3, 1000, 77): 0xBC756B7F,
    (-1, 1, 7, 4095, 2147483653): 0x70A2C42D,
}


def test_the_hash_has_published_values() -> None:
    for words, value in HASHES.items():
        assert int(edge_hash(words[0], *(torch.tensor(w) for w in words[1:]))) == value, words


def test_empty_row() -> None:
    """E01."""
    q = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    v = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    graph = mask("110", "000", "001")
    for backend in EVERY:
        out = ga.attend(q, q, v, graph, backend=backend)
        torch.testing.assert_close(out, torch.tensor([[1.660477, 2.660477], [0, 0], [5, 6]]), atol=1e-6, rtol=0)
        assert (out[1] == 0).all()
    torch.testing.assert_close(ga.weights(q, q, graph), torch.tensor([0.669762, 0.330238, 1.0]), atol=1e-6, rtol=0)


def test_log_sum_exp_and_its_gradient() -> None:
    """A01."""
    for backend in SOFT:
        q = torch.tensor([[1.0, 0]], requires_grad=True)
        k = torch.tensor([[0.0, 0], [1, 1]])
        _, lse = ga.attend_lse(q, k, k, ga.full(1, 2), backend=backend)
        assert lse.item() == pytest.approx(1.107940, abs=1e-6)
        (grad,) = torch.autograd.grad(lse.sum(), q)
        torch.testing.assert_close(grad, torch.tensor([[0.473593, 0.473593]]), atol=1e-6, rtol=0)


def test_direction() -> None:
    """D01, D02: one edge 0 -> 1 makes target 1 read source 0; weights sum to 1 per target."""
    v = torch.tensor([[1.0, 2], [3, 4]])
    for backend in EVERY:
        out = ga.attend(torch.zeros(2, 2), torch.zeros(2, 2), v, mask("00", "10"), backend=backend)
        torch.testing.assert_close(out, torch.tensor([[0.0, 0], [1, 2]]))
    graph = mask("010", "000", "110")
    torch.testing.assert_close(ga.weights(torch.zeros(3, 2), torch.zeros(3, 2), graph), torch.tensor([1.0, 0.5, 0.5]))


def test_a_score_of_zero_is_an_edge() -> None:
    """G10."""
    q = torch.tensor([[1.0], [0.0]])
    for backend in EVERY:
        out = ga.attend(
            q, torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [4.0]]), mask("10", "11"), backend=backend
        )
        torch.testing.assert_close(out, torch.tensor([[2.0], [3.0]]))


def test_alignment_of_causal_rectangles() -> None:
    """C01, E08, E10."""
    q, k, v = torch.zeros(2, 1), torch.zeros(5, 1), torch.arange(5.0)[:, None]
    for backend in EVERY:
        start = ga.attend(q, k, v, ga.causal(2, 5, align="start"), backend=backend)
        end = ga.attend(q, k, v, ga.causal(2, 5, align="end"), backend=backend)
        torch.testing.assert_close(start.squeeze(), torch.tensor([0.0, 0.5]))
        torch.testing.assert_close(end.squeeze(), torch.tensor([1.5, 2.0]))
    q = torch.randn(5, 3, requires_grad=True)
    for graph in (
        ga.causal(5, 2, align="end"),
        ga.disjoint([ga.causal(3, 1, align="end"), ga.causal(2, 1, align="end")]),
    ):
        for backend in EVERY:
            out = ga.attend(q, torch.randn(2, 3), torch.randn(2, 3), graph, backend=backend)
            (dq,) = torch.autograd.grad(out.sum(), q)
            assert (
                dq.isfinite().all() and (dq[graph.degree() == 0] == 0).all() and (out[graph.degree() == 0] == 0).all()
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_large_scores(dtype: torch.dtype) -> None:
    """P03: exp never overflows."""
    top = 1000.0 if dtype in (torch.float32, torch.float64) else 12.0
    k = torch.tensor([[top], [top + 1]], dtype=dtype)
    for backend in EVERY:
        out = ga.attend(
            torch.ones(1, 1, dtype=dtype), k, torch.tensor([[0.0], [1]], dtype=dtype), ga.full(1, 2), backend=backend
        )
        assert out.item() == pytest.approx(0.731059, abs=1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6)


def test_long_rows_in_half_precision() -> None:
    """P06: sums are in float32."""
    n = 1024
    q = torch.zeros(1, 4, dtype=torch.bfloat16)
    for backend in EVERY:
        out = ga.attend(
            q,
            torch.zeros(n, 4, dtype=torch.bfloat16),
            torch.ones(n, 1, dtype=torch.bfloat16),
            ga.full(1, n),
            backend=backend,
        )
        assert out.item() == 1
    assert ga.weights(q, torch.zeros(n, 4, dtype=torch.bfloat16), ga.full(1, n)).float().sum().item() == pytest.approx(
        1, abs=1e-2
    )


def test_scale_is_of_the_head_size() -> None:
    """P07."""
    head = ga.Head(64, 16, 4)
    x = torch.randn(5, 64)
    q, k, v = (w(x).view(5, 4, 16).transpose(0, 1) for w in (head.query, head.key, head.value))
    p = torch.softmax(q @ k.mT * 0.25, -1)
    torch.testing.assert_close(head(x, ga.full(5)), (p @ v).transpose(0, 1).reshape(5, 64))


def test_one_row_does_not_move_another() -> None:
    """K11."""
    graph = NAMED["random 31"]
    q, k, v = (torch.randn(31, 3) for _ in range(3))
    big = q.clone()
    big[3] *= 1e4
    other = torch.arange(31) != 3
    for backend in EVERY:
        a, b = (ga.attend(x, k, v, graph, backend=backend) for x in (q, big))
        torch.testing.assert_close(a[other], b[other])


def test_the_same_numbers_whatever_is_asked_for() -> None:
    """K12."""
    graph = NAMED["random 31"]
    q, k, v = (torch.randn(2, 4, 31, 3, dtype=torch.float64) for _ in range(3))
    for backend in SOFT:
        a = ga.attend(q, k, v, graph, backend=backend)
        b, lse = ga.attend_lse(q, k, v, graph, backend=backend)
        c = ga.attend(q, k, v, graph, backend=backend, dropout=0.0, seed=3)
        assert torch.equal(a, b) and torch.equal(a, c)
    p = ga.weights(q, k, graph)
    row, source = graph.edges()
    dense = torch.zeros(2, 4, 31, 31, dtype=torch.float64)
    dense[..., row, source] = p
    torch.testing.assert_close(dense @ v, a)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 3**0.5
    torch.testing.assert_close(torch.exp(scores[..., row, source] - lse[..., row]), p)


@pytest.mark.parametrize("score", ["dot", "additive", "gatv2"])
@pytest.mark.parametrize("lead", [(), (2, 1), (1, 3), (2, 3)])
def test_scores_are_what_the_softmax_takes(score: str, lead: tuple[int, ...]) -> None:
    """exp(score - lse of the reference) is the weight, whatever is added to or done with the score."""
    torch.manual_seed(0)
    graph = graph_of(torch.rand(*lead, 7, 9) < 0.4)
    width = 1 if score == "additive" else 4
    q, k = torch.randn(2, 3, 7, width).double(), torch.randn(2, 3, 9, width).double()
    made = {"dot": ga.Dot(), "additive": ga.Additive(0.3), "gatv2": ga.GATv2(torch.randn(3, 4).double())}[score]
    for options in ({}, {"softcap": 0.7, "scale": 0.9}, {"bias": torch.randn(graph.num_edges).double()}):
        s = ga.edge_scores(q, k, graph, score=made, **options)
        p = ga.weights(q, k, graph, score=made, **options)
        _, lse = ga.attend_lse(q, k, k, graph, score=made, backend="reference", **options)
        assert s.shape == p.shape
        bg, hg = lead or (1, 1)
        row, _ = graph.edges()  # rows count the graph's own axes too
        beside = lse.reshape(bg, 2 // bg, hg, 3 // hg, 7).permute(1, 3, 0, 2, 4).flatten(2)[..., row]
        torch.testing.assert_close(torch.exp(s.reshape(beside.shape) - beside), p.reshape(beside.shape))
    at = torch.rand(2, 3, 7, width).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda q: ga.edge_scores(q, k, graph, score=made), at)


@pytest.mark.parametrize("options", [{}, {"softcap": 0.8, "scale": 0.3}, {"bias": True}])
def test_scores_of_many_edges_take_sampled_products(options: dict) -> None:
    """Numbers and gradients of all of them, as from the dense matrix."""
    torch.manual_seed(0)
    graph = graph_of(torch.rand(70, 90) < 0.7)
    assert graph.num_edges > 2**12
    q, k = torch.randn(2, 4, 70, 5).double().requires_grad_(), torch.randn(2, 2, 90, 5).double().requires_grad_()
    options = dict(options)
    bias = torch.randn(4, graph.num_edges).double().requires_grad_() if options.pop("bias", False) else None
    s = ga.edge_scores(q, k, graph, bias=bias, **options)
    target, source = graph.targets_sources()
    dense = q @ k.repeat_interleave(2, 1).mT * options.get("scale", 5**-0.5)
    if "softcap" in options:
        dense = options["softcap"] * torch.tanh(dense / options["softcap"])
    wanted = dense[..., target, source] + (0 if bias is None else bias)
    torch.testing.assert_close(s, wanted)
    inputs = [x for x in (q, k, bias) if x is not None]
    up = torch.randn_like(s)
    for a, b in zip(torch.autograd.grad(s, inputs, up), torch.autograd.grad(wanted, inputs, up), strict=True):
        torch.testing.assert_close(a, b)


def test_scores_of_pairs_and_of_nothing() -> None:
    q, k = torch.randn(5, 4), torch.randn(6, 4)
    pairs = ga.from_edge_index(torch.tensor([[5, 0, 2], [0, 3, 4]]), (5, 6))
    torch.testing.assert_close(ga.edge_scores(q, k, pairs), (q[[0, 3, 4]] * k[[5, 0, 2]]).sum(1) / 2)
    assert ga.edge_scores(q.bfloat16(), k.bfloat16(), pairs).dtype == torch.float32
    assert ga.edge_scores(q, k, ga.empty(5, 6)).shape == (0,)
    assert ga.edge_scores(q.expand(2, 3, 5, 4), k.expand(2, 3, 6, 4), ga.empty(5, 6)).shape == (2, 3, 0)


def test_samples_stay_apart() -> None:
    """H05, H01."""
    q = torch.randn(3, 2, 3, 4)
    changed = q.clone()
    changed[0] += 1
    for backend in EVERY:
        a, b = (ga.attend(x, x, x, ga.causal(3), backend=backend) for x in (q, changed))
        assert torch.equal(a[1:], b[1:])
    graph = ga.padding([3, 1], 3)
    q = q[:2]
    both = ga.attend(q, q, q, graph)
    torch.testing.assert_close(both[:1], ga.attend(q[:1], q[:1], q[:1], ga.full(3)))
    torch.testing.assert_close(both[1:], q[1:, :, :1].expand(1, 2, 3, 4))


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 2])
@pytest.mark.parametrize("t", [1, 2])
def test_axes_of_size_one(b: int, h: int, t: int) -> None:
    """H06."""
    q = torch.randn(b, h, t, 3)
    for backend in EVERY:
        assert ga.attend(q, q, q, ga.causal(t), backend=backend).shape == (b, h, t, 3)
    assert ga.weights(q, q, ga.causal(t)).shape == (b, h, t * (t + 1) // 2)


def test_fewer_and_more_axes() -> None:
    q, k, v = torch.randn(5, 3), torch.randn(7, 3), torch.randn(7, 2)
    graph = NAMED["random rectangle"]
    one = ga.attend(q, k, v, graph)
    assert one.shape == (5, 2)
    for n in range(1, 5):
        more = ga.attend(*(x.expand(*(2,) * n, *x.shape) for x in (q, k, v)), graph)
        assert more.shape == (*(2,) * n, 5, 2)
        torch.testing.assert_close(more, one.expand_as(more))
    out, lse = ga.attend_lse(q.expand(2, 2, 2, 5, 3), k.expand(2, 2, 2, 7, 3), v.expand(2, 2, 2, 7, 2), graph)
    assert out.shape == (2, 2, 2, 5, 2) and lse.shape == (2, 2, 2, 5)


def test_seeded_dropout_is_the_same_everywhere() -> None:
    graph = random_graph(2, 1, 17, 17, p=0.5, seed=1)
    q, k, v = (torch.randn(2, 3, 17, 4, dtype=torch.float64) for _ in range(3))
    runs = [ga.attend(q, k, v, graph, dropout=0.5, seed=9, backend=b) for b in SOFT]
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0])
    again = ga.attend(q, k, v, graph, dropout=0.5, seed=torch.tensor(9), backend="dense")
    torch.testing.assert_close(again, runs[0])
    assert not torch.allclose(ga.attend(q, k, v, graph, dropout=0.5, seed=10, backend="dense"), runs[0])
    # an edge is dropped iff its hash is below floor(p 2^32)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 3, 17, 17)), indexing="ij")
    kept = edge_hash(9, b, h, i, j) >= drop_threshold(0.5)
    assert kept.float().mean().item() == pytest.approx(0.5, abs=0.03)
    p = torch.softmax((q @ k.mT / 2).masked_fill(~graph.dense(), -math.inf), -1).nan_to_num(0)
    torch.testing.assert_close((p * kept * 2) @ v, runs[0])
    assert int(hash32(-1, 0, 0, 0, 0)) == int(hash32(2**64 - 1 - 2**64, 0, 0, 0, 0))


def test_dropped_edges_equal_attention_over_the_kept_ones() -> None:
    """The identity a backend without dropout can use: exp(lse_kept - lse) / (1 - p) times attention over the rest."""
    graph = NAMED["random 31"]
    q, k, v = (torch.randn(1, 1, 31, 4, dtype=torch.float64) for _ in range(3))
    target, source = graph.targets_sources()
    zero = torch.zeros((), dtype=torch.int64)
    keep = edge_hash(4, zero, zero, target, source) >= drop_threshold(0.3)
    kept = graph.from_keys(graph.edge_keys()[keep], graph.shape)
    out, lse = ga.attend_lse(q, k, v, kept)
    _, whole = ga.attend_lse(q, k, v, graph)
    scale = torch.where(lse.isinf(), 0.0, torch.exp(lse - whole) / 0.7)
    torch.testing.assert_close(out * scale.unsqueeze(-1), ga.attend(q, k, v, graph, dropout=0.3, seed=4))


def test_merge_and_lists_of_graphs() -> None:
    graph = NAMED["random 31"]
    left = graph & ga.full(31)[:, :].from_runs(
        torch.arange(32), torch.zeros(31, dtype=torch.int64), torch.full((31,), 11), (31, 31)
    )
    right = graph - left
    q, k, v = (torch.randn(2, 2, 31, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    whole, whole_lse = ga.attend_lse(q, k, v, graph)
    parts = [ga.attend_lse(q, k, v, g) for g in (left, right, ga.empty(31))]
    out, lse = ga.merge(parts)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    listed = ga.attend(q, k, v, [left, right])
    torch.testing.assert_close(listed, whole)
    pull = torch.randn_like(whole)
    a = torch.autograd.grad((whole * pull).sum(), (q, k, v), retain_graph=True)
    b = torch.autograd.grad((listed * pull).sum(), (q, k, v))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match=r"disjoint, but edge \d+ -> \d+ is in graph 1"):
        ga.attend(q, k, v, [graph, left])


def test_autocast() -> None:
    head = ga.Head(16, 4, 4, qk_norm=True)
    x = torch.randn(2, 9, 16)
    plain = head(x, ga.causal(9))
    with torch.autocast("cpu", torch.bfloat16):
        half = head(x, ga.causal(9))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), plain, atol=3e-2, rtol=3e-2)


def test_errors_say_what_was_got_and_what_was_needed() -> None:
    q = torch.randn(2, 4, 7, 8)
    cases = [
        (
            dict(q=q, k=q, v=q, graph=ga.full(5)),
            ValueError,
            r"q has 7 rows, but the graph is Graph\(5 <- 5, 25 edges, 100.0% dense\): q needs 5",
        ),
        (dict(q=q, k=q, v=q, graph=ga.full(7, 5)), ValueError, "k has 7 rows.*k needs 5"),
        (dict(q=q, k=q, v=q, graph=ga.full(7).dense()), TypeError, "must be a Graph, got Tensor"),
        (dict(q=q, k=q.double(), v=q, graph=ga.full(7)), TypeError, "share one dtype"),
        (dict(q=q.long(), k=q.long(), v=q.long(), graph=ga.full(7)), TypeError, "share one dtype"),
        (dict(q=q, k=q[..., :3], v=q, graph=ga.full(7)), ValueError, "width 8 and k width 3"),
        (dict(q=q, k=q[:, :3], v=q[:, :3], graph=ga.full(7)), ValueError, "4, 3, 3 heads"),
        (dict(q=q, k=q[:, 0], v=q, graph=ga.full(7)), ValueError, "same number of axes"),
        (dict(q=q, k=q, v=q, graph=ga.padding([3, 4, 5], 7)), ValueError, "batch 2"),
        (dict(q=q[0], k=q[0], v=q[0], graph=ga.padding([3, 4], 7)), ValueError, "leading axes"),
        (
            dict(q=q, k=q, v=q, graph=ga.full(7), backend="fast"),
            ValueError,
            "backend must be 'auto' or one of reference",
        ),
        (
            dict(q=q, k=q, v=q, graph=ga.full(7), backend="sdpa", softcap=2.0),
            ValueError,
            "no softcap. These can: .*dense",
        ),
        (
            dict(q=q, k=q, v=q, graph=ga.full(7), bias=torch.zeros(3)),
            ValueError,
            r"bias has shape \(3,\).*\(49,\) or \(4, 49\) or \(2, 4, 49\)",
        ),
        (
            dict(q=q, k=q, v=q, graph=ga.full(7), bias=torch.zeros(49, dtype=torch.bool)),
            TypeError,
            "a bool mask is a graph",
        ),
        (dict(q=q, k=q, v=q, graph=ga.full(7), edge_key=torch.zeros(49, 3, 8)), ValueError, r"edge_key has shape"),
        (dict(q=q, k=q, v=q, graph=ga.full(7), dropout=1.0), ValueError, r"dropout must be in \[0, 1\)"),
        (dict(q=q, k=q, v=q, graph=ga.full(7), dropout=0.1, seed=1.5), TypeError, "seed must be an int"),
        (dict(q=q, k=q, v=q, graph=ga.full(7), scale=math.nan), ValueError, "scale must be finite"),
        (dict(q=q, k=q, v=q, graph=ga.full(7), score=ga.Additive()), ValueError, "width 1, got 8"),
        (dict(q=q, k=q, v=q, graph=ga.full(7), score="dot"), TypeError, "score must be"),
        (dict(q=q, k=q, v=q, graph=[]), ValueError, "empty"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            ga.attend(**arguments)


def test_explain_names_every_backend() -> None:
    q = torch.randn(1, 2, 31, 4)
    table = ga.explain(NAMED["random 31"], q, q, q)
    assert [e.backend for e in table] == list(ga.BACKENDS)
    assert sum(e.chosen for e in table) == 1
    assert "> " in str(table) and "ms" in str(table)
    with_score = ga.explain(NAMED["random 31"], q, q, q, score=ga.GATv2(torch.randn(2, 4)))
    assert "score is gatv2" in next(e for e in with_score if e.backend == "sdpa").reason
    bad = q.clone()
    bad[0, 0, 3] = math.nan
    table = ga.explain(ga.causal(31), q, bad, q)
    assert next(e for e in table if e.chosen).backend not in ("sdpa", "dense", "tiles")


def test_parity_in_float64() -> None:
    """The lecture's single head, SDPA (full, causal, cross), PyG's TransformerConv: the same weights, the same numbers."""
    from torch_geometric.nn import TransformerConv

    torch.set_default_dtype(torch.float64)
    try:
        x, context = torch.randn(3, 8, 16), torch.randn(3, 5, 16)
        head = ga.Head(16, 4)
        q, k, v = head.query(x), head.key(x), head.value(x)
        wei = (q @ k.transpose(-2, -1) * 4**-0.5).masked_fill(torch.tril(torch.ones(8, 8)) == 0, -math.inf)
        near = dict(atol=1e-12, rtol=0)
        torch.testing.assert_close(head(x, ga.causal(8)), torch.softmax(wei, -1) @ v, **near)
        torch.testing.assert_close(
            head(x, ga.causal(8)), F.scaled_dot_product_attention(q, k, v, is_causal=True), **near
        )
        torch.testing.assert_close(head(x, ga.full(8)), F.scaled_dot_product_attention(q, k, v), **near)
        ck, cv = head.key(context), head.value(context)
        crossed = head(x, ga.bipartite(8, 5), context)
        torch.testing.assert_close(crossed, F.scaled_dot_product_attention(q, ck, cv), **near)
        conv = TransformerConv(16, 4, heads=1, bias=False, root_weight=False)
        head = ga.Head(16, 4, bias=True)
        for ours, theirs in ((head.query, conv.lin_query), (head.key, conv.lin_key), (head.value, conv.lin_value)):
            ours.load_state_dict(
                {n: p for n, p in theirs.state_dict().items()}
                | ({} if theirs.bias is not None else {"bias": torch.zeros(4)})
            )
        graph = random_graph(19, 19, p=0.2, seed=3)
        row, source = graph.edges()
        nodes = torch.randn(19, 16)
        for backend in EVERY:
            torch.testing.assert_close(
                head(nodes, graph, backend=backend), conv(nodes, torch.stack([source, row])), **near
            )
    finally:
        torch.set_default_dtype(torch.float32)


def test_head_life_cycle() -> None:
    """K13, A05, H04: copies, state, modes."""
    head = ga.Head(8, 4, 2, dropout=0.8)
    x = torch.randn(2, 6, 8)
    graph = ga.causal(6)
    assert not any("mask" in n or "graph" in n for n in head.state_dict())
    torch.manual_seed(0)
    trained = head(x, graph)
    assert not torch.allclose(trained, head(x, graph))
    assert torch.equal(head(x, graph, seed=1), head(x, graph, seed=1))
    head.eval()
    quiet = head(x, graph)
    assert torch.equal(quiet, head(x, graph))
    head.weights(x, graph)
    torch.testing.assert_close(copy.deepcopy(head)(x, graph), quiet)
    other = ga.Head(8, 4, 2)
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other(x, graph), quiet)


@pytest.mark.parametrize("score", ["dot", "additive", "gatv2"])
def test_head_on_graphs_and_contexts(score: str) -> None:
    head = ga.Head(8, 4, 2, context_dim=6, score=score)
    x, context = torch.randn(3, 5, 8), torch.randn(3, 7, 6)
    graph = NAMED["random rectangle"]
    out = head(x, graph, context)
    assert out.shape == (3, 5, 8)
    assert (out[:, graph.degree() == 0] == 0).all()
    p = head.weights(x, graph, context)
    assert p.shape == (3, 2, graph.num_edges)
    row, source = graph.edges()
    dense = torch.zeros(3, 2, 5, 7)
    dense[..., row, source] = p
    _, v = head.keys_values(context)
    torch.testing.assert_close((dense @ v).transpose(1, 2).flatten(2), out)
    torch.testing.assert_close(head(x[0], graph, context[0]), out[0])


@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"qk_norm": True, "bias": True}])
def test_tied_head_is_one_projection_three_times(options: dict) -> None:
    torch.manual_seed(0)
    tied, apart = ga.Head(8, 4, 2, tied=True, **options), ga.Head(8, 4, 2, **options)
    assert sum(p.numel() for p in tied.value.parameters()) * 3 == sum(
        p.numel() for m in (apart.query, apart.key, apart.value) for p in m.parameters()
    )
    for name in ("query", "key", "value"):
        getattr(apart, name).load_state_dict(tied.value.state_dict())
    graph, cross = ga.window(6, 3), NAMED["random rectangle"]
    x, y, context = torch.randn(2, 6, 8), torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    torch.testing.assert_close(tied(x, graph), apart(x, graph))
    torch.testing.assert_close(tied(y, cross, context), apart(y, cross, context))
    moved = {"positions": torch.arange(6) + 2, "key_positions": torch.arange(6)}
    torch.testing.assert_close(tied(x, graph, **moved), apart(x, graph, **moved))
    keys, values = tied.keys_values(x)
    torch.testing.assert_close(tied.attend(tied.queries(x), keys, values, graph), tied(x, graph))
    torch.testing.assert_close(
        tied.edge_scores(tied.queries(x), keys, graph), apart.edge_scores(*apart.project(x)[:2], graph)
    )


def test_head_names_what_is_no_graph() -> None:
    head, x = ga.Head(8, 4, 2), torch.randn(2, 5, 8)
    queries, keys, _ = head.project(x)
    for wrong in (torch.ones(5, 5), [ga.causal(5)], None):
        for call in (head.weights, lambda x, g: head.edge_scores(queries, keys, g)):
            with pytest.raises(TypeError, match="graph must be a Graph, got"):
                call(x, wrong)


def test_head_options() -> None:
    x = torch.randn(2, 9, 8)
    graph = ga.causal(9)
    rotary = ga.Head(8, 4, 4, kv_heads=2, rotary=True, qk_norm=True)
    out = rotary(x, graph)
    assert out.shape == (2, 9, 16)
    # rotary scores depend on distances alone: shifting all positions changes nothing
    shifted = rotary(x, graph, positions=torch.arange(9) + 50, key_positions=torch.arange(9) + 50)
    torch.testing.assert_close(out, shifted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(out, rotary(x, graph, positions=torch.arange(9) + 3), atol=1e-4)
    # a decode step with cached keys and values equals the last row
    keys, values = rotary.keys_values(x)
    last = rotary.attend(rotary.queries(x[:, -1:], torch.tensor([8])), keys, values, ga.full(1, 9))
    torch.testing.assert_close(last, out[:, -1:])
    for bad in (
        dict(heads=3, kv_heads=2),
        dict(score="cosine"),
        dict(rotary=True, head_dim=3),
        dict(dropout=1.0),
        dict(score="gatv2", rotary=True),
        dict(score="additive", tied=True),
        dict(heads=4, kv_heads=2, tied=True),
        dict(context_dim=7, tied=True),
    ):
        with pytest.raises(ValueError):
            ga.Head(**{"dim": 8, "head_dim": 4} | bad)


# ---------------------------------------------------------------------- biases of -inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [(), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("name", [n for n in ga.BACKENDS if n not in ("reference", "flex", "triton")])
def test_a_bias_of_minus_infinity_on_every_backend(name: str, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    """On some edges it takes them out; on all of a target's it leaves a softmax of nothing, which is NaN; both exact."""
    torch.manual_seed(0)
    mask = torch.rand(*lead, 5, 7) < 0.6
    mask[..., 2, :] = False  # a target that reads nothing stays 0
    g = ga.from_mask(mask)
    q, k, v = torch.randn(2, 3, 5, 4, dtype=dtype), *torch.randn(2, 2, 3, 7, 4, dtype=dtype)
    hidden = ga.from_mask(mask & (torch.rand(*lead, 5, 7) < 0.4))
    row, source = g.edges()
    dead = row % 5 == 4
    some = torch.isin(g.edge_keys(), hidden.edge_keys())
    bias = torch.zeros(g.num_edges, dtype=dtype).masked_fill(some | dead, -math.inf)
    inside = {(): (), (2, 1): (3,), (1, 3): (2,), (2, 3): ()}[lead]
    bias = bias.expand(*inside, -1)
    try:
        got = ga.attend(q, k, v, g, bias=bias, backend=name)
    except ValueError as error:
        pytest.skip(str(error))
    wanted = ga.attend(q, k, v, g, bias=bias, backend="reference")
    torch.testing.assert_close(got, wanted, equal_nan=True)
    assert bool(got[..., 4, :].isnan().all()) == bool(mask[..., 4, :].any(-1).all())
    # on edges of targets that keep one, as if they were not in the graph
    left = g - hidden
    keeps = (left.degree() > 0).expand(2, 3, 5).clone()
    keeps[..., 4] = False
    less = ga.attend(q, k, v, left, backend="reference")
    torch.testing.assert_close(got[keeps], less[keeps])
    assert torch.equal(got[..., 2, :], torch.zeros_like(got[..., 2, :]))
