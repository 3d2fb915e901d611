"""Note 5 and exercise 3: a cross-attention head.  Queries from the stream you write, keys and values from the one you
read.  It differs from a self-attention head in the argument of two linear layers, and in nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from loop import figure, run
from torch import Tensor, nn

import graphattn as ga


class CrossHead(nn.Module):
    """The lecture's head, with `context` where `key` and `value` had `x`; every target reads every source."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.query = nn.Linear(width, size, bias=False)
        self.key = nn.Linear(width, size, bias=False)
        self.value = nn.Linear(width, size, bias=False)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """`x (B, T_q, C)`, `context (B, T_kv, C)` to `(B, T_q, size)` and the weights `(B, T_q, T_kv)`."""
        graph = ga.bipartite(x.shape[1], context.shape[1])
        q, k, v = self.query(x), self.key(context), self.value(context)
        q, k, v = q[:, None], k[:, None], v[:, None]  # one head: (B, 1, T, size)
        wei = ga.weights(q, k, graph)[:, 0].unflatten(-1, graph.shape)  # (B, T_q, T_kv): the graph is complete
        return ga.attend(q, k, v, graph)[:, 0], wei


def main(steps: int = 3, out: str = "runs/examples/cross_head") -> dict[str, Any]:
    """`steps` is the number of samples B."""
    writing, reading = ["ich", "liebe", "dich", "."], ["I", "do", "love", "you", "so", "."]
    b, t_q, t_kv, width, size = steps, len(writing), len(reading), 32, 16
    head = CrossHead(width, size)
    x, context = torch.randn(b, t_q, width), torch.randn(b, t_kv, width)
    answer, wei = head(x, context)
    assert wei.shape == (b, t_q, t_kv), wei.shape
    assert answer.shape == (b, t_q, size), answer.shape
    ones = bool((wei.sum(-1) - 1).abs().max() < 1e-5)
    print(f"(1) wei is (B, T_q, T_kv) = {tuple(wei.shape)}, each row sums to 1: {ones}")
    print(f"(2) the output is {tuple(answer.shape)}: it has T_q = {t_q} rows, those of the stream that is written")
    swapped = head(context, x)[0]
    print(f"    swapped by mistake it has {swapped.shape[1]} rows: the length of the wrong stream gives it away")

    try:
        ga.causal(t_q, t_kv)
    except ValueError as error:
        print(f"(3) a triangle needs one order for both streams, which they don't have: {error}")
    own, same = ga.Head(width, size), {f"{n}.weight": getattr(head, n).weight for n in ("query", "key", "value")}
    own.load_state_dict(same)
    graph = ga.bipartite(t_q, t_kv)
    cross = (own(x, graph, context) - answer).abs().max().item()
    itself = (own(x, ga.full(t_q)) - head(x, x)[0]).abs().max().item()
    print(f"    graphattn.Head is both: head(x, graph, context) differs from CrossHead by {cross:.1e}, head(x, graph) "
          f"from CrossHead(x, x) by {itself:.1e}")  # fmt: skip
    weights = own.weights(x, graph, context)[0, 0].detach()
    axes = ga.draw(graph, weights, layout="columns", labels=writing, source_labels=reading,
                   title="cross-attention of random weights")  # fmt: skip
    figure(out, "cross_head.png", axes)
    print(
        f"result: wei {tuple(wei.shape)}, output {tuple(answer.shape)}, Head and CrossHead differ by "
        f"{max(cross, itself):.1e}"
    )
    return {"wei": tuple(wei.shape), "out": tuple(answer.shape), "difference": max(cross, itself)}


if __name__ == "__main__":
    run(main)
