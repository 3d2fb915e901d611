"""FlexAttention: block lists and predicates against the dense mask; the compiled function against the reference.

Without a GPU the kernels run by torch's own decomposition (`aot_eager`), which shares the predicate, the score
modification and their gradients with the kernels, and once by the CPU's C++ compiler.  Nothing here needs triton.
"""

from __future__ import annotations

import math
import shutil

import pytest
import torch

import graphattn as ga
from graphattn.backends import flex, reference
from graphattn.backends.call import make_call
from graphattn.blocks import bounds, tile_bits, tiling

pytestmark = pytest.mark.filterwarnings("ignore")


def _random(*shape: int, p: float, seed: int = 0) -> ga.Graph:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < p
    mask[..., 3, :] = False
    return ga.from_mask(mask)


GRAPHS = {
    "causal": ga.causal(70),
    "window": ga.window(101, 13),
    "band": ga.band(89, 3, 5),
    "full": ga.full(33, 47),
    "empty": ga.empty(40, 20),
    "prefix": ga.prefix(67, 19),
    "documents": ga.disjoint([ga.full(13), ga.causal(40), ga.empty(7), ga.window(30, 4)]),
    "complement": ~ga.window(77, 9),
    "two runs": ga.window(101, 30) - ga.window(101, 20) | ga.self_loops(101),
    "gaps": ga.from_mask(torch.arange(64)[:, None] * 3 == torch.arange(200)),
    "sparse": _random(61, 83, p=0.1),
    "heads": _random(2, 3, 61, 83, p=0.03),
    "batch": _random(2, 1, 61, 83, p=0.97),
}


