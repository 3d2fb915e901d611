"""Note 5 at scale, small: gated cross-attention into a frozen language model (Flamingo, Alayrac et al. 2022).

A character GPT learns to write captions of pictures it can't see, and is frozen.  Gated blocks between its own let it
read the picture's patches: at first they are the identity, and only they learn.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from loop import figure, fit, run
from torch import Tensor, nn

import graphattn as ga
from graphattn.data import Vocabulary
from graphattn.generate import generate
from graphattn.gpt import GPT, GPTConfig
from graphattn.seq2seq import Conditioned

COLORS = {"red": (1, 0, 0), "green": (0, 0.7, 0), "blue": (0.1, 0.2, 1), "yellow": (1, 0.9, 0), "white": (1, 1, 1)}
SHAPES = {
    "square": ("11111", "10001", "10001", "10001", "11111"),
    "cross": ("00100", "00100", "11111", "00100", "00100"),
    "disc": ("01110", "11111", "11111", "11111", "01110"),
    "arrow": ("00100", "01110", "10101", "00100", "00100"),
}
HIGH, WIDE, PATCH = 6, 12, 3
PATCHES = (HIGH // PATCH) * (WIDE // PATCH)
BLOCK = 42
THINGS = [(color, shape) for color in COLORS for shape in SHAPES]
Scene = tuple[tuple[str, str], tuple[str, str]]


def caption(scene: Scene) -> str:
    (c1, s1), (c2, s2) = scene
    return f"a {c1} {s1} left of a {c2} {s2}."


def render(scene: Scene, chance: random.Random) -> Tensor:
    """`(3, HIGH, WIDE)` colours in [0, 1], a little noisy: one thing in each half, somewhere."""
    page = torch.zeros(3, HIGH, WIDE)
    for side, (color, shape) in enumerate(scene):
        y, x = chance.randrange(HIGH - 4), side * WIDE // 2 + chance.randrange(WIDE // 2 - 4)
        on = torch.tensor([[float(c) for c in row] for row in SHAPES[shape]])
        page[:, y : y + 5, x : x + 5] = torch.tensor(COLORS[color])[:, None, None] * on
    noise = torch.rand(page.shape, generator=torch.Generator().manual_seed(chance.randrange(2**31)))
    return (0.9 * page + 0.1 * noise).clamp(0, 1)


class Patches(nn.Module):
    """A picture as a set of vectors: each patch's pixels and its place, through one linear layer each."""

    def __init__(self, width: int):
        super().__init__()
        self.pixels = nn.Linear(3 * PATCH * PATCH, width)
        self.places = nn.Parameter(0.1 * torch.randn(PATCHES, width))

    def forward(self, pictures: Tensor) -> Tensor:
        """`(B, 3, HIGH, WIDE)` to `(B, PATCHES, width)`, row by row."""
        x = pictures.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # (B, 3, rows, columns, PATCH, PATCH)
        return self.pixels(x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)) + self.places


