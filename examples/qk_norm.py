"""Note 6's hedge: the scale holds at the start only.  At a high learning rate plain scores blow up; with QK-norm (layer
norm on queries and keys, Dehghani et al. 2023, section 2.1) they stay bounded and the model trains.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from loop import characters, figure, fit, last, run
from torch import Tensor

import graphattn as ga
from graphattn.gpt import GPT, GPTConfig

BLOCK, EVERY = 32, 10


def main(
    steps: int = 400, lr: float = 0.01, text: str | None = None, out: str = "runs/examples/qk_norm"
) -> dict[str, Any]:
    _, vocabulary, windows = characters(text, BLOCK)
    graph = ga.causal(BLOCK)
    probe, wanted = windows.evaluation(64)
    uniform = math.log(len(vocabulary))
    largest: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    held_out = {}
    for name, normed in (("plain", False), ("QK-norm", True)):
        torch.manual_seed(1337)
        model = GPT(GPTConfig(vocab=len(vocabulary), block=BLOCK, layers=4, heads=2, width=64, qk_norm=normed))
        largest[name] = []

        def look(step: int, model: GPT = model, seen: list[float] = largest[name]) -> None:
            if step % EVERY == 0:
                seen.append(largest_score(model, graph, probe[:16]))

        def loss_of(step: int, model: GPT = model) -> Tensor:
            inputs, targets = windows.batch(windows.starts(0, step, 24))
            return model(inputs, graph, targets)[1]

        losses[name] = fit(
            model, loss_of, steps, lr=lr, schedule="constant", warmup=steps // 20, clip=0.0, decay=0.0, name=name,
            on_step=look,
        )  # fmt: skip
        look(0)
        with torch.no_grad():
            held_out[name] = float(model(probe, graph, wanted)[1])
        print(f"{name}: largest score {max(largest[name]):.1f} (at the start {largest[name][0]:.2f}), training loss "
              f"{last(losses[name]):.3f}, held out {held_out[name]:.3f}")  # fmt: skip
    most = {name: max(values, key=lambda x: x if math.isfinite(x) else math.inf) for name, values in largest.items()}
    figure(out, "qk_norm.png", picture(largest, losses, lr))
    trains = held_out["QK-norm"] < uniform - 0.5
    print(
        f"result: at learning rate {lr}: largest score plain {most['plain']:.1f}, QK-norm {most['QK-norm']:.1f} "
        f"({most['QK-norm'] / most['plain']:.2f} of it); held-out loss {held_out['plain']:.3f} and "
        f"{held_out['QK-norm']:.3f} (knowing nothing {uniform:.2f}); QK-norm trains: {trains}"
    )
    return {"plain": most["plain"], "normed": most["QK-norm"], "held_out": held_out, "trains": trains}


@torch.no_grad()
def largest_score(model: GPT, graph: ga.Graph, tokens: Tensor) -> float:
    """The largest attention score on an edge, over layers, heads and samples; inf if the model has diverged."""
    mask = ga.to_mask(graph)
    x = model.tokens(tokens)
    if model.positions is not None:
        x = x + model.positions.weight[: tokens.shape[1]]
    largest = -math.inf
    for block in model.blocks:
        y = block.norm1(x)
        q, (k, _) = block.head.queries(y), block.head.keys_values(y)
        scores = q @ k.mT * block.head.head_dim**-0.5  # (B, heads, T, T)
        largest = max(largest, float(scores.masked_fill(~mask, -math.inf).amax()))
        x = block(x, graph)
    return largest if math.isfinite(largest) and bool(x.isfinite().all()) else math.inf


def picture(largest: dict[str, list[float]], losses: dict[str, list[float]], lr: float) -> Any:
    from graphattn.draw.palette import SOURCE, TARGET, new_figure

    page = new_figure(11, 4.4)
    left, right = page.subplots(1, 2)
    for name, color, line in zip(largest, (TARGET, SOURCE), ("-", "--"), strict=True):
        seen = [x if math.isfinite(x) else math.nan for x in largest[name][:-1]]
        left.plot([EVERY * n for n in range(len(seen))], seen, line, color=color, label=name)
        right.plot(losses[name], line, color=color, linewidth=1, label=name)
    left.axhline(50, color="#888888", linestyle=":", linewidth=1, label="50")
    left.set_yscale("log")
    left.set_xlabel("step")
    left.set_ylabel("largest attention score")
    left.set_title(f"learning rate {lr}")
    left.legend()
    right.set_xlabel("step")
    right.set_ylabel("training loss, nats per character")
    right.set_title("and what is learned")
    right.legend()
    return page


if __name__ == "__main__":
    run(main)
