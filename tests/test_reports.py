"""Small inputs that broke other libraries: what the other files leave of the public reports, each with its right value."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch_geometric.data import Data

import graphattn as ga
from graphattn.generate import choose, generate
from graphattn.gpt import GPT, GPTConfig
from graphattn.graph_data import GraphSet
from graphattn.graph_models import GraphPredictor
from graphattn.graph_train import GraphRecipe, fit_graphs
from graphattn.nodes import NodeClassifier

BACKENDS = [name for name in ga.BACKENDS if name not in ("flex", "triton")] + ["auto"]  # those differentiable on a CPU


@functools.cache
def here() -> list[str]:
    """Backends that can take a plain call: all, but for an engine that was not built."""
    q = torch.zeros(1, 1, 1, 8)
    missing = {e.backend for e in ga.explain(ga.full(1), q, q, q) if e.seconds is None}
    return [name for name in BACKENDS if name not in missing]


def attend(q: Tensor, k: Tensor, v: Tensor, graph: ga.Graph, backend: str, **options: object) -> Tensor:
    if backend not in here():
        pytest.skip(f"{backend} is not built here")
    return ga.attend(q, k, v, graph, backend=backend, **options)  # type: ignore[arg-type]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


# ---------------------------------------------------------------------- E: rows with no neighbour


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t, s, empty", [(6, 7, [0, 3, 5]), (129, 200, [0, 64, 128])])
def test_gradient_of_a_target_without_edges_is_zero(backend: str, t: int, s: int, empty: list[int]) -> None:
    """E03: exactly, although its query and what arrives from above are large; softmax has no NaN to repair later."""
    mask = torch.rand(t, s, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[:, 1] = True
    mask[empty] = False
    graph = ga.from_mask(mask)
    q, k, v = leaves((1, 1, t, 8), (1, 1, s, 8), (1, 1, s, 8))
    with torch.no_grad():
        q[:, :, empty] = 1e4
    pull = torch.randn(1, 1, t, 8)
    pull[:, :, empty] = 1e4
    grads = torch.autograd.grad((attend(q, k, v, graph, backend) * pull).sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, empty] == 0).all() and (grads[0].abs().amax(-1) > 0).sum() == t - 3
    # nor do they reach the sources
    pull[:, :, empty] = 0
    again = torch.autograd.grad((attend(q, k, v, graph, backend) * pull).sum(), (k, v))
    for a, b in zip(grads[1:], again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_weights_of_a_target_without_edges_move_nothing() -> None:
    """E03: also where the weights or log-sum-exps themselves are the loss, and where parts are merged."""
    graph = ga.from_mask(torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 1]]).bool())
    q, k, v = leaves((3, 2), (3, 2), (3, 2), dtype=torch.float64)
    p = ga.weights(q, k, graph)
    dq, dk = torch.autograd.grad((p * torch.tensor([3.0, 5, 7])).sum(), (q, k))
    assert (dq[1:] == 0).all() and dq[0].abs().min() > 0 and dq.isfinite().all() and dk.isfinite().all()
    for parts in ([graph], [graph, ga.empty(3)], [graph & ga.self_loops(3), graph - ga.self_loops(3)]):
        out, lse = ga.merge([ga.attend_lse(q, k, v, g) for g in parts])
        assert lse[1] == -math.inf and (out[1] == 0).all()
        grads = torch.autograd.grad(out.sum() + lse[[0, 2]].sum(), (q, k, v))
        whole, whole_lse = ga.attend_lse(q, k, v, graph, backend="reference")
        wanted = torch.autograd.grad(whole.sum() + whole_lse[[0, 2]].sum(), (q, k, v))
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("position", ["none", "rotary", "alibi", "relative"])
def test_left_padding_stays_in_its_rows(position: str) -> None:
    """E06: two left pads, none, and nothing but padding, through two layers; the loss counts real tokens only."""
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    graph = ga.causal(6) & ga.from_key_padding(keep, "keep")
    assert graph.degree()[:, 0].tolist() == [[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [0] * 6]
    model = GPT(GPTConfig(vocab=5, block=6, layers=2, heads=2, width=8, position=position)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    tokens = torch.randint(5, (3, 6))
    targets = torch.where(keep.bool(), tokens.roll(-1, 1), -1)
    logits, loss = model(tokens, graph, targets)
    torch.testing.assert_close(logits[0, 2:], model(tokens[0, 2:], ga.causal(4))[0])
    torch.testing.assert_close(logits[1], model(tokens[1], ga.causal(6))[0])
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())
    real = torch.cat([logits[0, 2:], logits[1]]), torch.cat([targets[0, 2:], targets[1]])
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(*real))


def test_a_sample_of_padding_only() -> None:
    """E06: lengths [3, 0]; its output is 0, in both layers."""
    head = ga.Head(8, 4, 2)
    graph = ga.causal(3) & ga.padding([3, 0], 3)
    x = torch.randn(2, 3, 8, requires_grad=True)
    out = head(head(x, graph), graph)
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[0], head(head(x[0], ga.causal(3)), ga.causal(3)))
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert grad.isfinite().all() and (grad[1] == 0).all()


@pytest.mark.parametrize("score", ["dot", "additive", "gatv2"])
def test_models_of_graphs_without_edges(score: str) -> None:
    """E09: four nodes, no edge: a bias or a node's own features are left, and every gradient is finite or 0."""
    pairs = torch.zeros(2, 0, dtype=torch.int64)
    none = ga.from_edge_index(pairs, 4)
    x = torch.randn(4, 3, requires_grad=True)
    conv = ga.GraphAttentionConv(3, 5, 2, score=score, residual=False)
    if conv.bias is not None:
        torch.nn.init.normal_(conv.bias)
    for edges in (pairs, none):
        out, (index, weights) = conv(x, edges, return_attention_weights=True)
        assert torch.equal(out, torch.zeros(4, 10) if conv.bias is None else conv.bias.expand(4, 10))
        assert index.shape == (2, 0) and weights.shape == (0, 2)
    inputs = [x, *(p for p in conv.parameters() if p is not conv.bias)]
    if out.requires_grad:
        assert all(g is None or (g == 0).all() for g in torch.autograd.grad(out.sum(), inputs, allow_unused=True))
    for model in (
        NodeClassifier(3, 2, heads=2, head_dim=4, score=score),
        NodeClassifier(3, 2, heads=2, head_dim=4, score=score, block="transformer", degree=True),
        NodeClassifier(3, 2, heads=2, head_dim=4, score=score, hops=3),
    ):
        model.eval()
        out = model(x, none)
        for i in range(4):  # a node without edges is alone, whoever else is there
            torch.testing.assert_close(out[i : i + 1], model(x[i : i + 1], ga.empty(1)))
        out.square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    whole = GraphPredictor(3, 2, width=8, heads=2, score=score)
    out = whole(x, none, torch.tensor([0, 0, 2, 2]), 3)
    out.sum().backward()
    assert out.shape == (3, 2) and x.grad.isfinite().all()