class Reader(nn.Module):
    """The frozen model with its gated blocks, and what turns a picture into vectors."""

    def __init__(self, model: GPT, width: int = 64):
        super().__init__()
        self.patches = Patches(width)
        self.conditioned = Conditioned(model, width)

    def forward(self, tokens: Tensor, pictures: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        t = tokens.shape[1]
        return self.conditioned(tokens, ga.causal(t), self.patches(pictures), ga.bipartite(t, PATCHES), targets)


def main(steps: int = 600, out: str = "runs/examples/gated_cross_attention") -> dict[str, Any]:
    """`steps` for the language model, then as many for the gated blocks."""
    pairs = [(a, b) for a in THINGS for b in THINGS]
    random.Random(0).shuffle(pairs)
    unseen, seen = pairs[:40], pairs[40:]
    vocabulary = Vocabulary.of("\n" + "".join(caption(p) for p in pairs))
    print(f"{len(seen)} scenes to learn, {len(unseen)} combinations held out, such as: {caption(unseen[0])}")

    def texts(scenes: list[Scene]) -> tuple[Tensor, Tensor]:
        lines = [("\n" + caption(s) + "\n").ljust(BLOCK + 1, "\n") for s in scenes]
        ids = torch.stack([vocabulary.encode(line) for line in lines])
        lengths = torch.tensor([len(caption(s)) + 1 for s in scenes])
        return ids[:, :-1], ids[:, 1:].where(torch.arange(BLOCK) < lengths[:, None], -1)

    def some(step: int, what: str) -> tuple[list[Scene], random.Random]:
        chance = random.Random(f"{what} {step}")
        return chance.choices(seen, k=32), chance

    torch.manual_seed(1337)
    model = GPT(GPTConfig(vocab=len(vocabulary), block=BLOCK, layers=2, heads=4, width=64))
    graph = ga.causal(BLOCK)

    def words_alone(step: int) -> Tensor:
        inputs, targets = texts(some(step, "words")[0])
        return model(inputs, graph, targets)[1]

    fit(model, words_alone, steps, lr=3e-3, name="language model")
    reader = Reader(model)
    frozen = {name: p.clone() for name, p in model.state_dict().items()}
    chance = random.Random(1)
    pictures = torch.stack([render(s, chance) for s in unseen])
    inputs, targets = texts(unseen)
    with torch.no_grad():
        blind, blind_loss = model(inputs, graph, targets)
        same_at_0 = torch.equal(reader(inputs, pictures)[0], blind)
    # a backend sums in its own order: both were computed by the same one
    print(f"step 0: with gated blocks the predictions equal the frozen model's bit for bit: {same_at_0}")

    def with_pictures(step: int) -> Tensor:
        scenes, chance = some(step, "pictures")
        inputs, targets = texts(scenes)
        return reader(inputs, torch.stack([render(s, chance) for s in scenes]), targets)[1]

    fit(reader, with_pictures, steps, lr=3e-3, name="gated blocks")
    unchanged = all(torch.equal(p, frozen[name]) for name, p in model.state_dict().items())
    with torch.no_grad():
        true = float(reader(inputs, pictures, targets)[1])
        shuffled = float(reader(inputs, pictures.roll(1, 0), targets)[1])
    gates = [float(g.gate_attend.detach().tanh()) for g in reader.conditioned.gated]
    print(f"after {steps} steps the frozen weights are bit-equal: {unchanged}; gates tanh(a): "
          + ", ".join(f"{g:+.3f}" for g in gates))  # fmt: skip
    print(f"held-out loss: frozen model alone {float(blind_loss):.4f}, true picture {true:.4f}, "
          f"another's picture {shuffled:.4f}")  # fmt: skip
    written = write(reader, vocabulary, pictures)
    right = sum(w == caption(s) for w, s in zip(written, unseen, strict=True))
    drawn = generate(model, graph, vocabulary.encode("\n"), 60, temperature=0, stop=[vocabulary.encode(".")])
    print(f"captions of unseen combinations written exactly right: {right} of {len(unseen)}; the first: {written[0]!r} "
          f"(without a picture: {vocabulary.decode(drawn)[1:]!r})")  # fmt: skip
    figure(out, "gated_cross_attention.png", page(reader, vocabulary, pictures[0], unseen[0]))
    print(
        f"result: step 0 bit-equal {same_at_0}, frozen weights bit-equal {unchanged}, held-out loss with the true "
        f"picture {true:.3f}, shuffled {shuffled:.3f}: {shuffled - true:.3f} below"
    )
    return {"same_at_0": same_at_0, "unchanged": unchanged, "true": true, "shuffled": shuffled,
            "blind": float(blind_loss), "right": right}  # fmt: skip


@torch.no_grad()
def write(reader: Reader, vocabulary: Vocabulary, pictures: Tensor) -> list[str]:
    """The most likely caption of each picture, a character at a time, up to its full stop."""
    tokens = vocabulary.encode("\n").expand(len(pictures), 1)
    while tokens.shape[1] < BLOCK:
        logits, _ = reader(tokens, pictures)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    texts = (vocabulary.decode(row[1:]) for row in tokens)
    return [text[: text.find(".") + 1] or text for text in texts]


@torch.no_grad()
def page(reader: Reader, vocabulary: Vocabulary, picture: Tensor, scene: Scene) -> Any:
    """The picture, and which patch each character of its caption reads in the last gated block."""
    from graphattn.draw.palette import new_figure

    words = "\n" + caption(scene)
    inner, model = reader.conditioned, reader.conditioned.model
    tokens, context = vocabulary.encode(words[:-1])[None], reader.patches(picture[None])
    t = tokens.shape[1]
    cross, past = ga.bipartite(t, PATCHES), ga.causal(t)
    x = model.tokens(tokens) + model.positions.weight[:t]
    for gated, block in zip(inner.gated[:-1], model.blocks[:-1], strict=True):
        x = block(gated(x, context, cross), past)
    gated = inner.gated[-1]
    weights = gated.head.weights(gated.norm1(x), cross, context)[0]  # (heads, t * PATCHES)
    sheet = new_figure(11, 7.5)
    sheet.set_layout_engine("constrained")  # the letters need the whole height
    left, right = sheet.subplots(1, 2, width_ratios=[1.3, 1])
    left.imshow(picture.permute(1, 2, 0).numpy(), extent=(0, WIDE, HIGH, 0))
    left.set_xticks(range(0, WIDE + 1, PATCH))
    left.set_yticks(range(0, HIGH + 1, PATCH))
    left.grid(color="#888888", linewidth=0.7)
    for n in range(PATCHES):
        row, column = divmod(n, WIDE // PATCH)
        left.text(column * PATCH + 0.15, row * PATCH + 0.55, str(n), color="#bbbbbb", fontsize=9)
    left.set_title(caption(scene))
    left.set_xlabel("pixel; numbers: patches")
    # the row of a character is the step that wrote it
    names = [c if c.strip() else "␣" for c in words[1:]]
    ga.draw(cross, weights, layout="matrix", ax=right, labels=names, source_labels=[str(n) for n in range(PATCHES)],
            title="which patch each written character reads")  # fmt: skip
    right.set_aspect("auto")
    return sheet


if __name__ == "__main__":
    run(main)
