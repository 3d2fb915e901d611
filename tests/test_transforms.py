"""Graphs built inside torch.func's transforms: plain values, the same as outside, and usable after them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import graphattn as ga

T = 5
BUILT: dict[str, Callable[[], ga.Graph]] = {
    "causal": lambda: ga.causal(T),
    "window": lambda: ga.window(T, 2),
    "documents": lambda: ga.documents([2, 3]),
    "random_regular": lambda: ga.random_regular(T, 2, 0),
    "expander": lambda: ga.expander(T, 2, 0),
    "bigbird": lambda: ga.bigbird(T, 2),
    "neighborhood": lambda: ga.neighborhood((T, 1), 1),
    "shifted_window": lambda: ga.shifted_window(T, 2, 1),
    "tree_ancestors": lambda: ga.tree_ancestors([-1, 0, 0, 1, 1]),
    "shared_prefix": lambda: ga.shared_prefix(2, [1, 2]),
    "encoder_decoder": lambda: ga.encoder_decoder(2, 3),
    "padding": lambda: ga.padding(torch.tensor([5, 3]), T),
    "stack": lambda: ga.stack([ga.causal(T), ga.full(T), ga.window(T, 1)], "head"),
    "from_mask": lambda: ga.from_mask(torch.ones(T, T).tril().bool()),
    "from_additive": lambda: ga.from_additive(torch.zeros(T, T)),
    "from_edge_index": lambda: ga.from_edge_index(torch.tensor([[3, 1, 2], [1, 2, 3]]), T),
    "from_csr": lambda: ga.from_csr(torch.tensor([0, 1, 1, 2, 2, 2]), torch.tensor([3, 0]), (T, T)),
    "from_predicate": lambda: ga.from_predicate(lambda b, h, i, j: i >= j, (T, T)),
    "from_cu_seqlens": lambda: ga.from_cu_seqlens(torch.tensor([0, 2, 5])),
    "algebra": lambda: (ga.causal(T) & ga.band(T, 2) | ga.self_loops(T)) - ga.empty(T) ^ ~ga.full(T),
    "power": lambda: ga.window(T, 2) ** 2 @ ga.window(T, 2),
    "transpose": lambda: (ga.window(T, 3) | ga.global_tokens(T, [1])).T,
    "relabel": lambda: ga.causal(T).relabel([3, 0, 4, 1, 2])[[0, 1, 2, 3, 4], :],
    "expand": lambda: ga.causal(T).expand(2, 3).select(1, 2),
}


def loss_with(make: Callable[[], ga.Graph]) -> Callable[[Tensor], Tensor]:
    return lambda q: ga.attend(q, q, q, make()).square().sum()


@pytest.mark.parametrize("name", BUILT)
def test_a_graph_built_inside_is_the_one_built_outside(name: str) -> None:
    make, kept = BUILT[name], []
    outside = make()
    q = torch.randn(2, 3, T, 4)

    def loss(q: Tensor) -> Tensor:
        kept.append(make())
        assert kept[-1] == outside and hash(kept[-1]) == hash(outside)
        return ga.attend(q, q, q, kept[-1]).square().sum()

    assert torch.equal(grad(loss)(q), grad(loss_with(lambda: outside))(q))
    assert torch.equal(jacrev(loss)(q), jacrev(loss_with(lambda: outside))(q))
    for g in kept:  # afterwards it is as any other
        assert g == outside and torch.equal(ga.to_mask(g), ga.to_mask(outside))
        x = q.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss_with(lambda: outside)(x), x)
        (got,) = torch.autograd.grad(loss_with(lambda g=g: g)(x), x)  # type: ignore[misc]
        assert torch.equal(got, wanted)
    if not outside.lead:
        several = torch.randn(3, 2, T, 4)
        mapped = vmap(loss_with(make), randomness="same")(several)
        torch.testing.assert_close(mapped, torch.stack([loss_with(make)(x) for x in several]))


def test_a_mask_computed_from_the_input_of_grad() -> None:
    def loss(q: Tensor) -> Tensor:
        seen = q[..., 0] > 0
        return ga.attend(q, q, q, ga.from_mask(seen[:, None] & seen)).square().sum()

    q = torch.randn(T, 4, dtype=torch.float64)
    x = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(grad(loss)(q), wanted)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: ga.from_mask(x > 0),
        lambda x: ga.padding((x[:1, 0] > 0).long(), T),
        lambda x: ga.documents((x[:, 0] > 0).long()),
        lambda x: ga.causal(T).relabel(x[:, 0].argsort()),
        lambda x: ga.from_edge_index((x[:2] > 0).long(), T),
    ],
)
def test_a_graph_may_not_differ_between_what_vmap_splits(build: Callable[[Tensor], ga.Graph]) -> None:
    with pytest.raises(ValueError, match="got a tensor that vmap splits, but one graph serves the whole batch"):
        vmap(lambda x: ga.attend(x, x, x, build(x)))(torch.randn(3, T, T))