# ---------------------------------------------------------------------- D, G: edges in every spelling


def arcs(kind: type) -> ga.Graph:
    graph = kind([(0, 2), (0, 2), (1, 2)])
    graph.add_node(3)
    return ga.from_networkx(graph)


SPELLINGS: dict[str, Callable[[], ga.Graph]] = {
    "edge_index": lambda: ga.from_edge_index([[0, 0, 1], [2, 2, 2]], 4),
    "int32": lambda: ga.from_edge_index(torch.tensor([[1, 0, 0], [2, 2, 2]], dtype=torch.int32), 4),
    "MultiDiGraph": lambda: arcs(nx.MultiDiGraph),
    "Data": lambda: ga.from_pyg(Data(edge_index=torch.tensor([[0, 1, 0], [2, 2, 2]]), num_nodes=4)),
    "scipy, values that cancel": lambda: ga.from_scipy(
        sp.coo_array(([1, -1, 1], ([0, 0, 1], [2, 2, 2])), shape=(4, 4))
    ),
    "csr": lambda: ga.from_csr([0, 0, 0, 3, 3], [0, 1, 0], 4),
    "union": lambda: ga.from_edge_index([[0], [2]], 4) | ga.from_edge_index([[1, 0], [2, 2]], 4),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_repeated_edge_weighs_once(name: str) -> None:
    """G01: 1/2 and 1/2, where counting twice would give 2/3 and 1/3."""
    graph = SPELLINGS[name]()
    assert graph.shape == (4, 4) and graph.num_edges == 2
    q, v = torch.zeros(4, 8), torch.tensor([[1.0], [3.0], [9.0], [9.0]])
    assert ga.weights(q, q, graph).tolist() == [0.5, 0.5]
    for backend in here():
        assert ga.attend(q, q, v, graph, backend=backend).flatten().tolist() == [0, 0, 2, 0], backend


def test_edge_values_are_moved_with_their_edges() -> None:
    """G03, G04: 36 shuffled edges of a triangle with a bias each: the numbers do not depend on the order."""
    pairs = ga.to_edge_index(ga.causal(8))
    bias = torch.randn(36)
    q, k, v = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 3)
    scores = torch.full((8, 8), -math.inf)
    scores[pairs[1], pairs[0]] = (q @ k.T / 2)[pairs[1], pairs[0]] + bias
    for seed in range(5):
        order = torch.randperm(36, generator=torch.Generator().manual_seed(seed))
        graph, ids = ga.from_edge_index(pairs[:, order], 8, return_ids=True)
        own = torch.empty(36).index_put_((ids,), bias[order])
        torch.testing.assert_close(ga.attend(q, k, v, graph, bias=own), scores.softmax(1) @ v)
        given = ga.weights(q, k, graph, bias=own)[ids]  # in the caller's order again
        torch.testing.assert_close(given, scores.softmax(1)[pairs[1], pairs[0]][order])


