"""Note 4 and exercise 1: break the mask on purpose.  Loss falls through the floor and the sample turns to noise.

Targets are the inputs shifted by one, so with every edge allowed position i reads its own label at i + 1.
`find_leak` says so before the first step.  Then the mask is kept and targets are shifted by two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from loop import characters, figure, fit, last, run
from torch import Tensor
from torch.nn import functional as F

import graphattn as ga
from graphattn.data import Windows
from graphattn.generate import generate
from graphattn.gpt import GPT, GPTConfig

BLOCK, LAYERS = 32, 2


def main(steps: int = 1000, text: str | None = None, out: str = "runs/examples/break_the_mask") -> dict[str, Any]:
    words, vocabulary, windows = characters(text, BLOCK)
    graphs = {"mask kept": ga.causal(BLOCK), "mask broken": ga.full(BLOCK)}
    leaks = {name: ga.find_leak([graph] * LAYERS) for name, graph in graphs.items()}
    for name, leak in leaks.items():
        print(f"before training, {name}:", "no leak" if leak is None else f"LEAK: {leak}")

    position, samples, asked, known = {}, {}, {}, {}
    for name, graph in graphs.items():
        model, losses = train(graph, windows, len(vocabulary), steps, 1, name)
        position[name] = by_position(model, graph, windows, 1)
        asked[name] = as_generation_asks(model, graph, windows)
        start = windows.held_out[:1]
        drawn = generate(model, graph, start, 300, seed=1)[1:]
        samples[name] = vocabulary.decode(drawn)
        known[name] = share_of_words(samples[name], words)
        mean = float(position[name].mean())
        print(f"{name}: training loss {last(losses):.3f}, held-out loss {mean:.3f}; 300 characters, of whose longer "
              f"words {known[name]:.0%} occur in the text:\n{indented(samples[name])}")  # fmt: skip

    broken = position["mask broken"]
    worst, final = float(broken[:-1].max()), float(broken[-1])
    print(
        f"mask broken, held-out loss by position: at most {worst:.4f} at positions 0 to {BLOCK - 2}, {final:.3f} at "
        f"position {BLOCK - 1}, whose label is the first character after the window: no edge leads to it, so it alone "
        f"learns to predict, from 1 label in {BLOCK}; once a context is full, generation asks it and nothing else"
    )
    print(
        f"asked as generation asks, for what comes after a text that ends: mask kept {asked['mask kept']:.3f} nats, "
        f"mask broken {asked['mask broken']:.3f}; knowing nothing is {math.log(len(vocabulary)):.3f}"
    )
    print(
        "why: the target of position i is the input of i + 1, an unmasked position copies it, in training and in "
        "validation alike; a sample has no future to copy.  Trust the sample."
    )

    two = ga.find_leak([graphs["mask kept"]] * LAYERS, offset=2)
    wider = ga.band(BLOCK, BLOCK, 1)
    once, twice = ga.find_leak(wider, offset=2), ga.find_leak([wider] * LAYERS, offset=2)
    model, losses = train(graphs["mask kept"], windows, len(vocabulary), steps, 2, "two ahead")
    ahead = float(by_position(model, graphs["mask kept"], windows, 2).mean())
    kept = float(position["mask kept"].mean())
    print(
        f"mask kept, targets shifted by two: {'no leak' if two is None else two}; training loss {last(losses):.3f}, "
        f"held-out loss {ahead:.3f}: harder than one ahead ({kept:.3f}), and honest"
    )
    print(
        f"with targets two ahead even reading one ahead (j <= i + 1) is {'no leak' if once is None else once} in one "
        f"layer, but in two: {twice}"
    )
    figure(out, "break_the_mask.png", picture(position))
    print(
        f"result: broken mask: loss at most {worst:.4f} at every position but the last ({final:.2f}); words of the "
        f"sample that exist: {known['mask broken']:.0%} (kept {known['mask kept']:.0%}); leak named first: "
        f"{leaks['mask broken'] is not None}"
    )
    return {"worst": worst, "last": final, "leak": leaks["mask broken"], "kept_leak": leaks["mask kept"], "two": two,
            "once": once, "twice": twice, "known": known, "samples": samples, "asked": asked, "ahead": ahead,
            "kept": kept}  # fmt: skip


def train(graph: ga.Graph, windows: Windows, vocab: int, steps: int, offset: int, name: str) -> tuple[GPT, list[float]]:
    """A small GPT on one graph, its targets the inputs shifted by `offset`; the same start and batches for all."""
    torch.manual_seed(1337)
    model = GPT(GPTConfig(vocab=vocab, block=BLOCK, layers=LAYERS, heads=4, width=64))

    def loss_of(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        first = torch.randint(len(windows.train) - BLOCK - offset, (24,), generator=generator)
        tokens = windows.train[first[:, None] + torch.arange(BLOCK + offset)]
        return model(tokens[:, :BLOCK], graph, tokens[:, offset:])[1]

    losses = fit(model, loss_of, steps, lr=3e-3, name=name)
    return model, losses


def held_out(windows: Windows, offset: int, most: int = 512) -> tuple[Tensor, Tensor]:
    first = torch.arange((len(windows.held_out) - offset) // BLOCK)[:most] * BLOCK
    tokens = windows.held_out[first[:, None] + torch.arange(BLOCK + offset)]
    return tokens[:, :BLOCK], tokens[:, offset:]


@torch.no_grad()
def by_position(model: GPT, graph: ga.Graph, windows: Windows, offset: int) -> Tensor:
    """`(BLOCK,)` mean held-out loss at each position, in nats."""
    inputs, targets = held_out(windows, offset)
    logits, _ = model(inputs, graph)
    return F.cross_entropy(logits.mT, targets, reduction="none").mean(0)


@torch.no_grad()
def as_generation_asks(model: GPT, graph: ga.Graph, windows: Windows) -> float:
    """Mean held-out loss of the last position over prefixes of every length: nothing beyond them exists."""
    inputs, targets = held_out(windows, 1, 128)
    losses = []
    for m in range(1, BLOCK + 1):
        logits, _ = model(inputs[:, :m], graph[:m, :m])
        losses.append(F.cross_entropy(logits[:, -1], targets[:, m - 1]))
    return float(torch.stack(losses).mean())


def share_of_words(sample: str, text: str) -> float:
    """Of the sample's words of four letters or more, the share that the text has; 0 if there are none."""

    def longer(s: str) -> list[str]:
        return [w for w in "".join(c if c.isalpha() else " " for c in s).split() if len(w) >= 4]

    exist, mine = set(longer(text)), longer(sample)
    return sum(w in exist for w in mine) / len(mine) if mine else 0.0


def indented(sample: str) -> str:
    return "\n".join("    | " + line for line in sample.splitlines())


def picture(position: dict[str, Tensor]) -> Any:
    from graphattn.draw.palette import SOURCE, TARGET, new_axes

    ax = new_axes(8, 4.5)
    for (name, losses), color, mark in zip(position.items(), (SOURCE, TARGET), "os", strict=True):
        ax.plot(losses.numpy(), color=color, marker=mark, markersize=4, label=name)
    ax.annotate(
        "the last label lies\noutside the window", (BLOCK - 1, float(position["mask broken"][-1])), (BLOCK - 13, 1.0),
        arrowprops={"arrowstyle": "->"}, fontsize=9,
    )  # fmt: skip
    ax.set_ylim(bottom=-0.1)
    ax.set_xlabel("position in the window")
    ax.set_ylabel("held-out loss, nats per character")
    ax.set_title("an unmasked position copies its label, the last one can't")
    ax.legend(loc="center left")
    return ax


if __name__ == "__main__":
    run(main)
