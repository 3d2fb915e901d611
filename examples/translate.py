"""Note 5: a full encoder-decoder, whose decoder has the third sublayer, translates number words to Roman numerals
and back.

Three graphs make it: the source reads itself, padding left out; the target reads its past; the target reads the source.
One model learns both directions; a tenth of the numbers is held out and never seen in either.
"""

from __future__ import annotations

from typing import Any

import torch
from loop import figure, fit, run
from torch import Tensor

import graphattn as ga
from graphattn.gpt import GPTConfig
from graphattn.seq2seq import EncoderDecoder, Graphs

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ROMAN = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"),
    (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip
MOST = 3999
VOCABULARY = ["<pad>", "<end>", "<to words>", "<to roman>", "thousand", "hundred", *ONES[1:], *TENS, *"IVXLCDM"]
ID = {token: n for n, token in enumerate(VOCABULARY)}
PAD, END = ID["<pad>"], ID["<end>"]
DIRECTIONS = {"words to Roman": "<to roman>", "Roman to words": "<to words>"}


def words_of(n: int) -> list[str]:
    """Tokens of 1..3999: 1984 is one thousand nine hundred eighty four."""
    out = []
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if n >= size:
            out += [ONES[n // size], name]
            n %= size
    if n >= 20:
        out.append(TENS[n // 10 - 2])
        n %= 10
    return out + ([ONES[n]] if n else [])


def roman_of(n: int) -> list[str]:
    """Tokens of 1..3999: 1984 is M C M L X X X I V."""
    out = []
    for size, name in ROMAN:
        out += list(name) * (n // size)
        n %= size
    return out


def batch_of(numbers: list[int], direction: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sources `(B, S)`, their lengths `(B,)`, target inputs `(B, T)` and targets `(B, T)`, -1 for padding."""
    from_words = direction == "words to Roman"
    read, write = (words_of, roman_of) if from_words else (roman_of, words_of)
    start = ID[DIRECTIONS[direction]]
    sources = [[ID[x] for x in read(n)] for n in numbers]
    answers = [[ID[x] for x in write(n)] + [END] for n in numbers]
    s, t = max(map(len, sources)), max(map(len, answers))
    source = torch.tensor([x + [PAD] * (s - len(x)) for x in sources])
    target = torch.tensor([[start, *x[:-1]] + [PAD] * (t - len(x)) for x in answers])
    wanted = torch.tensor([x + [-1] * (t - len(x)) for x in answers])
    return source, torch.tensor([len(x) for x in sources]), target, wanted


def main(steps: int = 3000, out: str = "runs/examples/translate") -> dict[str, Any]:
    """`steps` batches of 64 numbers, half in each direction."""
    order = torch.randperm(MOST, generator=torch.Generator().manual_seed(0)) + 1
    held_out, train = order[: MOST // 10].tolist(), order[MOST // 10 :].tolist()
    source, lengths, target, wanted = batch_of([8, 1984], "words to Roman")
    graphs = Graphs.of(lengths, source.shape[1], target.shape[1])
    print(f"{len(train)} numbers to learn, {len(held_out)} held out; 8 and 1984 from words to Roman are the graphs")
    for name, graph in graphs._asdict().items():
        print(f"  {name:8} {graph!r}")

    torch.manual_seed(1337)
    model = EncoderDecoder(GPTConfig(vocab=len(VOCABULARY), block=16, layers=2, heads=4, width=64))

    def loss_of(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        total = torch.zeros(())
        for direction in DIRECTIONS:
            numbers = [train[i] for i in torch.randint(len(train), (32,), generator=generator).tolist()]
            source, lengths, target, wanted = batch_of(numbers, direction)
            graphs = Graphs.of(lengths, source.shape[1], target.shape[1])
            total = total + model(source, target, graphs, wanted)[1]
        return total / 2

    fit(model, loss_of, steps, lr=3e-3, name="both directions")
    exact = {}
    for direction in DIRECTIONS:
        right, wrong = [], []
        for at in range(0, len(held_out), 200):
            numbers = held_out[at : at + 200]
            source, lengths, _, wanted = batch_of(numbers, direction)
            found = model.greedy(source, lengths, ID[DIRECTIONS[direction]], END, 16)
            for b in range(len(numbers)):
                good = [i for i in wanted[b].tolist() if i >= 0]
                mine = found[b].tolist()
                mine = mine[: mine.index(END) + 1] if END in mine else mine
                right.append(mine == good)
                if mine != good:
                    wrong.append((source[b, : lengths[b]].tolist(), mine))
        exact[direction] = sum(right) / len(right)
        print(f"{direction}: {sum(right)} of {len(right)} held-out numbers exactly right")
        for given, mine in wrong[:3]:
            print(f"    wrong: {shown(given)} -> {shown(mine)}")
    for n in held_out[:2]:
        for direction in DIRECTIONS:
            source, lengths, _, _ = batch_of([n], direction)
            found = model.greedy(source, lengths, ID[DIRECTIONS[direction]], END, 16)
            print(f"    {shown(source[0])} -> {shown(found[0])}")
    figure(out, "translate.png", picture(model, held_out[0]))
    there, back = exact.values()
    print(f"result: held-out numbers exactly right: words to Roman {there:.2%}, Roman to words {back:.2%}")
    return {"there": there, "back": back, "held_out": len(held_out)}


def shown(ids: list[int] | Tensor) -> str:
    words = [VOCABULARY[int(i)] for i in ids if int(i) not in (PAD, END)]
    return "".join(words) if all(len(w) == 1 for w in words) else " ".join(words)


@torch.no_grad()
def picture(model: EncoderDecoder, number: int) -> Any:
    """What each written token reads of the source in the last cross-attention, its heads averaged."""
    source, lengths, target, wanted = batch_of([number], "words to Roman")
    graphs = Graphs.of(lengths, source.shape[1], target.shape[1])
    context = model.encode(source, graphs.encoder)
    x = model.tokens(target) + model.target_positions.weight[: target.shape[1]]
    for block in model.decoder[:-1]:
        x = block(x, graphs.decoder, context, graphs.cross)
    block = model.decoder[-1]
    x = x + block.out(block.head(block.norm1(x), graphs.decoder))
    s, t = source.shape[1], target.shape[1]
    weights = block.cross.weights(block.norm_cross(x), ga.bipartite(t, s), context)  # (1, heads, t * s)
    return ga.draw(
        ga.bipartite(t, s), weights[0], layout="matrix", labels=[VOCABULARY[i] for i in wanted[0].tolist()],
        source_labels=[VOCABULARY[i] for i in source[0].tolist()],
        title=f"{number}: which word each numeral reads (last layer)",
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