def test_an_index_out_of_range_names_itself_and_the_size() -> None:
    """G06: at the door of every format; -1 is never the last node."""
    doors: list[Callable[[int], object]] = [
        lambda j: ga.from_edge_index([[0, j], [1, 1]], 3),
        lambda j: ga.from_edge_index(torch.tensor([[1, 1], [0, j]], dtype=torch.int8), 3),
        lambda j: ga.from_pyg(Data(edge_index=torch.tensor([[0, j], [1, 1]]), num_nodes=3)),
        lambda j: ga.edge_ids(ga.full(3), [[0, j], [1, 1]]),
        lambda j: ga.GraphAttentionConv(2, 2)(torch.randn(3, 2), torch.tensor([[0, j], [1, 1]])),
    ]
    for door in doors:
        for j in (5, -1):
            with pytest.raises(ValueError, match=rf"{j}\b.*\b3 (sources|targets)"):
                door(j)


def test_labels_keep_the_order_they_are_given() -> None:
    """N01: insertion order, or any other; ids stay below the number of nodes."""
    graph = nx.Graph([(1, 2), (2, 6), (3, 4), (5, 6)])
    assert list(graph) == [1, 2, 6, 3, 4, 5]
    for order in (list(graph), sorted(graph)):
        got, back = ga.from_networkx(graph, order=order, return_order=True)
        assert back == order and got.num_edges == 8
        assert {frozenset(order[n] for n in e) for e in ga.to_edge_index(got).T.tolist()} == {
            *map(frozenset, graph.edges)
        }


# ---------------------------------------------------------------------- F, M, T18: lengths, and who sees whom


def outcome(s: int, backend: str) -> list[Tensor]:
    """Outputs and gradients of a causal rectangle with `s` sources."""
    g = torch.Generator().manual_seed(s)
    q, k, v = (torch.randn(1, n, 8, generator=g).requires_grad_() for n in (129, s, s))
    out = attend(q, k, v, ga.causal(129, s, align="end"), backend)
    return [out, *torch.autograd.grad((out * torch.randn(out.shape, generator=g)).sum(), (q, k, v))]


reference_of = functools.cache(functools.partial(outcome, backend="reference"))


