"""What can flow where through a stack of graphs: receptive fields, and label leaks with a shortest witness.

Layers are given first to last, and a residual connection around each is implied: a node keeps what it had.
Heads of a layer are united, samples of a batch never mix.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..graph import Graph, _starts

_NOTHING = -(2**62)  # the value of a source that says nothing
# bytes of the widest table of bit sets kept at once
_TABLE_BYTES = 2**28
# a row with more runs than this is united by itself
_MANY = 256
# words a search among labels may unite: about an hour
_MOST = 10**12


@dataclass(frozen=True)
class Hop:
    """In `layer` (1 is the first) `target` reads `source`; `head` says which head does, None if the layer has one.

    `kind` is "self", "cross" (the source is a node of the context) or "context" (both are, and so is the layer).
    """

    source: int
    target: int
    layer: int
    head: int | None = None
    kind: str = "self"

    def __str__(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        if self.kind == "context":
            return f"context {self.source} -> context {self.target} in context layer {self.layer}{head}"
        if self.kind == "cross":
            return f"context {self.source} -> {self.target} in layer {self.layer}{head}"
        return f"{self.source} -> {self.target} in layer {self.layer}{head}"


@dataclass(frozen=True)
class Leak:
    """A shortest path along which a target reads what it must predict.

    Attributes:
        target: the node whose output leaks.  source: the input that reaches it (at or beyond the label, with `offset`).
        label: the source that holds what the target predicts.
        path: hops in the order of the layers, from `source` to `target`; empty if the target is its own label.
        batch: the sample, None if no layer has a batch axis.
        context: the node of the context that holds the content of `source`, None if the path starts in the stream.
    """

    target: int
    source: int
    label: int
    path: tuple[Hop, ...]
    batch: int | None = None
    context: int | None = None

    @property
    def layer(self) -> int:
        """The layer, from 1, in which the label arrives at the target; 0 if it was there from the start."""
        return self.path[-1].layer if self.path else 0

    def __str__(self) -> str:
        way = ", ".join(map(str, self.path)) or f"{self.target} keeps its input (residual)"
        what = "its own label" if self.source == self.label else f"source {self.source}, beyond its label {self.label}"
        sample = "" if self.batch is None else f"sample {self.batch}: "
        held = "" if self.context is None else f", which context {self.context} holds"
        return f"{sample}{way}: target {self.target} reads {what}{held}"


# ---------------------------------------------------------------------- layers as arrays


class _Layer:
    """One layer of one sample: runs of all heads, and what range queries over them need."""

    def __init__(self, graph: Graph, batch: int) -> None:
        b, h = graph.lead or (1, 1)
        low = (batch if b > 1 else 0) * h * graph.t
        indptr = graph.indptr[low : low + h * graph.t + 1].cpu().numpy()
        a, z = indptr[0], indptr[-1]
        self.t, self.heads = graph.t, h if graph.lead and h > 1 else 0
        # without a head nothing is read
        self.indptr = indptr - a if h else np.zeros(graph.t + 1, dtype=np.int64)
        self.start, self.stop = graph.start[a:z].cpu().numpy(), graph.stop[a:z].cpu().numpy()
        # a run of 2**k..2**(k+1) - 1 sources is the union of two stretches of 2**k
        self.level = np.frexp((self.stop - self.start).astype(np.float64))[1].astype(np.int64) - 1
        self.levels = int(self.level.max()) + 1 if a < z else 0
        self.first = self.level * graph.s + self.start
        self.last = self.level * graph.s + self.stop - (np.int64(1) << self.level)
        self.filled = np.flatnonzero(np.diff(self.indptr))
        self.heavy = np.flatnonzero(np.diff(self.indptr) > _MANY)
        self._slots: tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]] | None = None

    def best(self, value: np.ndarray) -> np.ndarray:
        """`(T,)` the largest value among the sources each target reads, _NOTHING for an empty target."""
        out = np.full(self.indptr.size - 1, _NOTHING, dtype=np.int64)
        if self.filled.size:
            table = _table(value, self.levels, np.maximum)
            reach = table[self.first]
            if self.levels > 1:
                np.maximum(reach, table[self.last], out=reach)
            out[self.filled] = np.maximum.reduceat(reach, self.indptr[self.filled])
        return out.reshape(self.heads, self.t).max(0) if self.heads else out

    def reads(self, target: np.ndarray, source: np.ndarray) -> np.ndarray:
        """Whether each target reads the source beside it, in any head."""
        out = np.zeros(target.size, dtype=bool)
        if not self.start.size:
            return out
        width = int(self.stop.max()) + 1
        width = max(width, int(source.max()) + 2 if source.size else 0)
        line = np.repeat(np.arange(self.indptr.size - 1), np.diff(self.indptr)) * width
        first, last = line + self.start, line + self.stop
        for h in range(max(self.heads, 1)):
            key = (target + h * self.t) * width + source
            run = np.searchsorted(first, key, side="right") - 1
            out |= (run >= 0) & (key < last[np.maximum(run, 0)])
        return out

    def sources(self, target: int) -> Iterator[tuple[int | None, np.ndarray]]:
        """Per head, the sources that one target reads."""
        for h in range(max(self.heads, 1)):
            a, z = self.indptr[h * self.t + target], self.indptr[h * self.t + target + 1]
            parts = [np.arange(i, j) for i, j in zip(self.start[a:z], self.stop[a:z], strict=True)]
            yield (h if self.heads else None), np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def unite(self, state: np.ndarray) -> np.ndarray:
        """`(T, W)`: the union of the bit sets `state (T, W)` of the sources each target reads."""
        if self._slots is None:
            self._slots = self._make_slots()
        order, slots = self._slots
        out = np.zeros((self.indptr.size - 1, state.shape[1]), dtype=state.dtype)
        if self.filled.size:
            table = _table(state, self.levels, np.bitwise_or)
        if slots:
            n = slots[0][0].size
            acc, buffer = np.zeros((n, state.shape[1]), state.dtype), np.empty((n, state.shape[1]), state.dtype)
            for first, last in slots:
                k = first.size
                np.take(table, first, axis=0, out=buffer[:k], mode="clip")
                acc[:k] |= buffer[:k]
                if self.levels > 1:
                    np.take(table, last, axis=0, out=buffer[:k], mode="clip")
                    acc[:k] |= buffer[:k]
            out[order] = acc
        for row in self.heavy:
            here = slice(self.indptr[row], self.indptr[row + 1])
            out[row] = np.bitwise_or.reduce(table[self.first[here]], axis=0)
            if self.levels > 1:
                out[row] |= np.bitwise_or.reduce(table[self.last[here]], axis=0)
        if self.heads:
            return np.bitwise_or.reduce(out.reshape(self.heads, self.t, -1), axis=0)
        return out

    def _make_slots(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Rows with most runs first, so that the k-th runs of all rows that have one are a block: no ragged loop."""
        count = np.diff(self.indptr)
        light = self.filled[count[self.filled] <= _MANY]
        order = light[np.argsort(-count[light], kind="stable")]
        most, begin = count[order], self.indptr[order]
        slots = []
        n = order.size
        for k in range(int(most[0]) if n else 0):
            n = int(np.searchsorted(-most[:n], -k))
            at = begin[:n] + k
            slots.append((self.first[at], self.last[at]))
        return order, slots


