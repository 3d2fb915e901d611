"""How long and how much memory the graph toolkit takes at a million tokens; each row is checked before it is timed.

python benchmarks/toolkit.py            # every row, each in its own process
python benchmarks/toolkit.py leak       # rows whose name begins so
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphattn as ga  # noqa: E402

MILLION = 2**20
Row = tuple[str, str, str]  # what, measured, required


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(make: Callable[[], object], repeat: int = 5) -> float:
    make()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        make()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def build(which: str) -> Iterator[Row]:
    t = MILLION
    lengths = torch.full((100,), t // 100)
    lengths[: t % 100] += 1
    make, edges = {
        "causal": (lambda: ga.causal(t), t * (t + 1) // 2),
        "window": (lambda: ga.window(t, 128), 128 * t - 128 * 127 // 2),
        "prefix": (lambda: ga.prefix(t, 1000), 1000 * 1000 + sum(range(1001, t + 1))),
        "documents": (lambda: ga.documents(lengths), int((lengths**2).sum())),
    }[which]
    ga.causal(8)
    before = peak_mb()
    start = time.perf_counter()
    graph = make()
    seconds, memory = time.perf_counter() - start, peak_mb() - before
    assert graph.num_edges == edges
    yield f"build {which}, T = {t:,}", f"{seconds:.3f} s, {memory:.0f} MB", "1 s, 100 MB"


def algebra() -> Iterator[Row]:
    t = MILLION
    lengths = torch.full((100,), t // 100)
    lengths[: t % 100] += 1
    causal, window, prefix, documents = ga.causal(t), ga.window(t, 128), ga.prefix(t, 1000), ga.documents(lengths)
    small = [ga.causal(300), ga.window(300, 8), ga.prefix(300, 20), ga.documents([100] * 3)]
    dense = [ga.to_mask(g) for g in small]
    assert torch.equal(
        ga.to_mask((small[0] & small[1]) | small[2] - small[3]), dense[0] & dense[1] | dense[2] & ~dense[3]
    )
    first = (causal & window) | prefix - documents
    again = (causal & window) | prefix - documents
    same = (window & causal) | (prefix & ~documents)
    assert first == same and window <= causal and not causal <= window
    yield (
        f"(causal & window) | prefix - documents, T = {t:,}",
        f"{timed(lambda: (causal & window) | prefix - documents, 3):.2f} s",
        "2 s",
    )
    yield "<= at that size", f"{timed(lambda: window <= causal, 3):.2f} s", "2 s"
    yield "== at that size", f"{timed(lambda: first == again, 3):.3f} s", "2 s"


def edges() -> Iterator[Row]:
    n, e = 10**6, 16 * 10**6
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, n, (2, e), generator=generator)
    pairs[:, e // 2 :] = pairs[:, torch.randint(0, e // 2, (e - e // 2,), generator=generator)]
    before = peak_mb()
    start = time.perf_counter()
    graph = ga.from_edge_index(pairs, n)
    seconds, memory = time.perf_counter() - start, peak_mb() - before
    assert graph.num_edges == np.unique(pairs[1].numpy() * n + pairs[0].numpy()).size
    yield "16 M unsorted edges with duplicates, 1 M nodes", f"{seconds:.1f} s, {memory / 1024:.2f} GB", "10 s, 2 GB"


def _random_causal(t: int, e: int, generator: torch.Generator) -> ga.Graph:
    pairs = torch.randint(0, t, (2, e), generator=generator)
    return ga.from_edge_index(torch.stack([pairs.min(0).values, pairs.max(0).values]), t)


def leak_next() -> Iterator[Row]:
    t, generator = 65_536, torch.Generator().manual_seed(0)
    layers = [_random_causal(t, 10**6, generator) for _ in range(12)]
    # the future is reached in twelve hops only: each layer but the last reads one step further back of a chain
    late = [ga.from_edge_index([[40_000 + k], [39_999 + k]], t) for k in range(12)]
    before = peak_mb()
    start = time.perf_counter()
    assert ga.find_leak(layers) is None
    seconds, memory = time.perf_counter() - start, peak_mb() - before
    yield "find_leak, 12 layers of 1 M edges, T = 65,536, none", f"{seconds:.2f} s, {memory:.0f} MB", "10 s"
    leaky = [*layers[:6], layers[6] | late[0], *layers[7:]]
    start = time.perf_counter()
    found = ga.find_leak(leaky)
    seconds = time.perf_counter() - start
    assert found is not None and (found.source, found.target, found.layer) == (40_000, 39_999, 7), found
    yield "the same with one edge to the future", f"{seconds:.2f} s", "10 s"


def leak_labels() -> Iterator[Row]:
    """Labels in an order that no sorting explains, so that only sets of bits can tell."""
    t, generator = 16_384, torch.Generator().manual_seed(0)
    order = torch.randperm(t, generator=generator)
    rank = order.argsort()
    layers = []
    for _ in range(12):
        pairs = rank[torch.randint(20, t, (2, 10**6), generator=generator)]
        layers.append(ga.from_edge_index(order[torch.stack([pairs.min(0).values, pairs.max(0).values])], t))
    label = _hard_labels(order, rank, generator)
    label[:20] = -1
    chained = [g | ga.from_edge_index([[12 - k], [11 - k]], t) for k, g in enumerate(layers)]
    past = label.clone()
    past[order[t // 2]] = order[7]
    first = label.clone()
    first[0] = 12
    cases = (
        ("none", layers, label),
        ("a label in the past", layers, past),
        ("a label twelve hops away", chained, first),
    )
    for what, stack, labels in cases:
        before = peak_mb()
        start = time.perf_counter()
        found = ga.find_leak(stack, labels=labels)
        seconds, memory = time.perf_counter() - start, peak_mb() - before
        exact = _leaks(stack, labels)
        assert (found is not None) == bool(exact.any())
        assert found is None or exact[found.target]
        words = "no leak" if found is None else f"found, {len(found.path)} hops"
        yield (
            f"find_leak, labels anywhere, 12 layers of 1 M edges, T = {t:,}: {what}",
            f"{seconds:.1f} s, {memory / 1024:.2f} GB, {words}; matrix powers: {int(exact.sum())} targets",
            "60 s, 2 GB, exact",
        )


def _hard_labels(order: Tensor, rank: Tensor, generator: torch.Generator) -> Tensor:
    """A label of each node that lies later in rank, chosen at random."""
    t = rank.numel()
    later = (rank + 1 + (torch.rand(t, generator=generator) * (t - 1 - rank).clamp(min=1)).long()).clamp(max=t - 1)
    label = order[later]
    label[rank == t - 1] = -1
    return label


def _leaks(layers: list[ga.Graph], label: Tensor) -> np.ndarray:
    """Per target, by boolean matrix powers over packed columns: an OR over every edge, nothing clever."""
    t = label.numel()
    out = np.zeros(t, dtype=bool)
    csr = [tuple(x.numpy() for x in ga.to_csr(g)) for g in layers]
    for low in range(0, t, 2048):
        columns = np.arange(low, min(t, low + 2048))
        state = np.zeros((t, columns.size // 8), dtype=np.uint8)
        state[columns] = np.packbits(np.eye(columns.size, dtype=bool), axis=1)
        for indptr, indices in csr:
            new = state.copy()
            for row in range(t):
                a, z = indptr[row], indptr[row + 1]
                if z > a:
                    new[row] |= np.bitwise_or.reduce(state[indices[a:z]], axis=0)
            state = new
        mine = np.flatnonzero((label.numpy() >= low) & (label.numpy() < low + columns.size))
        bits = np.unpackbits(state[mine], axis=1)
        out[mine] = bits[np.arange(mine.size), label.numpy()[mine] - low].astype(bool)
    return out


def block_mask() -> Iterator[Row]:
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < 129)

    names = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
    names += ["q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]
    for t, need in ((4096, 30), (16_384, 100)):
        graph = ga.window(t, 129)
        ours = ga.to_block_mask(graph)
        theirs = create_block_mask(mask_mod, None, None, t, t, device="cpu")
        for name in names:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        slow = timed(lambda t=t: create_block_mask(mask_mod, None, None, t, t, device="cpu"), 3)
        fast = timed(lambda t=t: ga.to_block_mask(ga.window(t, 129)), 15)
        yield (
            f"to_block_mask, window 129, T = {t:,} (window included)",
            f"{1000 * fast:.2f} ms, create_block_mask {1000 * slow:.0f} ms: {slow / fast:.0f} times",
            f"{need} times",
        )
    t = 262_144
    start = time.perf_counter()
    ga.to_block_mask(ga.window(t, 129))
    yield f"to_block_mask, T = {t:,}", f"{time.perf_counter() - start:.2f} s", "2 s"


def flex_output() -> Iterator[Row]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < 129)

    t = 1000
    q, k, v = torch.randn(3, 1, 2, t, 16).unbind()
    compiled = torch.compile(flex_attention)
    ours = compiled(q, k, v, block_mask=ga.to_block_mask(ga.window(t, 129)))
    theirs = compiled(q, k, v, block_mask=create_block_mask(mask_mod, None, None, t, t, device="cpu"))
    yield (
        f"the same Flex output, compiled, T = {t}",
        f"largest difference {float((ours - theirs).abs().max()):.1g}",
        "equal",
    )


def laws() -> Iterator[Row]:
    from tests.test_convert import PAIRS, random_mask

    said = refused = 0
    for seed in range(1000):
        mask = random_mask(seed)
        graph = ga.from_mask(mask)
        assert graph.num_edges == int(mask.sum())
        for there_and_back, can in PAIRS.values():
            if can(graph):
                assert there_and_back(graph) == graph
                said += 1
                continue
            try:
                there_and_back(graph)
            except ValueError:
                refused += 1
            else:
                raise AssertionError("a graph the format cannot say was not refused")
    yield f"{len(PAIRS)} converter pairs x 1,000 random graphs", f"{said} equal, {refused} refused, 0 wrong", "0 wrong"
    generator = torch.Generator().manual_seed(0)
    wrong = 0
    leads = [(), (1, 1), (2, 1), (1, 3), (2, 3)]
    for k in range(10_000):
        t, s = torch.randint(0, 9, (2,), generator=generator).tolist()
        one, other = leads[k % 5], leads[k % 5] if k % 2 else ()
        p = torch.rand((2,), generator=generator)
        a = torch.rand(*one, t, s, generator=generator) < p[0]
        b = torch.rand(*other, t, s, generator=generator) < p[1]
        x, y = ga.from_mask(a), ga.from_mask(b)
        for got, want in ((x | y, a | b), (x & y, a & b), (x - y, a & ~b), (x ^ y, a ^ b), (~x, ~a), (x.T, a.mT)):
            wrong += not (
                got == ga.from_mask(want.expand(got.shape)) and torch.equal(got.dense(), want.expand(got.shape))
            )
        wrong += (x <= y) != bool((a <= b).all()) or (x == y) != (a.shape == b.shape and torch.equal(a, b))
        product = (a.double() @ b.mT.double()) > 0
        wrong += not torch.equal((x @ y.T).dense(), product)
    yield "algebra against boolean matrices, 10,000 random pairs", f"{wrong} differences", "0"


ROWS: dict[str, Callable[[], Iterator[Row]]] = {
    **{f"build-{k}": (lambda k=k: build(k)) for k in ("causal", "window", "prefix", "documents")},
    "algebra": algebra,
    "edges": edges,
    "leak-next": leak_next,
    "leak-labels": leak_labels,
    "block-mask": block_mask,
    "flex-output": flex_output,
    "laws": laws,
}


def main(names: list[str]) -> None:
    if names[:1] == ["--row"]:
        for row in ROWS[names[1]]():
            print(json.dumps(row), flush=True)
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads\n\n| what | measured | required |\n|---|---|---|"
    )
    for name in ROWS:
        if names and not any(name.startswith(n) for n in names):
            continue
        run = subprocess.run([sys.executable, __file__, "--row", name], stdout=subprocess.PIPE, text=True)
        for line in run.stdout.splitlines():
            print("| " + " | ".join(cell.replace("|", r"\|") for cell in json.loads(line)) + " |", flush=True)
        if run.returncode:
            print(f"| {name} | failed: {run.returncode} | |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
