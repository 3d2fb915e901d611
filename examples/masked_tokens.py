"""Note 4's other half: where the full graph is right.  An encoder with padding, and BERT's masked-token objective.

The mask and the objective are one decision: predicting hidden characters, no node can read its own label, so every
edge may stay; and those from the future help.
"""

from __future__ import annotations

from typing import Any

import torch
from loop import characters, figure, fit, run
from torch import Tensor

import graphattn as ga
from graphattn.data import Windows
from graphattn.gpt import GPT, GPTConfig

BLOCK, LAYERS, HIDDEN = 64, 3, 0.15


def main(steps: int = 800, text: str | None = None, out: str = "runs/examples/masked_tokens") -> dict[str, Any]:
    _, vocabulary, windows = characters(text, BLOCK)
    padded = padding()

    graphs = {"full": ga.full(BLOCK), "causal": ga.causal(BLOCK)}
    hidden = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0)) < HIDDEN
    stack, labels = [graphs["full"]] * LAYERS, torch.arange(BLOCK)
    blind = ga.find_leak(stack, labels=labels, hidden=hidden, targets=hidden)
    sighted = ga.find_leak(stack, labels=labels, targets=hidden)
    next_token = ga.find_leak(stack)
    print(f"full graph, hidden characters: {'no leak' if blind is None else blind}")
    print(f"full graph, the same without hiding them: LEAK: {sighted}")
    print(f"full graph, next character: LEAK: {next_token}")

    mask_id = len(vocabulary)
    common = int(torch.bincount(windows.train).argmax())
    accuracy = {"most frequent character": 0.0}
    by_distance = {}
    for name, graph in graphs.items():
        torch.manual_seed(1337)
        model = GPT(GPTConfig(vocab=mask_id + 1, block=BLOCK, layers=LAYERS, heads=4, width=96, position="rotary"))

        def loss_of(step: int, model: GPT = model, graph: ga.Graph = graph) -> Tensor:
            tokens, _ = windows.batch(windows.starts(0, step, 24))
            seen, targets = hide(tokens, mask_id, step)
            return model(seen, graph, targets)[1]

        fit(model, loss_of, steps, lr=3e-3, name=f"{name} graph")
        right, targets = answers(model, graph, windows, mask_id)
        counted = targets >= 0
        accuracy[f"{name} graph"] = float(right[counted].float().mean())
        accuracy["most frequent character"] = float((targets[counted] == common).float().mean())
        by_distance[name] = right.sum(0) / counted.sum(0)
        if name == "full":
            show(model, graph, windows, vocabulary, mask_id)
    print(f"accuracy on hidden characters of held-out text, {HIDDEN:.0%} of them hidden, after {steps} steps each:")
    for name, value in accuracy.items():
        print(f"  {name:24} {value:.1%}")
    figure(out, "masked_tokens.png", picture(by_distance, accuracy["most frequent character"]))
    full, causal, unigram = (accuracy[n] for n in ("full graph", "causal graph", "most frequent character"))
    print(f"result: hidden characters found: full graph {full:.1%} > causal {causal:.1%} > unigram {unigram:.1%}: "
          f"{full > causal > unigram}")  # fmt: skip
    return {"full": full, "causal": causal, "unigram": unigram, "blind": blind, "sighted": sighted, "padded": padded}


def hide(tokens: Tensor, mask_id: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens with HIDDEN of them replaced by the mask, and those as targets, -1 elsewhere."""
    chosen = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < HIDDEN
    return tokens.masked_fill(chosen, mask_id), tokens.masked_fill(~chosen, -1)


@torch.no_grad()
def answers(model: GPT, graph: ga.Graph, windows: Windows, mask_id: int) -> tuple[Tensor, Tensor]:
    """`(N, T)` whether the most likely character is the hidden one, and the targets."""
    tokens, _ = windows.evaluation(512)
    seen, targets = hide(tokens, mask_id, 2**31)
    right = [model(some, graph)[0][..., :mask_id].argmax(-1) for some in seen.split(128)]
    return torch.cat(right) == targets, targets


@torch.no_grad()
def show(model: GPT, graph: ga.Graph, windows: Windows, vocabulary: Any, mask_id: int) -> None:
    tokens, _ = windows.evaluation(512)
    seen, _ = hide(tokens[:1], mask_id, 5)
    guess = model(seen, graph)[0][..., :mask_id].argmax(-1)
    filled = torch.where(seen == mask_id, guess, seen)
    holes = "".join("_" if i == mask_id else vocabulary.decode([i]) for i in seen[0].tolist())
    for name, line in (("text", vocabulary.decode(tokens[0])), ("seen", holes), ("read", vocabulary.decode(filled[0]))):
        print(f"    {name} | {line!r}")


def padding() -> float:
    """Sequences of 3, 7 and 5 in one padded batch, encoded as if each were alone; returns the largest difference."""
    lengths, s = [3, 7, 5], 7
    torch.manual_seed(2)
    model = GPT(GPTConfig(vocab=11, block=s, layers=LAYERS, heads=2, width=32))
    tokens = torch.randint(11, (3, s))
    mask = ga.padding(lengths, s)
    with torch.no_grad():
        together = model(tokens, mask)[0]
        junk = tokens.clone()
        for b, n in enumerate(lengths):
            junk[b, n:] = torch.randint(11, (s - n,))
        other = model(junk, mask)[0]
        apart = [model(tokens[b : b + 1, :n], ga.full(n))[0][0] for b, n in enumerate(lengths)]
    alone = max(float((together[b, :n] - apart[b]).abs().max()) for b, n in enumerate(lengths))
    moved = max(float((together[b, :n] - other[b, :n]).abs().max()) for b, n in enumerate(lengths))
    print(f"padded encoder: {mask!r} for lengths {lengths}; each sequence differs from itself alone by at most "
          f"{alone:.0e}, and by {moved:.0e} when the filler changes")  # fmt: skip
    return max(alone, moved)


def picture(by_position: dict[str, Tensor], unigram: float) -> Any:
    from graphattn.draw.palette import SOURCE, TARGET, new_axes

    ax = new_axes(8, 4.5)
    for (name, share), color, line in zip(by_position.items(), (SOURCE, TARGET), ("-", "--"), strict=True):
        # of eight neighbours: the single positions have few samples each
        smooth = share.view(-1, 8).mean(1)
        at = [8 * n + 3.5 for n in range(len(smooth))]
        ax.plot(at, smooth.numpy(), line, marker="o", color=color, label=f"{name} graph")
    ax.axhline(unigram, color="#888888", linestyle=":", label="most frequent character")
    ax.set_ylim(0, None)
    ax.set_xlabel("position in the window (means of 8)")
    ax.set_ylabel("hidden characters found")
    ax.set_title("with hidden characters as targets, the full graph is right")
    ax.legend(loc="lower right")
    return ax


if __name__ == "__main__":
    run(main)
