"""Every pattern is its formula, evaluated here on a dense grid of targets and sources."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import graphattn as ga

SIZES = [0, 1, 2, 5, 13]


def grid(t: int, s: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.arange(t)[:, None], torch.arange(t if s is None else s)[None]


def same(graph: ga.Graph, mask: Tensor) -> None:
    assert graph.shape == tuple(mask.shape)
    assert torch.equal(ga.to_mask(graph), mask)
    assert graph == ga.from_mask(mask)  # and it is canonical


# name -> (graph of t, formula of i, j); one line per pattern on a square
FORMULAS: dict[str, tuple[Callable[[int], ga.Graph], Callable[[Tensor, Tensor], Tensor]]] = {
    "full": (ga.full, lambda i, j: (i >= 0) & (j >= 0)),
    "empty": (ga.empty, lambda i, j: (i < 0) & (j < 0)),
    "self_loops": (ga.self_loops, lambda i, j: i == j),
    "causal": (ga.causal, lambda i, j: j <= i),
    "band 2 1": (lambda t: ga.band(t, 2, 1), lambda i, j: (i - 2 <= j) & (j <= i + 1)),
    "band -1 3": (lambda t: ga.band(t, -1, 3), lambda i, j: (i + 1 <= j) & (j <= i + 3)),
    "band 3 -1": (lambda t: ga.band(t, 3, -1), lambda i, j: (i - 3 <= j) & (j <= i - 1)),
    "band 0 -1": (lambda t: ga.band(t, 0, -1), lambda i, j: (i < 0) & (j < 0)),
    "band long": (lambda t: ga.band(t, 99, 99), lambda i, j: (i >= 0) & (j >= 0)),
    "window 1": (lambda t: ga.window(t, 1), lambda i, j: i == j),
    "window 3": (lambda t: ga.window(t, 3), lambda i, j: (i - 3 < j) & (j <= i)),
    "prefix": (lambda t: ga.prefix(t, t // 2), lambda i, j: (j <= i) | (j < i.numel() // 2)),
    "dilated": (lambda t: ga.dilated(t, 3, 2), lambda i, j: (j <= i) & ((i - j) % 2 == 0) & (i - j <= 4)),
    "dilated 1": (lambda t: ga.dilated(t, 3, 1), lambda i, j: (j <= i) & (i - j <= 2)),
    "strided": (lambda t: ga.strided(t, 3), lambda i, j: (j <= i) & ((i - j < 3) | ((i - j) % 3 == 0))),
    "fixed 1": (lambda t: ga.fixed(t, 4), lambda i, j: (j <= i) & ((i // 4 == j // 4) | (j % 4 >= 3))),
    "fixed 2": (lambda t: ga.fixed(t, 4, 2), lambda i, j: (j <= i) & ((i // 4 == j // 4) | (j % 4 >= 2))),
    "fixed 0": (lambda t: ga.fixed(t, 4, 0), lambda i, j: (j <= i) & (i // 4 == j // 4)),
    "global": (
        lambda t: ga.global_tokens(t, [x for x in (0, 3, 4, 4) if x < t]),
        lambda i, j: torch.isin(i, torch.tensor([0, 3, 4])) | torch.isin(j, torch.tensor([0, 3, 4])),
    ),
    "shifted": (lambda t: ga.shifted_window(t, 4, 2), lambda i, j: (i + 2) // 4 == (j + 2) // 4),
    "neighborhood": (lambda t: ga.neighborhood(t, 2), lambda i, j: (i - j).abs() <= 2),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("t", SIZES)
def test_formula(name: str, t: int) -> None:
    make, formula = FORMULAS[name]
    same(make(t), formula(*grid(t)))


@pytest.mark.parametrize("t,s", [(2, 5), (5, 2), (3, 3), (0, 4), (4, 0)])
def test_rectangles(t: int, s: int) -> None:
    i, j = grid(t, s)
    every = (i >= 0) & (j >= 0)
    same(ga.full(t, s), every)
    same(ga.bipartite(t, s), every)
    same(ga.empty(t, s), ~every)
    same(ga.causal(t, s, align="start"), j <= i)
    same(ga.causal(t, s, align="end"), j <= i + s - t)
    if t != s:
        with pytest.raises(ValueError, match="align"):
            ga.causal(t, s)


def test_c01_alignment_of_causal_is_named() -> None:
    v = torch.arange(5.0)[:, None]
    q, k = torch.zeros(2, 1), torch.zeros(5, 1)
    assert ga.attend(q, k, v, ga.causal(2, 5, align="start"), backend="reference").flatten().tolist() == [0, 0.5]
    assert ga.attend(q, k, v, ga.causal(2, 5, align="end"), backend="reference").flatten().tolist() == [1.5, 2.0]


def test_e08_more_targets_than_sources() -> None:
    assert ga.causal(5, 2, align="end").degree().tolist() == [0, 0, 0, 1, 2]


def test_k8_closed_form_counts() -> None:
    for t in SIZES:
        assert ga.full(t, 7).num_edges == 7 * t
        assert ga.causal(t).num_edges == t * (t + 1) // 2
        for w in (1, 2, 7):
            assert ga.window(t, w).num_edges == sum(min(i + 1, w) for i in range(t))
            assert ga.dilated(t, w, 3).num_edges == sum(min(i // 3 + 1, w) for i in range(t))
    assert ga.window(6, 3).degree().tolist() == [1, 2, 3, 3, 3, 3]  # C04
    assert ga.band(6, 2, 2).num_edges == 24 and ga.band(6, 3, 3).num_edges == 30
    assert ga.documents([3, 2, 1]).num_edges == 14 and (ga.causal(6) & ga.documents([3, 2, 1])).num_edges == 10  # C07


def test_padding_is_per_sample() -> None:
    graph = ga.padding([3, 0, 4], 4, t=2)
    assert graph.shape == (3, 1, 2, 4) and graph.degree().flatten().tolist() == [3, 3, 0, 0, 4, 4]
    assert ga.padding(torch.tensor([2], dtype=torch.int32), 3).shape == (1, 1, 3, 3)
    with pytest.raises(ValueError, match="5.*4 sources"):
        ga.padding([3, 5], 4)


def test_c06_composition_never_reopens_padding() -> None:
    """Two left pads, then three tokens of prefix: in whatever order it is put together."""
    keep = ga.from_key_padding([0, 0, 1, 1, 1, 1], "keep")
    want = [[], [], [2, 3, 4], [2, 3, 4], [2, 3, 4], [2, 3, 4, 5]]
    for graph in (ga.prefix(6, 5) & keep, keep & ga.prefix(6, 5), (ga.causal(6) & keep) | (ga.prefix(6, 5) & keep)):
        mask = ga.to_mask(graph)
        assert not mask[:, :2].any()
        assert [row.nonzero().flatten().tolist() for row in mask][2:] == want[2:]


def test_c10_documents_must_fill_the_tokens() -> None:
    with pytest.raises(ValueError, match="7.*9"):
        ga.documents([3, 4], t=9)
    assert ga.documents([3, 4], t=7).shape == (7, 7)
    assert ga.documents([0, 2, 0]) == ga.full(2)


def test_e10_fewer_keys_than_queries_per_document() -> None:
    graph = ga.disjoint([ga.causal(3, 1, align="end"), ga.causal(2, 1, align="end")])
    assert [e.tolist() for e in graph.edges()] == [[2, 4], [0, 1]]


def test_disjoint_and_stack_are_blocks() -> None:
    a, b = (torch.rand(*shape) < 0.5 for shape in ((2, 1, 3, 4), (1, 3, 2, 5)))
    want = torch.zeros(2, 3, 5, 9, dtype=torch.bool)
    want[:, :, :3, :4], want[:, :, 3:, 4:] = a, b
    same(ga.disjoint([ga.from_mask(a), ga.from_mask(b)]), want)
    c = torch.rand(3, 4) < 0.5
    plain = ga.disjoint([ga.from_mask(c), ga.empty(2, 0), ga.from_mask(c)])
    same(plain, torch.cat([torch.cat([c, c & False], 1), torch.zeros(2, 8).bool(), torch.cat([c & False, c], 1)]))
    assert ga.disjoint([]) == ga.empty(0)
    x, y = (torch.rand(*shape) < 0.5 for shape in ((2, 3, 3, 4), (1, 3, 3, 4)))
    same(
        ga.stack([ga.from_mask(x), ga.from_mask(y), ga.from_mask(c)], "batch"), torch.cat([x, y, c.expand(1, 3, 3, 4)])
    )
    same(ga.stack([ga.from_mask(c), ga.from_mask(x)], "head"), torch.cat([c.expand(2, 1, 3, 4), x], 1))
    with pytest.raises(ValueError, match="one size"):
        ga.stack([ga.full(2), ga.full(3)], "head")
    with pytest.raises(ValueError, match="at least one"):
        ga.stack([], "batch")
    with pytest.raises(ValueError, match="axis"):
        ga.stack([ga.full(2)], "rows")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1, 1), (0, 3)])
def test_grids(shape: tuple[int, ...]) -> None:
    at = torch.tensor(list(itertools.product(*map(range, shape)))).view(-1, len(shape))
    gap = (at[:, None] - at[None]).abs()
    for r in (0, 1, 2):
        near = (gap <= r).all(-1)
        same(ga.neighborhood(shape, r), near)
        same(ga.neighborhood(shape, r, causal=True), near.tril())
    mixed = tuple(range(len(shape)))
    same(ga.neighborhood(shape, mixed), (gap <= torch.tensor(mixed)).all(-1))
    for w, m in itertools.product((1, 2, 3), (0, 1, 2)):
        cell = torch.div(at + m, w, rounding_mode="floor")
        same(ga.shifted_window(shape, w, m), (cell[:, None] == cell[None]).all(-1))


def test_blocks_of_any_size() -> None:
    for sizes in ([2, 1, 3], [0, 2, 0, 1], []):
        block = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        same(ga.block_causal(sizes), block[:, None] >= block)
        coarse = torch.rand(len(sizes), len(sizes)) < 0.5
        same(ga.block_sparse(ga.from_mask(coarse), sizes), coarse[block][:, block])
    mask, rows, cols = torch.rand(2, 3, 4, 3) < 0.5, torch.tensor([1, 0, 2, 3]), torch.tensor([2, 2, 1])
    same(ga.block_sparse(ga.from_mask(mask), rows, cols), mask.repeat_interleave(rows, 2).repeat_interleave(cols, 3))
    same(ga.block_sparse(ga.from_mask(mask), 2), mask.repeat_interleave(2, 2).repeat_interleave(2, 3))
    with pytest.raises(ValueError, match="3 sizes.*4 target"):
        ga.block_sparse(ga.full(4), [1, 2, 3])


def test_bigbird_is_algebra_of_its_parts() -> None:
    graph = ga.bigbird(100, 8, window=3, global_blocks=1, random_blocks=2, seed=5)
    sizes = [8] * 12 + [4]
    part = ga.band(13, 1, 1) | ga.global_tokens(13, [0]) | ga.random_regular(13, 2, 5)
    assert graph == ga.block_sparse(part, sizes)
    assert ga.bigbird(5, 8) == ga.full(5)


def test_random_graphs_are_regular_and_repeatable() -> None:
    for t in (2, 7, 40):
        for d in {0, 1, t // 2, t - 1}:
            graph = ga.random_regular(t, d, seed=3)
            assert (graph.degree() == d).all() and (graph & ga.self_loops(t)).num_edges == 0
            assert graph == ga.random_regular(t, d, seed=3)
    assert ga.random_regular(40, 5, 3) != ga.random_regular(40, 5, 4)
    # each source is as likely as another: 4 sigma of 20,000 draws
    counts = sum(torch.bincount(ga.random_regular(20, 5, s).edges()[1], minlength=20) for s in range(200))
    assert ((counts - 1000).abs() < 4 * (1000 * 0.95) ** 0.5).all()
    with pytest.raises(ValueError, match="others"):
        ga.random_regular(4, 4, 0)


def test_expander_is_symmetric_connected_and_covers_fast() -> None:
    graph = ga.expander(1000, 6, seed=1)
    assert graph == graph.T and int(graph.degree().max()) <= 6 and graph.num_edges > 5900
    assert ga.layers_to_cover(graph) <= 6  # type: ignore[operator]
    assert ga.layers_to_cover(ga.expander(501, 2, seed=1)) == 250  # one cycle
    with pytest.raises(ValueError, match="even"):
        ga.expander(10, 3, 0)


def test_tree_ancestors() -> None:
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        t = int(torch.randint(0, 9, (), generator=g))
        name = torch.randperm(t, generator=g).tolist()  # children may come before parents
        parent = [-1] * t
        for k in range(1, t):
            up = int(torch.randint(-1, k, (), generator=g))
            parent[name[k]] = -1 if up < 0 else name[up]
        mask = torch.zeros(t, t, dtype=torch.bool)
        for i in range(t):
            j = i
            while j >= 0:
                mask[i, j], j = True, parent[j]
        same(ga.tree_ancestors(parent), mask)
    assert ga.tree_ancestors(torch.arange(-1, 99)) == ga.causal(100)
    with pytest.raises(ValueError, match="node 1.*cycle"):
        ga.tree_ancestors([-1, 2, 1])
    with pytest.raises(ValueError, match="3.*3 nodes"):
        ga.tree_ancestors([-1, 3, 0])


def test_shared_prefix_and_encoder_decoder() -> None:
    group = torch.tensor([0, 0, 1, 1, 3])
    i, j = grid(5)
    same(ga.shared_prefix(2, [2, 0, 1]), (j <= i) & ((group[j] == 0) | (group[i] == group[j])))
    same(ga.encoder_decoder(2, 3), ((i < 2) & (j < 2)) | ((i >= 2) & (j <= i)))
    enc, dec, cross = torch.rand(2, 2) < 0.5, torch.rand(3, 3) < 0.5, torch.rand(3, 2) < 0.5
    whole = torch.cat([torch.cat([enc, torch.zeros(2, 3).bool()], 1), torch.cat([cross, dec], 1)])
    same(ga.encoder_decoder(*(ga.from_mask(x) for x in (enc, dec, cross))), whole)
    with pytest.raises(ValueError, match="cross"):
        ga.encoder_decoder(2, 3, ga.full(2, 3))


def test_k_hop_is_distance() -> None:
    for seed in range(20):
        mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)) < 0.2
        one, reach = mask.float(), torch.eye(6)
        for k in range(4):
            want = ((reach > 0) & ~torch.eye(6, dtype=torch.bool)) | (mask & (k > 0))
            same(ga.k_hop(ga.from_mask(mask), k), want)
            reach = ((one + torch.eye(6)) @ reach > 0).float()


def test_composition_per_sample_and_per_head() -> None:
    """Causal inside each document, another length per sample, another window per head."""
    docs = ga.stack([ga.documents([3, 2]), ga.documents([1, 4])], "batch")
    heads = ga.stack([ga.window(5, 2), ga.full(5), ga.band(5, 1, 1)], "head")
    graph = ga.causal(5) & docs & heads & ga.padding([5, 4], 5)
    assert graph.lead == (2, 3)
    i, j = grid(5)
    doc = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    for b in range(2):
        near = [(i - 2 < j) & (j <= i), (i >= 0) & (j >= 0), (i - j).abs() <= 1]
        for h in range(3):
            want = (j <= i) & (doc[b][i] == doc[b][j]) & near[h] & (j < (5, 4)[b])
            same(graph.select(b, h), want)


def test_sizes_are_checked() -> None:
    for bad in (lambda: ga.full(-1), lambda: ga.window(4, 0), lambda: ga.prefix(3, 4), lambda: ga.fixed(4, 2, 3)):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(TypeError):
        ga.causal(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit"):
        ga.strided(2**20, 2)


HUGE = """
ga.full(2**40) ga.full(2**27,2**40) ga.causal(2**40) ga.causal(2**27,2**40,"start") ga.empty(2**27,2**40)
ga.band(2**40,1) ga.window(2**40,3) ga.prefix(2**40,3) ga.bipartite(2**40,3) ga.self_loops(2**40)
ga.padding([1]*1000,2**20) ga.padding([1],4,2**40) ga.documents([2**30]) ga.documents([2**62]*4)
ga.disjoint([ga.full(2**20)]*1000) ga.stack([ga.full(2**20)]*1000,"batch") ga.stack([ga.full(2**20)]*1000,"head")
ga.dilated(2**20,2**20,2) ga.strided(2**22,3) ga.fixed(2**22,3) ga.global_tokens(2**20,range(0,2**20,2))
ga.random_regular(2**20,2**19,0) ga.expander(2**20,2**20,0) ga.bigbird(2**40,64) ga.bigbird(2**27,1)
ga.block_sparse(ga.causal(8),2**36) ga.block_sparse(ga.causal(4),[2**40]*4) ga.block_sparse(ga.causal(4),[2**62]*4)
ga.block_sparse(ga.empty(10**6),2**36) ga.block_sparse(ga.causal(2),[1,1],[2**62,2**62])
ga.block_sparse(ga.causal(2).expand(1000,1),2**18) ga.block_causal([2**40,1])
ga.neighborhood((2**20,2**20),1) ga.neighborhood((0,2**34),1) ga.neighborhood((4096,4096),4096)
ga.neighborhood((2**14,2**14),1,causal=True) ga.shifted_window((2**20,2**20),4) ga.shifted_window(2**30,4)
ga.shared_prefix(2**40,[1]) ga.shared_prefix(1,[2**62]*4) ga.encoder_decoder(2**40,2)
ga.k_hop(ga.dilated(2**12,2**12,2),2)
ga.causal(2**10).expand(2**20,2**10) ga.dilated(2**10,2**10,2).expand(2**9,2**7)
ga.dilated(2**10,2**10,2)[[1023]*10**6,:] ga.causal(2**20).expand(1,1)|ga.empty(2**20).expand(1000,1)
"""


def test_huge_sizes_are_refused_before_anything_is_built() -> None:
    """Each of them would take from 20 GiB to more than there is; the process may not have 6."""
    pytest.importorskip("resource")
    calls = HUGE.split()
    program = f"""