def _table(value: np.ndarray, levels: int, op: np.ufunc) -> np.ndarray:
    """Row `k * T + j` is `op` over `value[j : j + 2**k]`."""
    if levels <= 1:
        return value
    t = value.shape[0]
    table = np.empty((levels, *value.shape), value.dtype)
    table[0] = value
    for k in range(1, levels):
        half = 1 << (k - 1)
        table[k] = table[k - 1]
        op(table[k - 1, : t - half], table[k - 1, half:], out=table[k, : t - half])
    return table.reshape(levels * t, *value.shape[1:])


def whole(x: object, name: str) -> int:
    """`x` as a Python int of at most 2**40 either way; a bool, a float or a tensor with axes is none."""
    got = f"{x!r}" if not isinstance(x, Tensor) else f"a tensor of {x.dtype} and shape {tuple(x.shape)}"
    if isinstance(x, (bool, np.bool_)) or (isinstance(x, (Tensor, np.ndarray)) and (x.ndim or "bool" in str(x.dtype))):
        raise TypeError(f"{name} must be an integer, got {got}")
    try:
        n = operator.index(x)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {got}") from None
    if abs(n) > 2**40:
        raise ValueError(f"{name} must be within 2**40, got {n}")
    return n


def _check(graphs: Graph | Iterable[Graph]) -> tuple[list[Graph], int, int | None]:
    """Layers, number of nodes, number of samples (None: no layer has a batch axis)."""
    layers = [graphs] if isinstance(graphs, Graph) else list(graphs)
    if not layers:
        raise ValueError("a stack needs at least one graph")
    for k, g in enumerate(layers, 1):
        if not isinstance(g, Graph):
            raise TypeError(f"layer {k} must be a Graph, got {type(g).__name__}")
        if g.t != g.s or g.t != layers[0].t:
            raise ValueError(f"layer {k} is {g!r}, layer 1 {layers[0]!r}: a stack needs square graphs of one size")
    sizes = {g.lead[0] for g in layers if g.lead} - {1}
    if len(sizes) > 1:
        raise ValueError(f"layers have batch axes of {sorted(sizes)} samples")
    return layers, layers[0].t, sizes.pop() if sizes else None


