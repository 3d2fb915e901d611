"""Converters: every pair keeps every graph it can say, in the stated orientation and polarity, and refuses the rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

import graphattn as ga

LEADS = [(), (), (), (1, 1), (2, 1), (1, 3), (2, 3)]


def random_mask(seed: int) -> Tensor:
    """Rectangles, empty rows, isolated last nodes, no edges, leading axes, long runs; sizes 0 and 1 too."""
    g = torch.Generator().manual_seed(seed)
    lead = LEADS[int(torch.randint(0, len(LEADS), (), generator=g))]
    t, s = torch.randint(0, 8, (2,), generator=g).tolist()
    if seed % 3 == 0:
        s = t
    mask = torch.rand(*lead, t, s, generator=g) < torch.rand((), generator=g)
    if seed % 5 == 0 and t and s:
        mask[..., -1, :] = False
        mask[..., -1] = False
    if seed % 7 == 0:
        mask = mask & False
    if seed % 11 == 0 and t:
        mask[..., : t // 2, :] = True
    return mask


MASKS = [random_mask(seed) for seed in range(300)]


def square(g: ga.Graph) -> bool:
    return not g.lead and g.t == g.s


# name -> (there and back, which graphs the format can express)
PAIRS: dict[str, tuple[Callable[[ga.Graph], Any], Callable[[ga.Graph], bool]]] = {
    "mask": (lambda g: ga.from_mask(ga.to_mask(g)), lambda g: True),
    "additive": (lambda g: ga.from_additive(ga.to_additive(g)), lambda g: True),
    "additive bf16": (lambda g: ga.from_additive(ga.to_additive(g, torch.bfloat16)), lambda g: True),
    "edge_index": (lambda g: ga.from_edge_index(ga.to_edge_index(g), g.shape), lambda g: not g.lead),
    "csr": (lambda g: ga.from_csr(*ga.to_csr(g), g.shape), lambda g: not g.lead),
    "scipy": (lambda g: ga.from_scipy(ga.to_scipy(g)), lambda g: not g.lead),
    "networkx": (lambda g: ga.from_networkx(ga.to_networkx(g)), square),
    "pyg": (lambda g: ga.from_pyg(ga.to_pyg(g)), square),
    "hf": (lambda g: ga.from_hf(ga.to_hf(g)), lambda g: bool(g.lead)),
    "hf bool": (lambda g: ga.from_hf(ga.to_hf(g, torch.bool)), lambda g: bool(g.lead)),
    "predicate": (lambda g: ga.from_predicate(ga.to_predicate(g), g.shape), lambda g: True),
    "block mask": (
        lambda g: (
            ga.from_block_mask(ga.to_block_mask(g, (2, 4))).expand(*g.lead)
            if g.lead
            else ga.from_block_mask(ga.to_block_mask(g, (2, 4)))
        ),
        lambda g: True,
    ),
    "pickle": (lambda g: pickle.loads(pickle.dumps(g)), lambda g: True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_round_trips(name: str) -> None:
    there_and_back, can = PAIRS[name]
    said = 0
    for mask in MASKS:
        graph = ga.from_mask(mask)
        assert graph.num_edges == int(mask.sum())
        if can(graph):
            said += 1
            assert there_and_back(graph) == graph, mask
        else:
            with pytest.raises(ValueError, match="Graph"):
                there_and_back(graph)
    assert said > 20


def first_edge(graph: ga.Graph) -> str:
    row, source = (int(x[0]) for x in graph.edges())
    return f"{source} -> {row % graph.t}"


@pytest.mark.parametrize("to", [ga.to_edge_index, ga.to_csr, ga.to_scipy, ga.to_networkx, ga.to_pyg, ga.to_cu_seqlens])
def test_refusals_name_the_first_edge(to: Callable[[ga.Graph], Any]) -> None:
    graph = ga.from_mask(torch.tensor([[[[0, 0], [0, 1], [1, 0]]]]).bool())
    with pytest.raises(ValueError, match=first_edge(graph)):
        to(graph)


# ---------------------------------------------------------------------- polarity (M)


def test_m01_blocked_is_the_complement() -> None:
    blocked = torch.ones(3, 3).bool().triu(1)
    graph = ga.from_mask(~blocked)
    assert graph == ga.causal(3) and graph.num_edges == 6
    v = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    out = ga.attend(torch.randn(3, 2), torch.randn(3, 2), v, graph, backend="reference")
    (grad,) = torch.autograd.grad(out[0].sum(), v)
    assert out[0].item() == 1 and grad.flatten().tolist() == [1, 0, 0]
    assert ga.from_mask(blocked) != graph  # the complement is never the same graph


def test_m03_key_padding_says_what_true_means() -> None:
    for graph in (
        ga.from_key_padding(torch.tensor([[1, 1, 0]]), true_means="keep"),
        ga.from_key_padding(torch.tensor([[False, False, True]]), true_means="drop"),
        ga.from_hf(torch.tensor([[1, 1, 0]])),
    ):
        assert graph.shape == (1, 1, 3, 3) and graph.num_edges == 6
        assert graph.degree().flatten().tolist() == [2, 2, 2] and not ga.to_mask(graph)[..., 2].any()
    with pytest.raises(TypeError):
        ga.from_key_padding(torch.ones(1, 3))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="2"):
        ga.from_key_padding(torch.tensor([[1, 2, 0]]), "keep")
    with pytest.raises(TypeError, match="float"):
        ga.from_key_padding(torch.ones(1, 3), "keep")
    with pytest.raises(ValueError, match="true_means"):
        ga.from_key_padding(torch.ones(1, 3).bool(), "mask")  # type: ignore[arg-type]


def test_key_padding_pair() -> None:
    for seed in range(50):
        keep = torch.rand(3, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
        for true_means in ("keep", "drop"):
            graph = ga.from_key_padding(keep, true_means, t=2)  # type: ignore[arg-type]
            assert torch.equal(ga.to_key_padding(graph, true_means), keep)  # type: ignore[arg-type]
            plain = ga.from_key_padding(keep[0], true_means)  # type: ignore[arg-type]
            assert not plain.lead and torch.equal(ga.to_key_padding(plain, true_means), keep[0])  # type: ignore[arg-type]
    assert ga.from_key_padding(torch.ones(2, 3).bool(), "keep") == ga.padding([3, 3], 3)
    for graph, words in (
        (ga.causal(3), "edge 1 -> 1"),
        (ga.full(0, 3), "no targets"),
        (ga.full(2).expand(1, 2), "heads"),
    ):
        with pytest.raises(ValueError, match=words):
            ga.to_key_padding(graph, "keep")


def test_m05_mask_types() -> None:
    want = ga.causal(3)
    rows = [[True, False, False], [True, True, False], [True, True, True]]
    for mask in (torch.tensor(rows), np.array(rows), rows, np.asmatrix(rows)):
        assert ga.from_mask(mask) == want
    for dtype in (torch.uint8, torch.int64, torch.float32):
        with pytest.raises(TypeError, match="bool"):
            ga.from_mask(torch.tensor(rows).to(dtype))
    with pytest.raises(ValueError, match="batch and heads alike"):
        ga.from_mask(torch.ones(2, 3, 3).bool())


def test_additive_masks_hold_zero_and_minus_infinity_only() -> None:
    graph = ga.from_mask(torch.tensor([[True, False]]))
    assert ga.to_additive(graph).tolist() == [[0, -torch.inf]]
    for value in (1.0, -1e9, torch.finfo(torch.float32).min, torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"at \[0, 1\]"):
            ga.from_additive(torch.tensor([[0.0, value]]))
    with pytest.raises(TypeError, match="floating"):
        ga.from_additive(torch.ones(2, 2, dtype=torch.int64))


def test_hugging_face_masks() -> None:
    graph = ga.causal(3).expand(2, 1)
    mask = ga.to_hf(graph, torch.float16)
    assert mask.shape == (2, 1, 3, 3) and set(mask.unique().tolist()) == {0, torch.finfo(torch.float16).min}
    assert ga.from_hf(mask) == ga.from_hf(mask == 0) == graph
    assert ga.from_hf(torch.zeros(1, 1, 2, 2).masked_fill(torch.eye(2).bool(), -torch.inf)).num_edges == 2
    assert ga.from_hf(torch.tensor([[1, 0]]), t=3).shape == (1, 1, 3, 2)
    with pytest.raises(ValueError, match="-1"):
        ga.from_hf(torch.full((1, 1, 2, 2), -1.0))
    with pytest.raises(TypeError, match="int64"):
        ga.from_hf(torch.ones(1, 1, 2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="expand"):
        ga.to_hf(ga.causal(3))


# ---------------------------------------------------------------------- orientation (D)


def test_d01_one_edge_in_every_format() -> None:
    """The edge 0 -> 1: target 1 reads source 0."""
    graph = ga.from_edge_index([[0], [1]], 2)
    assert ga.to_mask(graph).nonzero().tolist() == [[1, 0]]
    assert ga.to_edge_index(graph).tolist() == [[0], [1]]
    assert list(ga.to_networkx(graph).edges) == [(0, 1)]
    assert ga.to_scipy(graph).toarray().tolist() == [[0, 1], [0, 0]]
    assert [x.tolist() for x in ga.to_csr(graph)] == [[0, 0, 1], [0]]
    assert ga.to_pyg(graph).edge_index.tolist() == [[0], [1]]
    zero, one = torch.tensor(0), torch.tensor(1)
    predicate = ga.to_predicate(graph)
    assert bool(predicate(zero, zero, one, zero)) and not bool(predicate(zero, zero, zero, one))
    out = ga.attend(torch.randn(2, 1), torch.randn(2, 1), torch.tensor([[5.0], [7.0]]), graph, backend="reference")
    assert out.flatten().tolist() == [0, 5]
    assert ga.to_edge_index(ga.causal(3)).tolist() == [[0, 0, 1, 0, 1, 2], [0, 1, 1, 2, 2, 2]]


def test_d04_networkx_is_the_transpose_of_the_mask() -> None:
    graph = ga.causal(3)
    dense = nx.to_numpy_array(ga.to_networkx(graph), nodelist=range(3))
    assert (ga.to_mask(graph).numpy() == dense.T).all()
    assert ga.from_networkx(nx.from_numpy_array(dense, create_using=nx.DiGraph)) == graph
    assert ga.from_scipy(sp.csr_array(dense)) == graph


def test_k3_reversing_is_noticed() -> None:
    star = ga.from_edge_index([[1, 2, 3], [0, 0, 0]], (4, 5))
    assert star.degree().tolist() == [3, 0, 0, 0] and star.T.degree().tolist() == [0, 1, 1, 1, 0]
    assert ga.from_scipy(ga.to_scipy(star).T.tocsr()) == star.T


# ---------------------------------------------------------------------- edge lists (G)


def test_g01_g03_an_edge_list_is_a_set() -> None:
    graph = ga.from_edge_index([[0, 0, 1], [2, 2, 2]], 3)
    assert graph.num_edges == 2 and ga.to_mask(graph)[2].tolist() == [True, True, False]
    pairs = ga.to_edge_index(ga.causal(8))
    assert ga.from_edge_index(pairs[:, torch.randperm(36)], 8) == ga.causal(8)
    multi = nx.MultiDiGraph([(0, 2), (0, 2), (1, 2)])
    assert ga.from_networkx(multi) == graph


def test_g04_ids_follow_each_edge() -> None:
    pairs = torch.tensor([[1, 2, 0, 2, 0, 1], [0, 0, 1, 1, 2, 2]])
    values = torch.tensor([5, 4, 3, 2, 1, 0])
    graph, ids = ga.from_edge_index(pairs, 3, return_ids=True)
    own = torch.empty(6, dtype=values.dtype)
    own[ids] = values
    assert torch.equal(ga.edge_ids(graph, pairs), ids) and torch.equal(own[ids], values)
    assert torch.equal(ga.to_edge_index(graph)[:, ids], pairs)
    by_source = torch.argsort(pairs[0] * 3 + pairs[1])  # sorted by (source, target), as the report has it
    assert own[ga.edge_ids(graph, pairs[:, by_source])].tolist() == [3, 1, 5, 0, 4, 2]
    doubled, ids = ga.from_edge_index([[0, 1, 0], [1, 1, 1]], 2, return_ids=True)
    assert ids.tolist() == [0, 1, 0] and doubled.num_edges == 2
    with pytest.raises(ValueError, match="0 -> 0 is no edge"):
        ga.edge_ids(graph, [[1, 0], [0, 0]])
    with pytest.raises(ValueError, match="1 -> 1 is no edge"):  # just behind the run 0 of target 1
        ga.edge_ids(graph, [[0, 1], [1, 1]])
    with pytest.raises(ValueError, match="0 -> 0 is no edge"):
        ga.edge_ids(ga.empty(2), [[0], [0]])
    assert ga.edge_ids(ga.empty(2), torch.zeros(2, 0, dtype=torch.int64)).numel() == 0


def test_g05_integer_types() -> None:
    pairs = torch.tensor([[0, 1], [1, 1]])
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert ga.from_edge_index(pairs.to(dtype), 2) == ga.from_edge_index(pairs, 2)
    with pytest.raises(TypeError, match="float32"):
        ga.from_edge_index(pairs.float(), 2)
    with pytest.raises(TypeError, match="bool"):
        ga.from_edge_index(pairs.bool(), 2)
    wide = ga.from_edge_index(torch.tensor([[2**31 - 2], [2]], dtype=torch.int32), (3, 2**31))  # keys need 64 bits
    assert ga.to_edge_index(wide).tolist() == [[2**31 - 2], [2]]


def test_g06_out_of_range() -> None:
    for pairs in ([[0, 5], [1, 1]], [[-1], [0]], [[0], [3]]):
        with pytest.raises(ValueError, match="3 (sources|targets)"):
            ga.from_edge_index(pairs, 3)
    with pytest.raises(ValueError, match=r"\(2, E\)"):
        ga.from_edge_index([[0, 1, 2]], 3)
    with pytest.raises(ValueError):
        ga.from_csr([0, 1], [3], (1, 3))


def test_g08_rectangles_get_no_loops() -> None:
    graph = ga.from_edge_index([[0, 1, 1, 1], [0, 1, 2, 3]], (4, 2))
    assert graph.num_edges == 4
    assert ga.attend(torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 5), graph, backend="reference").shape == (
        4,
        5,
    )
    with pytest.raises(ValueError):
        graph | ga.self_loops(4)


def test_g10_stored_zeros_are_edges() -> None:
    values = sp.coo_array(([3, 0, 9, 8, 1], ([0, 2, 1, 1, 1], [1, 0, 2, 0, 1])), shape=(3, 3))
    assert ga.from_scipy(values).num_edges == 5
    csr = torch.sparse_csr_tensor([0, 1, 2], [1, 0], [0.0, 1.0], size=(2, 3))
    assert ga.to_mask(ga.from_csr(csr)).tolist() == [[False, True, False], [True, False, False]]


def test_csr_in_any_order_and_its_errors() -> None:
    assert ga.from_csr([0, 2, 2, 5], [2, 0, 1, 0, 1], (3, 3)) == ga.from_edge_index([[0, 2, 0, 1], [0, 0, 2, 2]], 3)
    with pytest.raises(ValueError, match="neither array"):
        ga.from_csr([0, 1], [0])
    with pytest.raises(ValueError, match="4"):
        ga.from_csr([0, 1], [0], (3, 3))


# ---------------------------------------------------------------------- objects (N, K5)


def test_n01_labels_need_an_order() -> None:
    graph = nx.Graph()
    graph.add_nodes_from([4, 2, 6])
    graph.add_edges_from([(4, 6), (2, 6)])
    with pytest.raises(ValueError, match="order"):
        ga.from_networkx(graph)
    got, order = ga.from_networkx(graph, order=list(graph), return_order=True)
    assert order == [4, 2, 6]
    assert ga.to_mask(got).int().tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    assert set(ga.to_networkx(got, order=order).edges) == {(4, 6), (6, 4), (2, 6), (6, 2)}
    with pytest.raises(ValueError, match="each of the 3 nodes"):
        ga.from_networkx(graph, order=[4, 2])
    late = nx.DiGraph()
    late.add_edge(2, 0)
    late.add_node(1)  # labels 0..2, added in another order: the label is the number
    assert ga.to_edge_index(ga.from_networkx(late)).tolist() == [[2], [0]]
    with pytest.raises(ValueError, match="not 0..1"):
        ga.from_networkx(nx.DiGraph([(True, False)]))


def test_n03_undirected_goes_both_ways() -> None:
    arcs = nx.DiGraph([(0, 1), (0, 3), (2, 0), (2, 1), (2, 3)])
    graph = ga.from_networkx(arcs.to_undirected())
    assert graph == graph.T and graph.num_edges == 10
    directed = ga.from_networkx(arcs)
    assert directed.num_edges == 5 and directed | directed.T == graph
    assert ga.from_networkx(nx.Graph([(0, 0), (0, 1)])).num_edges == 3


def test_e09_no_edges_keep_their_size() -> None:
    assert ga.from_networkx(nx.empty_graph(5)) == ga.empty(5)
    assert ga.from_edge_index(torch.zeros(2, 0), 4) == ga.empty(4)  # an empty list has no integer type to speak of
    assert ga.from_pyg(Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=4)) == ga.empty(4)
    assert ga.to_pyg(ga.empty(4)).num_nodes == 4


def test_pyg_batches_are_disjoint() -> None:
    parts = [ga.causal(3), ga.empty(2), ga.from_edge_index([[0], [1]], 2)]
    batch = Batch.from_data_list([ga.to_pyg(g) for g in parts])
    whole = ga.disjoint(parts)
    assert ga.from_pyg(batch) == whole
    again = ga.to_pyg(whole, lengths=[3, 2, 2])
    assert isinstance(again, Batch) and [ga.from_pyg(d) for d in again.to_data_list()] == parts
    with pytest.raises(ValueError, match="edge 0 -> 2 joins"):
        ga.to_pyg(whole, lengths=[2, 3, 2])


def test_pyg_guesses_no_number_of_nodes() -> None:
    pairs = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="num_nodes"):
        ga.from_pyg(Data(edge_index=pairs))
    assert ga.from_pyg(Data(edge_index=pairs, x=torch.zeros(4, 1))).shape == (4, 4)
    assert ga.from_pyg(Data(edge_index=pairs, num_nodes=3)).shape == (3, 3)


def test_cu_seqlens() -> None:
    graph = ga.from_cu_seqlens([0, 3, 5, 6])
    assert graph == ga.documents([3, 2, 1])
    assert ga.to_cu_seqlens(graph).tolist() == [0, 3, 5, 6] and ga.to_cu_seqlens(graph).dtype == torch.int32
    for seed in range(300):
        g = torch.Generator().manual_seed(seed)
        n = int(torch.randint(0, 5, (), generator=g))
        q, k = torch.randint(0, 4, (2, n), generator=g)
        q, k = (torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]) for x in (q, k))
        packed = ga.from_cu_seqlens(q, k)
        assert packed == ga.disjoint([ga.full(int(a), int(b)) for a, b in zip(q.diff(), k.diff(), strict=True)])
        assert ga.from_cu_seqlens(*ga.to_cu_seqlens(packed, pair=True)) == packed
        mask = torch.rand(4, 4, generator=g) < 0.4
        try:
            boundaries = ga.to_cu_seqlens(ga.from_mask(mask), pair=True)
        except ValueError as error:
            assert "->" in str(error)
        else:
            assert torch.equal(ga.to_mask(ga.from_cu_seqlens(*boundaries)), mask)
    with pytest.raises(ValueError, match="pair"):
        ga.to_cu_seqlens(ga.full(2, 3))
    for bad in ([1, 2], [0, 2, 1], []):
        with pytest.raises(ValueError, match="rise from 0"):
            ga.from_cu_seqlens(bad)


# ---------------------------------------------------------------------- cost (F07, K14)


def test_f07_dense_masks_are_refused_with_their_size() -> None:
    big = ga.causal(2**17)
    for convert in (ga.to_mask, ga.to_additive):
        with pytest.raises(ValueError, match="GiB"):
            convert(big)
    assert ga.padding([10] * 12, 13_622).num_runs == 12 * 13_622  # heads share: the same for any number of them
    wide = torch.zeros(3, 2**23, dtype=torch.bool)  # read in several blocks
    wide[1, 5:-5] = True
    assert torch.equal(ga.to_mask(ga.from_mask(wide)), wide)