import resource, time, torch, graphattn as ga
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
for call in {calls!r}:
    start = time.process_time()
    try:
        print(call, eval(call))
    except ValueError as error:
        late = time.process_time() - start > 5
        if late or not any(word in str(error) for word in ("over the limit of", "too many cells to number")):
            print(call, error, late)
    except BaseException as error:
        print(call, type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr


def test_every_pattern_is_tried_with_a_huge_size() -> None:
    from graphattn import patterns

    ours = [n for n, f in vars(patterns).items() if getattr(f, "__module__", "") == patterns.__name__ and n[0] != "_"]
    missing = [n for n in ours if f"ga.{n}(" not in HUGE]
    assert missing == ["tree_ancestors"]  # as large as what it is given


@pytest.mark.parametrize("bad", [True, torch.tensor(True), 2.0, "2", None])
def test_numbers_of_patterns_are_integers(bad: object) -> None:
    for make in (
        lambda: ga.causal(bad),  # type: ignore[arg-type]
        lambda: ga.window(4, bad),  # type: ignore[arg-type]
        lambda: ga.bigbird(8, bad),  # type: ignore[arg-type]
        lambda: ga.block_sparse(ga.causal(2), bad),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, ValueError), match="integer"):
            make()


@pytest.mark.parametrize("make", [ga.causal, lambda t: ga.window(t, 128), lambda t: ga.prefix(t, 1000)])
def test_k14_a_million_tokens_cost_their_runs(make: Callable[[int], ga.Graph]) -> None:
    graph = make(2**20)
    assert graph.num_runs == 2**20 and sum(x.numel() for x in (graph.indptr, graph.start, graph.stop)) < 2**22