def _blocks(mask: torch.Tensor, bm: int, bn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(leads, rows, columns of blocks, bm, bn) of the mask, and of what exists, padded with False."""
    m = mask.reshape(-1, *mask.shape[-2:])
    nq, nk = -(-m.shape[1] // bm), -(-m.shape[2] // bn)
    pad = torch.zeros(m.shape[0], nq * bm, nk * bn, dtype=torch.bool)
    room = pad.clone()
    pad[:, : m.shape[1], : m.shape[2]] = m
    room[:, : m.shape[1], : m.shape[2]] = True
    return tuple(x.view(-1, nq, bm, nk, bn).transpose(2, 3) for x in (pad, room))  # type: ignore[return-value]


@pytest.mark.parametrize("sizes", [(16, 32), (8, 64), (32, 32), (32, 16)])
@pytest.mark.parametrize("name", GRAPHS)
def test_tiling_and_bits_are_those_of_the_mask(name: str, sizes: tuple[int, int]) -> None:
    graph, (bm, bn) = GRAPHS[name], sizes
    tiles = tiling(graph, bm, bn)
    mask, room = _blocks(graph.dense(), bm, bn)
    some = mask.flatten(3).any(-1)
    every = (mask | ~room).flatten(3).all(-1) & some
    torch.testing.assert_close(tiles.all.dense().view(every.shape), every)
    torch.testing.assert_close(tiles.some.dense().view(every.shape), some & ~every)
    row, col = tiles.some.edges()
    bits = (tile_bits(graph, tiles)[..., None] >> torch.arange(min(bn, 32))) & 1
    torch.testing.assert_close(bits.bool().view(-1, bm, bn), mask.flatten(0, 1)[row, col])


def test_bounds_hold_every_run_or_none() -> None:
    graph = GRAPHS["two runs"]
    start, stop = bounds(graph, 4)
    assert start.shape == (101, 2)
    at = torch.arange(101)
    torch.testing.assert_close(((at >= start[..., None]) & (at < stop[..., None])).any(1), graph.dense())
    assert bounds(graph, 1) is None


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "empty"])
def test_predicate_and_lists_say_the_mask(name: str) -> None:
    graph = GRAPHS[name]
    block_mask, kind = flex.block_mask_of(graph, 32)
    lead = graph.lead or (1, 1)
    b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (*lead, graph.t, graph.s)), indexing="ij")
    dense = graph.dense().view(*lead, graph.t, graph.s)
    torch.testing.assert_close(block_mask.mask_mod(b, h, q, kv), dense)
    assert kind.startswith("bounds") == (bounds(graph, flex.RUNS) is not None)
    mask, room = _blocks(graph.dense(), 32, 32)
    some = mask.flatten(3).any(-1)
    every = (mask | ~room).flatten(3).all(-1) & some
    for count, at, want in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, some & ~every),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, every),
        (block_mask.q_num_blocks, block_mask.q_indices, (some & ~every).mT),
        (block_mask.full_q_num_blocks, block_mask.full_q_indices, every.mT),
    ):
        got = torch.zeros_like(want)
        count, at = count.reshape(want.shape[:2]), at.reshape(want.shape)
        for i, j in torch.cartesian_prod(torch.arange(want.shape[0]), torch.arange(want.shape[1])).tolist():
            assert at[i, j, : count[i, j]].unique().numel() == count[i, j]
            got[i, j, at[i, j, : count[i, j]].long()] = True
        torch.testing.assert_close(got, want)


def test_says_why_not() -> None:
    graph = ga.window(20, 5)
    q = torch.randn(2, 20, 16)
    e = graph.num_edges

    def why(*x: torch.Tensor, **options: object) -> str | None:
        return flex.why_not(make_call(*(x or (q, q, q)), graph, **options))  # type: ignore[arg-type]

    assert "dropout" in why(dropout=0.5)
    assert "vectors per edge" in why(edge_value=torch.zeros(e, 16))
    assert "gatv2" in why(score=ga.GATv2(torch.ones(16)))
    assert "float64" in why(*(q.double(),) * 3)
    assert "log-sum-exp" in why(want_lse=True)
    assert "no backward on a CPU" in why(q.clone().requires_grad_(), q, q)
    sparse = GRAPHS["sparse"]
    q, k = torch.zeros(2, sparse.t, 16), torch.zeros(2, sparse.s, 16)
    assert "more than 4" in flex.why_not(make_call(q, k, k, sparse, bias=torch.zeros(sparse.num_edges)))


def test_auto_never_compiles_on_a_cpu_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 20, 16)
    call = make_call(q, q, q, ga.window(20, 5))
    assert flex.cost(call) == math.inf
    monkeypatch.setattr(flex, "_has_cxx", lambda: False)
    assert "C++ compiler" in flex.why_not(call)


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what would be kernels by torch's decomposition, which also has a backward on a CPU."""
    import torch.nn.attention.flex_attention as module

    monkeypatch.setattr(flex, "_COMPILER", "aot_eager")
    monkeypatch.setattr(module, "_validate_device", lambda *a: None)


def _agree(graph: ga.Graph, *, heads: int, kv_heads: int, batch: int = 1, leaves: tuple = (), **options) -> None:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(batch, heads, graph.t, 8, generator=generator)
    k, v = (torch.randn(batch, kv_heads, graph.s, d, generator=generator) for d in (8, 5))
    leaves = (q, k, v, *leaves)
    for x in leaves:
        x.requires_grad_()
    call = make_call(q, k, v, graph, want_lse=True, **options)
    got, want = flex.attend(call), reference.attend(call)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[1], want[1])
    weight = [torch.randn(x.shape, generator=generator) for x in want]
    grads = []
    for out, lse in (got, want):
        loss = (out * weight[0]).sum() + (torch.where(lse.isinf(), 0.0, lse) * weight[1]).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_gradients_and_lse_with_few_runs_groups_cap_and_bias(decomposed: None) -> None:
    graph = ga.window(61, 20) - ga.window(61, 9) | ga.self_loops(61)
    bias = torch.randn(4, graph.num_edges)
    _agree(graph, heads=4, kv_heads=2, softcap=3.0, bias=bias, leaves=(bias,))


def test_gradients_and_lse_with_bits_leading_axes_and_positions(decomposed: None) -> None:
    table = torch.randn(3, 11)
    _agree(_random(2, 3, 61, 83, p=0.1), batch=2, heads=3, kv_heads=3, bias=ga.relative(table, 1), leaves=(table,))


def test_lengths_share_compiled_versions_and_too_many_raise(decomposed: None) -> None:
    torch._dynamo.reset()
    flex._ENTRIES.clear()
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    for t in (300, 350, 401, 555, 642):
        q = torch.randn(1, 1, t, 8)
        flex.attend(make_call(q, q, q, ga.window(t, 9)))
    assert counters["stats"]["unique_graphs"] - before <= 3
    # nothing runs uncompiled: when torch refuses another version, so do we
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(RuntimeError, match="would recompile"):
        q = torch.randn(1, 3, 300, 8)
        flex.attend(make_call(q, q, q, ga.window(300, 9)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for FlexAttention on a CPU")
def test_compiled_on_a_cpu() -> None:
    graph = _random(2, 1, 131, 140, p=0.05)
    q, k, v = torch.randn(2, 2, 131, 16), torch.randn(2, 1, 140, 16), torch.randn(2, 1, 140, 16)
    with torch.no_grad():
        got = ga.attend(q, k, v, graph, backend="flex")
        torch.testing.assert_close(got, ga.attend(q, k, v, graph, backend="reference"), atol=2e-5, rtol=1e-4)
    assert (got[:, :, 3] == 0).all()
