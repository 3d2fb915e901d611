"""Note 3: nothing crosses the batch.  Four graphs of eight nodes are one graph of thirty-two, block-diagonal.

Corrects the notes: the batch alone hides 24 of the 32 nodes from any node, not 28, and the triangle hides the future
too, so a node never sees between 24 and 31 of them, itself not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from loop import figure, run
from torch import Tensor, nn

import graphattn as ga

POOLS, NODES, WIDTH = 4, 8, 16


def main(steps: int = 6, out: str = "runs/examples/batch") -> dict[str, Any]:
    """`steps` is the number of layers that messages may take."""
    pool = ga.causal(NODES)
    everyone = ga.disjoint([pool] * POOLS)
    print(f"four pools: {everyone!r}, and the same as a batch: {pool!r} x {POOLS}")

    head = ga.Head(WIDTH, 8, heads=2)
    x = torch.randn(POOLS, NODES, WIDTH)
    apart = head(x, pool)  # (4, 8, 16)
    together = head(x.flatten(0, 1), everyone)  # (32, 16)
    difference = (apart.flatten(0, 1) - together).abs().max().item()
    print(f"batched and block-diagonal answers differ by at most {difference:.1e}")

    between = (everyone - ga.disjoint([ga.full(NODES)] * POOLS)).num_edges
    total = POOLS * NODES
    # through any number of layers, not one
    seen = [len(ga.receptive_field([everyone] * steps, node)) for node in range(NODES)]
    never = [total - n for n in seen]
    print(f"edges between pools: {between}; {steps} layers deep, of {total} nodes")
    for node in range(NODES):
        print(f"  node {node + 1} of its pool sees {seen[node]}, never sees {never[node]}: "
              f"{total - NODES} in other pools and {NODES - 1 - node} in its future")  # fmt: skip
    print(
        f"the notes say that any node is forbidden from ever seeing 28: without the triangle it is {total - NODES}, "
        f"with it {min(never)} to {max(never)} (28 for node 4 only, {sum(never) / NODES} on average)"
    )

    layers = {"attention": lambda y: head(y, pool), "LayerNorm": nn.LayerNorm(WIDTH), "BatchNorm": Over(WIDTH)}
    reach = {name: influence(layer, x) for name, layer in layers.items()}
    crossing = {name: float((m - m.diag().diag()).abs().max()) for name, m in reach.items()}
    for name, value in crossing.items():
        print(f"largest gradient of one pool's output by another pool's input, {name}: {value:.2g}")
    figure(out, "batch.png", picture(everyone, reach))
    print(
        f"result: never seen of {total}: {min(never)} to {max(never)} ({total - NODES} by the batch alone); gradient "
        f"across pools: attention {crossing['attention']:.1g}, LayerNorm {crossing['LayerNorm']:.1g}, "
        f"BatchNorm {crossing['BatchNorm']:.2g}"
    )
    return {"never": never, "by_batch": total - NODES, "difference": difference, "crossing": crossing}


class Over(nn.Module):
    """BatchNorm of each channel over batch and time, in training mode."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def influence(layer: Any, x: Tensor) -> Tensor:
    """`(pools, pools)`: entry (a, b) is the largest gradient of a random sum of pool a's output by pool b's input."""
    rows = []
    for a in range(len(x)):
        own = x.clone().requires_grad_()
        y = layer(own)[a]
        (grad,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), own)
        rows.append(grad.abs().amax((1, 2)))
    return torch.stack(rows)


def picture(graph: ga.Graph, reach: dict[str, Tensor]) -> Any:
    from graphattn.draw.palette import new_figure

    page = new_figure(12, 4.2)
    grid = page.add_gridspec(1, 4, width_ratios=[1.25, 1, 1, 1])
    ga.draw(graph, layout="matrix", ax=page.add_subplot(grid[0]), title="four pools, one graph of 32")
    for n, (name, m) in enumerate(reach.items(), 1):
        ax = page.add_subplot(grid[n])
        ax.imshow(m.numpy(), cmap="Blues", vmin=0, vmax=float(m.max()))
        for a in range(POOLS):
            for b in range(POOLS):
                dark = float(m[a, b]) > 0.6 * float(m.max())
                ax.text(b, a, f"{float(m[a, b]):.2g}", ha="center", va="center", color="white" if dark else "black",
                        fontsize=8)  # fmt: skip
        ax.set_title(f"{name}:\nlargest gradient", fontsize=11)
        ax.set_xticks(range(POOLS), [str(b + 1) for b in range(POOLS)])
        ax.set_yticks(range(POOLS), [str(a + 1) for a in range(POOLS)])
        ax.set_xlabel("input of pool")
        if n == 1:
            ax.set_ylabel("output of pool")
    return page


if __name__ == "__main__":
    run(main)
