"""Continue a text one token at a time, with a key/value cache wherever the graph allows one.

After m tokens the next one is predicted by row m - 1 of the model on `graph[:m, :m]`.  A cache gives the same numbers
iff no row that was computed before reads a source that came later; it then keeps only the keys and values that some
later row still reads, so a window needs a window of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from graphattn.gpt import GPT, Block, cycle
from graphattn.graph import Graph
from graphattn.scores import Position


@torch.no_grad()
def generate(
    model: GPT,
    graphs: Graph | Sequence[Graph],
    prompt: Tensor,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[Tensor] = (),
    cache: bool = True,
    say: Callable[[str], None] | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The prompt followed by up to `length` new tokens.

    Args:
        graphs: as in `GPT.forward`, of the model's block or smaller; contexts longer than it keep their last part.
        prompt: `(T,)` or `(B, T)` int64, T at least 1.
        temperature: 0 takes the most likely token.
        top_k: draw from the k most likely; more than there are means all.  top_p: from the fewest whose probability
            reaches p (Holtzman et al. 2020).  Both apply after the temperature, k first.
        seed: of the draws; without it torch's random state is used.
        stop: token sequences; generation ends after the first that appears (one prompt only).
        cache: False computes every token from its whole context.
        say: gets one line if that is needed for this graph.
        on_token: gets each new `(B,)` or `()` token.

    Returns:
        `(T + new,)` or `(B, T + new)` int64.

    Raises:
        TypeError: a prompt that is no tensor of integers.
        ValueError: an argument out of range, ids the model does not know, or logits that are not finite.
    """
    check_sampling(temperature, top_k, top_p)
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    if not isinstance(prompt, Tensor) or prompt.dtype == torch.bool or prompt.is_floating_point():
        got = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise TypeError(f"prompt must be a tensor of integer token ids, got {got}: such as torch.tensor([0, 5])")
    if prompt.dim() not in (1, 2) or prompt.shape[-1] == 0:
        raise ValueError(f"prompt must be (T,) or (B, T) with T at least 1, got shape {tuple(prompt.shape)}")
    vocab = model.config.vocab
    if prompt.numel() and not 0 <= int(prompt.min()) <= int(prompt.max()) < vocab:
        raise ValueError(f"prompt ids span {int(prompt.min())}..{int(prompt.max())}, the model knows 0..{vocab - 1}")
    if stop and prompt.dim() == 2 and prompt.shape[0] != 1:
        raise ValueError(f"stop works on one prompt at a time, got {prompt.shape[0]}")
    device = model.tokens.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    tokens = prompt.to(device).reshape(-1, prompt.shape[-1])  # (B, T)
    tails = [s.to(device) for s in stop]
    training = model.training
    model.eval()
    try:
        stream = next_logits(model, graphs, tokens, cache=cache, say=say)
        logits = next(stream) if length else None
        for n in range(length):
            assert logits is not None
            new = choose(logits, temperature, top_k, top_p, generator)  # (B,)
            tokens = torch.cat([tokens, new[:, None]], 1)
            if on_token is not None:
                on_token(new[0] if prompt.dim() == 1 else new)
            # a stop sequence may begin in the prompt but must end in what is new
            if any(len(s) and len(s) <= tokens.shape[1] and torch.equal(tokens[0, -len(s) :], s) for s in tails):
                break
            if n + 1 < length:
                logits = stream.send(new)
    finally:
        model.train(training)
    return tokens[0] if prompt.dim() == 1 else tokens


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def choose(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One id per row of logits `(B, vocab)`: `(B,)` int64.

    Raises:
        ValueError: an argument out of range, or logits that are not finite (a weight is NaN or inf).
    """
    check_sampling(temperature, top_k, top_p)
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the model's logits are not finite: a weight is NaN or infinite, nothing can be drawn")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if torch.tensor(temperature, dtype=wide.dtype) == 0:  # also what is below the smallest number
        return wide.argmax(-1)
    # less the largest: a tiny temperature then sends the others to -inf, never to NaN
    wide = (wide - wide.max(-1, keepdim=True).values) / temperature
    order = torch.argsort(wide, dim=-1, descending=True, stable=True)
    wide = wide.gather(-1, order)
    if top_k is not None:
        wide[:, top_k:] = -math.inf
    if top_p is not None:
        p = wide.softmax(-1)
        beyond = p.cumsum(-1) - p >= top_p
        beyond[:, 0] = False  # a top_p below the smallest number
        wide = wide.masked_fill(beyond, -math.inf)
    drawn = torch.multinomial(wide.softmax(-1), 1, generator=generator)
    return order.gather(-1, drawn)[:, 0]


# ---------------------------------------------------------------------- where the logits come from


def next_logits(
    model: GPT,
    graphs: Graph | Sequence[Graph],
    tokens: Tensor,
    *,
    cache: bool = True,
    say: Callable[[str], None] | None = None,
) -> Generator[Tensor, Tensor, None]:
    """A generator of logits `(B, vocab)` for the next token; `send` it the tokens `(B,)` that were chosen."""
    layers = cycle(graphs, model.config.layers)
    block = model.config.block
    for graph in layers:
        if graph.t != graph.s or graph.t != layers[0].t:
            raise ValueError(f"generation needs square graphs of one size, got {layers[0]!r} and {graph!r}")
        block = min(block, graph.t)
    layers = [g.to(tokens.device) for g in layers]
    ready = max(cacheable_from(g) for g in layers)
    if say is not None and cache and ready >= block:
        say("earlier positions read later ones in this graph, so every token is computed from its whole context")
    held: _Cache | None = None
    new: Tensor
    while True:
        m = tokens.shape[1]
        if m > block:
            held = None
            new = yield model(tokens[:, -block:], layers)[0][:, -1]
        elif not cache or m < ready:
            new = yield model(tokens, [g[:m, :m] for g in layers])[0][:, -1]
        else:
            held = held or _Cache(model, layers)
            new = yield held.extend(tokens)
        tokens = torch.cat([tokens, new[:, None]], 1)


def cacheable_from(graph: Graph) -> int:
    """The smallest context from which on no row reads a source that comes after it was computed."""

    def find() -> int:
        rows = torch.arange(graph.t, device=graph.device).repeat(graph.rows // max(graph.t, 1))
        reach = torch.zeros(graph.rows, dtype=torch.int64, device=graph.device)
        some = graph.indptr.diff() > 0
        reach[some] = graph.stop[graph.indptr[1:][some] - 1]
        ahead = reach[reach > rows + 1]
        return int(ahead.max()) if ahead.numel() else 0

    return graph.cached("cacheable_from", find)


def last_reader(graph: Graph) -> Tensor:
    """`(T_kv,)`: the last target that reads each source, -1 for none."""

    def find() -> Tensor:
        last = torch.full((graph.s,), -1, dtype=torch.int64)
        target = (graph.run_row() % max(graph.t, 1)).tolist()
        runs = sorted(zip(target, graph.start.tolist(), graph.stop.tolist(), strict=True))
        for i, start, stop in runs:  # rising targets: later ones overwrite
            last[start:stop] = i
        return last.to(graph.device)

    return graph.cached("last_reader", find)


class _Cache:
    """Keys and values per layer of the positions that some later row reads."""

    def __init__(self, model: GPT, layers: list[Graph]):
        self.model, self.layers = model, layers
        self.done = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def extend(self, tokens: Tensor) -> Tensor:
        """Logits after the last of all tokens `(B, m)`, those before it being cached, or none."""
        m = tokens.shape[1]
        first = self.done
        if 0 < first != m - 1:
            raise AssertionError("a cache grows by one token at a time")
        model = self.model
        x = model.tokens(tokens[:, first:])  # (B, new, C)
        if model.positions is not None:
            x = x + model.positions.weight[first:m]
        for number, (block, graph) in enumerate(zip(model.blocks, self.layers, strict=True)):
            x = self._layer(number, block, graph, x, first, m)  # type: ignore[arg-type]
        self.done = m
        return model.logits(x[:, -1])

    def _layer(self, number: int, block: Block, graph: Graph, x: Tensor, first: int, m: int) -> Tensor:
        head = block.head
        at = torch.arange(first, m, device=x.device)
        y = block.norm1(x)
        queries = head.queries(y, at)
        keys, values = head.keys_values(y, at)  # (B, kv heads, new, D)
        if first == 0:
            sources, rows = at, graph[:m, :m]
            bias: Tensor | Position | None = block.bias()
            self.keys.append(keys)
            self.values.append(values)
        else:
            sources, rows = _step(graph, first)
            bias = self._bias(block, rows, sources, first)
            keys = torch.cat([self.keys[number], keys], -2)
            values = torch.cat([self.values[number], values], -2)
        heard = head.attend(queries, keys, values, rows, bias=bias, softcap=block.softcap)
        keep = last_reader(graph)[sources] >= m
        self.keys[number], self.values[number] = keys[..., keep, :], values[..., keep, :]
        return block.think(x + block.out(heard))

    @staticmethod
    def _bias(block: Block, rows: Graph, sources: Tensor, target: int) -> Tensor | None:
        """Per edge, by the true distance: the kept sources need not be neighbours."""
        if block.position not in ("alibi", "relative"):
            return None
        lead_rows, column = rows.edges()
        distance = sources[column] - target  # j - i
        if block.position == "alibi":
            bias = -block.slopes[:, None] * distance.abs()  # (H, E)
        else:
            reach = block.table.shape[1] // 2
            bias = block.table[:, distance.clamp(-reach, reach) + reach]
        if not rows.lead:
            return bias
        b, h = rows.lead
        return bias[lead_rows % h, torch.arange(column.numel(), device=column.device)] if h > 1 else bias


def _step(graph: Graph, m: int) -> tuple[Tensor, Graph]:
    """When row m comes: the positions held, itself last, and the row as a graph over them."""

    def make() -> tuple[Tensor, Graph]:
        here = torch.arange(m, device=graph.device)
        sources = torch.cat([here[last_reader(graph)[:m] >= m], here.new_tensor([m])])
        return sources, graph[m : m + 1, sources]

    return graph.cached(("decode", m), make)
