"""Reordering: fuller tiles, and the same attention permuted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import graphattn as ga


def fill(graph: ga.Graph, tile: int) -> float:
    """Tile fill by its definition, cell by cell."""
    mask = ga.to_mask(graph)
    pad = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % tile, 0, -mask.shape[-2] % tile))
    tiles = pad.unflatten(-1, (-1, tile)).unflatten(-3, (-1, tile)).any(-1).any(-2)
    return float(mask.sum() / (tiles.sum() * tile * tile)) if mask.any() else 1.0


def test_tile_fill_is_edges_over_cells_of_tiles_that_hold_one() -> None:
    for seed in range(30):
        g = torch.Generator().manual_seed(seed)
        shape = ((9, 14), (2, 3, 9, 14), (1, 1, 0, 3))[seed % 3]
        graph = ga.from_mask(torch.rand(*shape, generator=g) < 0.1)
        for tile in (1, 4, 64):
            assert abs(ga.tile_fill(graph, tile) - fill(graph, tile)) < 1e-6
    assert ga.tile_fill(ga.full(128)) == 1


@pytest.mark.parametrize(
    "make,least",
    [
        (lambda: ga.band(400, 6, 6), 7.0),
        (lambda: ga.disjoint([ga.full(16)] * 25), 14.0),
        (lambda: ga.neighborhood((20, 20), 1), 4.0),
        (lambda: ga.disjoint([ga.from_mask(torch.rand(40, 40) < 0.4) for _ in range(10)]), 4.0),
    ],
)
def test_a_shuffled_graph_is_put_in_order(make: Callable[[], ga.Graph], least: float) -> None:
    graph = make()
    shuffled = graph.relabel(torch.randperm(graph.t))
    order, gain = ga.reorder(shuffled, tile=16)
    assert torch.equal(order.sort().values, torch.arange(graph.t))
    after = fill(shuffled.relabel(order), 16)
    assert abs(after / fill(shuffled, 16) - gain) < 1e-4
    assert gain > least and after > 0.6 * fill(graph, 16)
    again, same = ga.reorder(shuffled, tile=16)
    assert torch.equal(again, order) and same == gain


def test_never_worse_and_small_graphs() -> None:
    for graph in (ga.full(50), ga.causal(50), ga.empty(50), ga.empty(0), ga.self_loops(1), ga.window(300, 20)):
        order, gain = ga.reorder(graph)
        assert gain >= 1 and order.numel() == graph.t
    assert ga.reorder(ga.causal(128)).gain == 1
    assert ga.reorder(ga.stack([ga.causal(20), ga.random_regular(20, 3, 0)], "head"), 4).gain >= 1
    with pytest.raises(ValueError, match="as many targets as sources"):
        ga.reorder(ga.full(3, 4))


@pytest.mark.parametrize(
    "graph", [ga.causal(30) & ga.random_regular(30, 9, 0), ga.band(30, 2, 1), ga.tree_ancestors(range(-1, 29))]
)
def test_permuting_tokens_and_graph_alike_permutes_the_output(graph: ga.Graph) -> None:
    shuffle = torch.randperm(30)
    graph = graph.relabel(shuffle)
    order, _ = ga.reorder(graph, tile=4)
    if torch.equal(order, torch.arange(30)):
        order = torch.randperm(30)
    q, k, v = torch.randn(3, 2, 3, 30, 4, dtype=torch.float64).unbind()
    out = ga.attend(q, k, v, graph, backend="edges")
    moved = ga.attend(*(x[..., order, :] for x in (q, k, v)), graph.relabel(order), backend="edges")
    torch.testing.assert_close(moved, out[..., order, :])
    torch.testing.assert_close(moved[..., order.argsort(), :], out)