def _prepare(layers: Sequence[Graph], batch: int) -> list[_Layer]:
    made = {id(g): _Layer(g, batch) for g in {id(g): g for g in layers}.values()}
    return [made[id(g)] for g in layers]


# ---------------------------------------------------------------------- receptive field


def receptive_field(graphs: Graph | Iterable[Graph], target: int, batch: int | None = None) -> Tensor:
    """The sources whose input can influence `target` through the stack, itself included: rising int64.

    Args:
        graphs: layers first to last, or one graph.
        target: node, 0 <= target < T.
        batch: the sample, needed when a layer has a batch axis longer than 1.
    """
    layers, t, b = _stack(graphs, batch)
    target = whole(target, "target")
    if not 0 <= target < t:
        raise ValueError(f"target {target} is out of range for {t} nodes")
    seen = np.zeros(t, dtype=bool)
    seen[target] = True
    for layer in reversed(_prepare(layers, b)):
        rows = np.flatnonzero(np.tile(seen, max(layer.heads, 1)))
        count = np.diff(layer.indptr)[rows]
        run = np.repeat(layer.indptr[rows] - (np.cumsum(count) - count), count) + np.arange(count.sum())
        change = np.bincount(layer.start[run], minlength=t + 1) - np.bincount(layer.stop[run], minlength=t + 1)
        seen |= np.cumsum(change)[:t] > 0
    return torch.from_numpy(np.flatnonzero(seen))


def coverage(graphs: Graph | Iterable[Graph], batch: int | None = None, *, most: int | None = None) -> Tensor:
    """How many sources can influence each target after 0, 1, ..., L layers: `(L + 1, T)` int64, row 0 is all ones.

    Where every target's sources are one stretch that holds the target itself (causal, window, band, documents), the
    ends of the stretch say all; else sets of bits are united, at a cost of T^2 / 64 words per layer.

    Args:
        most: words that may be united; 10**12, about an hour, if not given.

    Raises:
        ValueError: more than that; ask `receptive_field` about a few targets instead.
    """
    layers, t, b = _stack(graphs, batch)
    made = _prepare(layers, b)
    sizes = [np.ones(t, dtype=np.int64)]
    if all(_is_stretch(x) for x in made):
        high, low = np.arange(t), np.arange(t)
        for layer in made:
            high, low = np.maximum(high, layer.best(high)), np.minimum(low, -layer.best(-low))
            sizes.append(high - low + 1)
    else:
        every = np.arange(t)
        _refuse_search(made, every, t, most)
        sizes += [np.zeros(t, dtype=np.int64) for _ in made]
        for _, state in _blocks(made, every, every):
            for k, layer in enumerate(made, 1):
                state |= layer.unite(state)
                sizes[k] += _ones(state)
    return torch.from_numpy(np.stack(sizes))


