"""FlexAttention: predicates of any graph, and block masks straight from runs, exact per element."""

from __future__ import annotations

import copy
import pickle
import shutil

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import graphattn as ga
from graphattn.convert.flex import _Bits, _Runs

TABLES = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
TABLES += ["q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def ragged(seed: int, *shape: int) -> Tensor:
    """Some long runs, some single edges, some empty rows."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(*shape, generator=g) < (0.02, 0.3, 0.9)[seed % 3]
    t, s = shape[-2:]
    for _ in range(3):
        a, b = sorted(torch.randint(0, s + 1, (2,), generator=g).tolist())
        c, d = sorted(torch.randint(0, t + 1, (2,), generator=g).tolist())
        mask[..., c:d, a:b] = True
    mask[..., t // 2, :] = False
    return mask


SHAPES = [(5, 7), (130, 70), (7, 4500), (2, 3, 17, 33), (1, 2, 9, 130), (3, 1, 11, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_predicates_answer_for_every_pair(shape: tuple[int, ...]) -> None:
    lead = shape[:-2] or (1, 1)
    for seed in range(3):
        mask = ragged(seed, *shape)
        graph = ga.from_mask(mask)
        predicate = pickle.loads(pickle.dumps(ga.to_predicate(graph)))  # F09: pickles, as a worker needs
        assert torch.equal(create_mask(predicate, *lead, *shape[-2:], device="cpu").view(shape), mask)
        assert ga.from_predicate(predicate, shape) == graph


def test_both_kinds_of_predicate_are_met() -> None:
    few, many = (
        ga.window(300, 7) | ga.from_mask(torch.eye(300).bool().flip(0)),
        ga.random_regular(300, 40, 0) | ga.causal(300),
    )
    assert isinstance(ga.to_predicate(few), _Runs) and isinstance(ga.to_predicate(many), _Bits)
    for graph in (few, many):
        assert ga.from_predicate(ga.to_predicate(graph), 300) == graph


def test_words_of_words() -> None:
    """Runs over 64 and over 4096 sources use one bit of a higher level, beside ragged ends."""
    mask = torch.zeros(3, 20_000, dtype=torch.bool)
    for a, b in ((1, 3), (5, 70), (100, 4300), (4301, 4302), (8192, 16_384), (16_400, 20_000)):
        mask[1, a:b] = True
    graph = ga.from_mask(mask)
    predicate = ga.to_predicate(graph)
    assert isinstance(predicate, _Bits) and len(predicate.tables) == 3
    assert sum(rows.numel() for rows, _, _ in predicate.tables) < 300
    assert ga.from_predicate(predicate, mask.shape) == graph


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [128, 8, (4, 16)])
def test_block_masks_are_those_of_create_block_mask(shape: tuple[int, ...], block: int | tuple[int, int]) -> None:
    lead = shape[:-2] or (1, 1)
    for seed in range(3):
        graph = ga.from_mask(ragged(seed, *shape))
        ours = ga.to_block_mask(graph, block)
        theirs = create_block_mask(ga.to_predicate(graph), *lead, *shape[-2:], device="cpu", BLOCK_SIZE=block)
        for name in TABLES:
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a.dtype == b.dtype and torch.equal(a, b), name
        assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
        assert ga.from_block_mask(ours) == ga.from_block_mask(theirs) == graph


def test_f01_exact_per_element_not_per_block() -> None:
    mask = create_block_mask(causal, None, None, 200, 200, device="cpu")
    assert int(mask.to_dense().sum()) == 3
    assert ga.from_block_mask(mask) == ga.causal(200) and ga.causal(200).num_edges == 20_100
    coarse = create_block_mask(causal, None, None, 200, 200, device="cpu", separate_full_blocks=False)
    assert ga.from_block_mask(coarse) == ga.causal(200)
    alone = BlockMask.from_kv_blocks(torch.tensor([[[1]]]), torch.tensor([[[[0]]]]), seq_lengths=(5, 7))
    assert ga.from_block_mask(alone) == ga.full(5, 7)  # no predicate: blocks are whole, and end where the sequence does


@pytest.mark.parametrize("s", [1, 127, 129, 200, 1025])
def test_f02_lengths_that_fill_no_block(s: int) -> None:
    graph = ga.causal(129, s, align="end")
    q, k, v = torch.randn(1, 1, 129, 8), torch.randn(1, 1, s, 8), torch.randn(1, 1, s, 8)
    out = flex_attention(q, k, v, block_mask=ga.to_block_mask(graph))
    torch.testing.assert_close(out, ga.attend(q, k, v, graph, backend="reference"), atol=1e-5, rtol=1e-5)


def test_f03_another_length_is_refused() -> None:
    q = torch.randn(1, 1, 512, 8)
    with pytest.raises(ValueError):
        flex_attention(q, q, q, block_mask=ga.to_block_mask(ga.causal(1024)))


def test_a_sliced_block_mask_has_lost_its_predicate() -> None:
    mask = ga.to_block_mask(ga.window(300, 5))
    with pytest.raises(ValueError, match="sliced"):
        ga.from_block_mask(mask[:, :, :1])


def test_f05_f09_copies_keep_the_edges() -> None:
    for graph in (ga.causal(20), ga.random_regular(20, 9, 0), ga.padding([3, 5], 7)):
        for again in (graph.to("cpu"), copy.deepcopy(graph), copy.copy(graph), pickle.loads(pickle.dumps(graph))):
            assert again == graph
        mask = pickle.loads(pickle.dumps(ga.to_block_mask(graph, 8)))
        assert ga.from_block_mask(mask) == (graph if graph.lead != (1, 1) else graph.select(0, 0))


def test_f10_offsets_of_each_sample_and_blocks_that_do_not_divide() -> None:
    offsets = torch.tensor([0, 3])

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q + offsets[b] >= kv

    graph = ga.from_predicate(shifted, (2, 1, 10, 13))
    i, j = torch.arange(10)[:, None], torch.arange(13)
    assert torch.equal(ga.to_mask(graph)[:, 0], torch.stack([i >= j, i + 3 >= j]))
    assert ga.from_block_mask(create_block_mask(shifted, 2, 1, 10, 13, device="cpu", BLOCK_SIZE=8)) == graph
    assert ga.from_block_mask(ga.to_block_mask(graph, 8)) == graph
    for bad in (lambda b, h, q, kv: q.item() >= kv, lambda b, h, q, kv: q >= kv if q > 3 else q == kv):
        with pytest.raises(ValueError, match="tensor operations"):
            ga.from_predicate(bad, (10, 13))
    with pytest.raises(ValueError, match="bool"):
        ga.from_predicate(lambda b, h, q, kv: q - kv, (10, 13))


def test_a_table_of_blocks_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="GiB"):
        ga.to_block_mask(ga.empty(2**22))


@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention compiles with g++")
def test_compiled_flex_gives_the_same_output() -> None:
    graph = ga.causal(70, 90, align="end") & ga.from_mask(torch.rand(70, 90) < 0.5)
    assert isinstance(ga.to_predicate(graph), _Bits)
    q, k, v = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16)
    mask = create_block_mask(ga.to_predicate(graph), None, None, 70, 90, device="cpu")
    compiled = torch.compile(flex_attention)
    out = compiled(q, k, v, block_mask=ga.to_block_mask(graph))
    assert torch.equal(out, compiled(q, k, v, block_mask=mask))
    torch.testing.assert_close(out, ga.attend(q, k, v, graph, backend="reference"), atol=1e-5, rtol=1e-5)
