"""Note 6 and exercise 2: scaled attention.  Why scores are divided by the square root of the head size, in numbers.

Corrects the notes: dividing by the square root of 384 channels instead of a head's 64 is off by sqrt(6) = 2.45, not 2;
and a query bias does not cancel in the softmax, a key bias does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from loop import figure, run

import graphattn as ga

T, SIZES = 8, (16, 64, 256)


def main(steps: int = 20, out: str = "runs/examples/scaling") -> dict[str, Any]:
    """`steps` batches of 5000 sequences of 8 nodes."""
    channels, heads = 384, 6
    scales = {"raw": 1.0, "scaled": None, "channels": channels**-0.5}
    table = {size: measure(steps, size, scales) for size in SIZES}
    print("mean of the largest weight in the last of 8 causal rows, q and k ~ N(0, 1), times 1 and 3; uniform: 0.125")
    print("  inputs  head size   variance of scores: raw, scaled   peak mass: raw, scaled")
    for times in (1, 3):
        for size in SIZES:
            raw, scaled = (table[size][kind, times] for kind in ("raw", "scaled"))
            print(f"  {times}x {size:14} {raw[0]:19.1f} {scaled[0]:13.2f} {raw[1]:14.3f} {scaled[1]:8.3f}")
    print("the scale removes the dependence on the head size; it does not undo the growth of trained weights (3x)")

    logits = torch.tensor([0.3, -0.1, 0.2, 0.0, 0.5])
    soft, sharp = logits.softmax(-1), (8 * logits).softmax(-1)
    given = ", ".join(f"{x:.1f}" for x in logits)
    print(f"softmax of ({given}): largest {soft.max():.3f}; of eight times that: {sharp.max():.3f}")

    size = channels // heads
    factor = math.sqrt(channels / size)
    by_head, by_channels = (table[size][kind, 1] for kind in ("scaled", "channels"))
    print(
        f"{channels} channels in {heads} heads, scaled by 1/sqrt({channels}) instead of 1/sqrt({size}): scores are "
        f"{factor:.3f} times too small (standard deviation {by_channels[0] ** 0.5:.3f}, not {by_head[0] ** 0.5:.3f}), "
        f"peak mass {by_channels[1]:.3f}, not {by_head[1]:.3f}; the notes say 2 times, which is 4 heads' error"
    )
    moved = biases()
    print(
        f"a bias of 1 on every key changes the output by {moved['key']:.1e}: q . (k + b) adds q . b to a whole row, "
        "which the softmax cancels"
    )
    print(
        f"a bias of 1 on every query changes the output by {moved['query']:.2f}: (q + b) . k adds b . k, another "
        "number for every source; the notes say both cancel"
    )
    figure(out, "scaling.png", picture(table, soft, sharp))
    scaled, raw = ([table[n][kind, 1][1] for n in SIZES] for kind in ("scaled", "raw"))
    print(
        f"result: peak mass at head sizes {SIZES}: scaled {shown(scaled)}, unscaled {shown(raw)}; "
        f"scaling by C is off by {factor:.2f}"
    )
    return {"scaled": scaled, "raw": raw, "scaled3": [table[n]["scaled", 3][1] for n in SIZES], "factor": factor,
            "sharp": float(sharp.max()), "soft": float(soft.max()), "moved": moved}  # fmt: skip


def measure(steps: int, size: int, scales: dict[str, float | None]) -> dict[tuple[str, int], tuple[float, float]]:
    """(scale, factor on q and k) to the variance of the scores and the mean peak weight of the last causal row."""
    generator = torch.Generator().manual_seed(size)
    row = ga.causal(T)[T - 1 :, :]  # (1 <- 8)
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    for _ in range(steps):
        q = torch.randn(5000, 1, 1, size, generator=generator)
        k = torch.randn(5000, 1, T, size, generator=generator)
        for name, scale in scales.items():
            for times in (1, 3):
                peak = ga.weights(q * times, k * times, row, scale=scale).amax(-1).mean()
                scores = q @ k.mT * times**2 * (size**-0.5 if scale is None else scale)
                found.setdefault((name, times), []).append(torch.stack([scores.var(), peak]))
    return {key: tuple(torch.stack(pairs).mean(0).tolist()) for key, pairs in found.items()}


def biases() -> dict[str, float]:
    """How far the output moves when every channel of the keys, or of the queries, gets a constant of 1."""
    head = ga.Head(32, 16, heads=2, bias=True).double()
    x = torch.randn(5, T, 32, dtype=torch.float64)
    moved = {}
    with torch.no_grad():
        for name in ("key", "query"):
            projection = getattr(head, name)
            projection.bias.zero_()
            before = head(x, ga.causal(T))
            projection.bias.fill_(1.0)
            moved[name] = float((head(x, ga.causal(T)) - before).abs().max())
            projection.bias.zero_()
    return moved


def shown(values: list[float]) -> str:
    return ", ".join(f"{v:.3f}" for v in values)


def picture(table: dict[int, Any], soft: torch.Tensor, sharp: torch.Tensor) -> Any:
    from graphattn.draw.palette import SOURCE, TARGET, new_figure

    page = new_figure(11, 4.6)
    left, right = page.subplots(1, 2)
    for times, line in ((1, "-"), (3, "--")):
        for kind, color, mark, name in (("raw", TARGET, "s", "unscaled"), ("scaled", SOURCE, "o", "scaled")):
            left.plot(SIZES, [table[n][kind, times][1] for n in SIZES], line, color=color, marker=mark,
                      label=f"{name}, inputs x {times}")  # fmt: skip
    left.axhline(1 / T, color="#888888", linewidth=1, linestyle=":", label="uniform over 8")
    left.set_xscale("log", base=2)
    left.set_xticks(SIZES, [str(n) for n in SIZES])
    left.set_ylim(0, 1.05)
    left.set_xlabel("head size")
    left.set_ylabel("peak mass of the last row")
    left.set_title("the scale removes the dependence on width")
    left.legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.55))
    at = torch.arange(len(soft)).numpy()
    right.bar(at - 0.2, soft.numpy(), 0.4, color=SOURCE, label="softmax(s)")
    right.bar(at + 0.2, sharp.numpy(), 0.4, color=TARGET, label="softmax(8 s)")
    right.set_xlabel("source")
    right.set_ylabel("weight")
    right.set_title("eight times the scores: nearly one-hot")
    right.legend()
    return page


if __name__ == "__main__":
    run(main)