def layers_to_cover(graphs: Graph | Sequence[Graph], goal: Graph | None = None, batch: int | None = None) -> int | None:
    """After how many layers every target can be influenced by all it should be; None if never.

    Args:
        graphs: one graph, applied again and again, or a stack, of which a first part may do.
        goal: what should be reached, all sources if not given; `causal(t)` for a causal stack.
        batch: the sample, needed when a layer has a batch axis longer than 1.
    """
    again = isinstance(graphs, Graph)
    layers, t, b = _stack(graphs, batch)
    if goal is not None and (goal.lead or (goal.t, goal.s) != (t, t)):
        raise ValueError(f"goal must be a graph of {t} nodes without leading axes, got {goal!r}")
    made = _prepare(layers, b)
    if goal is not None and not _is_stretch(_Layer(goal, 0)) and goal.num_edges:
        return _cover_bits(made, goal, again, t)
    if goal is not None:
        wanted = _Layer(goal, 0)
        want_high, want_low = (
            np.maximum(np.arange(t), wanted.best(np.arange(t))),
            -np.maximum(-np.arange(t), wanted.best(-np.arange(t))),
        )
    else:
        want_high, want_low = np.full(t, t - 1), np.zeros(t, dtype=np.int64)
    if not all(_is_stretch(x) for x in made):
        return _cover_bits(made, goal, again, t)
    high, low = np.arange(t), np.arange(t)
    for k in range(t + 1 if again else len(made) + 1):
        if (high >= want_high).all() and (low <= want_low).all():
            return k
        if not again and k == len(made):
            return None
        layer = made[0 if again else k]
        new_high, new_low = np.maximum(high, layer.best(high)), np.minimum(low, -layer.best(-low))
        if again and np.array_equal(high, new_high) and np.array_equal(low, new_low):
            return None
        high, low = new_high, new_low
    return None


def _cover_bits(made: list[_Layer], goal: Graph | None, again: bool, t: int) -> int | None:
    every = np.arange(t)
    _refuse_search(made, every, t)
    wanted = None if goal is None else _Layer(goal, 0)
    most = 0
    for _, state in _blocks(made, every, every):
        if wanted is None:
            want = np.broadcast_to(np.bitwise_or.reduce(state, axis=0), state.shape)
        else:
            want = wanted.unite(state)
        k = 0
        while (want & ~state).any():
            if not again and k == len(made):
                return None
            new = state | made[0 if again else k].unite(state)
            if again and np.array_equal(new, state):
                return None
            state, k = new, k + 1
        most = max(most, k)
    return most


def _stack(graphs: Graph | Iterable[Graph], batch: int | None) -> tuple[list[Graph], int, int]:
    layers, t, samples = _check(graphs)
    if samples == 0:
        raise ValueError(f"the layers are of 0 samples, such as {next(g for g in layers if 0 in g.lead[:1])!r}")
    if samples and batch is None:
        raise ValueError(f"the layers differ between {samples} samples: say batch=")
    batch = 0 if batch is None else whole(batch, "batch")
    if not 0 <= batch < (samples or 1):
        raise ValueError(f"batch {batch} is out of range for {samples or 1} samples")
    return layers, t, batch


def _is_stretch(layer: _Layer) -> bool:
    """Every target reads one run that holds or touches itself, or nothing: its receptive field stays a stretch."""
    if layer.heads or layer.filled.size != layer.start.size:
        return False
    return bool((layer.start <= layer.filled + 1).all() and (layer.stop >= layer.filled).all())


