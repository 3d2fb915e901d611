"""Modes, transforms, threads and inputs that once broke something: each the law behind the case."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import graphattn as ga
from graphattn.backends import _try_module
from tests.test_conformance import graph_of

DONE = ["dense", "sdpa", "edges", "csr", "tiles", "native", "auto"]


def scattered() -> ga.Graph:
    return graph_of(torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) < 0.4)


@pytest.mark.parametrize("backend", DONE)
@pytest.mark.parametrize(
    "make", [scattered, lambda: ga.window(12, 3), lambda: ga.empty(12)], ids=["scattered", "window", "empty"]
)
def test_a_first_use_in_any_mode_leaves_the_graph_usable(backend: str, make) -> None:
    """What is kept on a graph belongs to no transform and no mode."""
    graph, x = make(), torch.randn(2, 2, 12, 4)

    def f(y: torch.Tensor) -> torch.Tensor:
        return ga.attend(y, x, x, graph, backend=backend).square().sum()

    try:
        with torch.inference_mode():
            f(x)
        inside = torch.func.grad(f)(x)
    except ValueError as error:
        assert "can't do this call" in str(error)
        inside = None
    y = x.clone().requires_grad_()
    try:
        (plain,) = torch.autograd.grad(f(y), y)
    except ValueError as error:
        pytest.skip(str(error))
    if inside is not None:
        torch.testing.assert_close(inside, plain)


@pytest.mark.parametrize("make", [scattered, lambda: ga.window(12, 3), lambda: ga.causal(12), lambda: ga.full(12)])
def test_vmap_over_a_batch(make) -> None:
    graph, x = make(), torch.randn(3, 2, 2, 12, 4)
    out = torch.vmap(lambda y: ga.attend(y, y, y, graph))(x)
    torch.testing.assert_close(out, torch.stack([ga.attend(y, y, y, graph) for y in x]))


def test_threads_that_meet_a_new_graph_at_once() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    x = torch.randn(1, 2, 60, 8)
    try:
        for n in range(30):
            graph = graph_of(torch.rand(60, 60, generator=torch.Generator().manual_seed(n)) < 0.2)
            barrier, found = threading.Barrier(6), []

            def work(graph=graph, barrier=barrier, found=found) -> None:
                y = x.clone().requires_grad_()
                barrier.wait()
                ga.attend(y, y, y, graph).sum().backward()
                found.append(y.grad)

            threads = [threading.Thread(target=work) for _ in range(6)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert len(found) == 6 and all(torch.equal(g, found[0]) for g in found)
            assert graph.edges()[0] is graph.edges()[0]
    finally:
        sys.setswitchinterval(before)


def test_what_converters_give_is_the_callers() -> None:
    graph = ga.causal(3)
    for x in (*ga.to_csr(graph), ga.to_edge_index(graph), graph.degree(), ga.to_mask(graph)):
        x.zero_()
    assert graph == ga.causal(3) and graph.edges()[1].tolist() == [0, 0, 1, 0, 1, 2]
    assert graph.degree().tolist() == [1, 2, 3]


@pytest.mark.parametrize("backend", DONE)
def test_width_zero_is_exact_or_refused(backend: str) -> None:
    graph = ga.causal(3)
    for d, dv in ((0, 1), (1, 0)):
        q, v = torch.ones(1, 1, 3, d).double(), torch.arange(3.0 * dv).double().view(1, 1, 3, dv)
        try:
            out = ga.attend(q, q, v, graph, backend=backend)
        except ValueError as error:
            assert "can't do this call" in str(error)
            continue
        torch.testing.assert_close(out, ga.attend(q, q, v, graph, backend="reference"))


def test_a_nan_in_a_query_stays_in_its_row() -> None:
    """An empty target has zero gradients whatever its query holds."""
    graph = graph_of(torch.tensor([[True, False], [False, False]]))
    q = torch.randn(1, 1, 2, 4)
    q[0, 0, 1] = float("nan")
    q, k, v = q.requires_grad_(), torch.randn(1, 1, 2, 4).requires_grad_(), torch.randn(1, 1, 2, 4).requires_grad_()
    ga.attend(q, k, v, graph).sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["tiles", "native"])
def test_a_second_derivative_is_refused_not_wrong(backend: str) -> None:
    if _try_module(backend)[0] is None:
        pytest.skip("not here")
    q = torch.randn(1, 1, 8, 4, requires_grad=True)
    try:
        out = ga.attend(q, q, q, ga.causal(8), backend=backend)
    except ValueError as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeError, match="differentiable once"):
        (g,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        g.square().sum().backward()


@pytest.mark.parametrize("backend", DONE)
def test_autocast_is_over_at_the_door(backend: str) -> None:
    q, graph = torch.randn(2, 2, 12, 4), scattered()
    with torch.autocast("cpu", torch.bfloat16):
        try:
            out = ga.attend(q, q.bfloat16(), q, graph, bias=torch.randn(graph.num_edges), backend=backend)
        except ValueError as error:
            pytest.skip(str(error))
    assert out.dtype == torch.bfloat16


def test_half_precision_does_not_round_a_wide_bias() -> None:
    graph, q = ga.causal(40), torch.randn(40, 8).half()
    bias = torch.linspace(900, 1000, graph.num_edges)
    with pytest.raises(ValueError, match="round the bias"):
        ga.attend(q, q, q, graph, bias=bias, backend="sdpa")
    want = ga.attend(q, q, q, graph, bias=bias, backend="reference")
    torch.testing.assert_close(ga.attend(q, q, q, graph, bias=bias), want, atol=4e-3, rtol=0)


def test_arguments_that_were_taken_silently() -> None:
    q = torch.randn(2, 3, 8, 4)
    graph = ga.causal(8)
    with pytest.raises(TypeError, match="scale must be a plain number"):
        ga.attend(q, q, q, graph, scale=torch.tensor(0.3, requires_grad=True))
    with pytest.raises(TypeError, match="scale must be a plain number"):
        ga.attend(q, q, q, graph, scale="0.5")
    with pytest.raises(ValueError, match="leading ones must agree"):
        ga.attend(q.view(2, 3, 1, 8, 4), q.view(3, 2, 1, 8, 4), q.view(6, 1, 1, 8, 4), graph)
    with pytest.raises(TypeError, match="must be a Graph, got str"):
        ga.attend(q, q, q, "causal")
    with pytest.raises(TypeError):
        ga.alibi(torch.ones(3), 0.5)


def test_numbers_beyond_reason_are_refused_at_once() -> None:
    big = 10**12
    for make in (
        lambda: ga.full(big), lambda: ga.causal(big), lambda: ga.empty(big), lambda: ga.self_loops(big),
        lambda: ga.prefix(big, 1), lambda: ga.documents([big]), lambda: ga.padding([1], 2, big),
        lambda: ga.global_tokens(10**7, range(0, 10**4, 2)), lambda: ga.full(2**63), lambda: ga.full(3, 2**70),
        lambda: ga.to_edge_index(ga.causal(2 * 10**5)), lambda: ga.parse("neighborhood([2147483648,2147483648,0],1)", 0),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            make()
    assert ga.band(5, 0, 2**63 - 1) == ga.full(5) - (ga.causal(5) - ga.self_loops(5))
    assert ga.band(5, 2**63 - 1, 2**63 - 1) == ga.full(5)


def test_integers_of_numpy_and_torch_are_integers() -> None:
    import numpy as np

    for n in (np.int64(2), torch.tensor(2)):
        assert ga.from_edge_index([[0], [1]], n).shape == (2, 2)
    with pytest.raises(TypeError):
        ga.from_edge_index([[0], [0]], True)
    q = torch.randn(4, 2)
    same = [ga.attend(q, q, q, ga.full(4), dropout=0.5, seed=s) for s in (3, np.int64(3), torch.tensor(3))]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
