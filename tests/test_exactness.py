"""Float32 is as exact as float32 can be: `auto`, `native`, `csr` and `tiles` beside dense attention, both against float64.

The bound: four times the error of dense float32 attention, plus 8 eps times a scale that knows the sizes: of an output,
the largest value a target could return; of a gradient, the largest sum of absolute terms that makes it up.

    python -m tests.test_exactness 10000
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.backends import _try_module
from tests.test_conformance import graph_of

EPS = torch.finfo(torch.float32).eps
BACKENDS = ("auto", "native", "csr", "tiles", "edges")


def random_case(seed: int) -> tuple[ga.Graph, list[Tensor], Tensor]:
    """Graph (1 to 48 nodes a side, any density, holes and stretches), float32 inputs of very different scales, a pull."""
    g = torch.Generator().manual_seed(seed)
    t, s = torch.randint(1, 49, (2,), generator=g).tolist()
    p = torch.rand(1, generator=g).item() ** 2
    mask = torch.rand(t, s, generator=g) < p
    if seed % 3 == 0:  # stretches, as the tile path meets them
        low, length = torch.randint(0, s, (t, 1), generator=g), torch.randint(0, s + 1, (t, 1), generator=g)
        j = torch.arange(s)
        mask = (j >= low) & (j < low + length)
    h, d = [(1, 16), (2, 8), (4, 4), (3, 5), (1, 64)][seed % 5]
    size = 10.0 ** torch.empty(3).uniform_(-1, 1, generator=g)
    q, k, v = (size[n] * torch.randn(1, h, m, d, generator=g) for n, m in enumerate((t, s, s)))
    return graph_of(mask), [q, k, v], torch.randn(1, h, t, d, generator=g)


def results(graph: ga.Graph, tensors: list[Tensor], pull: Tensor, backend: str, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = ga.attend(*leaves, graph, backend=backend)
    return [x.double() for x in (out.detach(), *torch.autograd.grad((out * pull.to(dtype)).sum(), leaves))]


def scales(graph: ga.Graph, tensors: list[Tensor], pull: Tensor) -> list[Tensor]:
    """Sums of absolute terms for out, dq, dk, dv: (1, h, 1, 1) each."""
    q, k, v = (x.double() for x in tensors)
    mask, scale = graph.dense(), q.shape[-1] ** -0.5
    s = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    p = torch.softmax(s, -1).nan_to_num(0)
    # an absolute error of eps |q||k| in a score is a relative one in every weight
    score = 1 + (q.abs() @ k.abs().mT * scale).masked_fill(~mask, 0)
    big = v.abs().amax((-2, -1), keepdim=True)
    dp = (pull.double().abs() @ v.abs().mT).masked_fill(~mask, 0)
    ds = p * score * (dp + (p * dp).sum(-1, keepdim=True))
    top = lambda x: x.amax((-2, -1), keepdim=True)  # noqa: E731
    return [
        top(score) * big, top(ds @ k.abs()) * scale, top(ds.mT @ q.abs()) * scale, top((p * score).mT @ pull.double().abs()),
    ]  # fmt: skip


def check(seed: int, backends: tuple[str, ...]) -> dict[str, float]:
    """Largest error over bound, by backend; above 1 is a failure."""
    graph, tensors, pull = random_case(seed)
    exact = results(graph, tensors, pull, "dense", torch.float64)
    dense = results(graph, tensors, pull, "dense", torch.float32)
    bounds = [
        4 * (d - e).abs().amax() + 8 * EPS * s
        for d, e, s in zip(dense, exact, scales(graph, tensors, pull), strict=True)
    ]
    worst = {}
    for backend in backends:
        try:
            got = results(graph, tensors, pull, backend, torch.float32)
        except ValueError as error:
            assert "can't do this call" in str(error), error
            continue
        worst[backend] = max(
            ((g - e).abs() / b.clamp(min=1e-300)).max().item() for g, e, b in zip(got, exact, bounds, strict=True)
        )
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
def test_as_exact_as_float32_can_be(backend: str) -> None:
    if backend != "auto" and _try_module(backend)[0] is None:
        pytest.skip(str(_try_module(backend)[1]))
    worst = [check(seed, (backend,)).get(backend) for seed in range(400)]
    done = [w for w in worst if w is not None]
    if not done:
        pytest.skip(f"{backend} can't do these calls here")
    assert max(done) <= 1


if __name__ == "__main__":
    most: dict[str, float] = {}
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for seed in range(count):
        for name, w in check(seed, BACKENDS).items():
            most[name] = max(most.get(name, 0.0), w)
    print(f"{count} random graphs, largest error over the bound:", {k: round(v, 3) for k, v in most.items()})
