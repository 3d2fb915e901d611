"""Audits are exact: whatever the graphs let through is found, by a shortest path, and nothing else is."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphattn as ga
from graphattn.audit.page import density_map

FAR = 10**6


def hops(masks: list[Tensor], n: int) -> Tensor:
    """`(n, n)` fewest hops from source j to target i through layers with residual connections: the definition."""
    steps = np.full((n, n), FAR)
    np.fill_diagonal(steps, 0)
    for mask in masks:
        new = steps.copy()
        for i, j in mask.nonzero().tolist():
            new[i] = np.minimum(new[i], steps[j] + 1)
        steps = new
    return torch.from_numpy(steps)


def random_stack(g: torch.Generator) -> tuple[int, list[Tensor]]:
    """Masks `(T, T)` or `(B, H, T, T)`, some repeated, some causal but for a few edges, some empty."""
    t = int(torch.randint(0, 9, (), generator=g))
    batch = (1, 1, 2, 3)[int(torch.randint(0, 4, (), generator=g))]
    p = (0.02, 0.05, 0.15, 0.4)[int(torch.randint(0, 4, (), generator=g))]
    masks: list[Tensor] = []
    few = int(torch.randint(0, 3, (), generator=g)) == 0
    for _ in range(int(torch.randint(1, 6, (), generator=g))):
        kind = 5 if few else int(torch.randint(0, 6, (), generator=g))
        if kind == 0 and masks:
            masks.append(masks[-1])
            continue
        lead = [(), (), (batch, 1), (1, 2), (batch, 2)][int(torch.randint(0, 5, (), generator=g))]
        mask = torch.rand(*lead, t, t, generator=g) < p
        if kind < 4:
            mask = mask.tril() | (torch.rand(mask.shape, generator=g) < 0.02)
        if kind == 4:
            mask = mask | ga.to_mask(ga.band(t, 2, 0))
        if kind == 5:  # content moves one node down and nowhere else: leaks take many hops
            mask = ga.to_mask(ga.band(t, -1, 1))
        masks.append(mask)
    return t, masks


def of_sample(masks: list[Tensor], b: int) -> list[Tensor]:
    return [m if m.dim() == 2 else m[b if m.shape[0] > 1 else 0].any(0) for m in masks]


@pytest.mark.parametrize("seed", range(8))
def test_find_leak_equals_boolean_matrix_powers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(seed)
    if seed % 2:  # rows of many runs, and several blocks of labels, without large graphs
        monkeypatch.setattr("graphattn.audit.flow._MANY", 1)

    def coin(p: float) -> bool:
        return float(torch.rand((), generator=g)) < p

    leaks, longest = 0, 0
    for _ in range(250):
        t, masks = random_stack(g)
        layers: list[ga.Graph] = []
        for k, m in enumerate(masks):
            layers.append(layers[-1] if k and m is masks[k - 1] else ga.from_mask(m))
        offset = (1, 1, 1, 2, 0, -1, -3, 9)[int(torch.randint(0, 8, (), generator=g))]
        labels = hidden = targets = None
        if coin(0.5):
            labels = torch.randperm(t, generator=g) if coin(0.5) else torch.randint(-1, max(t, 1), (t,), generator=g)
            labels = torch.arange(t) if coin(0.2) else labels.clamp(max=t - 1)
        samples = max([m.shape[0] for m in masks if m.dim() == 4], default=1)
        many = any(m.dim() == 4 and m.shape[0] > 1 for m in masks)
        if coin(0.4):
            hidden = torch.rand(*((samples, t) if coin(0.3) and many else (t,)), generator=g) < 0.5
        if coin(0.5):
            targets = torch.rand(t, generator=g) < 0.3
        if coin(0.3) and t > 5:  # far away: several hops if at all
            labels, targets = torch.full((t,), t - 1 - int(coin(0.5))), [t - 5]
        wanted = [
            targets is None or (i in targets if isinstance(targets, list) else bool(targets[i])) for i in range(t)
        ]
        best: tuple[int, int, int] | None = None
        for b in range(samples):
            steps = hops(of_sample(masks, b), t).tolist()
            mask = None if hidden is None else hidden if hidden.dim() == 1 else hidden[b]
            for i, j in itertools.product(range(t), range(t)):
                if not wanted[i] or (mask is not None and mask[j]) or steps[i][j] >= FAR:
                    continue
                if int(labels[i]) == j if labels is not None else j >= i + offset:
                    here = (steps[i][j], b, i)
                    best = here if best is None else min(best, here)
        found = ga.find_leak(layers, offset, labels=labels, hidden=hidden, targets=targets)
        got = None if found is None else (len(found.path), found.batch or 0, found.target)
        assert got == best, (masks, offset, labels, hidden, targets)
        if found is None:
            continue
        leaks, longest = leaks + 1, max(longest, len(found.path))
        # the witness is a path of the graphs, in the order of the layers
        node, last = found.source, 0
        for hop in found.path:
            mask = masks[hop.layer - 1]
            mask = mask if mask.dim() == 2 else mask[(found.batch or 0) if mask.shape[0] > 1 else 0, hop.head or 0]
            assert hop.source == node and hop.layer > last and mask[hop.target, hop.source]
            node, last = hop.target, hop.layer
        assert node == found.target
        assert found.label == (found.target + offset if labels is None else int(labels[found.target]))
    assert leaks > 50 and longest >= 3


@pytest.mark.parametrize("table", [1, 2**28])
def test_many_labels_take_several_words_and_blocks(table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphattn.audit.flow._TABLE_BYTES", table)
    t, g = 230, torch.Generator().manual_seed(table)
    own = torch.arange(t)
    for way in (1, -1):
        ring = ga.from_edge_index(torch.stack([own.roll(way), own]), t)
        found = ga.find_leak([ring] * 5, labels=own.roll(5 * way))  # all leak, five hops away
        assert found is not None and (found.target, found.source, len(found.path)) == (0, -5 * way % t, 5)
        assert ga.find_leak([ring] * 5, labels=own.roll(6 * way)) is None
    for k in range(6):
        masks = [torch.rand(t, t, generator=g) < 0.004 for _ in range(4)]
        masks[k % 4][:, 20 : 20 + 16 * k] |= torch.rand(t, 1, generator=g) < 0.05  # long runs
        reach = [torch.eye(t)]
        for m in masks:
            reach.append(((m.float() + torch.eye(t)) @ reach[-1] > 0).float())
        layers = [ga.from_mask(m) for m in masks]
        assert torch.equal(ga.coverage(layers), torch.stack([r.sum(1) for r in reach]).long())
        # labels that are read by nobody in one hop, and then some that are reached in the end
        direct = torch.stack([m.float() for m in masks]).sum(0) + torch.eye(t)
        never = torch.where(reach[-1] > 0, -torch.inf, torch.rand(t, t, generator=g)).argmax(1)
        assert ga.find_leak(layers, labels=never) is None
        late = (reach[-1] > 0) & (direct == 0)
        for target in late.any(1).nonzero().flatten().tolist()[:: 10 + k]:
            labels = never.clone()
            labels[target] = late[target].nonzero().flatten()[-1]
            found = ga.find_leak(layers, labels=labels)
            assert found is not None and (found.target, found.source) == (target, int(labels[target]))
            assert len(found.path) == int(hops(masks, t)[target, found.source])


def chain(n: int, t: int) -> list[ga.Graph]:
    """n layers; content moves one node down in each: n -> n - 1 -> ... -> 0."""
    return [ga.from_edge_index([[n - k], [n - k - 1]], t) for k in range(n)]


def test_a_label_many_layers_away() -> None:
    layers = chain(7, 9)
    found = ga.find_leak(layers, targets=[0])
    assert found is not None and len(found.path) == 1 and found.source == 1  # 1 -> 0 alone
    found = ga.find_leak(layers, offset=7)
    assert found is not None and (found.source, found.target, len(found.path), found.layer) == (7, 0, 7, 7)
    assert ga.find_leak(layers, offset=8) is None and ga.find_leak(layers[::-1], offset=2) is None
    label = torch.full((9,), -1)
    label[0] = 7
    found = ga.find_leak(layers, labels=label)
    assert found is not None and [h.layer for h in found.path] == list(range(1, 8))
    assert str(found).startswith("7 -> 6 in layer 1, 6 -> 5 in layer 2") and found.label == 7
    assert ga.find_leak(layers[:-1], labels=label) is None
    assert ga.find_leak([*layers, *layers], labels=label, hidden=torch.arange(9) == 7) is None


def test_the_witness_reads_as_the_contract_says() -> None:
    layers = [ga.causal(8) | ga.from_edge_index([[4], [3]], 8)]
    assert str(ga.find_leak(layers)) == "4 -> 3 in layer 1: target 3 reads its own label"
    beyond = ga.find_leak([ga.causal(8), ga.causal(8) | ga.from_edge_index([[6], [3]], 8)])
    assert str(beyond) == "6 -> 3 in layer 2: target 3 reads source 6, beyond its label 4"
    itself = ga.find_leak(ga.causal(3), offset=0)
    assert itself is not None and itself.path == () and itself.layer == 0 and "residual" in str(itself)
    headed = ga.find_leak(ga.stack([ga.causal(4), ga.band(4, 0, 1)], "head"))
    assert str(headed) == "1 -> 0 in layer 1, head 1: target 0 reads its own label"
    sample = ga.find_leak(ga.stack([ga.causal(4), ga.causal(4) | ga.from_edge_index([[3], [2]], 4)], "batch"))
    assert str(sample) == "sample 1: 3 -> 2 in layer 1: target 2 reads its own label"


def test_causal_stacks_do_not_leak_and_full_ones_do() -> None:
    for t in (1, 2, 50):
        stack = [ga.causal(t), ga.window(t, 3), ga.causal(t) & ga.full(t), ga.self_loops(t), ga.empty(t)]
        assert ga.find_leak(stack) is None
        assert (ga.find_leak([*stack, ga.full(t)]) is None) == (t == 1)
    assert ga.find_leak(ga.empty(0)) is None and ga.find_leak([ga.empty(0)], labels=[]) is None


def test_prefix_leaks_only_inside_the_prefix() -> None:
    graph = ga.prefix(20, 6)
    assert ga.find_leak(graph) is not None
    assert ga.find_leak([graph] * 4, targets=torch.arange(20) >= 5) is None
    assert ga.find_leak([graph] * 4, targets=range(4, 20)) is not None


def test_shifted_targets() -> None:
    """Predicting k ahead allows reading k - 1 ahead in all layers together, not in each."""
    ahead = ga.causal(20) | ga.band(20, 0, 1)
    assert ga.find_leak([ahead] * 2, offset=3) is None
    found = ga.find_leak([ahead] * 3, offset=3)
    assert found is not None and found.source == found.target + 3 and len(found.path) == 3


def test_permuted_order() -> None:
    """XLNet: tokens are predicted in a random order; each sees those before it, and its label comes next."""
    order = torch.randperm(200)
    rank = order.argsort()
    graph = ga.causal(200).relabel(rank)  # target order[r] reads order[:r + 1]
    labels = torch.full((200,), -1)
    labels[order[:-1]] = order[1:]
    assert ga.find_leak([graph] * 3, labels=labels) is None
    extra = ga.from_edge_index([[int(order[101])], [int(order[100])]], 200)
    found = ga.find_leak([graph, graph | extra, graph], labels=labels)
    assert found is not None and (found.source, found.target, found.layer) == (int(order[101]), int(order[100]), 2)
    assert ga.find_leak(graph) is not None  # in the order of the numbers it leaks, of course


def test_packed_documents_and_node_labels() -> None:
    docs = ga.causal(6) & ga.documents([3, 3])
    last = torch.tensor([1, 2, -1, 4, 5, -1])
    assert ga.find_leak([docs] * 3, labels=last) is None
    assert ga.find_leak([docs, ga.causal(6)], labels=torch.tensor([-1, -1, -1, -1, 0, -1])) is not None
    # label propagation: labels of training nodes are inputs, and a node must not see its own
    ring = ga.band(6, 1, 1)
    known = torch.tensor([True, True, False, False, True, False])
    own = torch.arange(6)
    assert ga.find_leak([ring] * 2, labels=own, hidden=~known, targets=~known) is None
    assert ga.find_leak([ring] * 2, labels=own, hidden=~known) is not None


def test_masked_tokens() -> None:
    masked = torch.rand(30) < 0.3
    masked[3] = True
    own = torch.arange(30)
    stack = [ga.full(30)] * 3
    assert ga.find_leak(stack, labels=own, hidden=masked, targets=masked) is None
    kept = masked.clone()
    kept[3] = False  # BERT keeps one in ten as it is: that one reads its own label
    found = ga.find_leak(stack, labels=own, hidden=kept, targets=masked)
    assert found is not None and found.target == 3 and found.path == ()


def test_heads_are_united_and_samples_kept_apart() -> None:
    up, down = ga.from_edge_index([[2], [1]], 3), ga.from_edge_index([[1], [0]], 3)
    heads = ga.stack([up, down], "head")
    assert ga.find_leak([heads] * 2, offset=2) is not None  # 2 -> 1 by one head, 1 -> 0 by the other
    samples = ga.stack([up, down], "batch")
    assert ga.find_leak([samples] * 2, offset=2) is None
    assert ga.receptive_field([samples] * 2, 0, batch=1).tolist() == [0, 1]
    with pytest.raises(ValueError, match="batch="):
        ga.receptive_field(samples, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_second_stream_is_a_joint_graph(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def rand(t: int, s: int) -> Tensor:
        return torch.rand(t, s, generator=g) < 0.15

    for _ in range(150):
        t, s, depth, before = (int(torch.randint(a, b, (), generator=g)) for a, b in ((1, 6), (0, 5), (1, 4), (0, 3)))
        own = [rand(t, t) for _ in range(depth)]
        cross = [rand(t, s) for _ in range(depth)]
        context = [rand(s, s) for _ in range(before)]
        holds = torch.randint(-1, t, (s,), generator=g)
        labels = torch.randint(-1, t, (t,), generator=g) if seed else None
        joint = []
        for mask, row, col in [
            *((m, t, t) for m in context),
            *itertools.chain.from_iterable(((a, 0, 0), (c, 0, t)) for a, c in zip(own, cross, strict=True)),
        ]:
            whole = torch.zeros(t + s, t + s, dtype=torch.bool)
            whole[row : row + mask.shape[0], col : col + mask.shape[1]] = mask
            joint.append(whole)
        steps = hops(joint, t + s)
        content = torch.cat([torch.arange(t), holds])
        best = None
        for i, n in itertools.product(range(t), range(t + s)):
            v = int(content[n])
            if v >= 0 and steps[i, n] < FAR and (v >= i + 1 if labels is None else v == int(labels[i])):
                best = min(best or (FAR, 0), (int(steps[i, n]), i))
        found = ga.find_leak(
            [ga.from_mask(m) for m in own],
            labels=labels,
            cross=[ga.from_mask(m) for m in cross],
            context=[ga.from_mask(m) for m in context],
            holds=holds,
        )
        assert (None if found is None else (len(found.path), found.target)) == best
        if found is not None and found.context is not None:
            assert int(holds[found.context]) == found.source and "context" in str(found)


def test_cross_attention_of_another_text_is_no_leak() -> None:
    decoder = [ga.causal(6)] * 2
    assert ga.find_leak(decoder, cross=ga.full(6, 4), context=[ga.full(4)] * 2) is None
    found = ga.find_leak(decoder, cross=[None, ga.full(6, 6)], holds=range(6))
    assert str(found) == "context 1 -> 0 in layer 2: target 0 reads its own label, which context 1 holds"
    joint = ga.encoder_decoder(4, 6)
    assert ga.find_leak([joint] * 2, targets=range(4, 10)) is None
    with pytest.raises(ValueError, match="cross"):
        ga.find_leak(decoder, cross=ga.full(4, 6), context=ga.full(6))
    with pytest.raises(ValueError, match="3 entries"):
        ga.find_leak(decoder, cross=[None, None, None])


def test_inputs_of_audits_are_checked() -> None:
    two = ga.causal(2)
    for bad, error in (
        (lambda: ga.find_leak([]), "at least one"),
        (lambda: ga.find_leak([two, ga.causal(3)]), "layer 2"),
        (lambda: ga.find_leak(ga.full(2, 3)), "square"),
        (lambda: ga.find_leak(two, labels=[0, 2]), "labels"),
        (lambda: ga.find_leak(two, labels=[0]), r"\(2,\)"),
        (lambda: ga.find_leak(two, targets=[2]), "targets"),
        (lambda: ga.find_leak([two.expand(2, 1), two.expand(3, 1)]), "samples"),
        (lambda: ga.find_leak(two.expand(2, 1), hidden=torch.zeros(3, 2).bool()), "3 samples"),
        (lambda: ga.receptive_field(two, 2), "target 2"),
        (lambda: ga.coverage(two, batch=1), "batch 1"),
    ):
        with pytest.raises(ValueError, match=error):
            bad()
    with pytest.raises(TypeError, match="hidden"):
        ga.find_leak(two, hidden=[0, 1])
    with pytest.raises(TypeError, match="layer 1"):
        ga.find_leak([torch.ones(2, 2)])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [1.0, 0.5, True, np.True_, torch.tensor(True), torch.tensor(1.0), torch.tensor([1]),
                                 np.array([1]), "1", None, float("nan")])  # fmt: skip
def test_numbers_that_are_no_integers_are_refused(bad: object) -> None:
    two, model, x = ga.causal(2), nn.Identity(), torch.randn(1, 2, 3)
    for ask in (
        lambda: ga.find_leak(two, bad),  # type: ignore[arg-type]
        lambda: ga.find_leak(two, bad, labels=[0, 1]),  # type: ignore[arg-type]
        lambda: ga.receptive_field(two, bad),  # type: ignore[arg-type]
        lambda: ga.assert_no_leak(model, x, offset=bad),  # type: ignore[arg-type]
        lambda: ga.assert_no_leak(model, x, offset=0, positions=[bad]),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeError, match="must be an integer, got"):
            ask()
    if bad is not None:
        with pytest.raises(TypeError, match="batch must be an integer"):
            ga.coverage(two.expand(3, 1), batch=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"offset must be within 2\*\*40"):
        ga.find_leak(two, 2**41)


def test_integers_of_every_kind_are_one() -> None:
    g = ga.band(5, 2, 1)
    for one in (np.int64(1), np.uint8(1), torch.tensor(1), torch.tensor(1, dtype=torch.int32), np.array(1)):
        assert ga.find_leak(g, one) == ga.find_leak(g, 1)  # type: ignore[arg-type]
        assert torch.equal(ga.receptive_field(g, one), ga.receptive_field(g, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("t", [0, 1, 5])
@pytest.mark.parametrize("lead", [(0, 1), (1, 0), (0, 0), (0, 3), (3, 0)])
def test_no_sample_leaks_nothing_and_no_head_reads_nothing(lead: tuple[int, int], t: int) -> None:
    none = ga.from_mask(torch.ones(*lead, t, t, dtype=torch.bool))
    labels, samples = torch.arange(t), lead[0]
    stacks: list[ga.Graph | list[ga.Graph]] = [none, [none, none]]
    if lead[1]:
        stacks.append([ga.full(t), none])
    for stack in stacks:
        for options in ({}, {"offset": 0}, {"labels": labels}, {"labels": labels, "hidden": labels >= 0}):
            found = ga.find_leak(stack, **options)  # type: ignore[arg-type]
            # a target keeps its own input whatever it reads
            own = samples > 0 and t > 0 and "hidden" not in options and options.get("offset") != 1
            own = own and ("labels" in options or options.get("offset") == 0)
            assert (found is not None) == own
            assert found is None or (found.path == () and found.batch == (0 if samples > 1 else None))
        if samples == 0:
            with pytest.raises(ValueError, match=r"of 0 samples, such as Graph\(0 x"):
                ga.coverage(stack, 0)
        elif t:
            assert ga.receptive_field(stack, t - 1, 0).tolist() == [t - 1]
            assert bool((ga.coverage(stack, 0) == 1).all())
    if t and samples == 0:
        with pytest.raises(ValueError, match="batch axes"):
            ga.find_leak([none, ga.full(t).expand(2, 1)])
    if t and samples:
        # the labels have samples where the layers have none of their own
        assert ga.find_leak(ga.causal(t), hidden=torch.zeros(0, t, dtype=torch.bool), labels=labels) is None
        assert ga.find_leak([none, ga.causal(t)]) is None
        assert ga.find_leak([none, ga.full(t)] if t > 1 else ga.full(t), 0) is not None


def test_a_search_of_hours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphattn.audit.flow._MOST", 5000)
    ring = ga.from_edge_index(torch.stack([torch.arange(200).roll(1), torch.arange(200)]), 200)
    label = torch.arange(200).roll(5)  # five hops away, in cycles that no order explains
    assert ga.find_leak([ring] * 5, labels=label, targets=range(3)) is not None
    with pytest.raises(ValueError, match="steps of 64 bits"):
        ga.find_leak([ring] * 5, labels=label)
    with pytest.raises(ValueError, match="steps of 64 bits"):
        ga.coverage([ring] * 5)


# ---------------------------------------------------------------------- fields


def test_receptive_fields_and_coverage_are_matrix_powers() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(150):
        t, masks = random_stack(g)
        layers = [ga.from_mask(m) for m in masks]
        samples = max([m.shape[0] for m in masks if m.dim() == 4], default=1)
        for b in range(samples):
            batch = b if samples > 1 else None
            ms = of_sample(masks, b)
            reach = [hops(ms[:k], t) < FAR for k in range(len(ms) + 1)]
            for i in range(t):
                assert torch.equal(ga.receptive_field(layers, i, batch), reach[-1][i].nonzero().flatten())
            assert torch.equal(ga.coverage(layers, batch), torch.stack([r.sum(1) for r in reach]))
            for goal in (None, ga.causal(t), ga.from_mask(torch.rand(t, t, generator=g) < 0.2)):
                want = torch.ones(t, t).bool() if goal is None else ga.to_mask(goal)
                first = next((k for k, r in enumerate(reach) if not (want & ~r).any()), None)
                assert ga.layers_to_cover(layers, goal, batch) == first


def test_fields_with_a_gap_beside_the_target() -> None:
    assert ga.coverage(ga.band(6, -2, 2))[1].tolist() == [2, 2, 2, 2, 1, 1]
    assert ga.coverage(ga.band(6, 2, -2))[1].tolist() == [1, 1, 2, 2, 2, 2]
    assert ga.coverage(ga.band(6, -1, 2))[1].tolist() == [3, 3, 3, 3, 2, 1]
    assert ga.layers_to_cover(ga.band(6, -2, 2)) is None


def test_layers_to_cover_closed_forms() -> None:
    assert ga.layers_to_cover(ga.full(9)) == 1 and ga.layers_to_cover(ga.full(1)) == 0
    assert ga.layers_to_cover(ga.causal(9)) is None and ga.layers_to_cover(ga.causal(9), ga.causal(9)) == 1
    for w in (2, 3, 8):  # each layer reaches w - 1 further back
        assert ga.layers_to_cover(ga.window(64, w), ga.causal(64)) == -(-63 // (w - 1))
    assert ga.layers_to_cover(ga.window(2**20, 2**18 + 1), ga.causal(2**20)) == 4
    assert ga.layers_to_cover(ga.global_tokens(50, [7])) == 2
    assert ga.layers_to_cover(ga.documents([3, 3])) is None
    assert ga.layers_to_cover([ga.window(9, 2), ga.causal(9)], ga.causal(9)) == 2


# ---------------------------------------------------------------------- compare


@pytest.mark.parametrize(
    "a,b,words",
    [
        (ga.causal(6), ga.causal(6), "equal: 21 edges"),
        (ga.causal(6), ~ga.causal(6), "complement"),
        (ga.causal(6), ga.causal(6).T, "transpose"),
        (ga.causal(6), ga.band(6, 6, -1), "moved by -1"),
        (ga.window(6, 2), ga.window(6, 3), "a is a part of b"),
        (ga.window(6, 3), ga.window(6, 2), "b is a part of a"),
        (ga.self_loops(6), ga.band(6, -2, 3), "disjoint"),
    ],
)
def test_compare_names_the_usual_mistakes(a: ga.Graph, b: ga.Graph, words: str) -> None:
    found = ga.compare(a, b)
    assert words in str(found)
    assert (found.only_a, found.only_b) == (a - b, b - a)
    assert found.both + found.only_a.num_edges == a.num_edges and found.equal == (a == b)


def test_compare_counts_kinds_of_edges() -> None:
    text = str(ga.compare(ga.band(5, 1, 2), ga.empty(5)))
    assert (
        "16 edges in 5 of 5 rows (4 from the past, 5 to oneself, 7 from the future), sources 0..4, first 0 -> 0" in text
    )
    assert "5 targets without a source in b, but not in a" in text
    assert "7 edges in 4 of 5 rows (7 from the future)" in str(ga.compare(ga.band(5, -1, 2), ga.empty(5)))
    a, b = ga.from_mask(torch.rand(2, 1, 5, 7) < 0.5), ga.from_mask(torch.rand(1, 3, 5, 7) < 0.5)
    assert ga.compare(a, b).only_a == a - b and "batch" in str(ga.compare(a, b))
    with pytest.raises(ValueError):
        ga.compare(ga.full(2), ga.full(3))


# ---------------------------------------------------------------------- models


class Mixer(nn.Module):
    """A head with residual and a norm, over tokens."""

    def __init__(self, norm: str = "layer", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head, self.out = nn.Embedding(11, 8), ga.Head(8, 8), nn.Linear(8, 11)
        self.kind, self.dropout = norm, nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(8) if norm == "batch" else nn.LayerNorm(8)

    def forward(self, tokens: Tensor, graph: ga.Graph) -> Tensor:
        x = self.embed(tokens)
        x = x + self.head(x, graph)
        if self.kind == "time":
            x = x - x.mean(1, keepdim=True)
        elif self.kind == "batch":
            x = self.norm(x.mT).mT
        else:
            x = self.norm(x)
        return self.out(self.dropout(x))


def test_a_causal_model_moves_nothing_earlier() -> None:
    tokens = torch.randint(0, 11, (2, 9))
    for graph in (ga.causal(9), ga.window(9, 3)):
        ga.assert_no_leak(Mixer(), tokens, graph)
    ga.assert_no_leak(Mixer(dropout=0.5).train(), tokens, graph)  # the same units dropped in every call
    ga.assert_no_leak(lambda x: (x.cumsum(1), None), torch.randn(2, 9, 3), offset=1)
    ga.assert_no_leak(lambda x: x.cumsum(0), torch.randn(9))
    ga.assert_no_leak(lambda x: torch.zeros(1, 5, 3), torch.zeros(1, 5, dtype=torch.int64), vocab=4)


def test_a_leak_of_a_model_is_located() -> None:
    tokens = torch.randint(0, 11, (2, 9))
    leaky = ga.causal(9) | ga.from_edge_index([[6], [3]], 9)
    with pytest.raises(AssertionError, match="changing input 6 moves output 3, which predicts input 4"):
        ga.assert_no_leak(Mixer(), tokens, leaky)
    ga.assert_no_leak(Mixer(), tokens, leaky, positions=[3, 8])
    with pytest.raises(AssertionError, match="output"):
        ga.assert_no_leak(Mixer("time"), tokens, ga.causal(9))  # a norm over time leaks what no mask shows
    with pytest.raises(AssertionError, match="output 0, which predicts input 0"):
        ga.assert_no_leak(Mixer(), tokens, ga.causal(9), offset=0)
    with pytest.raises(AssertionError):
        ga.assert_no_leak(lambda x: x.flip(1), torch.randn(1, 4, 2))


def test_batch_norm_mixes_samples_in_training_only() -> None:
    model, tokens = Mixer("batch"), torch.randint(0, 11, (3, 5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(AssertionError):
        ga.assert_no_leak(model.train(), tokens, ga.causal(5))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # running statistics put back
    ga.assert_no_leak(model.eval(), tokens, ga.causal(5))
    with pytest.raises(AssertionError, match="sample 0 moves sample"):
        ga.assert_no_leak(lambda x: x.cumsum(1) - x[:1] * 0.5 if x.shape[0] > 1 else x, torch.randn(3, 1, 2))


def test_models_without_positions_or_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="position"):
        ga.assert_no_leak(lambda x: x.sum(1), torch.randn(2, 5))
    with pytest.raises(ValueError, match="finite"):
        ga.assert_no_leak(lambda x: x * torch.nan, torch.randn(2, 5))
    with pytest.raises(ValueError, match="str"):
        ga.assert_no_leak(lambda x: "no", torch.randn(2, 5))


# ---------------------------------------------------------------------- page


def test_the_page_says_what_there_is(tmp_path: Path) -> None:
    layers = [ga.window(40, 4), ga.causal(40), ga.window(40, 4)]
    text = ga.audit_page(layers, names=["window(4)", "causal", "window(4)"], tile=8)
    assert "layers 1, 3: window(4)\n  Graph(40 <- 40, 154 edges, 9.6% dense)" in text
    assert "a target reads 1 to 4 sources, median 4" in text and "tiles of 8 x 8 are" in text
    assert "after  3 layers  least 1, median 20.5, most 40" in text and "no leak" in text
    leaky = ga.audit_page([ga.full(4)] * 2)
    assert "layers 1-2\n" in leaky and "leak: 1 -> 0 in layer 1: target 0 reads its own label" in leaky
    assert "read nothing" in ga.audit_page(ga.band(4, 1, -1))
    assert "of 0 sources" in ga.audit_page(ga.empty(0))
    batch = ga.audit_page(ga.padding([3, 4], 4) & ga.causal(4), batch=1)
    assert "sample 1" in batch and "no leak" in batch
    figure = ga.audit_picture(layers, tmp_path / "page.png", names=["a", "b", "a"])
    assert (tmp_path / "page.png").stat().st_size > 1000 and len(figure.axes) == 4
    for small in (ga.empty(0), ga.empty(3), ga.causal(1)):
        ga.audit_picture(small)
    import matplotlib.pyplot as plt

    assert not plt.get_fignums()  # V05


def test_large_stacks_tell_the_fields_of_some_targets() -> None:
    layer = ga.causal(30_000) & ga.random_regular(30_000, 40, 0)
    assert "(of 9 targets)" in ga.audit_page([layer] * 2)


def test_density_maps_count_edges() -> None:
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        mask = torch.rand(13, 29, generator=g) < 0.5
        mask[3:9, 5:27] = True
        for side in (1, 4, 32):
            want = np.array(
                [
                    [mask[i : i + side, j : j + side].double().mean() for j in range(0, 29, side)]
                    for i in range(0, 13, side)
                ]
            )
            np.testing.assert_allclose(density_map(ga.from_mask(mask), side), want)