@pytest.mark.parametrize("s", [1, 127, 129, 200, 1025])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_lengths_that_fill_no_block(backend: str, s: int) -> None:
    """F02: outputs and gradients of every backend, for more targets than sources too."""
    for a, b in zip(outcome(s, backend), reference_of(s), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_graph_of_another_length_is_refused() -> None:
    """F03, C10: both sizes are named, and a graph used at its own length first is no excuse."""
    graph = ga.window(1024, 5)
    ga.attend(*torch.randn(3, 1024, 4), graph)
    q = torch.randn(512, 4)
    with pytest.raises(ValueError, match=r"q has 512 rows.*1024 <- 1024"):
        ga.attend(q, q, q, graph)
    with pytest.raises(ValueError, match=r"k has 10 rows.*10 <- 20"):
        ga.attend(*torch.randn(3, 10, 4), ga.full(10, 20))
    with pytest.raises(ValueError, match=r"q has 9 rows.*7 <- 7"):
        ga.attend(*torch.randn(3, 9, 4), ga.from_cu_seqlens([0, 3, 7]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", [3, 70])
def test_no_gradient_comes_from_the_future(backend: str, t: int) -> None:
    """M01, T18: d out[i] / d v[j] is 0 for j > i, exactly, and never 0 for j <= i; keys likewise, but for out[0]."""
    q, k, v = leaves((1, 2, t, 8), (1, 2, t, 8), (1, 2, t, 8))
    out = attend(q, k, v, ga.causal(t), backend)
    assert torch.equal(out[:, :, 0], v[:, :, 0])
    for i in range(0, t, 1 if t < 9 else 23):
        dk, dv = (x.abs().amax((0, 1, 3)) for x in torch.autograd.grad(out[:, :, i].sum(), (k, v), retain_graph=True))
        assert (dv[: i + 1] > 0).all() and (dv[i + 1 :] == 0).all()
        assert (dk[i + 1 :] == 0).all() and (i == 0 or (dk[: i + 1] > 0).all())


def trained(graph: ga.Graph, backend: str, steps: int = 45) -> float:
    """The mean loss of the last third, in nats, on four symbols that come without any rule."""
    model = GPT(GPTConfig(vocab=4, block=graph.t, layers=1, heads=1, width=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    drawn, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        text = torch.randint(4, (16, graph.t + 1), generator=drawn)
        loss = model(text[:, :-1], graph, text[:, 1:], backend=backend)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-steps // 3 :]).mean())


@pytest.mark.parametrize("backend", ["edges", "auto"])
def test_noise_is_never_predicted(backend: str) -> None:
    """T18: the loss stays at the entropy, with one position and with eight; a graph that leaks takes it far below."""
    assert trained(ga.full(1), backend) > math.log(4) - 0.03 and trained(ga.causal(8), backend) > math.log(4) - 0.03
    assert trained(ga.band(8, -1, 1), backend) < 0.5


# ---------------------------------------------------------------------- R: determinism


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("deterministic", [False, True], indirect=True)
@pytest.mark.parametrize(
    "score, backend", [("additive", "edges"), ("additive", "auto"), ("dot", "csr"), ("dot", "auto")]
)
def test_training_twice_gives_the_same_bits(score: str, backend: str, deterministic: None) -> None:
    """R01: GAT on a sparse graph, with dropout, the same seed twice; with torch's flag and without."""
    n = 1500
    pairs = torch.randint(n, (2, 12_000), generator=torch.Generator().manual_seed(0))
    x, y = torch.randn(n, 20), torch.randint(3, (n,))

    def run() -> dict[str, Tensor]:
        torch.manual_seed(5)
        graph = ga.from_edge_index(pairs, n) | ga.self_loops(n)
        model = NodeClassifier(20, 3, heads=2, head_dim=4, score=score)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x, graph, backend=backend), y).backward()
            optimizer.step()
        return model.state_dict()

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


JUNK = (
    None,
    3,
    [[1, 0], [0, 1]],
    np.eye(3),
    np.asmatrix(np.eye(3)),
    torch.eye(3).bool().to_sparse(),
    "abc",
    object(),
    {},
)


@pytest.mark.parametrize("name", [name for name in dir(ga) if name.startswith("from_")])
def test_converters_refuse_what_they_cannot_read(name: str) -> None:
    """D04: a graph, or a TypeError or ValueError, never an error from within."""
    convert = getattr(ga, name)
    needed = [p for p in inspect.signature(convert).parameters.values() if p.default is p.empty and p.kind in (0, 1)]
    for x in JUNK:
        try:
            convert(x, *[3] * (len(needed) - 1))
        except (TypeError, ValueError, FileNotFoundError) as error:
            assert str(error), x


def test_negative_scales_on_causal_graphs() -> None:
    """K10: fused kernels hide before they scale, so that what is hidden became NaN or the largest."""
    q, v = torch.zeros(2, 1), torch.tensor([[1.0], [3.0]])
    assert torch.equal(ga.attend(q, q, v, ga.causal(2), scale=0.0), torch.tensor([[1.0], [2.0]]))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 200, 8).unbind(0)
    for scale in (0.0, -0.01, -1.0, -30.0):
        for dtype, room in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.05)):
            given = [x.to(dtype) for x in (q, k, v)]
            right = ga.attend(*(x.double() for x in given), ga.causal(200), scale=scale, backend="reference")
            for backend in ("auto", "sdpa"):
                out = ga.attend(*given, ga.causal(200), scale=scale, backend=backend)
                torch.testing.assert_close(out.double(), right, atol=room, rtol=room)