def _ones(state: np.ndarray) -> np.ndarray:
    """Number of bits set in each row."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(state).sum(1, dtype=np.int64)
    return np.unpackbits(state.view(np.uint8), axis=1).sum(1, dtype=np.int64)


# ---------------------------------------------------------------------- leaks


def find_leak(
    graphs: Graph | Iterable[Graph],
    offset: int = 1,
    labels: Tensor | Sequence[int] | None = None,
    hidden: Tensor | Sequence[bool] | None = None,
    targets: Tensor | Sequence[int] | Sequence[bool] | None = None,
    *,
    cross: Graph | Sequence[Graph | None] | None = None,
    context: Graph | Iterable[Graph] = (),
    holds: Tensor | Sequence[int] | None = None,
) -> Leak | None:
    """Does any target read what it must predict, through any number of layers?  None, or a shortest witness.

    Exact for the graphs: a path exists iff the label's input can influence the target's output through attention and
    the implied residual connections.

    - `offset`: target i predicts source i + offset, and reading anything at or beyond it leaks (next token: 1).
      An integer.
    - `labels (T,)`: instead, the one source that holds each target's label, -1 for none: permuted orders (XLNet),
      packed documents, node labels given as inputs (a node is its own label; `hidden` masks those to predict).
    - `hidden (T,)`: sources whose input is masked out, which say nothing but still pass on what they read.  Masked
      tokens (BERT): `labels=range(T), hidden=masked, targets=masked`.
    - `targets`: those with a loss, a bool `(T,)` or indices; all of them if not given.
    - `cross`: a second stream of S nodes, the context, read after the self-attention of each layer: one `(T <- S)`
      graph for all layers, or one per layer, None where a layer has none.  `context`: the layers of that stream itself,
      `(S <- S)`, which come first.  `holds (S,)`: the source whose content each context node holds, -1 (all, if not
      given) for content of its own, which is no label.

    Args:
        graphs: layers first to last, or one graph; square, of one size.  Heads are united, samples kept apart.
            labels, hidden, bool targets and holds may have a batch axis, `(B, T)`.

    Returns:
        None, or the `Leak` with the fewest hops (of those: the first sample, then the first target).  Of no sample,
        None; a layer without a head reads nothing.

    Raises:
        TypeError: an offset that is no integer, labels or others of another kind.
        ValueError: sizes that do not fit together, or a search among labels that would take hours; the figure is named.
    """
    offset = whole(offset, "offset")
    layers, t, samples = _check(graphs)
    stack, names, s, samples = _streams(layers, t, samples, cross, context)
    label = _per_sample(labels, t, "labels", False)
    masked = _per_sample(hidden, t, "hidden", True)
    loss = _targets(targets, t)
    held = _per_sample(holds, s, "holds", False)
    for name, x in (("labels", label), ("hidden", masked), ("targets", loss), ("holds", held)):
        if x is not None and x.shape[0] != 1:
            if samples is not None and samples != x.shape[0]:
                raise ValueError(f"{name} has {x.shape[0]} samples, the layers have {samples}")
            samples = x.shape[0]
    for name, x in (("labels", label), ("holds", held)):
        if x is not None and x.size and (x.min() < -1 or x.max() >= t):
            raise ValueError(
                f"{name} span {x.min()}..{x.max()}, but there are {t} sources: each needs -1 <= value < {t}"
            )
    found: Leak | None = None
    shared: list[_Layer] | None = None
    for b in range(1 if samples is None else samples):
        if shared is None or any(g.lead and g.lead[0] > 1 for g in stack):
            shared = _prepare(stack, b)
        own = _of(loss, b)
        rows = np.arange(t) if own is None else np.flatnonzero(own)
        value = np.full(t + s, _NOTHING)
        value[:t] = np.arange(t)
        mask = _of(masked, b)
        if mask is not None:
            value[:t][mask] = _NOTHING
        if held is not None:
            content = np.asarray(_of(held, b))
            value[t:] = np.where(content < 0, _NOTHING, content)
        most = None if found is None else len(found.path) - 1
        if label is None:
            hit = _offset_leak(shared, value, rows, offset, most)
        else:
            hit = _label_leak(shared, value, rows, np.asarray(_of(label, b)), most)
        if hit is None:
            continue
        node, target, goal, path = hit
        hops = tuple(_named(hop, names, t) for hop in path)
        found = Leak(
            target, int(value[node]), goal, hops, None if samples is None else b, node - t if node >= t else None
        )
        if not path:
            break
    return found


def _streams(
    layers: list[Graph],
    t: int,
    samples: int | None,
    cross: Graph | Sequence[Graph | None] | None,
    context: Graph | Iterable[Graph],
) -> tuple[list[Graph], list[tuple[str, int]], int, int | None]:
    """Both streams as one of t + s nodes: its layers, the kind and number of each, s, and the number of samples."""
    names = [("self", k + 1) for k in range(len(layers))]
    before = [context] if isinstance(context, Graph) else list(context)
    between = [cross] * len(layers) if isinstance(cross, Graph) or cross is None else list(cross)
    if len(between) != len(layers):
        raise ValueError(
            f"cross has {len(between)} entries for {len(layers)} layers: give one graph, or one or None each"
        )
    extra = [g for g in (*before, *between) if g is not None]
    if not extra:
        return layers, names, 0, samples
    s = before[0].s if before else extra[0].s
    for g in before:
        if (g.t, g.s) != (s, s):
            raise ValueError(f"context layer {g!r} must be ({s} <- {s}), one node per node of the context")
    for c in between:
        if c is not None and (c.t, c.s) != (t, s):
            raise ValueError(f"cross {c!r} must be ({t} <- {s}): targets are the stream's, sources the context's")
    sizes = {g.lead[0] for g in extra if g.lead} - {1} | (set() if samples is None else {samples})
    if len(sizes) > 1:
        raise ValueError(f"layers have batch axes of {sorted(sizes)} samples")
    made: dict[tuple[int, int, int], Graph] = {}

    def put(g: Graph, row: int, col: int) -> Graph:
        key = (id(g), row, col)
        if key not in made:
            made[key] = _embed(g, t + s, row, col)
        return made[key]

    stack = [put(g, t, t) for g in before]
    names = [("context", k + 1) for k in range(len(before))]
    for k, (g, c) in enumerate(zip(layers, between, strict=True), 1):
        stack.append(put(g, 0, 0))
        names.append(("self", k))
        if c is not None:
            stack.append(put(c, 0, t))
            names.append(("cross", k))
    return stack, names, s, sizes.pop() if sizes else None


def _embed(graph: Graph, n: int, row: int, col: int) -> Graph:
    """The same edges among n nodes, targets moved by `row` and sources by `col`."""
    lead = graph.lead or (1, 1)
    count = torch.zeros(lead[0] * lead[1], n, dtype=torch.int64, device=graph.device)
    count[:, row : row + graph.t] = graph.indptr.diff().view(count.shape[0], graph.t)
    return Graph._new(_starts(count.view(-1)), graph.start + col, graph.stop + col, (*graph.lead, n, n))


def _named(hop: Hop, names: Sequence[tuple[str, int]], t: int) -> Hop:
    kind, layer = names[hop.layer - 1]
    source = hop.source - t if hop.source >= t else hop.source
    target = hop.target - t if hop.target >= t else hop.target
    return Hop(source, target, layer, hop.head, kind)


def _per_sample(x: object, t: int, name: str, is_bool: bool) -> np.ndarray | None:
    if x is None:
        return None
    out = x.cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if out.shape[-1:] != (t,) or out.ndim > 2:
        raise ValueError(f"{name} must be ({t},), one per node, or (B, {t}), got shape {out.shape}")
    if out.size and (out.dtype != bool if is_bool else out.dtype.kind not in "iu"):
        raise TypeError(f"{name} must be {'bool' if is_bool else 'integers'}, got {out.dtype}")
    return np.atleast_2d(out).astype(bool if is_bool else np.int64)


def _targets(targets: object, t: int) -> np.ndarray | None:
    if targets is None:
        return None
    out = targets.cpu().numpy() if isinstance(targets, Tensor) else np.asarray(targets)
    if out.dtype == bool:
        return _per_sample(out, t, "targets", True)
    if out.ndim != 1 or (out.size and out.dtype.kind not in "iu"):
        raise TypeError(f"targets must be bool ({t},) or a list of indices, got {out.dtype} of shape {out.shape}")
    out = out.astype(np.int64)
    if out.size and (out.min() < 0 or out.max() >= t):
        raise ValueError(f"targets span {out.min()}..{out.max()}, but there are {t} nodes")
    mask = np.zeros((1, t), dtype=bool)
    mask[0, out] = True
    return mask


def _of(x: np.ndarray | None, b: int) -> np.ndarray | None:
    return None if x is None else x[b if x.shape[0] > 1 else 0]


_Hit = tuple[int, int, int, tuple[Hop, ...]]


def _offset_leak(
    layers: list[_Layer], value: np.ndarray, rows: np.ndarray, offset: int, most: int | None
) -> _Hit | None:
    """One number per node is exact: the largest source reached decides `source >= target + offset`."""
    goal = rows + offset
    reach = value
    for layer in layers:
        reach = np.maximum(reach, layer.best(reach))
    if not (reach[rows] >= goal).any():
        return None
    before = [value] * (len(layers) + 1)  # after each layer, the largest source reached in at most h hops
    h = 0
    while not (before[-1][rows] >= goal).any():
        h += 1
        if most is not None and h > most:
            return None
        now = [value]
        for k, layer in enumerate(layers):
            now.append(np.maximum(now[-1], layer.best(before[k])))
        before = now
    target = int(rows[before[-1][rows] >= goal].min())
    own, beyond = value == target + offset, value >= target + offset
    path = _path(layers, own, target, h)
    return _hit(path if path is not None else _path(layers, beyond, target, h), target, target + offset)


def _label_leak(
    layers: list[_Layer], value: np.ndarray, rows: np.ndarray, label: np.ndarray, most: int | None
) -> _Hit | None:
    """One set per node: which labels it can have read; kept in blocks of bits, after what is cheap has been tried."""
    n = value.size
    holder = np.argsort(value, kind="stable")  # nodes that hold a content, by content
    content = value[holder]
    rows = rows[label[rows] >= 0]
    first, last = np.searchsorted(content, label[rows]), np.searchsorted(content, label[rows], side="right")
    rows, first, last = rows[last > first], first[last > first], last[last > first]
    goal = label[rows]
    most = len(layers) if most is None else most

    def hit(target: int, h: int) -> _Hit:
        return _hit(_path(layers, value == label[target], target, h), target, int(label[target]))

    if most >= 0 and (value[rows] == goal).any():
        return hit(int(rows[value[rows] == goal][0]), 0)
    if most < 1:
        return None
    count = last - first
    pair = np.repeat(np.arange(rows.size), count)
    node = holder[np.repeat(first - (np.cumsum(count) - count), count) + np.arange(pair.size)]
    direct = np.zeros(pair.size, dtype=bool)
    for layer in {id(x): x for x in layers}.values():
        direct |= layer.reads(rows[pair], node)
    if direct.any():
        return hit(int(rows[pair[direct]].min()), 1)
    if most < 2:
        return None
    t = label.size
    for order in (np.arange(t), _chain(label)):
        # a necessary condition that is cheap: the label lies within the extremes, in some order, of what is reached
        if order is None or not rows.size:
            continue
        known = value >= 0
        place = order[np.where(known, value, 0)]
        high, low = np.where(known, place, _NOTHING), np.where(known, -place, _NOTHING)
        for layer in layers:
            high, low = np.maximum(high, layer.best(high)), np.maximum(low, layer.best(low))
        keep = (order[goal] <= high[rows]) & (-order[goal] <= low[rows])
        rows, goal = rows[keep], goal[keep]
    if not rows.size:
        return None
    _refuse_search(layers, goal, n)
    leaks = np.zeros(rows.size, dtype=bool)
    for some, state in _blocks(layers, goal, value):
        for layer in _effective(layers, state):
            state |= layer.unite(state)
        leaks[some.rows] = some.holds(state, rows)
    rows, goal = rows[leaks], goal[leaks]
    if not rows.size:
        return None
    best = n
    kept: list[np.ndarray] | None = None
    for h in range(2, most + 1):
        blocks = 0
        for some, state in _blocks(layers, goal, value):
            blocks += 1
            # sets reached in h hops follow from those in h - 1, which are kept if there is but one block
            before, done = (kept, h - 1) if kept is not None else ([state] * (len(layers) + 1), 0)
            for _ in range(h - done):
                before = _one_more_hop(layers, before)
            there = some.holds(before[-1], rows)
            if there.any():
                best = min(best, int(rows[some.rows][there].min()))
        if best < n:
            return hit(best, h)
        kept = before if blocks == 1 else None
    return None


def _one_more_hop(layers: list[_Layer], before: list[np.ndarray]) -> list[np.ndarray]:
    now = [before[0]]
    for k, layer in enumerate(layers):
        now.append(now[-1] | layer.unite(before[k]))
    return now


def _refuse_search(layers: list[_Layer], goal: np.ndarray, n: int, most: int | None = None) -> None:
    most = _MOST if most is None else most
    words = -(-np.unique(goal).size // 64)
    work = words * sum(x.start.size * (2 if x.levels > 1 else 1) + n * x.levels for x in layers)
    if work > most:
        raise ValueError(
            f"{goal.size:,} labels among {n:,} nodes and {len(layers)} layers take about {work:.1e} steps of 64 bits, "
            f"over the limit of {most:.0e}: ask about fewer targets"
        )


def _chain(label: np.ndarray) -> np.ndarray | None:
    """Steps along i -> label[i] -> ... to its end, an order that permuted labels follow.  None for a cycle."""
    n = label.size
    nxt = np.append(np.where(label < 0, n, label), n)
    steps = (nxt != np.arange(n + 1)).astype(np.int64)
    steps[n] = 0
    for _ in range(max(n, 1).bit_length() + 1):
        steps = steps + steps[nxt]
        nxt = nxt[nxt]
    return steps[:n] if (nxt == n).all() else None


@dataclass
class _Some:
    """A block of labels: `rows` are the pairs whose label is among them, `bit` where it lies in a set."""

    rows: np.ndarray
    bit: np.ndarray

    def holds(self, state: np.ndarray, rows: np.ndarray) -> np.ndarray:
        word, shift = self.bit // 64, (self.bit % 64).astype(np.uint64)
        return (state[rows[self.rows], word] >> shift & np.uint64(1)).astype(bool)


def _blocks(layers: list[_Layer], goal: np.ndarray, value: np.ndarray) -> Iterator[tuple[_Some, np.ndarray]]:
    n = value.size
    columns, at = np.unique(goal, return_inverse=True)
    levels = max((x.levels for x in layers), default=1)
    words = int(np.clip(_TABLE_BYTES // (8 * max(n * max(levels, 1), 1)), 1, 32))
    for low in range(0, columns.size, words * 64):
        mine = columns[low : low + words * 64]
        rows = np.flatnonzero((at >= low) & (at < low + mine.size))
        state = np.zeros((n, -(-mine.size // 64)), dtype=np.uint64)
        bit = np.searchsorted(mine, value)
        node = np.flatnonzero(mine[np.minimum(bit, mine.size - 1)] == value)
        bit = bit[node]
        state[node, bit // 64] |= np.uint64(1) << (bit % 64).astype(np.uint64)
        yield _Some(rows, at[rows] - low), state


def _effective(layers: list[_Layer], state: np.ndarray) -> Iterator[_Layer]:
    """The layers in turn, without those that changed nothing when last applied and would change nothing again."""
    idle: set[int] = set()
    for layer in layers:
        if id(layer) in idle:
            continue
        old = state.copy()
        yield layer
        idle = {*idle, id(layer)} if np.array_equal(old, state) else set()


def _path(layers: list[_Layer], source: np.ndarray, target: int, h: int) -> tuple[int, tuple[Hop, ...]] | None:
    """A path of h hops from any of `source (T,)` bool to target, as early as can be; None if the shortest is longer."""
    far = -_NOTHING
    steps = [np.where(source, 0, far)]
    for layer in layers:
        steps.append(np.minimum(steps[-1], 1 - layer.best(-steps[-1])))
    if steps[-1][target] != h:
        return None
    path: list[Hop] = []
    node, k = target, len(layers)
    while h:
        k = next(m for m in range(k + 1) if steps[m][node] == h)
        for head, read in layers[k - 1].sources(node):
            read = read[steps[k - 1][read] == h - 1]
            if read.size:
                path.append(Hop(int(read[0]), node, k, head))
                break
        node, k, h = path[-1].source, k - 1, h - 1
    return node, tuple(reversed(path))


def _hit(found: tuple[int, tuple[Hop, ...]] | None, target: int, goal: int) -> _Hit:
    assert found is not None
    return found[0], target, goal, found[1]