def graph_set(y: torch.Tensor) -> GraphSet:
    sizes = [3 + k % 3 for k in range(y.numel())]
    return GraphSet("made", [ga.full(n) for n in sizes], [torch.randn(n, 4) for n in sizes], None, y, [])


def test_training_on_whole_graphs_refuses_what_cannot_train() -> None:
    """T01: batches of one, one graph, targets that are all the same, no graph, no epoch, NaN."""
    ids = torch.arange(12)
    recipe = GraphRecipe(width=8, heads=2, layers=1, walk=0, epochs=2, batch=1, norm="layer")
    data = graph_set(ids % 2)
    torch.manual_seed(3)
    start = recipe.model(data).state_dict()
    model, _ = fit_graphs(data, recipe, ids[:8], ids[8:10], ids[10:], seed=3)
    assert any(not torch.equal(a, b) for a, b in zip(start.values(), model.state_dict().values(), strict=True))
    for change, parts, what in (
        ({"norm": "batch"}, (ids[:8], ids[8:10], ids[10:]), "batches of 2 graphs or more, got batch=1"),
        ({"norm": "batch", "batch": 4}, (ids[:1], ids[8:10], ids[10:]), "and 1 to train on"),
        ({}, (ids[:0], ids[8:10], ids[10:]), "train holds no graph"),
        ({}, (ids[:8], ids[:0], ids[10:]), "val holds no graph"),
        ({}, (ids[:8], ids[8:10], ids[:0]), "test holds no graph"),
        ({"epochs": 0}, (ids[:8], ids[8:10], ids[10:]), "epochs must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=what):
            fit_graphs(data, replace(recipe, **change), *parts)
    for y, train in ((torch.ones(12), ids[:8]), (torch.randn(12), ids[:1])):
        _, figures = fit_graphs(graph_set(y), recipe, train, ids[8:10], ids[10:])
        assert math.isfinite(figures["test"])
    with pytest.raises(ValueError, match="NaN or inf in features or targets"):
        fit_graphs(graph_set(torch.full((12,), math.nan)), recipe, ids[:8], ids[8:10], ids[10:])


def test_generation_at_the_edge_of_numbers() -> None:
    """T08, K16: a temperature or top_p below the smallest float32, and prompts that are no ids."""
    logits = torch.tensor([[1.0, 2, 0, -1]])
    for options in ({"temperature": 1e-46}, {"temperature": 1e-44}, {"top_p": 1e-46}, {"top_p": 1e-44}):
        assert choose(logits, **options).item() == 1
    model = GPT(GPTConfig(vocab=5, block=8, layers=1, heads=2, width=8))
    for prompt in (torch.tensor([1.0, 2.0]), torch.tensor([True]), [1, 2], "ab"):
        with pytest.raises(TypeError, match="prompt must be a tensor of integer token ids, got"):
            generate(model, ga.causal(8), prompt, 3)
